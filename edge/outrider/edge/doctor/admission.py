"""Whether the verifier takes a session."""

from __future__ import annotations

import time
from dataclasses import replace

from outrider.edge.client import Client
from outrider.edge.decoding import Journal
from outrider.edge.doctor.finding import Finding, ok
from outrider.edge.doctor.remedies import failed_by
from outrider.edge.doctor.visit import Visit
from outrider.proto.errors import OutriderError
from outrider.proto.types import CloudFrame, Opened

PROMPT = "The"


class _Answers(Journal):
    """Keeps what the verifier says to an Open."""

    def __init__(self) -> None:
        self.opened: Opened | None = None

    def received(self, frame: CloudFrame, at: float) -> None:  # noqa: ARG002 - the journal's signature
        if isinstance(frame, Opened):
            self.opened = frame


async def admit(visit: Visit) -> Finding:
    """One token, without drafts: the lease, the model's name, the tokenizer and the room are what is tried."""
    answers = _Answers()
    client = Client(replace(visit.config, drafter="none", tokenizer=visit.tokenizer))
    began = time.monotonic()
    try:
        await client.prepare()
        async for _ in client.generate(PROMPT, max_tokens=1, journal=answers):
            pass
    except OutriderError as error:
        return failed_by(error)
    finally:
        await client.close()
    seconds = time.monotonic() - began
    opened = visit.opened = answers.opened
    assert opened is not None  # noqa: S101 - a text came, and none does before Opened
    return ok(
        f"{opened.verifier} takes {opened.context_length} positions and {opened.credit} drafts in flight; "
        f"first token after {1000 * seconds:.0f} ms",
        verifier=opened.verifier,
        context_length=opened.context_length,
        credit=opened.credit,
        max_drafts=opened.max_drafts,
        first_token_s=seconds,
    )

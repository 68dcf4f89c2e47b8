"""Whether a text comes out right, and sooner with drafts."""

from __future__ import annotations

from dataclasses import replace

from outrider.edge.client import Client
from outrider.edge.doctor.finding import Finding, ok, warning
from outrider.edge.doctor.remedies import failed_by
from outrider.edge.doctor.visit import Visit
from outrider.edge.events import Completion
from outrider.proto.errors import OutriderError

PROMPT = "Once upon a time there was a small house at the edge of the forest, and in it lived"
TOKENS = 16


async def decode(visit: Visit) -> Finding:
    """The same greedy text with the config's drafter and without any."""
    drafting = visit.client
    assert drafting is not None  # noqa: S101 - needed by this check
    plain = Client(replace(visit.config, drafter="none", tokenizer=visit.tokenizer))
    try:
        await plain.prepare()
        await drafting.complete(PROMPT, max_tokens=TOKENS, ignore_eos=True)  # the first one teaches its policies
        alone = await plain.complete(PROMPT, max_tokens=TOKENS, ignore_eos=True)
        drafted = await drafting.complete(PROMPT, max_tokens=TOKENS, ignore_eos=True)
    except OutriderError as error:
        return failed_by(error)
    finally:
        await plain.close()
    return _compared(alone, drafted, visit)


def _compared(alone: Completion, drafted: Completion, visit: Visit) -> Finding:
    s = drafted.statistics
    figures = {
        "tokens": float(len(drafted.tokens)),
        "drafted_tokens_s": len(drafted.tokens) / drafted.seconds,
        "cloud_tokens_s": len(alone.tokens) / alone.seconds,
        "accepted": float(s.accepted),
        "acceptance": s.hits / s.compared if s.compared else 0.0,
        "steps": float(s.steps),
        "same": alone.tokens == drafted.tokens,
    }
    speeds = f"{figures['drafted_tokens_s']:.1f} tok/s with drafts, {figures['cloud_tokens_s']:.1f} without"
    if alone.tokens != drafted.tokens:
        exact = visit.opened is not None and visit.opened.batch_invariant
        return warning(
            f"two greedy texts of {TOKENS} tokens differ"
            + (", though the verifier says batch-invariant" if exact else ""),
            "in bfloat16 near-ties flip; start `outrider verifier` with --dtype float32 or --batch-invariant",
            **figures,
        )
    if s.drafter_error:
        return warning(
            f"the drafter gave up during the text: {s.drafter_error}",
            "give --drafter ngram, or mend the package with `outrider export`",
            **figures,
        )
    return ok(
        f"{TOKENS} tokens, the same both ways; {s.accepted} were accepted drafts, {s.steps} target steps; {speeds} "
        "(so few tell little; `outrider bench` measures)",
        **figures,
    )

"""Texts from an engine of probes, as an edge gets them that drafts after each commit."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from outrider.cloud.grammar.grammar import GrammarMatcher
from outrider.cloud.serving.probe_engine import ProbeEngine
from outrider.cloud.serving.slots import Outbox
from outrider.proto.errors import OutriderError, Unavailable
from outrider.proto.types import (
    CloudFrame,
    Commit,
    CommittedToken,
    Draft,
    DraftToken,
    FinishReason,
    Open,
    Opened,
    Sampling,
)

ANSWER_WITHIN_S = 120.0
KEYS = itertools.count()


class Inbox(Outbox):
    """Frames as they come."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[CloudFrame | OutriderError] = asyncio.Queue()

    def put(self, item: CloudFrame | OutriderError) -> None:
        """Keep it."""
        self.queue.put_nowait(item)

    def unread(self) -> int:
        """Nothing stays unread."""
        return 0


def ids(text: Sequence[CommittedToken]) -> list[int]:
    """The tokens' ids."""
    return [token.id for token in text]


async def write(
    engine: ProbeEngine,
    prompt: tuple[int, ...],
    sampling: Sampling,
    draft: Callable[[int], Sequence[int]],
    *,
    matcher: GrammarMatcher | None = None,
    resumes: bool = False,
    committed: tuple[int, ...] = (),
    **asked: Any,
) -> tuple[list[CommittedToken], FinishReason | None]:
    """A text after `committed`, and its end; `draft` says what is drafted from a position of the text on.

    An edge that `resumes` opens another session where one is lost.
    """
    text, rules, before = list[CommittedToken](), engine.rules, len(committed)
    while True:
        key, outbox, chain = next(KEYS), Inbox(), itertools.count()
        so_far = (*committed, *ids(text))
        engine.post_open(
            key,
            Open(rules.model, rules.tokenizer_sha256, prompt, sampling, f"s{key}", so_far, **asked),
            outbox,
            matcher,
        )
        try:
            while True:
                item = await asyncio.wait_for(outbox.queue.get(), ANSWER_WITHIN_S)
                if isinstance(item, OutriderError):
                    raise item
                at = before + len(text)
                if isinstance(item, Commit):
                    assert item.start == len(prompt) + at
                    text += item.tokens
                    at += len(item.tokens)
                    if item.finish is not None:
                        return text, item.finish
                elif not isinstance(item, Opened):
                    continue
                if drafts := draft(at):
                    tokens = tuple(map(DraftToken, drafts[:32]))
                    engine.post_frame(key, Draft(next(chain), len(prompt) + at, tokens), lambda: None)
        except Unavailable:
            if not resumes:
                raise
        finally:
            engine.post_close(key)

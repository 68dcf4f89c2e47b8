"""An edge in the engine's own thread, which answers each commit with drafts that are right now and then."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

from outrider.cloud.serving.engine import Engine
from outrider.cloud.serving.slots import Outbox, Owner
from outrider.proto.types import Commit, Continue, Draft, DraftToken, Learning, Open, Patience, Sampling, token_ids

ALLOWED = Learning()


class DraftingOutbox(Outbox):
    """Decodes `prompt` as stream `key`; `drafts` maps the text so far, prompt included, to the next drafts."""

    def __init__(
        self,
        engine: Engine,
        key: int,
        prompt: Sequence[int],
        drafts: Callable[[list[int]], Sequence[int]] = lambda _: (),
        drafter: tuple[str, str] = ("", ""),
    ) -> None:
        self.transcript = list(prompt)
        self.commits: list[Commit] = []
        self.error: Exception | None = None
        self._engine, self._key, self._drafts, self._drafter = engine, key, drafts, drafter
        self._prompt = tuple(prompt)
        self._chain = 0
        self._ended = threading.Event()

    def open(
        self,
        sampling: Sampling,
        *,
        learning: Learning | None = ALLOWED,
        teacher: str | None = "alice",
        session: str = "",
        **fields: Any,
    ) -> None:
        rules = self._engine.rules
        frame = Open(
            rules.model,
            rules.tokenizer_sha256,
            self._prompt,
            sampling,
            session or f"s{self._key}",
            patience=Patience(math.inf, 64),
            learning=learning,
            **fields,
        )
        self._engine.post_open(self._key, frame, self, owner=Owner(teacher or "", teaches=teacher is not None))

    def begin_turn(self, prompt: Sequence[int], sampling: Sampling) -> None:
        self._ended.clear()
        start = len(self.transcript)
        self.transcript += prompt
        self._chain += 1
        self._engine.post_frame(self._key, Continue(start, tuple(prompt), sampling, self._chain), lambda: None)
        self._draft()

    def put(self, item: Any) -> None:
        if isinstance(item, Exception):
            self.error = item
        elif isinstance(item, Commit):
            self.commits.append(item)
            self.transcript += token_ids(item.tokens)
        if isinstance(item, Exception) or getattr(item, "finish", None) is not None:
            self._ended.set()
        else:
            self._draft()

    def _draft(self) -> None:
        drafts = tuple(map(DraftToken, self._drafts(list(self.transcript))))
        self._chain += 1
        draft = Draft(self._chain, len(self.transcript), drafts, *self._drafter, complete=True)
        self._engine.post_frame(self._key, draft, lambda: None)

    def unread(self) -> int:
        return 0

    def end(self) -> list[int]:
        """The text, prompt included, when it has ended."""
        assert self._ended.wait(60), "the text does not end"
        if self.error is not None:
            raise self.error
        return self.transcript

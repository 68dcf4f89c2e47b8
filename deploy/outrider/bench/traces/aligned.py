"""One selector for many sessions, one after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from outrider.proto.policy.selection import RoundOutcome, SelectionView, Selector


class Aligned(Selector):
    """Tells its inner selector, at a text's end, of as many tokens of every drafter.

    Else that would wait for those that idle drafters have not read, and take the next text's for them.
    """

    def __init__(self, inner: Selector, arms: int) -> None:
        self._inner = inner
        self._told = [0] * arms  # tokens of this text
        self._last: RoundOutcome | None = None

    @property
    def reads_along(self) -> bool:  # type: ignore[override]  # elsewhere a fact about a class
        """As the inner one."""
        return self._inner.reads_along

    def begin_text(self) -> Selector:
        """End the text before it, and take the next."""
        if self._last is not None and self.reads_along:
            unread = [max(self._told) - told for told in self._told]
            nothing = replace(self._last, committed=0, judged=0, accepted=0, agreement=math.nan, seconds=0.0)
            hits = tuple((None,) * tokens for tokens in unread)
            confidence = tuple((math.nan,) * tokens for tokens in unread)
            self._inner.learn(replace(nothing, hits=hits, confidence=confidence))
        self._told = [0] * len(self._told)
        return self

    def choose(self, view: SelectionView) -> int:
        """The arm of the round that begins."""
        return self._inner.choose(view)

    def read_prompt(self, log_q: Sequence[float]) -> None:
        """What each gave to the prompt."""
        self._inner.read_prompt(log_q)

    def score(self, view: SelectionView, chosen: int) -> tuple[int, ...]:
        """Idle arms to read with."""
        return self._inner.score(view, chosen)

    def learn(self, outcome: RoundOutcome) -> None:
        """What the round gave."""
        self._last = outcome
        self._told = [told + len(hits) for told, hits in zip(self._told, outcome.hits, strict=True)]
        self._inner.learn(outcome)

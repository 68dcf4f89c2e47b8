"""Selectors on the session machine, whose drafts and commits stream both ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from outrider.bench.replay import replay as machine
from outrider.bench.replay.costs import Costs
from outrider.bench.replay.replay import Outcome, Policy, Rival
from outrider.bench.replay.selection import Text, in_hindsight
from outrider.bench.replay.wire import ShapeAt
from outrider.bench.traces.aligned import Aligned
from outrider.bench.traces.grid import WARM_UP_TOKENS
from outrider.bench.traces.stages import Course, in_seconds
from outrider.proto.policy.selection import Selector


@dataclass(frozen=True, slots=True)
class Stream:
    """A turn passes on where a chain of drafts begins anew; idle drafters read along while the current one waits.

    Attributes:
        costs: [K] of the verifier and the events, with each drafter's own.
        shape_at: the link.
        policy: makes that of both sides, anew for every run.
        seed: of the jitter.
    """

    costs: Sequence[Costs]
    shape_at: ShapeAt
    policy: Callable[[], Policy]
    seed: int = 0
    _known: dict[tuple[object, ...], list[Course]] = field(init=False, default_factory=dict)  # of one drafter, one run
    _cloud_s: dict[tuple[int, ...], float] = field(init=False, default_factory=dict)  # by the tokens of a text

    def cloud_s(self, text: Text) -> float:
        """From the request to the last token, as the others."""
        tokens = text.tracks[0].trace.tokens
        if tokens not in self._cloud_s:
            [outcome] = self._replayed([text], 0, replace(self.policy(), drafting=False))
            self._cloud_s[tokens] = outcome.arrivals[-1]
        return self._cloud_s[tokens]

    def alone(self, texts: Sequence[Text], arm: int) -> list[Course]:
        """The texts with one drafter; edge and verifier keep what they have measured."""
        key = (arm, *(text.tracks[arm].trace.tokens for text in texts))
        if key not in self._known:
            outcomes = self._replayed(texts, arm, self.policy())
            self._known[key] = [_course(outcome, (arm,) * len(outcome.arrivals)) for outcome in outcomes]
        return self._known[key]

    def courses(self, texts: Sequence[Text], selector: Selector) -> list[Course]:
        """The texts one after the other; edge and verifier keep what they have measured."""
        first, *others = self.costs
        if not others:
            return self.alone(texts, 0)
        aligned = Aligned(selector, len(self.costs))
        outcomes = machine.replay(
            [text.tracks[0].trace for text in texts],
            self.shape_at,
            first,
            self.policy(),
            warm_up_tokens=WARM_UP_TOKENS,
            seed=self.seed,
            rivals=[
                [Rival(track.trace, costs) for track, costs in zip(text.tracks[1:], others, strict=True)]
                for text in texts
            ],
            selector=aligned.begin_text,
        )
        return [_course(outcome, outcome.turns) for outcome in outcomes]

    def best(self, texts: Sequence[Text]) -> list[Course]:
        """In hindsight; of texts that do not change the best drafter of each, as `alone` gives it."""
        self._known.clear()  # a new run begins
        unchanged = [text for text in texts if not text.changes]
        alone = zip(*(self.alone(unchanged, arm) for arm in range(len(self.costs))), strict=True)
        return [self._best(text) if text.changes else min(next(alone), key=in_seconds) for text in texts]

    def _best(self, text: Text) -> Course:
        return in_hindsight(text, lambda selector: self.courses([text], selector)[0])

    def _replayed(self, texts: Sequence[Text], arm: int, policy: Policy) -> list[Outcome]:
        traces = [text.tracks[arm].trace for text in texts]
        costs = self.costs[arm]
        return machine.replay(traces, self.shape_at, costs, policy, warm_up_tokens=WARM_UP_TOKENS, seed=self.seed)


def _course(outcome: Outcome, turns: Sequence[int]) -> Course:
    return Course(np.array(outcome.arrivals), np.array(turns, dtype=np.int16))

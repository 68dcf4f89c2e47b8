"""Selectors of drafters on recorded texts: how long each token took, and which drafter was active."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from outrider.bench.bench_settings import WARM_UP_TOKENS
from outrider.proto.policy.selector import RoundOutcome, SelectionView, Selector
from research.replay.pool_texts import PoolText
from research.replay.traced import DrafterArm, Policy, ReplayOutcome, replay
from research.simulator.clock import Costs
from research.simulator.wire import ShapeAt


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One text with one selector.

    Attributes:
        at_s: [n] seconds that went into the text up to and with each token.
        choices: [n] index of the drafter that was active when each token came.
    """

    at_s: np.ndarray
    choices: np.ndarray

    @property
    def seconds(self) -> float:
        """Seconds of the whole text."""
        return float(self.at_s[-1])


@dataclass(frozen=True, slots=True)
class Stage:
    """A link with machines at both ends, in the simulator.

    Another drafter becomes the active one where a chain of drafts begins; idle drafters catch up while that one waits.
    With a policy of synchronous rounds this is MetaSD's own setting (arXiv 2604.05417).

    Attributes:
        costs: [K] costs of the verifier and the events, with each drafter's own.
        shape_at: the link.
        policy: policy of both sides.
        seed: seed of the jitter.
    """

    costs: Sequence[Costs]
    shape_at: ShapeAt
    policy: Policy
    seed: int = 0
    _alone: dict[tuple[object, ...], list[Trajectory]] = field(init=False, default_factory=dict)
    _cloud_s: dict[tuple[int, ...], float] = field(init=False, default_factory=dict)  # by a text's tokens

    def cloud_s(self, text: PoolText) -> float:
        """Return the seconds of cloud streaming, from the request to the last token."""
        tokens = text.traces[0].tokens
        if tokens not in self._cloud_s:
            [outcome] = self._replayed([text], 0, replace(self.policy, drafting=False))
            self._cloud_s[tokens] = outcome.arrivals[-1]
        return self._cloud_s[tokens]

    def alone(self, texts: Sequence[PoolText], arm: int) -> list[Trajectory]:
        """Play the texts with one drafter; edge and verifier keep their measurements."""
        key = (arm, *(text.traces[arm].tokens for text in texts))
        if key not in self._alone:
            outcomes = self._replayed(texts, arm, self.policy)
            self._alone[key] = [_trajectory_of(outcome, (arm,) * len(outcome.arrivals)) for outcome in outcomes]
        return self._alone[key]

    def trajectories(self, texts: Sequence[PoolText], selector: Selector) -> list[Trajectory]:
        """Play the texts one after the other; edge and verifier keep their measurements."""
        if len(self.costs) == 1:
            return self.alone(texts, 0)
        outcomes = self._replayed(
            texts,
            0,
            self.policy,
            others=[list(map(DrafterArm, text.traces[1:], self.costs[1:])) for text in texts],
            selector=Aligned(selector, len(self.costs)).begin_text,
        )
        return [_trajectory_of(outcome, outcome.active) for outcome in outcomes]

    def best(self, texts: Sequence[PoolText]) -> list[Trajectory]:
        """Play in hindsight: with the fastest drafter of each text, or of each stretch where the domain changes.

        An oracle that knew every single bit and took another drafter each round would be out of reach.
        """
        self._alone.clear()  # a new run begins
        unchanged = [text for text in texts if not text.changes]
        alone = zip(*(self.alone(unchanged, arm) for arm in range(len(self.costs))), strict=True)
        return [self._best(text) if text.changes else min(next(alone), key=lambda run: run.seconds) for text in texts]

    def _best(self, text: PoolText) -> Trajectory:
        """Try every drafter on one stretch after the other."""
        ends, warm_up = (*text.changes, text.tokens), min(WARM_UP_TOKENS, text.tokens)
        order: tuple[int, ...] = ()
        for end in ends:
            orders = [(*order, arm) for arm in range(len(self.costs))]
            runs = [self.trajectories([text], _Ordered(order, ends, -warm_up))[0] for order in orders]
            best, order = min(zip(runs, orders, strict=True), key=lambda run: run[0].at_s[end - 1])
        return best

    def _replayed(
        self,
        texts: Sequence[PoolText],
        arm: int,
        policy: Policy,
        others: Sequence[Sequence[DrafterArm]] = (),
        selector: Callable[[], Selector] | None = None,
    ) -> list[ReplayOutcome]:
        return replay(
            [text.traces[arm] for text in texts],
            self.shape_at,
            self.costs[arm],
            policy,
            warm_up_tokens=WARM_UP_TOKENS,
            seed=self.seed,
            others=others,
            selector=selector,
        )


@dataclass(slots=True)
class _Ordered(Selector):
    """One drafter for each stretch, the last of them for what is left; `at` is below 0 before the text."""

    order: tuple[int, ...]
    ends: tuple[int, ...]
    at: int

    def choose(self, view: SelectionView) -> int:
        del view
        return self.order[min(bisect.bisect_right(self.ends, self.at), len(self.order) - 1)]

    def learn(self, outcome: RoundOutcome) -> None:
        self.at += outcome.committed


class Aligned(Selector):
    """One selector for many sessions: at a text's end it has heard of as many tokens of every drafter.

    Otherwise it would wait for those that idle drafters have not read, and take the next text's for them.
    """

    def __init__(self, inner: Selector, arms: int) -> None:
        self._inner = inner
        self._heard = [0] * arms  # tokens of this text
        self._last: RoundOutcome | None = None

    @property
    def catches_up(self) -> bool:  # type: ignore[override]  # elsewhere a fact about a class
        return self._inner.catches_up

    @property
    def stride(self) -> int:  # type: ignore[override]  # elsewhere a field
        return self._inner.stride

    def begin_text(self) -> Selector:
        """End the text before, and begin the next."""
        if self._last is not None and self.catches_up:
            unread = [max(self._heard) - heard for heard in self._heard]
            nothing = self._last._replace(committed=0, verified=0, accepted=0, agreement=math.nan, seconds=0.0)
            hits = tuple((None,) * tokens for tokens in unread)
            self._inner.learn(nothing._replace(hits=hits))
        self._heard = [0] * len(self._heard)
        return self

    def choose(self, view: SelectionView) -> int:
        return self._inner.choose(view)

    def read_prompt(self, log_q: Sequence[float]) -> None:
        self._inner.read_prompt(log_q)

    def score(self, view: SelectionView, chosen: int, unread: Sequence[int]) -> tuple[int, ...]:
        return self._inner.score(view, chosen, unread)

    def learn(self, outcome: RoundOutcome) -> None:
        self._last = outcome
        self._heard = [heard + len(hits) for heard, hits in zip(self._heard, outcome.hits, strict=True)]
        self._inner.learn(outcome)


def _trajectory_of(outcome: ReplayOutcome, active: Sequence[int]) -> Trajectory:
    return Trajectory(np.array(outcome.arrivals), np.array(active, dtype=np.int16))

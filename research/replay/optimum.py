"""The best policy in hindsight: what a run could have been if its hits and its link had been known."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from outrider.proto.errors import ConfigError
from outrider.proto.policy import Window
from outrider.proto.types import Patience
from research.replay.traced import Policy, ReplayOutcome, replay
from research.replay.traces import HitTrace
from research.simulator.clock import Costs
from research.simulator.wire import ShapeAt

LENGTHS = range(1, 17)  # of synchronous and of co-located drafting
_MIN_SHARES = (0.005, 0.015, 0.05, 0.15, 0.3)
_WINDOWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
_WAITS_S = (0.0, 0.003, 0.006, 0.012, 0.025, 0.05, 0.1, math.inf)
_PRICES = (None, 0.0, 0.2, 1.0, 3.0)


@dataclass(frozen=True, slots=True)
class Best:
    """A policy, and its outcomes."""

    policy: Policy
    outcomes: list[ReplayOutcome]

    @property
    def tokens_per_second(self) -> float:
        """Tokens a second over all texts."""
        return tokens_per_second(self.outcomes)


def tokens_per_second(outcomes: Sequence[ReplayOutcome]) -> float:
    """Return tokens a second over all texts, from the request to the last token.

    Raises:
        ConfigError: there is no text.
    """
    if not outcomes:
        raise ConfigError("are none; record some with a drafter first", field="traces")
    return sum(len(o.arrivals) for o in outcomes) / sum(o.seconds for o in outcomes)


def synchronous(length: int) -> Policy:
    """Return classical speculative decoding: draft, wait for the verdict, begin again (Leviathan et al. 2023)."""
    return Policy(window=Window(length), patience=Patience(math.inf, length))


def colocated(length: int) -> Policy:
    """Return drafting beside the target: so many drafts before every step, none during one, and none at the edge."""
    return Policy(drafting=False, here=True, drafts_here=length)


def best_length(
    policy_of: Callable[[int], Policy],
    traces: Sequence[HitTrace],
    shape_at: ShapeAt,
    costs: Costs,
    *,
    warm_up_tokens: int = 0,
) -> tuple[int, Best]:
    """Return the length that gives most tokens a second by `policy_of` it, and its outcome."""
    tried = {
        length: Best(policy, replay(traces, shape_at, costs, policy, warm_up_tokens=warm_up_tokens))
        for length, policy in ((n, policy_of(n)) for n in LENGTHS)
    }
    return max(tried.items(), key=lambda entry: entry[1].tokens_per_second)


def best_in_hindsight(
    traces: Sequence[HitTrace], shape_at: ShapeAt, costs: Costs, *, warm_up_tokens: int = 0, here: bool = False
) -> Best:
    """Return the best of many policies for these texts on this link: windows, patiences, and who drafts.

    First every window is tried with the planned patience and every patience with the default window, then the best
    three of each with each other; synchronous speculation and cloud streaming are policies too. Where the verifier
    has a drafter of its own (`here`), so are that drafter alone, and both ends at several prices. Steps verify trees.
    """

    def tried(policies: Iterable[Policy]) -> list[Best]:
        by_trees = [replace(policy, trees=True) for policy in policies]  # which are chains where rows are dear
        results = [Best(p, replay(traces, shape_at, costs, p, warm_up_tokens=warm_up_tokens)) for p in by_trees]
        return sorted(results, key=lambda best: -best.tokens_per_second)

    windows = [*(Window(min_share=share) for share in _MIN_SHARES), *map(Window, _WINDOWS)]
    patiences = [None, *(Patience(seconds, drafts) for seconds in _WAITS_S for drafts in (4, 16))]
    by_window = tried(Policy(window=window) for window in windows)
    by_patience = tried(Policy(patience=patience) for patience in patiences)
    together = tried(
        Policy(window=one.policy.window, patience=other.policy.patience)
        for one in by_window[:3]
        for other in by_patience[:3]
    )
    _, in_rounds = best_length(synchronous, traces, shape_at, costs, warm_up_tokens=warm_up_tokens)
    alone = tried([Policy(drafting=False)])
    found = [*by_window, *by_patience, *together, in_rounds, *alone]
    if here:
        _, beside = best_length(colocated, traces, shape_at, costs, warm_up_tokens=warm_up_tokens)
        found += [beside, *tried(Policy(here=True, price=price) for price in _PRICES)]
    return max(found, key=lambda best: best.tokens_per_second)

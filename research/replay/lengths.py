"""Policies of a fixed length, in rounds and beside the target, and the best length of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.proto.errors import ConfigError
from outrider.proto.policy import Window
from outrider.proto.types import Patience
from research.replay.hit_traces import HitTrace
from research.replay.traced import Policy, ReplayOutcome, replay
from research.simulator.clock import Costs
from research.simulator.wire import ShapeAt

LENGTHS = range(1, 17)  # of synchronous and of co-located drafting


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

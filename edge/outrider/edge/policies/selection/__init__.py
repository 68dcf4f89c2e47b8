"""Selectors that learn which drafter drafts the next round: pure rules that cannot change a token.

`outrider.proto.policy.selection` has the protocol. The objective is committed tokens a second, E[N]/E[T] (renewal
reward), with each drafter's speed, its switch and the link in T; MetaSD's own, alignment, is there to compare.

base      helpers of several, and the selector that draws blindly
rewards   block divergence, its estimates, block efficiency, and what a reward is worth: tokens a second, or alignment
experts   costs of idle drafters, and weights of drafters with full information
leader    follow the leader, the default, and Hedge
bandits   MetaSD-UCB, discounted and sliding-window UCB, Thompson sampling, EXP3, Sequential Halving
routing   the drafter that is surest of itself
names     all of them by the names that users give

Nothing here knows of sessions, links or models. `outrider.bench.traces.stages` plays selectors on hit traces and
compares them with the oracle in hindsight; an edge with several drafters fills the same view from what it measures.
"""

from __future__ import annotations

from outrider.edge.policies.selection.bandits import (
    DiscountedUcb,
    Exp3,
    MetaSdUcb,
    SequentialHalving,
    SlidingUcb,
    Thompson,
)
from outrider.edge.policies.selection.base import RandomSelector
from outrider.edge.policies.selection.experts import FixedShare, Walk
from outrider.edge.policies.selection.leader import Hedge, Leader, default_selector
from outrider.edge.policies.selection.names import SELECTORS, MakeSelector, selector_named
from outrider.edge.policies.selection.rewards import (
    Alignment,
    BlockDivergence,
    BlockEfficiency,
    Objective,
    Reward,
    Throughput,
)
from outrider.edge.policies.selection.routing import Routing

__all__ = [
    "SELECTORS",
    "Alignment",
    "BlockDivergence",
    "BlockEfficiency",
    "DiscountedUcb",
    "Exp3",
    "FixedShare",
    "Hedge",
    "Leader",
    "MakeSelector",
    "MetaSdUcb",
    "Objective",
    "RandomSelector",
    "Reward",
    "Routing",
    "SequentialHalving",
    "SlidingUcb",
    "Thompson",
    "Throughput",
    "Walk",
    "default_selector",
    "selector_named",
]

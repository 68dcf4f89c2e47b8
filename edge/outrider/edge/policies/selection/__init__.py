"""Selectors that learn which drafter drafts the next round, by the names of options: pure rules, none changes a token.

`outrider.proto.policy.selection` has the protocol. The objective is committed tokens a second, E[N]/E[T] (renewal
reward), with each drafter's speed, its switch and the link in T; MetaSD's own, alignment, is there to compare.

base      helpers of several, the selector that draws blindly, and the one that takes the drafter surest of itself
rewards   block divergence, block efficiency, and what a reward is worth: tokens a second, or alignment
experts   costs of idle drafters, and weights of drafters with full information
leader    follow the leader, the default, and Hedge
bandits   MetaSD-UCB, discounted and sliding-window UCB, Thompson sampling, EXP3, Sequential Halving

Nothing here knows of sessions, links or models. `research.traces.stages` plays selectors on hit traces and
compares them with the oracle in hindsight; an edge with several drafters fills the same view from what it measures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from outrider.edge.policies.selection.bandits import (
    DiscountedUcb,
    Exp3,
    MetaSdUcb,
    SequentialHalving,
    SlidingUcb,
    Thompson,
)
from outrider.edge.policies.selection.base import RandomSelector, Routing
from outrider.edge.policies.selection.experts import FixedShare
from outrider.edge.policies.selection.leader import Hedge, default_selector
from outrider.edge.policies.selection.rewards import BlockDivergence, BlockEfficiency
from outrider.proto.errors import ConfigError
from outrider.proto.near import did_you_mean
from outrider.proto.policy.selection import Selector, StaticSelector

HALVING_ROUNDS = 60  # over which Sequential Halving spreads its trials

MakeSelector = Callable[[int, np.random.Generator], Selector]
"""Called with the number of drafters and the generator to draw from."""

SELECTORS: Mapping[str, MakeSelector] = {
    "leader": lambda arms, _rng: default_selector(arms),
    "static": lambda _arms, _rng: StaticSelector(),
    "random": RandomSelector,
    "metasd-bd": lambda arms, _rng: MetaSdUcb(arms=arms, reward=BlockDivergence()),
    "metasd-be": lambda arms, _rng: MetaSdUcb(arms=arms, reward=BlockEfficiency()),
    "exp3": lambda arms, rng: Exp3(arms=arms, rng=rng),
    "thompson": lambda arms, rng: Thompson(arms=arms, rng=rng),
    "halving": lambda arms, _rng: SequentialHalving(arms=arms, budget=HALVING_ROUNDS),
    "discounted": lambda arms, _rng: DiscountedUcb(arms=arms),
    "sliding": lambda arms, _rng: SlidingUcb(arms=arms),
    "hedge": lambda arms, rng: Hedge(FixedShare(arms=arms), rng),
    "routing": lambda arms, _rng: Routing(arms=arms),
}


def selector_named(name: str) -> MakeSelector:
    """Return what makes the selector of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in SELECTORS:
        raise ConfigError(
            f"{name!r} is none of {', '.join(SELECTORS)}{did_you_mean(name, SELECTORS)}", field="selector"
        )
    return SELECTORS[name]

"""Which drafter drafts the next round: selectors behind one interface, pure rules that cannot change a token.

A selector is asked at the beginning of a round (`choose`), says which idle drafters are worth reading along (`score`),
and is told what the round gave (`learn`). The objective is committed tokens a second, E[N]/E[T] (renewal reward),
with each drafter's speed, its switch and the link in T; MetaSD's own objective, alignment, is at hand to compare.

arms            drafters and their costs, what a choice is made on, what a round gave, the interface
rewards         block divergence, its estimates, block efficiency, and what each is as a statistic
objective       what a reward is worth: tokens a second, or alignment alone
counterfactual  what an idle drafter would have committed, from its hits
experts         weights of drafters with full information: each pays for every token what it would have cost
fixed           one drafter always; any at random
ucb             MetaSD-UCB, discounted UCB, sliding-window UCB
exp3, thompson, halving, hedge, leader, routing
                one selector each
default         the one that is best on hit traces
names           all of them by the names that users give

Nothing here knows of sessions, links or models. `outrider.bench.replay.selection` plays selectors on hit traces and
judges them against the oracle in hindsight; an edge with several drafters fills the same view from what it measures.
"""

from __future__ import annotations

from outrider.proto.policy.selection.arms import Arm, RoundOutcome, SelectionView, Selector
from outrider.proto.policy.selection.counterfactual import Walk
from outrider.proto.policy.selection.default import default_selector
from outrider.proto.policy.selection.exp3 import Exp3
from outrider.proto.policy.selection.experts import FixedShare
from outrider.proto.policy.selection.fixed import RandomSelector, StaticSelector
from outrider.proto.policy.selection.halving import SequentialHalving
from outrider.proto.policy.selection.hedge import Hedge
from outrider.proto.policy.selection.leader import Leader
from outrider.proto.policy.selection.names import SELECTORS, MakeSelector, selector_named
from outrider.proto.policy.selection.objective import Alignment, Objective, Throughput
from outrider.proto.policy.selection.rewards import BlockDivergence, BlockEfficiency, Reward
from outrider.proto.policy.selection.routing import Routing
from outrider.proto.policy.selection.thompson import Thompson
from outrider.proto.policy.selection.ucb import DiscountedUcb, MetaSdUcb, SlidingUcb

__all__ = [
    "SELECTORS",
    "Alignment",
    "Arm",
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
    "RoundOutcome",
    "Routing",
    "SelectionView",
    "Selector",
    "SequentialHalving",
    "SlidingUcb",
    "StaticSelector",
    "Thompson",
    "Throughput",
    "Walk",
    "default_selector",
    "selector_named",
]

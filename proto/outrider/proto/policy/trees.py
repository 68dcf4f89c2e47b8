"""Trees of drafts: which drafts of a chain and of its branches a step verifies.

With shared noise a tree is exact as it stands: the path along the target's tokens is followed (docs/exactness.md). A
draft is worth a row of the step by the chance that the target's tokens lead to it, the product of the chances along its
path, and a step commits 1 + (sum of these chances) tokens on average. Chances fall along every path, so the likeliest n
drafts are a tree, and no other tree of n drafts commits more. How many pay follows from the price of a row: one more,
of chance r, raises the tokens a second while

    r (1 + rho (n + 1)) > rho (1 + sum of the n chances),

where rho is the time of a row over that of a step beside its rows. A branch's first draft counts as `BRANCH_ROWS` rows.
Where rows are dear, what is left is a chain, or nothing.

The trees of the literature are points of this rule: SpecInfer (Miao et al. 2024) fixes the number of children by depth,
Sequoia (Chen et al. 2024) knows chances by depth and rank alone, EAGLE-2 (Li et al. 2024) and OPT-Tree (Wang et al.
2024) take the likeliest nodes by the drafter's probabilities; trees merged of several drafters' chains (CoSine, TAPS)
have runs of other drafters for branches. Recursive rejection sampling (RSD, Jeon et al. 2024) draws siblings without
replacement; here they are the drafter's next best under the same noise.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

LEAST = 0.01  # chance of a draft below which no row is spent on it, whatever a row costs
# Rows of the chain as dear as a branch's first: mostly 2 to 5 (`python -m research engine --steps 1x9+8`), without a
# trend from 100 to 1,000 tokens of text: only its last chunk of keys, 256 at most, is read once more for each branch.
BRANCH_ROWS = 3.0


@dataclass(frozen=True, slots=True)
class Run:
    """A branch of `length` tokens that a step could verify, after `index` drafts of the chain.

    Attributes:
        chance: chance that the target's token is its first, given that the chain agrees before it.
    """

    index: int
    chance: float
    length: int


class Tree(NamedTuple):
    """The drafts to verify: the first `chain` drafts of the chain, and of each run the first of `runs` [b]."""

    chain: int
    runs: tuple[int, ...]


def best_tree(
    chances: Sequence[float], runs: Sequence[Run], *, follows: float, room: int, row_share: float = 0.0
) -> Tree:
    """Return the tree by which tokens come fastest.

    Args:
        chances: [n] chance that each draft of the chain agrees, given that all before it do.
        runs: [b] branches.
        follows: chance that a further draft of a run agrees, given that all before it do.
        room: most drafts.
        row_share: time of a row over that of a step beside its rows; 0: unknown, or rows cost nothing.
    """
    kept, chain, total, taken = [0] * len(runs), 0, 1.0, 0
    leaving: dict[int, list[int]] = {}
    for index, run in enumerate(runs):
        leaving.setdefault(run.index, []).append(index)
    # Chance to be reached, negative; the chain's drafts before others of one chance, so that a parent comes first.
    heap: list[tuple[float, int]] = []

    def grow(reached: float) -> None:
        if chain < len(chances):
            heapq.heappush(heap, (-reached * chances[chain], -1))
        for index in leaving.get(chain, ()):
            heapq.heappush(heap, (-reached * runs[index].chance, index))

    grow(1.0)
    rows = 1.0
    while heap and taken < room:
        chance, run_index = heapq.heappop(heap)
        price = BRANCH_ROWS if run_index >= 0 and not kept[run_index] else 1.0
        if -chance < LEAST:
            break
        if -chance * (1 + row_share * rows) <= row_share * price * total:
            if run_index < 0:
                break
            continue
        taken += 1
        rows += price
        total -= chance
        if run_index < 0:
            chain += 1
            grow(-chance)
            continue
        kept[run_index] += 1
        if kept[run_index] < runs[run_index].length:
            heapq.heappush(heap, (chance * follows, run_index))
    return Tree(chain, tuple(kept))

"""Times of a further row of a step: one of the chain, and the first of a branch."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from statistics import median

from outrider.cloud.target.target import Target
from outrider.proto.types import Sampling
from research.engine.record import RowPrices
from research.engine.steps import Case, Clock, Steps

# Steps of a turn that warm the caches, and those that count.
_WARM, _TIMED = 2, 5


def row_prices(target: Target, case: Case, sampling: Sampling, clock: Clock, turns: int) -> RowPrices:
    """Let steps with one row, with the chain, and with branches beside it take turns, and return what rows add.

    Args:
        target: target with room for the contexts of all three.
        case: step with branches.
        sampling: sampling settings of all sessions.
        clock: seconds.
        turns: turns that count; the first, which warms up, does not.
    """
    one, chain = replace(case, rows=1, logits=1, branches=0), replace(case, branches=0)
    with ExitStack() as stack:
        every = [stack.enter_context(Steps(target, each, sampling, clock)) for each in (one, chain, case)]
        times = [[median(steps.turn(_WARM, _TIMED)) for steps in every] for _ in range(turns + 1)][1:]
    chain_s = median(of_chain - of_one for of_one, of_chain, _ in times) / (case.rows - 1)
    branch_s = median(of_tree - of_chain for _, of_chain, of_tree in times) / case.branches
    return RowPrices(case.context, 1e3 * chain_s / case.sessions, 1e3 * branch_s / case.sessions)

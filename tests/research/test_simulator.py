"""The simulator: several edges on one verifier, by the engine's own rules of a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bad_link import Faults
from oracle_texts import RULES, decode, own_texts

from outrider.cloud.serving.batching import Batch, Batching, credit_of
from outrider.proto.types import Patience
from research.simulator.clock import Costs, VirtualClock


class Noted(Batching):
    """Rules of a batch that note how many sessions each step has."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def plan(self, candidates, now) -> Batch:
        batch = super().plan(candidates, now)
        if batch.shares:
            self.sizes.append(len(batch.shares))
        return batch


def decoded(edges: int, **options) -> tuple[list[list[int]], list[int], float]:
    """Return texts, the sessions of each step, and when the last text has ended."""
    batching = Noted()
    simulations, ended = decode(edges, batching=batching, **options)
    return [simulation.emitted for simulation in simulations], batching.sizes, ended


@pytest.mark.parametrize("edges", [1, 3, 12])
def test_texts_are_the_targets_own_however_many_share_its_steps(edges) -> None:
    texts, sizes, _ = decoded(edges)
    assert texts == own_texts(edges)
    assert max(sizes) == edges


def test_texts_are_the_targets_own_on_a_bad_link() -> None:
    faults = Faults(jitter_s=0.03, duplicated=0.2, reordered=0.2, breaks_every_s=0.7, goaway_every_s=1.5)
    texts, _, _ = decoded(3, faults=faults)
    assert texts == own_texts(3)


def test_sessions_that_share_steps_are_hardly_slower_than_one_alone() -> None:
    costs = Costs(row_s=0.0)
    (_, one, alone_s), (_, many, together_s) = (decoded(edges, costs=costs) for edges in (1, 8))
    assert together_s < 1.5 * alone_s
    assert len(many) < 4 * len(one), "8 times the texts"


def test_sessions_without_patience_are_all_in_the_step_of_the_first() -> None:
    _, sizes, _ = decoded(4, rules=replace(RULES, patience=Patience(0.0)), faults=Faults(delay_s=0.0))
    assert set(sizes[2:12]) == {4}, "before the first text ends"


def test_long_prompts_are_read_in_chunks_while_others_decode() -> None:
    texts, sizes, _ = decoded(2, prompt=700)
    assert texts == own_texts(2, prompt=700)
    assert sizes[0] == 1, "the first prompt takes all the room there is"


def test_the_same_seeds_give_the_same_run() -> None:
    faults = Faults(jitter_s=0.05, duplicated=0.2, reordered=0.2)
    assert decoded(3, faults=faults)[2] == decoded(3, faults=faults)[2]


def test_credit_shrinks_with_the_crowd_down_to_a_step_of_drafts() -> None:
    rules = replace(RULES, max_credit=64, max_drafts=16)
    assert [credit_of(rules, n) for n in (0, 1, 8, 16, 32, 400)] == [64, 64, 64, 32, 16, 16]
    assert credit_of(replace(rules, max_credit=4), 100) == 4


def test_a_clock_without_events_raises() -> None:
    clock, seen = VirtualClock(), []
    clock.at(2.0, lambda: seen.append("b"))
    clock.at(1.0, lambda: seen.append("a"))
    clock.at(2.0, lambda: seen.append("c"))
    for _ in range(3):
        clock.advance()
    assert (seen, clock.now) == (["a", "b", "c"], 2.0)
    with pytest.raises(RuntimeError, match=r"nothing will ever happen again after 2\.000 s"):
        clock.advance()

"""A crowd of texts with goals of service on one simulated verifier: texts as ever, gaps kept, and nobody starved."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from bad_link import Faults, FaultySimulation
from oracle_drafters import ScriptedDrafters, drafter_of
from oracle_texts import ORACLE, RULES, decode, own_texts

from outrider.cloud.serving import service_goals
from outrider.cloud.serving.service_goals import FAIR_SHARE, StepGoals
from outrider.cloud.serving.slots import Slot
from outrider.proto.session.both_ends import DraftingHere
from outrider.proto.types import EdgeFrame, Open, ServiceClass, ServiceGoal, class_of
from research.simulator.clock import Costs
from research.simulator.simulated_verifier import SimulatedStream, SimulatedVerifier
from research.traces.local_threads import LocalThreads

GAP = ServiceGoal(gap_s=0.075)
INTERACTIVE, BATCH = ServiceGoal(), ServiceGoal(batch=True)
SESSIONS, TOKENS = 24, 240
NEAR_CAPACITY = Costs(step_s=0.03, row_s=0.002)  # 18 rows end in 0.9 of the gap, and 15 must


def mixed(number: int) -> ServiceGoal:
    return (GAP, BATCH, INTERACTIVE, BATCH)[number % 4]


@dataclass(frozen=True)
class Fared:
    """How the texts of one class fared while all ran: commits' gaps at the edge in seconds, and tokens a second."""

    gaps: tuple[float, ...]
    rates: tuple[float, ...]

    @property
    def p99_gap_s(self) -> float:
        return statistics.quantiles(self.gaps, n=100)[-1]

    @property
    def least_share(self) -> float:
        """Least rate over the median of the class."""
        return min(self.rates) / max(1e-9, statistics.median(self.rates))

    @property
    def all_in_every_step(self) -> bool:
        """Whether the slowest gets a token of every step: more is up to its drafts alone."""
        return min(self.rates) >= 0.9 / statistics.median(self.gaps)


def fared(simulations: Sequence[FaultySimulation], of: ServiceClass) -> Fared:
    """Say how the texts that `mixed` gives this class fared."""
    until = min(simulation.arrivals[-1] for simulation in simulations)
    since = max(simulation.arrivals[0] for simulation in simulations)
    chosen = [each for number, each in enumerate(simulations) if class_of(mixed(number)) is of]
    assert until > since + 1.0, "they ran together for long enough"
    gaps, rates = [], []
    for each in chosen:
        within = [at for at in each.arrivals if since <= at <= until]
        gaps += [later - earlier for earlier, later in pairwise(sorted(set(within)))]
        rates.append(len(within) / (until - since))
    return Fared(tuple(gaps), tuple(rates))


def crowd(service: Any = mixed, **more: Any) -> list[FaultySimulation]:
    settings = {"costs": NEAR_CAPACITY, "tokens": TOKENS, "service": service, "apart_s": 0.1, **more}
    return decode(SESSIONS, **settings)[0]


def all_fared(simulations: Sequence[FaultySimulation]) -> dict[ServiceClass, Fared]:
    return {each: fared(simulations, each) for each in ServiceClass}


def check_goals(found: dict[ServiceClass, Fared]) -> None:
    """Check that gaps are kept, that batch keeps its floor, and that nobody starves."""
    assert found[ServiceClass.FIGURES].p99_gap_s <= GAP.gap_s, "gaps are kept"
    medians = {each: statistics.median(fared.rates) for each, fared in found.items()}
    floor = 0.9 * medians[ServiceClass.FIGURES] / service_goals.MAX_STEPS_OUT
    assert medians[ServiceClass.BATCH] >= floor, "batch keeps its floor"
    for name, each in found.items():
        assert each.least_share >= FAIR_SHARE or each.all_in_every_step, f"nobody of {name.name} starves"


def table(found: dict[ServiceClass, Fared]) -> str:
    """Return the figures of a crowd, which `-s` shows."""
    return "\n".join(
        f"{name.name.lower():12} p99 gap {1e3 * each.p99_gap_s:6.1f} ms   {statistics.mean(each.rates):5.1f} tokens/s"
        f"   least/median {each.least_share:.2f}"
        for name, each in found.items()
    )


def test_gaps_are_kept_near_capacity_and_nobody_starves() -> None:
    with_goals, without = all_fared(crowd()), all_fared(crowd(lambda _: None))
    print(f"\nwith goals\n{table(with_goals)}\nwithout\n{table(without)}")
    check_goals(with_goals)
    with pytest.raises(AssertionError, match="gaps are kept"):
        check_goals(without)


def test_sessions_whose_drafts_seldom_hit_do_not_starve_either() -> None:
    def proposer(number: int) -> Any:
        return drafter_of(ORACLE, number, 0.95 if number % 3 else 0.3, confidence="telling")

    cheap_rows = Costs(step_s=0.03, row_s=0.0012)
    check_goals(all_fared(crowd(proposer=proposer, costs=cheap_rows)))


def test_a_crowd_that_comes_at_once_is_held_before_small_steps_were_met() -> None:
    simulations = crowd(apart_s=0.0)
    records = [r for each in simulations if (r := each.edge.statistics.service) is not None and r.goal is GAP]
    assert all(record.kept > 0.9 * record.gaps for record in records)


def strict_priority(goals: StepGoals, decoding: Sequence[Slot], now: float) -> Sequence[Slot]:
    """Let batch sessions take part only where there is room for all."""
    allowed = taking_part(goals, decoding, now)
    others = [slot for slot in decoding if class_of(slot.session.service) is not ServiceClass.BATCH]
    return others if len(allowed) < len(decoding) else decoding


def the_same_rest(goals: StepGoals, decoding: Sequence[Slot], now: float) -> Sequence[Slot]:
    """Let as many rest as should, and always the same."""
    excess = len(decoding) - len(taking_part(goals, decoding, now))
    batch = [slot for slot in decoding if class_of(slot.session.service) is ServiceClass.BATCH]
    resting = sorted(batch, key=lambda slot: slot.key)[len(batch) - excess :]
    return [slot for slot in decoding if slot not in resting]


taking_part = StepGoals.taking_part
DEFECTS = {
    "strict priority": ("taking_part", strict_priority, "batch keeps its floor"),
    "the same rest always": ("taking_part", the_same_rest, "nobody of BATCH starves"),
    "nobody rests": ("taking_part", lambda _, decoding, __: decoding, "gaps are kept"),
    "goals are ignored": ("of", classmethod(lambda *_: None), "gaps are kept"),
    "drafts are not given up": ("rows_to_cut", lambda *_: Counter(), "gaps are kept"),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_planted_defect_of_the_rules_is_found(defect, monkeypatch) -> None:
    name, wrong, words = DEFECTS[defect]
    monkeypatch.setattr(StepGoals, name, wrong)
    with pytest.raises(AssertionError, match=words):
        check_goals(all_fared(crowd()))


TREES = {"rules": replace(RULES, trees=True), "trees": True}
BRANCHING = {"proposer": lambda number: drafter_of(ORACLE, number, 0.6, confidence="telling", runners_up=2)}
BAD_LINK = Faults(jitter_s=0.02, duplicated=0.1, reordered=0.1, breaks_every_s=1.0, goaway_every_s=2.0)


@pytest.mark.parametrize(
    "more",
    [{}, TREES | BRANCHING, {"faults": BAD_LINK}, TREES | BRANCHING | {"faults": BAD_LINK}, {"drafts_here": 2}],
    ids=["plain", "trees", "bad link", "trees on a bad link", "drafts of both ends"],
)
def test_texts_are_those_of_plain_decoding_whatever_is_asked_for(more) -> None:
    if "drafts_here" in more:
        rng = random.Random(5)
        beside = ScriptedDrafters([drafter_of(ORACLE, 1, 0.8)], 0.001, rng)
        more |= {"local": lambda clock: LocalThreads(clock, DraftingHere("here@1"), lambda _: beside.draft)}
    simulations = crowd(tokens=60, **more)
    assert [each.emitted for each in simulations] == own_texts(SESSIONS, tokens=60)
    records = [each.edge.statistics.service for each in simulations]
    assert all(record is not None and record.gaps > 0 for record in records)
    if "faults" in more:
        assert sum(each.edge.statistics.resumes for each in simulations) > SESSIONS


def test_a_stream_that_is_opened_again_carries_the_goal() -> None:
    opened = []
    receive = SimulatedVerifier.receive

    def noted(verifier: SimulatedVerifier, stream: SimulatedStream, frame: EdgeFrame) -> None:
        if isinstance(frame, Open):
            opened.append((frame.epoch, frame.session, frame.service))
        receive(verifier, stream, frame)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(SimulatedVerifier, "receive", noted)
        crowd(tokens=60, faults=BAD_LINK)
    assert max(epoch for epoch, *_ in opened) > 0
    assert all(service == mixed(int(session[1:])) for _, session, service in opened)


def test_a_gap_that_no_step_can_keep_holds_nobody_and_is_reported() -> None:
    def hopeless(number: int) -> ServiceGoal | None:
        return ServiceGoal(gap_s=0.005) if mixed(number) is GAP else mixed(number)

    simulations = crowd(hopeless)
    held, free = (all_fared(each)[ServiceClass.BATCH] for each in (simulations, crowd(lambda _: None)))
    assert statistics.median(held.rates) == pytest.approx(statistics.median(free.rates), rel=0.1)
    asked = [each.edge.statistics.service for number, each in enumerate(simulations) if mixed(number) is GAP]
    assert all(record is not None and record.missed for record in asked)

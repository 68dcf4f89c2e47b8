"""Modes of a benchmark, replayed on recorded hits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.bench.bench_metrics import latencies, pooled, work_per_token
from outrider.bench.bench_settings import WARM_UP_TOKENS
from outrider.bench.benchmark.bench_record import BenchmarkRun
from outrider.bench.links import BenchLink, LinkRecord
from outrider.proto.types import Goal
from research.intervals import bytes_per_token
from research.replay.hit_traces import HitTrace
from research.replay.lengths import best_length, colocated
from research.replay.traced import Policy, ReplayOutcome, replay
from research.simulator.clock import Costs


def replayed_run(mode: str, link: LinkRecord, outcomes: Sequence[ReplayOutcome], **fields: Any) -> BenchmarkRun:
    """Return a run that was computed from recorded hits."""
    metrics = pooled(outcomes) | work_per_token(outcomes) | latencies(outcomes) | bytes_per_token(outcomes)
    return BenchmarkRun(mode, link, replayed=True, **metrics, **fields)


@dataclass(frozen=True, slots=True)
class Replays:
    """Replays of one recording.

    Attributes:
        traces: the drafter's hits in the texts.
        costs: costs of the machines.
        goal: goal of the policies.
        price: seconds of waiting that a second of the verifier's drafting is worth; None: derived.
    """

    traces: Sequence[HitTrace]
    costs: Costs
    goal: Goal
    price: float | None = None

    def best_length(self, policy_of: Callable[[int], Policy], link: BenchLink) -> int:
        """Return the length that makes the texts fastest over a link, by `policy_of` it."""
        length, _ = best_length(policy_of, self.traces, link.shape_at, self.costs, warm_up_tokens=WARM_UP_TOKENS)
        return length

    def modes(self, link: BenchLink, colocated_length: int, common: Mapping[str, Any]) -> list[BenchmarkRun]:
        """Return the modes over a link that need no search.

        Args:
            link: link between edge and verifier.
            colocated_length: drafts before every step of a drafter beside the target.
            common: fields that all runs have.
        """
        ahead = Policy(goal=self.goal, trees=True)
        goal = {"goal": self.goal.name.lower()}
        modes: dict[str, tuple[Policy, dict[str, Any]]] = {
            "cloud": (Policy(drafting=False), {}),
            "colocated": (replace(colocated(colocated_length), trees=True), {"drafts_here": colocated_length}),
            "edge": (ahead, goal),
            "outrider": (replace(ahead, here=True, price=self.price), goal),
        }
        runs = []
        for mode, (policy, fields) in modes.items():
            outcomes = replay(self.traces, link.shape_at, self.costs, policy, warm_up_tokens=WARM_UP_TOKENS)
            runs.append(replayed_run(mode, link.record, outcomes, **fields | {**common}))
        return runs

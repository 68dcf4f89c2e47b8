"""Modes of a benchmark that are replayed on its recorded hits, and the lengths that replays choose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.bench.benchmark.record import BenchmarkRun
from outrider.bench.benchmark.runs import load_run, replayed_run
from outrider.bench.links import BenchLink, LinkRecord
from outrider.bench.replay.crowd import LENGTHS, Load, load_of
from outrider.bench.replay.optimum import best_in_hindsight, best_length, colocated, pearl
from outrider.bench.replay.traced import Policy, replay
from outrider.bench.replay.traces import HitTrace
from outrider.bench.simulator.clock import Costs
from outrider.proto.types import Goal

WARM_UP_TOKENS = 24
LOAD_S = 6.0  # that a replay of many sessions measures
LENGTH_FIELDS = {"sync": "sync_length", "pearl": "pearl_length", "colocated": "drafts_here"}


def fields_of(mode: str, lengths: Mapping[str, int], goal: Goal) -> dict[str, Any]:
    """Return the fields of a run by its mode: the length of its drafts, by mode in `lengths`, and its goal."""
    planned = mode in ("edge-chains", "edge", "chains", "outrider")
    fields: dict[str, Any] = {"goal": goal.name.lower() if planned else None}
    return fields | ({LENGTH_FIELDS[mode]: lengths[mode]} if mode in LENGTH_FIELDS else {})


@dataclass(frozen=True, slots=True)
class Replays:
    """Replays of one benchmark.

    Attributes:
        traces: the drafter's hits in the texts.
        costs: costs of the machines.
        goal: goal of the policies.
        here: whether the verifier has a drafter of its own.
        price: seconds of waiting that a second of its drafting is worth; None: derived.
        logprobs: whether commits carry log probabilities.
        chains: modes without trees to replay.
    """

    traces: Sequence[HitTrace]
    costs: Costs
    goal: Goal
    here: bool
    price: float | None = None
    logprobs: bool = True
    chains: tuple[str, ...] = ()

    def best_length(self, policy_of: Callable[[int], Policy], link: BenchLink) -> int:
        """Return the length that makes the texts fastest over a link, by `policy_of` it."""
        length, _ = best_length(policy_of, self.traces, link.shape_at, self.costs, warm_up_tokens=WARM_UP_TOKENS)
        return length

    def optimum(self, link: BenchLink, common: Mapping[str, Any]) -> BenchmarkRun:
        """Return the best of many policies over a link, in hindsight; `common` are fields that all runs have."""
        best = best_in_hindsight(self.traces, link.shape_at, self.costs, warm_up_tokens=WARM_UP_TOKENS, here=self.here)
        return replayed_run("optimum", link.record, best.outcomes, **common)

    def modes(self, link: BenchLink, lengths: Mapping[str, int], common: Mapping[str, Any]) -> list[BenchmarkRun]:
        """Return the modes over a link that need no search but that of a length.

        Args:
            link: link between edge and verifier.
            lengths: drafts of a block of PEARL, and before every step of a drafter beside the target; 0: leave it out.
            common: fields that all runs have.
        """
        runs = []
        for mode, policy in self._policies(lengths).items():
            outcomes = replay(self.traces, link.shape_at, self.costs, policy, warm_up_tokens=WARM_UP_TOKENS)
            fields = fields_of(mode, lengths, self.goal) | {**common}
            runs.append(replayed_run(mode, link.record, outcomes, **fields))
        return runs

    def together(
        self,
        links: Sequence[BenchLink],
        sessions: int,
        modes: Sequence[str],
        record: LinkRecord,
        common: Mapping[str, Any],
    ) -> list[BenchmarkRun]:
        """Return those of `modes` with many sessions at once, each edge on a machine of its own (`crowd.load_of`).

        Args:
            links: links that are dealt out among the sessions.
            sessions: number of sessions, which go on with text after text.
            modes: modes of the benchmark.
            record: record of these links.
            common: fields that all runs have.
        """
        shapes = [link.shape for link in links]

        def loaded(policy: Policy) -> Load:
            return load_of(self.traces, self.costs, policy, sessions=sessions, links=shapes, threads=1, seconds=LOAD_S)

        length = 0
        if "colocated" in modes:
            length = max(LENGTHS, key=lambda length: loaded(colocated(length)).tokens_per_second)
        return [
            load_run(mode, record, loaded(policy), **fields_of(mode, {"colocated": length}, self.goal) | {**common})
            for mode, policy in self._policies({"colocated": length}).items()
            if mode in modes
        ]

    def _policies(self, lengths: Mapping[str, int]) -> dict[str, Policy]:
        policies = {"cloud": Policy(drafting=False)}
        for mode, policy_of in (("pearl", pearl), ("colocated", colocated)):
            if lengths.get(mode):
                policies[mode] = replace(policy_of(lengths[mode]), trees=mode == "colocated")
        ahead = Policy(goal=self.goal, trees=True)
        if self.here:
            policies["edge"] = ahead
        policies["outrider"] = replace(ahead, here=self.here, price=self.price)
        for mode in self.chains:
            policies[mode] = replace(ahead if mode == "edge-chains" else policies["outrider"], trees=False)
        return {mode: replace(policy, logprobs=self.logprobs) for mode, policy in policies.items()}

"""A benchmark of many real sessions, simulated again: the same prompts, link and prices on a virtual clock."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outrider.bench.bench_metrics import grouped
from outrider.bench.bench_results import Benchmark, BenchmarkRun
from outrider.bench.bench_settings import WARM_UP_TOKENS
from outrider.deploy.link.shape import LinkShape
from outrider.proto.errors import ConfigError
from outrider.proto.policy import Measurements
from outrider.proto.session import CatchUpJob, CaughtUp, Drafted, DrafterFailed, DraftJob, EdgeSession
from outrider.proto.types import Sampling
from research.fleet.many_sessions import ManyTexts, numbered, quantile
from research.simulator.clock import Costs, VirtualClock
from research.simulator.simulated_verifier import SimulatedVerifier
from research.simulator.simulation import Drafters, Simulation
from research.simulator.wire import WireLink
from research.traces.recordings import HitTrace
from research.traces.traced import Policy, TracedText, open_frame, replay, rules_of, synchronous


class OneCore:
    """The drafters of all edges of a benchmark, whose jobs one thread does in their order."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._busy_until = 0.0

    def of(self, text: TracedText) -> Drafters:
        return _Queued(self, text)

    def wait_s(self, seconds: float) -> float:
        """Return the seconds until a job that takes so many is done."""
        self._busy_until = max(self._busy_until, self._clock.now) + seconds
        return self._busy_until - self._clock.now


class _Queued:
    def __init__(self, core: OneCore, text: TracedText) -> None:
        self._core = core
        self._text = text

    def draft(self, job: DraftJob) -> tuple[Drafted | DrafterFailed, float]:
        drafted, seconds = self._text.draft(job)
        return drafted, self._core.wait_s(seconds)

    def catch_up(self, job: CatchUpJob) -> tuple[CaughtUp | DrafterFailed, float]:
        caught_up, seconds = self._text.catch_up(job)
        return caught_up, self._core.wait_s(seconds)


SIMULATED = ("cloud", "sync", "edge")  # modes without a drafter beside the target
Begun = list[tuple[Simulation, WireLink]]


def simulated_again(
    run: BenchmarkRun, benchmark: Benchmark, traces: Sequence[HitTrace], costs: Costs
) -> dict[str, Any]:
    """Return the figures of a run, measured and simulated.

    `traces` are of the prompts of the benchmark, as many or more of each domain. Raises `ConfigError` where the run had
    not all prompts at once.
    """
    of_domain = grouped(traces, lambda trace: trace.domain)
    each = benchmark.environment.prompts // len(of_domain)
    chosen = [trace.first(benchmark.environment.max_tokens) for own in of_domain.values() for trace in own[:each]]
    texts = [replace(trace, prompt_tokens=1) for trace in chosen]  # the verifier has read the prompts before
    if len(texts) != benchmark.sessions:
        raise ConfigError(
            f"has {benchmark.sessions} sessions and {len(texts)} prompts; run all at once", field="measured"
        )
    costs = replace(costs, commit_s=(run.overhead_ms_p50 or 0.0) / 1e3)
    found = _figures(_decoded(run, texts, costs))
    rows = [{"figure": name, "measured": getattr(run, name), "simulated": found[name]} for name in found]
    return {"mode": run.name, "sessions": benchmark.sessions, "rtt_ms": run.link.rtt_ms, "figures": rows}


def _decoded(run: BenchmarkRun, traces: Sequence[HitTrace], costs: Costs) -> Begun:
    """Decode the texts of a run at once, on an edge that has decoded its first tokens before."""
    clock, rng, policy = VirtualClock(), random.Random(0), _policy(run)
    shape = LinkShape.of(rtt_ms=run.link.rtt_ms, up_mbit=run.link.up_mbit, down_mbit=run.link.down_mbit)
    measurements = Measurements()
    replay([traces[0].first(WARM_UP_TOKENS)], lambda _: shape, costs, policy, measurements=measurements)
    texts = [numbered(trace, number, costs) for number, trace in enumerate(traces)]
    verifier = SimulatedVerifier(clock, rules_of(texts, policy), ManyTexts(texts), costs)
    begun, core = Begun(), OneCore(clock)
    for number, text in enumerate(texts):
        sampling = Sampling(max_tokens=len(text.tokens) - text.first, ignore_eos=True)
        frame = open_frame(text, policy, sampling, str(number))
        edge = EdgeSession(frame, policy.window, measurements=copy.deepcopy(measurements))
        link = WireLink(clock, lambda _: shape, costs, edge.statistics, rng)
        begun.append((Simulation(clock, edge, verifier, core.of(text), lambda _, link=link: link), link))  # type: ignore[misc]
    for simulation, _ in begun:
        simulation.begin()
    while any(simulation.done is None for simulation, _ in begun):
        clock.advance()
    return begun


def _policy(run: BenchmarkRun) -> Policy:
    match run.mode:
        case "cloud":
            return Policy(drafting=False)
        case "sync":
            return synchronous(run.length or 1)
        case _:
            return Policy(trees=True)


def _figures(begun: Begun) -> dict[str, float]:
    """Return figures of texts by the names of `BenchmarkRun`."""
    tokens = sum(len(simulation.arrivals) for simulation, _ in begun)
    counts = [simulation.edge.statistics for simulation, _ in begun]
    gaps = sorted(b - a for simulation, _ in begun for a, b in itertools.pairwise(simulation.arrivals))
    steps = sum(count.steps for count in counts)
    return {
        "tokens_per_second": tokens / max(simulation.arrivals[-1] for simulation, _ in begun),
        "steps_per_token": steps / tokens,
        "rows_per_token": (steps + sum(count.verified for count in counts)) / tokens,
        "token_gap_ms_p99": 1e3 * quantile(gaps, 0.99, 0.0),
        "uplink_bytes_per_token": sum(link.wire_up.bytes for _, link in begun) / tokens,
        "downlink_bytes_per_token": sum(link.wire_down.bytes for _, link in begun) / tokens,
    }

"""Thousands of edges on many verifiers: texts arrive as in a public trace, and are placed by the coordinator's rule."""

from __future__ import annotations

import csv
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from outrider.coordinator.cluster import VerifierInfo, VerifierState
from outrider.coordinator.fleet_view import place
from outrider.deploy.link.link_traces import LinkTrace
from outrider.proto.errors import ConfigError, ResourceExhausted
from outrider.proto.plumbing.files import read_text
from outrider.proto.policy import Measurements
from outrider.proto.session import Done, EdgeInstruction, EdgeSession
from outrider.proto.types import Sampling
from research.fleet.many_sessions import WARM_UP_S, Load, ManyTexts, Observed, endless, measured, numbered
from research.fleet.prices import Device, VerifierPrices
from research.fleet.schemes import Scheme
from research.simulator.clock import VirtualClock
from research.simulator.simulated_verifier import SimulatedVerifier
from research.simulator.simulation import Simulation
from research.simulator.wire import WireLink
from research.traces.local_threads import LocalThreads
from research.traces.recordings import HitTrace
from research.traces.traced import TracedText, open_frame, rules_of

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
MAX_TOKENS = 512  # of a text; longer ones are cut
VOCABULARY = 1 << 24  # a text's number is a token of it
MODEL = "reference"


@dataclass(frozen=True, slots=True)
class Arrival:
    """A text that is asked for `at_s` after the trace's first, and the tokens that it gets."""

    at_s: float
    tokens: int


def read_arrivals(path: Path) -> list[Arrival]:
    """Read a trace of Azure's LLM inference, 2023 (github.com/Azure/AzurePublicDataset, CC-BY 4.0).

    Raises:
        ConfigError: it cannot be read, has other columns or a wrong line, or no requests.
    """
    rows = csv.DictReader(read_text(path, "arrivals").removeprefix("\ufeff").splitlines())
    if tuple(rows.fieldnames or ()) != COLUMNS:
        raise ConfigError(f"{path} has not the columns {', '.join(COLUMNS)} of Azure's trace", field="arrivals")
    try:
        asked = [(datetime.fromisoformat(row[COLUMNS[0]][:26]), int(row[COLUMNS[2]])) for row in rows]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} line {rows.line_num}: {error}", field="arrivals") from error
    if not asked:
        raise ConfigError(f"{path} has no requests", field="arrivals")
    first = asked[0][0]
    return [Arrival((at - first).total_seconds(), min(MAX_TOKENS, max(2, tokens))) for at, tokens in asked]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """The size of a run.

    Attributes:
        edges: number of edges, each with one text at a time at most.
        verifiers: number of verifiers.
        texts: texts that go on when it begins; as many begin a second as end at `pace_s` a token.
        seconds: time that is measured after a warm-up.
        pace_s: mean time a token by which the rate of arrivals is set, in seconds.
    """

    edges: int = 10_000
    verifiers: int = 64
    texts: int = 4000
    seconds: float = 6.0
    pace_s: float = 0.025
    max_sessions: int = 512
    seed: int = 0


@dataclass(slots=True)
class _Edge:
    device: Device
    trace: LinkTrace
    offset_s: float
    measurements: Measurements = field(default_factory=Measurements)


@dataclass(slots=True)
class _Verifier:
    machine: SimulatedVerifier
    local: LocalThreads | None
    texts: dict[int, TracedText]
    beside: dict[str, TracedText]
    sessions: int = 0


class _FleetText(Simulation):
    """One text, which says when it is done."""

    on_done: Callable[[], None]

    def follow(self, instruction: EdgeInstruction) -> None:
        super().follow(instruction)
        if isinstance(instruction, Done):
            self.on_done()


class Fleet:
    """A run of one scheme; `refused` counts the texts that found no edge or no slot."""

    def __init__(
        self,
        traces: Sequence[HitTrace],
        arrivals: Sequence[Arrival],
        scheme: Scheme,
        prices: VerifierPrices,
        plan: FleetPlan,
        devices: Sequence[Device],
        links: Sequence[LinkTrace],
    ) -> None:
        self.refused = 0
        self._traces, self._arrivals, self._scheme, self._prices, self._plan = traces, arrivals, scheme, prices, plan
        self._clock, self._rng = VirtualClock(), random.Random(plan.seed)
        self._idle = [
            _Edge(devices[i % len(devices)], links[i // len(devices) % len(links)], self._rng.uniform(0.0, 600.0))
            for i in range(plan.edges)
        ]
        self._observed: list[Observed] = []
        self._running: dict[int, tuple[_FleetText, WireLink, _Edge, float]] = {}
        self._numbers = 0
        self._verifiers = [self._new_verifier() for _ in range(plan.verifiers)]

    def run(self) -> Load:
        """Run it and return how its texts fared."""
        plan, end_s = self._plan, WARM_UP_S + self._plan.seconds
        for _ in range(plan.texts):
            tokens = self._rng.choice(self._arrivals).tokens
            self._clock.at(self._rng.uniform(0.0, WARM_UP_S / 2), partial(self._begin, self._rng.randint(1, tokens)))
        for at_s, tokens in self._scaled():
            if at_s >= end_s:
                break
            self._clock.at(at_s, partial(self._begin, tokens))
        self._clock.at(end_s, lambda: None)  # a small fleet may have no text in the end
        while self._clock.now < end_s:
            self._clock.advance()
        for text, link, edge, began_s in self._running.values():
            self._observed.append(Observed(text.arrivals, began_s, end_s, text.edge.statistics, link, edge.device))
        busy_s = sum(verifier.local.busy_s for verifier in self._verifiers if verifier.local is not None)
        return measured(self._observed, plan.seconds, busy_s)

    def _scaled(self) -> Iterator[tuple[float, int]]:
        """Yield times and lengths of texts, from a moment of the trace on, at the plan's rate."""
        plan, arrivals = self._plan, self._arrivals
        mean = sum(arrival.tokens for arrival in arrivals) / len(arrivals)
        rate = plan.texts / (mean * plan.pace_s)
        speed = rate * arrivals[-1].at_s / len(arrivals)
        first = self._rng.randrange(len(arrivals) // 2)
        for arrival in arrivals[first:]:
            yield (arrival.at_s - arrivals[first].at_s) / speed, arrival.tokens

    def _new_verifier(self) -> _Verifier:
        texts, beside = dict[int, TracedText](), dict[str, TracedText]()
        local = self._scheme.beside(self._clock, lambda session: beside[session].draft)
        costs = self._scheme.costs(self._prices, 0.0)
        rules = rules_of((numbered(self._traces[0], 0, costs),), self._scheme.policy)
        rules = replace(rules, vocab_size=VOCABULARY, context_length=2 * MAX_TOKENS)
        batching = self._scheme.new_batching()
        machine = SimulatedVerifier(self._clock, rules, ManyTexts(texts), costs, batching, local)
        return _Verifier(machine, local, texts, beside)

    def _place(self) -> _Verifier:
        """Return the verifier that the coordinator's rule chooses; raises `ResourceExhausted`."""
        state = VerifierState.READY
        infos = [
            VerifierInfo(
                name=f"{i:02}",
                address="",
                model=MODEL,
                tokenizer_sha256="",
                state=state,
                sessions=each.sessions,
                max_sessions=self._plan.max_sessions,
                kv_pages=1,
                kv_pages_free=1,
                step_s=each.machine.step_s.value,
            )
            for i, each in enumerate(self._verifiers)
        ]
        return self._verifiers[int(place(infos, MODEL, "").name)]

    def _begin(self, tokens: int) -> None:
        try:
            edge = self._idle.pop(self._rng.randrange(len(self._idle)))
        except ValueError:
            self.refused += 1
            return
        try:
            verifier = self._place()
        except ResourceExhausted:
            self.refused += 1
            self._idle.append(edge)
            return
        number, clock, scheme = self._numbers, self._clock, self._scheme
        self._numbers += 1
        verifier.sessions += 1
        trace = endless(self._traces, number, tokens).first(tokens)
        costs = scheme.costs(self._prices, edge.device.drafting_s)
        verifier.texts[number] = text = numbered(trace, number, costs)
        if verifier.local is not None:
            verifier.beside[str(number)] = numbered(trace, number, scheme.costs_here(self._prices))
        sampling = Sampling(max_tokens=tokens, ignore_eos=True)
        machine = EdgeSession(
            open_frame(text, scheme.policy, sampling, str(number)),
            scheme.policy.window,
            measurements=edge.measurements,
        )
        link = WireLink(clock, lambda now: edge.trace.at(now + edge.offset_s), costs, machine.statistics, self._rng)
        running = _FleetText(clock, machine, verifier.machine, text, lambda _: link)
        running.on_done = partial(self._end, number, verifier)
        self._running[number] = running, link, edge, clock.now
        running.begin()

    def _end(self, number: int, verifier: _Verifier) -> None:
        text, link, edge, began_s = self._running.pop(number)
        self._observed.append(
            Observed(text.arrivals, began_s, self._clock.now, text.edge.statistics, link, edge.device)
        )
        verifier.sessions -= 1
        self._idle.append(edge)
        if text.stream is not None:
            self._clock.at(self._clock.now, text.stream.close)

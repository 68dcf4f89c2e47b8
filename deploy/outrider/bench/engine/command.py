"""`outrider engine-bench`: steps of one target by part, and in turn with those of other engines."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import torch
from rich.console import Console

from outrider.bench.commands import EngineSettings
from outrider.bench.engine.engine_steps import learning_cost, planning_s
from outrider.bench.engine.parts import pass_shares
from outrider.bench.engine.peer import PeerAbsent, PeerProcess, PeerSpec, peer_specs
from outrider.bench.engine.record import GENERATE, OURS, PLAIN, CaseResult, EngineRecord, EngineTimes, StepParts
from outrider.bench.engine.row_prices import row_prices
from outrider.bench.engine.steps import Case, Clock, Steps, generate_first_s, generate_in_turns
from outrider.bench.engine.table import table
from outrider.bench.environment import environment
from outrider.bench.outputs import check_file
from outrider.bench.record import save
from outrider.cloud.config import VerifierConfig
from outrider.cloud.family_index import find_target
from outrider.cloud.precision import dtype_name
from outrider.cloud.target import load_model, load_target
from outrider.deploy.arguments import Given
from outrider.proto.errors import ConfigError
from outrider.proto.types import Guarantee, Sampling

_PAGE = 16
_ENGINE_STEPS = 40  # of each session in the engine itself
_GROWTH = 128  # positions that a session of the engine may hold beyond its text
# Steps of a turn that warm the caches after another engine's turn, and those that count.
_WARM, _TIMED = 3, 3


def engine_bench(given: Given) -> int:
    """Run `outrider engine-bench`."""
    options, verifier = given(EngineSettings), given(VerifierConfig)
    if options.json:
        check_file(options.json, "json")
    with ExitStack() as stack:
        record = _EngineBench(options, verifier, stack).measure()
    Console(width=100, highlight=False).print(table(record))
    if options.json:
        save(record, options.json)
    return 0


@dataclass(slots=True)
class _Turns:
    """The turns of all engines in one case: seconds of each turn's steps, by engine."""

    by_engine: defaultdict[str, list[list[float]]] = field(default_factory=lambda: defaultdict(list))
    absent: dict[str, str] = field(default_factory=dict)

    def times(self, engine: str, same_tokens: int | None) -> EngineTimes:
        """Sum up an engine's turns but for the first, which warms up."""
        turns, ours = self.by_engine[engine][1:], self.by_engine[OURS][1:]
        return EngineTimes(
            1e3 * median(seconds for turn in turns for seconds in turn),
            median(median(theirs) / median(of_ours) for theirs, of_ours in zip(turns, ours, strict=True)),
            same_tokens,
        )


class _EngineBench:
    """One measurement from its options to its record."""

    def __init__(self, options: EngineSettings, verifier: VerifierConfig, stack: ExitStack) -> None:
        if verifier.threads:
            torch.set_num_threads(verifier.threads)
        self._options, self._verifier = options, verifier
        one_thread = torch.get_num_threads() == 1
        self._clock: Clock = time.thread_time if one_thread else time.perf_counter
        self._clock_name = "cpu" if one_thread else "wall"
        self._sampling = Sampling(temperature=options.temperature, seed=1)
        self._cases = list(_cases(options))
        load = partial(load_target, verifier.target, kv_tokens=max(map(kv_positions, self._cases)), page_size=_PAGE)
        self._packed = load(dtype=verifier.dtype, exact=verifier.exact)
        dtype = dtype_name(self._packed.dtype)
        self._plain = load(dtype=dtype, exact="off", packed=False, straight=False)
        for case in sorted(self._cases, key=lambda case: (-case.context, -case.rows)):
            needed, room = case.context + case.rows, self._plain.context_length
            if needed > room:
                message = f"takes {needed} positions with the rows, and the target has {room}; take less"
                field = "context" if case.context == options.context else "steps"
                raise ConfigError(message, field=field if case.context else "prefill")
        source = find_target(verifier.target)
        self._library = load_model(source, verifier.target, device="cpu", dtype=dtype)
        self._versions: dict[str, str] = {}
        self._absent: dict[str, str] = {}
        specs = peer_specs(options, _folder(source), dtype)
        self._peers = [peer for spec in specs if (peer := self._start(spec, stack)) is not None]

    def _start(self, spec: PeerSpec, stack: ExitStack) -> PeerProcess | None:
        try:
            peer = PeerProcess(spec, torch.get_num_threads(), self._clock_name)
            stack.callback(peer.close)
            self._versions[spec.label] = peer.loaded()
        except PeerAbsent as absent:
            self._absent[spec.label] = str(absent)
            return None
        return peer

    def measure(self) -> EngineRecord:
        """Measure all cases."""
        options, packing = self._options, self._packed.packing
        return EngineRecord(
            environment=environment(
                self._verifier,
                dtype_name(self._packed.dtype),
                drafter="",
                drafter_version=None,
                drafter_threads=None,
                prompts=0,
                max_tokens=0,
                seed=0,
            ),
            clock=self._clock_name,
            context=options.context,
            repetitions=options.repetitions,
            temperature=options.temperature,
            packed_shapes=packing.packed,
            plain_shapes=packing.plain,
            packed_bytes=packing.packed_bytes,
            rows_keep_bits=self._packed.passes.guarantee is not Guarantee.DISTRIBUTION,
            peers=self._versions,
            absent=self._absent,
            results=tuple(map(self._result, self._cases)),
        )

    def _result(self, case: Case) -> CaseResult:
        turns, same = _Turns(), dict[str, int]()
        contexts = case.contexts(self._packed.vocab_size)
        with (
            Steps(self._plain, case, self._sampling, self._clock) as plain,
            Steps(self._packed, case, self._sampling, self._clock) as packed,
        ):
            peers = []
            for peer in self._peers:
                if case.branches:
                    turns.absent[peer.spec.label] = "has no steps with branches"
                    continue
                try:
                    tokens = peer.prepare(contexts, case.rows, case.logits)
                except PeerAbsent as absent:
                    turns.absent[peer.spec.label] = str(absent)
                    continue
                peers.append(peer)
                if tokens:
                    pairs = zip(tokens, packed.tokens_after_contexts, strict=True)
                    same[peer.spec.label] = sum(theirs == ours for theirs, ours in pairs)
            of_ours = self._take_turns(case, turns, plain, packed, peers)
            parts = self._parts(packed, of_ours, case)
            learning, prices = None, None
            if case.branches:
                prices = row_prices(self._packed, case, self._sampling, self._clock, self._options.repetitions)
            elif self._options.learning and case.context:
                learning = learning_cost(
                    self._packed, case, self._engine_steps(case), self._sampling, self._options.repetitions
                )
        elsewhere = case.context not in (0, self._options.context)
        return CaseResult(
            f"{case.name}@{case.context}" if elsewhere else case.name,
            case.sessions,
            case.rows,
            parts,
            {engine: turns.times(engine, same.get(engine)) for engine in turns.by_engine},
            turns.absent,
            learning,
            prices,
        )

    def _engine_steps(self, case: Case) -> int:
        """Return the steps of each session in the engine itself, as far as the target has positions for them."""
        return min(_ENGINE_STEPS, (self._packed.context_length - case.context) // case.rows - 1)

    def _take_turns(
        self, case: Case, turns: _Turns, plain: Steps, packed: Steps, peers: Sequence[PeerProcess]
    ) -> list[tuple[float, float]]:
        """Let all engines take turns, and return pass and sampling of our steps."""
        warm, timed = (_WARM, _TIMED) if case.context else (0, 1)
        of_ours: list[tuple[float, float]] = []

        def between(of_generate: Sequence[float] = ()) -> None:
            measured = packed.turn(warm, timed)
            of_ours.extend(measured)
            turns.by_engine[OURS].append([sum(step) for step in measured])
            turns.by_engine[PLAIN].append([sum(step) for step in plain.turn(warm, timed)])
            if of_generate:
                turns.by_engine[GENERATE].append(list(of_generate))
            for peer in peers:
                _take(peer, turns, warm, timed)

        repetitions = self._options.repetitions + 1  # the first one warms up
        if case.decodes:
            contexts = case.contexts(self._packed.vocab_size)
            generate_in_turns(self._library, contexts, repetitions, warm, timed, self._clock, between)
        else:
            prompt = case.prompt(self._packed.vocab_size)
            for _ in range(repetitions):
                between([generate_first_s(self._library, prompt, self._clock)] if not case.context else ())
        return of_ours[timed:]

    def _parts(self, steps: Steps, measured: Sequence[tuple[float, float]], case: Case) -> StepParts:
        shares = pass_shares(steps)
        forward_ms = 1e3 * median(forward_s for forward_s, _ in measured)
        between_s = None
        if case.context and not case.branches:
            between_s = planning_s(self._packed, case, self._engine_steps(case), self._sampling)
        return StepParts(
            forward_ms,
            forward_ms * shares.products,
            forward_ms * shares.attention,
            forward_ms * shares.operators,
            forward_ms * shares.python,
            shares.calls,
            1e3 * median(sampling_s for _, sampling_s in measured),
            None if between_s is None else 1e3 * between_s,
        )


def _take(peer: PeerProcess, turns: _Turns, warm: int, timed: int) -> None:
    """Let a peer take its turn, unless one of its turns has failed."""
    label = peer.spec.label
    if label in turns.absent:
        return
    try:
        turns.by_engine[label].append(peer.turn(warm, timed))
    except PeerAbsent as absent:
        turns.absent[label] = str(absent)
        turns.by_engine.pop(label, None)


def _cases(options: EngineSettings) -> Iterator[Case]:
    for sessions, rows, branches, context in options.steps:
        yield Case(sessions, rows, rows, context or options.context, branches)
    if options.prefill:
        yield Case(1, options.prefill, 1, 0)


def kv_positions(case: Case) -> int:
    """Return the positions of the KV cache that steps, others and texts of the engine take beside each other."""
    contexts = 4 if case.branches else 2
    beside = _PAGE * case.branches
    return case.sessions * (contexts * case.context + (_ENGINE_STEPS + 1) * case.rows + _GROWTH + beside)


def _folder(source: str) -> str:
    """Return the folder of a target that has been loaded, also where its name is one of the hub."""
    if Path(source).is_dir():
        return source
    from huggingface_hub import snapshot_download

    return str(snapshot_download(source, local_files_only=True))

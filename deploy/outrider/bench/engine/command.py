"""`outrider engine-bench`: steps of one target by part, and in turn with those of other engines."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import torch
from rich.console import Console

from outrider.bench.commands import EngineSettings
from outrider.bench.engine.engine_steps import learning_cost, planning_s
from outrider.bench.engine.parts import pass_shares
from outrider.bench.engine.peer import PeerAbsent, PeerProcess, PeerSpec, peer_specs
from outrider.bench.engine.record import LIBRARY, OURS, CaseResult, EngineRecord, EngineTimes, StepParts
from outrider.bench.engine.row_prices import row_prices
from outrider.bench.engine.steps import Case, Clock, LibrarySteps, Steps
from outrider.bench.engine.table import table
from outrider.bench.environment import environment
from outrider.bench.outputs import check_file
from outrider.bench.record import save
from outrider.cloud.config import VerifierConfig
from outrider.cloud.family_index import find_target
from outrider.cloud.precision import dtype_name
from outrider.cloud.target import load_model, load_target
from outrider.deploy.arguments import Given
from outrider.deploy.progress import stage
from outrider.proto.errors import ConfigError
from outrider.proto.types import Guarantee, Sampling

_PAGE = 16
_ENGINE_STEPS = 40  # of each session in the engine itself
_GROWTH = 128  # positions that a session of the engine may hold beyond its text
# Steps of a turn that warm the caches after another engine's turn, and those that count.
_WARM, _TIMED = 2, 2
_MIN_TURNS = 3  # the first one warms up

Turn = Callable[[int, int], list[float]]  # takes steps that warm up and steps that count, returns seconds of these


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


class _EngineBench:
    """One measurement from its options to its record."""

    def __init__(self, options: EngineSettings, verifier: VerifierConfig, stack: ExitStack) -> None:
        torch.set_num_threads(verifier.torch_threads)
        self._options, self._verifier = options, verifier
        one_thread = torch.get_num_threads() == 1
        self._clock: Clock = time.thread_time if one_thread else time.perf_counter
        self._clock_name = "cpu" if one_thread else "wall"
        self._sampling = Sampling(temperature=options.temperature, seed=1)
        self._cases = list(_cases(options))
        with stage(f"loading {verifier.target}"):
            self._ours = load_target(
                verifier.target,
                dtype=verifier.dtype,
                exact=verifier.exact,
                kv_tokens=max(map(kv_positions, self._cases)),
                page_size=_PAGE,
            )
        dtype = dtype_name(self._ours.dtype)
        for case in sorted(self._cases, key=lambda case: (-case.context, -case.rows)):
            needed, room = case.context + case.rows, self._ours.context_length
            if needed > room:
                message = f"takes {needed} positions with the rows, and the target has {room}; take less"
                field = "context" if case.context in options.context else "steps"
                raise ConfigError(message, field=field if case.context else "prefill")
        source = find_target(verifier.target)
        with stage("loading it in transformers"):
            self._library = load_model(source, verifier.target, device="cpu", dtype=dtype)
        self._versions: dict[str, str] = {}
        self._absent: dict[str, str] = {}
        specs = peer_specs(options, _folder(source), dtype)
        self._peers = [peer for spec in specs if (peer := self._start(spec, stack)) is not None]

    def _start(self, spec: PeerSpec, stack: ExitStack) -> PeerProcess | None:
        try:
            with stage(f"loading it in {spec.label}"):
                peer = PeerProcess(spec, torch.get_num_threads(), self._clock_name)
                stack.callback(peer.close)
                self._versions[spec.label] = peer.loaded()
        except PeerAbsent as absent:
            self._absent[spec.label] = str(absent)
            return None
        return peer

    def measure(self) -> EngineRecord:
        """Measure all cases, each in its share of the time."""
        packing = self._ours.packing
        ends, results = time.monotonic() + self._options.seconds, []
        for left, case in zip(range(len(self._cases), 0, -1), self._cases, strict=True):
            results.append(self._result(case, time.monotonic() + (ends - time.monotonic()) / left))
        return EngineRecord(
            environment=environment(
                self._verifier,
                dtype_name(self._ours.dtype),
                drafter="",
                drafter_version=None,
                drafter_threads=None,
                prompts=0,
                max_tokens=0,
                seed=0,
            ),
            clock=self._clock_name,
            temperature=self._options.temperature,
            packed_shapes=packing.packed,
            plain_shapes=packing.plain,
            packed_bytes=packing.packed_bytes,
            rows_keep_bits=self._ours.passes.guarantee is not Guarantee.DISTRIBUTION,
            peers=self._versions,
            absent=self._absent,
            results=tuple(results),
        )

    def _result(self, case: Case, ends: float) -> CaseResult:
        same: dict[str, bool] = {}
        absent: dict[str, str] = {}
        with (
            stage(f"{case.name} after {case.context} tokens"),
            Steps(self._ours, case, self._sampling, self._clock) as ours,
        ):
            engines: dict[str, Turn] = {OURS: ours.turn}
            if not case.branches:
                engines[LIBRARY] = LibrarySteps(self._library, case, self._clock).turn
            text = case.text(self._ours.vocab_size)
            for peer in self._peers:
                label = peer.spec.label
                try:
                    if case.branches:
                        raise PeerAbsent("has no steps with branches")
                    token = peer.prepare(text, case.sessions, case.rows, case.logits)
                except PeerAbsent as why:
                    absent[label] = str(why)
                    continue
                engines[label] = peer.turn
                if token is not None:
                    same[label] = token == ours.token_after_context
            times = self._take_turns(case, engines, absent, ends)
            parts = self._parts(ours, case) if self._options.parts else None
            learning, prices = None, None
            if case.branches:
                prices = row_prices(self._ours, case, self._sampling, self._clock, self._options.repetitions)
            elif self._options.learning and case.context:
                learning = learning_cost(
                    self._ours, case, self._engine_steps(case), self._sampling, self._options.repetitions
                )
        return CaseResult(
            case.name,
            case.sessions,
            case.rows,
            case.context,
            len(times[OURS]),
            {engine: _times(turns, times[OURS], same.get(engine)) for engine, turns in times.items()},
            absent,
            parts,
            learning,
            prices,
        )

    def _engine_steps(self, case: Case) -> int:
        """Return the steps of each session in the engine itself, as far as the target has positions for them."""
        return min(_ENGINE_STEPS, (self._ours.context_length - case.context) // case.rows - 1)

    def _take_turns(
        self, case: Case, engines: dict[str, Turn], absent: dict[str, str], ends: float
    ) -> dict[str, list[list[float]]]:
        """Let all engines take turns until `ends`, and return the seconds of the steps of those that did not fail."""
        warm, timed = (_WARM, _TIMED) if case.context else (0, 1)
        times: defaultdict[str, list[list[float]]] = defaultdict(list)
        for turn in range(self._options.repetitions + 1):
            if turn >= _MIN_TURNS and time.monotonic() > ends:
                break
            for name, take in engines.items():
                try:
                    if name not in absent:
                        times[name].append(take(warm, timed))
                except PeerAbsent as why:
                    absent[name] = str(why)
        return {name: turns[1:] for name, turns in times.items() if name not in absent}

    def _parts(self, steps: Steps, case: Case) -> StepParts:
        shares = pass_shares(steps)
        made = [steps.step() for _ in range(_WARM + self._options.repetitions)][_WARM:]
        forward_ms, sampling_ms = (1e3 * median(seconds) for seconds in zip(*made, strict=True))
        between_s = None
        if case.context and not case.branches:
            between_s = planning_s(self._ours, case, self._engine_steps(case), self._sampling)
        return StepParts(
            forward_ms,
            forward_ms * shares.products,
            forward_ms * shares.attention,
            forward_ms * shares.operators,
            forward_ms * shares.python,
            shares.calls,
            sampling_ms,
            None if between_s is None else 1e3 * between_s,
        )


def _times(turns: list[list[float]], of_ours: list[list[float]], same_token: bool | None) -> EngineTimes:
    """Sum up an engine's turns beside ours."""
    return EngineTimes(
        1e3 * median(seconds for turn in turns for seconds in turn),
        median(median(theirs) / median(ours) for theirs, ours in zip(turns, of_ours, strict=True)),
        same_token,
    )


def _cases(options: EngineSettings) -> Iterator[Case]:
    for context in options.context:
        for shape in options.steps:
            if not shape.context or context == options.context[0]:
                yield Case(shape.sessions, shape.rows, shape.rows, shape.context or context, shape.branches)
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

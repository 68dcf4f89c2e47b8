"""`python -m research engine`: steps of one target by part, and in turn with those of transformers."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from statistics import median

import torch
from rich.console import Console

from outrider.bench.environment import environment
from outrider.bench.record import check_file, save
from outrider.cloud.models.family_index import find_target
from outrider.cloud.target.precision import dtype_name
from outrider.cloud.target.target import load_model, load_target
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.arguments import Given
from outrider.deploy.process.progress import stage
from outrider.proto.errors import ConfigError
from outrider.proto.types import Guarantee, Sampling
from research.engine.engine_record import LIBRARY, OURS, CaseResult, EngineRecord, EngineTimes, StepParts
from research.engine.engine_steps import planning_s
from research.engine.engine_table import table
from research.engine.pass_parts import pass_shares
from research.engine.timed_steps import Case, Clock, LibrarySteps, Steps
from research.research_settings import EngineSettings

_PAGE = 16
_ENGINE_STEPS = 40  # of each session in the engine itself
_GROWTH = 128  # positions that a session of the engine may hold beyond its text
# Steps of a turn that warm the caches after another engine's turn, and those that count.
_WARM, _TIMED = 2, 2
_MIN_TURNS = 3  # the first one warms up

Turn = Callable[[int, int], list[float]]  # takes steps that warm up and steps that count, returns seconds of these


def engine_bench(given: Given) -> int:
    """Run `python -m research engine`."""
    options, verifier = given(EngineSettings), given(VerifierConfig)
    if options.json:
        check_file(options.json, "json")
    record = _EngineBench(options, verifier).measure()
    Console(width=100, highlight=False).print(table(record))
    if options.json:
        save(record, options.json)
    return 0


class _EngineBench:
    """One measurement from its options to its record."""

    def __init__(self, options: EngineSettings, verifier: VerifierConfig) -> None:
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
                raise ConfigError(message, field="context" if case.context else "prefill")
        source = find_target(verifier.target)
        with stage("loading it in transformers"):
            self._library = load_model(source, verifier.target, device="cpu", dtype=dtype)

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
            results=tuple(results),
        )

    def _result(self, case: Case, ends: float) -> CaseResult:
        with (
            stage(f"{case.name} after {case.context} tokens"),
            Steps(self._ours, case, self._sampling, self._clock) as ours,
        ):
            engines: dict[str, Turn] = {OURS: ours.turn, LIBRARY: LibrarySteps(self._library, case, self._clock).turn}
            times = self._take_turns(case, engines, ends)
            parts = self._parts(ours, case) if self._options.parts else None
        return CaseResult(
            case.name,
            case.sessions,
            case.rows,
            case.context,
            len(times[OURS]),
            {engine: _times(turns, times[OURS]) for engine, turns in times.items()},
            parts,
        )

    def _engine_steps(self, case: Case) -> int:
        """Return the steps of each session in the engine itself, as far as the target has positions for them."""
        return min(_ENGINE_STEPS, (self._ours.context_length - case.context) // case.rows - 1)

    def _take_turns(self, case: Case, engines: dict[str, Turn], ends: float) -> dict[str, list[list[float]]]:
        """Let both engines take turns until `ends`, and return the seconds of their steps."""
        warm, timed = (_WARM, _TIMED) if case.context else (0, 1)
        times: defaultdict[str, list[list[float]]] = defaultdict(list)
        for turn in range(self._options.repetitions + 1):
            if turn >= _MIN_TURNS and time.monotonic() > ends:
                break
            for name, take in engines.items():
                times[name].append(take(warm, timed))
        return {name: turns[1:] for name, turns in times.items()}

    def _parts(self, steps: Steps, case: Case) -> StepParts:
        shares = pass_shares(steps)
        made = [steps.step() for _ in range(_WARM + self._options.repetitions)][_WARM:]
        forward_ms, sampling_ms = (1e3 * median(seconds) for seconds in zip(*made, strict=True))
        between_s = None
        if case.context:
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


def _times(turns: list[list[float]], of_ours: list[list[float]]) -> EngineTimes:
    """Sum up an engine's turns beside ours."""
    return EngineTimes(
        1e3 * median(seconds for turn in turns for seconds in turn),
        median(median(theirs) / median(ours) for theirs, ours in zip(turns, of_ours, strict=True)),
    )


def _cases(options: EngineSettings) -> Iterator[Case]:
    for context in options.context:
        for shape in options.steps:
            yield Case(shape.sessions, shape.rows, shape.rows, context)
    if options.prefill:
        yield Case(1, options.prefill, 1, 0)


def kv_positions(case: Case) -> int:
    """Return the positions of the KV cache that steps, others and texts of the engine take beside each other."""
    return case.sessions * (2 * case.context + (_ENGINE_STEPS + 1) * case.rows + _GROWTH)

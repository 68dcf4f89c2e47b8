"""`outrider engine-bench`: plain and packed steps of one target in turn, and transformers' `generate` between them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch
from rich.console import Console

from outrider.bench.commands import EngineSettings
from outrider.bench.engine.record import EngineRecord, StepComparison, StepParts
from outrider.bench.engine.steps import Clock, MeasuredStep, Steps, generate_times
from outrider.bench.engine.table import table
from outrider.bench.environment import environment
from outrider.bench.outputs import check_file
from outrider.bench.record import save
from outrider.cloud.config import VerifierConfig
from outrider.cloud.family_index import resolve_target
from outrider.cloud.target import load_model, load_target
from outrider.deploy.arguments import Given
from outrider.proto.errors import ConfigError
from outrider.proto.types import Sampling

_PAGE = 16


def engine_bench(given: Given) -> int:
    """Run `outrider engine-bench`."""
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
        if verifier.threads:
            torch.set_num_threads(verifier.threads)
        self._options, self._verifier = options, verifier
        self._clock: Clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        self._sizes = [tuple(map(int, text.split("x"))) for text in options.steps]
        tokens = max(sessions * (options.context + rows + _PAGE) for sessions, rows in self._sizes)
        self._plain, self._packed = (
            load_target(verifier.target, dtype=verifier.dtype, kv_tokens=tokens, page_size=_PAGE, packed=packed)
            for packed in (False, True)
        )
        needed = options.context + max(rows for _, rows in self._sizes)
        if needed > self._plain.context_length:
            message = (
                f"takes {needed} positions with the rows, and the target has {self._plain.context_length}; take less"
            )
            raise ConfigError(message, field="context")
        source = resolve_target(verifier.target)
        self._library = load_model(source, verifier.target, device="cpu", dtype=verifier.dtype)

    def measure(self) -> EngineRecord:
        """Measure all steps."""
        options, packing = self._options, self._packed.packing
        return EngineRecord(
            environment=environment(
                self._verifier,
                drafter="",
                drafter_version=None,
                drafter_threads=None,
                prompts=0,
                max_tokens=0,
                seed=0,
            ),
            clock="thread" if self._clock is time.thread_time else "wall",
            context=options.context,
            repetitions=options.repetitions,
            temperature=options.temperature,
            packed_shapes=packing.packed,
            plain_shapes=packing.plain,
            packed_bytes=packing.packed_bytes,
            rows_keep_bits=packing.rows_keep_bits,
            results=tuple(self._result(sessions, rows) for sessions, rows in self._sizes),
        )

    def _result(self, sessions: int, rows: int) -> StepComparison:
        options, vocab = self._options, self._plain.vocab_size
        contexts = [[(37 * i + j) % vocab for i in range(options.context)] for j in range(sessions)]
        sampling = Sampling(temperature=options.temperature, seed=1)
        plain_times: list[MeasuredStep] = []
        packed_times: list[MeasuredStep] = []
        generate_s: list[float] = []
        with (
            Steps(self._plain, contexts, rows, sampling, self._clock) as plain,
            Steps(self._packed, contexts, rows, sampling, self._clock) as packed,
        ):

            def pair() -> None:
                plain_times.append(plain.step())
                packed_times.append(packed.step())

            if rows == 1:
                generate_s = generate_times(self._library, contexts, options.repetitions, self._clock, pair)
            else:
                for _ in range(options.repetitions + 1):
                    pair()
        pairs = zip(plain_times[1:], packed_times[1:], strict=True)  # the first one warms up
        return StepComparison(
            sessions,
            rows,
            _parts(plain_times[1:]),
            _parts(packed_times[1:]),
            median(of_plain.forward_s / of_packed.forward_s for of_plain, of_packed in pairs),
            1e3 * median(generate_s) if generate_s else None,
        )


def _parts(times: Sequence[MeasuredStep]) -> StepParts:
    return StepParts(
        1e3 * median(each.forward_s for each in times),
        1e3 * median(each.products_s for each in times),
        1e3 * median(each.attention_s for each in times),
        1e3 * median(each.sampling_s for each in times),
    )

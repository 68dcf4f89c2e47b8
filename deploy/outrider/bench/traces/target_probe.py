"""What a step of the target takes, by trying: one session, so many rows, as an engine that judges its drafts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

from outrider.bench.comparison.texts import Text
from outrider.bench.traces.costs import TargetCosts
from outrider.cloud.kv_cache import SessionCache
from outrider.cloud.sampling import Sampler, VerificationInput
from outrider.cloud.target import Rows, Target
from outrider.proto.policy import Line
from outrider.proto.types import Sampling

DRAFTS = (0, 1, 2, 4, 8, 16)  # judged in a step
REPEATS = 5
TEXTS = 4


class TargetProbe:
    """Times steps after the prompts of a few texts."""

    def __init__(self, target: Target, sampling: Sampling) -> None:
        self._target = target
        self._sampling = sampling
        self._sampler = Sampler(target.device)

    def costs(self, texts: Sequence[Text]) -> TargetCosts:
        """Of the middle ones by length; the very first step is not counted: it makes the target ready."""
        ordered = sorted(texts, key=lambda text: text.prompt_length)
        first = max(0, (len(ordered) - TEXTS) // 2)
        chosen = ordered[first : first + TEXTS]
        self._steps_after(chosen[0], (0,), 1)
        reading: list[tuple[int, float]] = []
        by_rows: dict[int, list[float]] = {}
        for text in chosen:
            reading_s, steps = self._steps_after(text, DRAFTS, REPEATS)
            reading.append((text.prompt_length, reading_s))
            for rows, seconds in steps:
                by_rows.setdefault(rows, []).append(seconds)
        line = Line(fade=1.0)
        for rows, all_s in by_rows.items():
            line.add(rows, median(all_s))
        prefill_s = median(max(0.0, seconds - line.base) / rows for rows, seconds in reading)
        return TargetCosts(line.base, line.slope, prefill_s)

    def _steps_after(self, text: Text, drafts: Sequence[int], repeats: int) -> tuple[float, list[tuple[int, float]]]:
        """Seconds of reading the prompt; (rows, seconds) of steps after it. What the drafts say does not matter."""
        prompt, pool = text.transcript[: text.prompt_length], self._target.pool
        drafts = [count for count in drafts if len(prompt) + 1 + count <= self._target.context_length]
        transcript = [*prompt, text.transcript[text.prompt_length]]
        cache = pool.allocate(len(transcript) + max(drafts))
        try:
            reading_s = self._step(cache, VerificationInput(self._sampling, list(prompt), len(prompt), ()), prompt)
            steps = []
            for _ in range(repeats):
                for count in drafts:  # in turn: a slow moment meets them all
                    cache.truncate(len(prompt))
                    block = (transcript[-1],) * count
                    judged = VerificationInput(self._sampling, transcript, len(prompt), block)
                    steps.append((count + 1, self._step(cache, judged, (transcript[-1], *block))))
        finally:
            pool.release(cache)
        return reading_s, steps

    def _step(self, cache: SessionCache, judged: VerificationInput, rows: Sequence[int]) -> float:
        """Seconds of one that puts `rows` into the cache, the last of which are judged."""
        began = time.perf_counter()
        logits = self._target.forward([Rows(cache, tuple(rows), len(judged.block) + 1)])
        self._sampler.sample(logits, [judged])
        return time.perf_counter() - began

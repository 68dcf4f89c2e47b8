"""Records for tests: texts drawn from any target, as a verifier would log them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from outrider.cloud.learning.lesson_record import LessonRecord
from outrider.cloud.learning.trainer_settings import TrainerSettings
from outrider.proto.noise import gumbel
from outrider.proto.salts import salted
from outrider.proto.types import Sampling


def quick_settings(folder: Path, **changes: object) -> TrainerSettings:
    """Return settings of a trainer that is small and quick: matrices of rank 2, short batches, no warm-up."""
    quick = {"drafter": "general", "rank": 2, "positions": 96, "texts": 4, "warm_up_steps": 1, "rate": 0.01}
    return TrainerSettings(folder=folder, **(quick | changes))  # type: ignore[arg-type]


LogP = Callable[[np.ndarray], np.ndarray]
"""Returns log-probabilities [vocab] after tokens [n]."""


def bigram_target(vocab: int, *, seed: int, sharpness: float = 3.0, words: int = 12) -> LogP:
    """A target whose next token depends on the last one alone, over the first `words` tokens mostly."""
    logits = np.random.default_rng(seed).normal(size=(words, words)) * sharpness
    rest = math.log(1e-3 / (vocab - words))

    def log_p(tokens: np.ndarray) -> np.ndarray:
        row = np.full(vocab, rest)
        own = logits[int(tokens[-1]) % words]
        row[:words] = own - np.log(np.exp(own).sum()) + math.log(1 - 1e-3)
        return row

    return log_p


def text_record(
    log_p: LogP,
    *,
    vocab: int,
    seed: int = 0,
    temperature: float = 0.0,
    prompt: int = 4,
    length: int = 24,
    key: str = "key",
    prompt_class: int = 0,
    at_s: float = 1e9,
    model: str = "reference",
    top: int = 64,
) -> LessonRecord:
    """A text of `length` tokens after a prompt, with a row for each."""
    tokens = np.random.default_rng(seed).integers(12, size=prompt).astype(np.uint32)
    rows = []
    for _ in range(length):
        row = log_p(tokens)
        position = len(tokens)
        noise = gumbel(seed, position, np.arange(vocab)) if temperature else 0.0
        tokens = np.append(tokens, np.uint32((row / (temperature or 1) + noise).argmax()))
        rows.append(row)
    judged = np.array(rows)
    top_ids = np.argsort(-judged, axis=1)[:, :top]
    top_logp = np.take_along_axis(judged, top_ids, axis=1).astype(np.float16)
    rest = 1 - np.exp(np.take_along_axis(judged, top_ids, axis=1)).sum(1)
    return LessonRecord(
        model=model,
        session_salt=salted(b"", f"session-{seed}"),
        key_salt=salted(b"", key),
        prompt_class=prompt_class,
        sampling=Sampling(temperature=temperature, seed=seed),
        at_s=at_s,
        start=0,
        first_generated=prompt,
        tokens=tokens.astype(np.uint32),
        positions=np.arange(prompt, prompt + length, dtype=np.uint32),
        top_ids=top_ids.astype(np.uint32),
        top_logp=np.minimum(top_logp, np.float16(0)),
        rest_logp=np.log(np.clip(rest, 1e-9, 1)).astype(np.float32),
        weights=np.ones(length, np.float32),
    )

"""Records of lessons for tests: made of whatever texts and positions a test names."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.cloud.learning.lesson_record import LessonRecord
from outrider.proto.salts import salted
from outrider.proto.types import Sampling


def teaching(vocab: int, rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Likeliest tokens [rows, s], their log p in float16, and the log of the rest, of random logits."""
    logits = np.random.default_rng(seed).normal(size=(rows, vocab)) * 3
    logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    top = min(64, vocab)
    ids = np.argsort(-logp, axis=1, kind="stable")[:, :top].astype(np.uint32)
    of_top = np.take_along_axis(logp, ids.astype(np.int64), axis=1)
    rest = 1 - np.exp(of_top).sum(axis=1)
    with np.errstate(divide="ignore"):
        of_rest = np.log(np.where(rest > 1e-12, rest, 0)).astype(np.float32)
    return ids, np.minimum(of_top, 0).astype(np.float16), np.minimum(of_rest, 0)


def record_of(
    prompt: list[int],
    text: list[int],
    positions: Sequence[int],
    *,
    vocab: int = 300,
    start: int = 0,
    key: str = "alice",
    session: str = "s",
    sampling: Sampling | None = None,
    seed: int = 0,
) -> LessonRecord:
    """A record of prompt + text with rows at absolute `positions`."""
    ids, logp, rest = teaching(vocab, len(positions), seed)
    return LessonRecord(
        model="reference",
        session_salt=salted(b"", session),
        key_salt=salted(b"", key),
        prompt_class=3,
        sampling=sampling or Sampling(temperature=1.0, seed=(1 << 64) - 1, stop_tokens=(5,)),
        at_s=1e9,
        start=start,
        first_generated=len(prompt),
        tokens=np.array([*prompt, *text][start:], np.uint32),
        positions=np.array(positions, np.uint32),
        top_ids=ids,
        top_logp=logp,
        rest_logp=rest,
        weights=np.ones(len(positions), np.float32),
    )

"""Records of lessons for tests: made of whatever texts and blocks a test names."""

from __future__ import annotations

import numpy as np

from outrider.cloud.learning.record import NO_DRAFTER, LessonKind, LessonRecord
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
    blocks: dict[int, list[int]],
    *,
    vocab: int = 300,
    start: int = 0,
    drafters: tuple[str, ...] = ("tiny@1",),
    suffix_targets: int = 7,
    key: str = "alice",
    session: str = "s",
    sampling: Sampling | None = None,
    seed: int = 0,
) -> LessonRecord:
    """A record of all rows of `blocks`, drafts by the absolute position of their first, of prompt + text."""
    tokens = [*prompt, *text]
    starts, ends, drafts = list(blocks), [], list[int]()
    row_block, row_index, kinds, targets = list[int](), list[int](), list[int](), list[int]()
    for number, (first, block) in enumerate(blocks.items()):
        alive = True
        for index in range(len(block) + 1):
            row_block.append(number)
            row_index.append(index)
            token = tokens[first + index] if alive else suffix_targets
            targets.append(token)
            if not alive:
                kinds.append(LessonKind.SUFFIX)
            elif index == len(block):
                kinds.append(LessonKind.OWN)
            else:
                alive = block[index] == token
                kinds.append(LessonKind.ACCEPTED if alive else LessonKind.MISSED)
        drafts += block
        ends.append(len(drafts))
    ids, logp, rest = teaching(vocab, len(kinds), seed)
    return LessonRecord(
        model="reference",
        session_salt=salted(b"", session),
        key_salt=salted(b"", key),
        prompt_class=3,
        drafters=drafters,
        sampling=sampling or Sampling(temperature=1.0, seed=(1 << 64) - 1, stop_tokens=(5,)),
        at_s=1e9,
        start=start,
        first_generated=len(prompt),
        tokens=np.array(tokens[start:], np.uint32),
        block_starts=np.array(starts, np.uint32),
        block_ends=np.array(ends, np.uint32),
        drafts=np.array(drafts, np.uint32),
        drafted_by=np.array([0 if drafters else NO_DRAFTER] * len(drafts), np.uint8),
        row_block=np.array(row_block, np.uint32),
        row_index=np.array(row_index, np.uint32),
        kinds=np.array(kinds, np.uint8),
        targets=np.array(targets, np.uint32),
        top_ids=ids,
        top_logp=logp,
        rest_logp=rest,
        weights=np.ones(len(kinds), np.float32),
    )

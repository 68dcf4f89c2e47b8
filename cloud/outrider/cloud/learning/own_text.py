"""The record of a text that nobody verified here: all of its tokens, and of the target no more than a caller knows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.cloud.learning.lesson_record import MAX_ROWS, LessonRecord
from outrider.proto.types import Sampling

Teacher = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Likeliest tokens [m, s] uint32, log p of these [m, s] float16, log of the rest [m] float32, as a record has them."""


def record_of_text(
    tokens: Sequence[int],
    first_generated: int,
    sampling: Sampling,
    *,
    model: str,
    session_salt: bytes,
    key_salt: bytes,
    prompt_class: int = 0,
    at_s: float = 0.0,
    teacher: Teacher | None = None,
    tokenizer_sha256: str = "",
) -> LessonRecord:
    """Return the record of a text, with a row for each generated token.

    Args:
        tokens: [n] the text from position 0; what is beyond `MAX_ROWS` generated tokens is left out.
        first_generated: position of the first token after the prompt.
        sampling: settings with the seed.
        model: id of the target.
        session_salt: [16] bytes, the same for all texts of a session.
        key_salt: [16] bytes, the same for all texts of whom they are taken to be.
        prompt_class: kind of text.
        at_s: time, Unix seconds.
        teacher: the target's likeliest tokens in each row; None: unknown, and losses of tokens alone learn from it.
        tokenizer_sha256: hash of the target's tokenizer; empty: unknown.

    Raises:
        InvalidArgument: nothing may be learned from such a text, or it has no prompt.
    """
    tokens = tokens[: first_generated + MAX_ROWS]
    n = len(tokens) - first_generated
    nothing = np.zeros((n, 0), np.uint32), np.zeros((n, 0), np.float16), np.zeros(n, np.float32)
    top_ids, top_logp, rest_logp = teacher or nothing
    return LessonRecord(
        model=model,
        session_salt=session_salt,
        key_salt=key_salt,
        prompt_class=prompt_class,
        sampling=sampling,
        at_s=at_s,
        start=0,
        first_generated=first_generated,
        tokens=np.array(tokens, np.uint32),
        positions=np.arange(first_generated, first_generated + n, dtype=np.uint32),
        top_ids=top_ids,
        top_logp=top_logp,
        rest_logp=rest_logp,
        weights=np.ones(n, np.float32),
        tokenizer_sha256=tokenizer_sha256,
    )

"""A text that a caller expects, checked and indexed for drafts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from outrider.drafters.suffix_index import SuffixIndex
from outrider.edge.pool.preparation import Ready
from outrider.edge.prompts import checked
from outrider.proto.errors import InvalidArgument

FIELD = "prediction"
MAX_TOKENS = 1 << 17
MAX_CHARACTERS = 8 * MAX_TOKENS
_IN_THREAD = 4096  # characters or tokens; less is done sooner than a thread takes over


Prediction = str | Sequence[int] | SuffixIndex | None
"""Text, token ids of the target's tokenizer, or what `indexed_prediction` made of one of them; None: not known."""


async def indexed_prediction(ready: Ready, prediction: Prediction) -> SuffixIndex | None:
    """Return the index of a prediction; None where it is empty.

    Raises:
        InvalidArgument: it is neither text nor token ids, is too long, or has a token that the tokenizer does not know.
    """
    if prediction is None or isinstance(prediction, SuffixIndex):
        return prediction
    prediction = checked(prediction, FIELD)
    if not prediction:
        return None
    _check_length(prediction)
    if len(prediction) < _IN_THREAD:
        return _index(ready, prediction)
    return await asyncio.to_thread(_index, ready, prediction)


def _check_length(prediction: str | Sequence[int]) -> None:
    """Raise `InvalidArgument` for a prediction, text or token ids, that is too long."""
    limit, unit = (MAX_CHARACTERS, "characters") if isinstance(prediction, str) else (MAX_TOKENS, "tokens")
    if len(prediction) > limit:
        raise _refused(f"has {len(prediction)} {unit}; {limit} at most")


def _index(ready: Ready, prediction: str | Sequence[int]) -> SuffixIndex | None:
    tokens = ready.encode(prediction, special=False)
    _check_length(tokens)
    vocab_size = ready.tokenizer.get_vocab_size()
    if any(not 0 <= token < vocab_size for token in tokens):
        raise _refused(f"has a token that is not in 0..{vocab_size - 1}")
    return SuffixIndex([np.array(tokens, dtype=np.uint32)]) if tokens else None


def _refused(why: str) -> InvalidArgument:
    return InvalidArgument(why, field=FIELD)

"""Prompts and predictions in tokens.

A long prompt is encoded away from the event loop, and refused before it costs much if it cannot fit.
A tokenizer takes about 5 us and 400 bytes a character. So what a text may have at all is counted in characters, and a
text that may still be too long is encoded in slices first, which ends as soon as they have too many tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tokenizers import Tokenizer

from outrider.drafters.suffix_index import SuffixIndex
from outrider.proto.errors import PromptTooLong
from outrider.proto.types import Lease, Opened, require, require_text, require_tokens

MAX_CHARACTERS = 4 << 20
IN_THREAD = 4096  # characters; shorter texts are encoded sooner than a thread takes over
SLICE = 1 << 16  # characters; longer texts are encoded one at a time, which bounds the memory
FITTING = 2  # contexts: what has more tokens fits nowhere; less than that is for the verifier to refuse
FIELD = "open.prompt"
PREDICTION = "prediction"  # the field
MAX_PREDICTED_TOKENS = 1 << 17
MAX_PREDICTED_CHARACTERS = 8 * MAX_PREDICTED_TOKENS
Prediction = str | Sequence[int] | SuffixIndex | None
"""Text, token ids of the target's tokenizer, or what `indexed_prediction` made of one of them; None: not known."""

_long_texts = ThreadPoolExecutor(1, thread_name_prefix="outrider-prompt")


class PromptEncoder:
    """Encoder of prompts for one target, with its tokenizer.

    Attributes:
        context_length: positions that the target holds at any verifier met so far; 0: none has been met.
    """

    def __init__(self) -> None:
        self.context_length = 0
        self._longest_token = 0  # 0: not known yet

    def meet(self, said: Opened | Lease) -> None:
        """Take in how many positions a verifier's target holds, as its answer or its lease says; 0: it does not."""
        self.context_length = max(self.context_length, said.context_length)

    async def encode(self, tokenizer: Tokenizer, prompt: str | Sequence[int], *, special: bool) -> tuple[int, ...]:
        """Return the token ids of a prompt, with the tokenizer's special tokens around it or not; token ids stay.

        Raises:
            InvalidArgument: it is neither text nor token ids.
            PromptTooLong: the target's context cannot hold it.
        """
        prompt = checked(prompt, FIELD)
        if not isinstance(prompt, str):
            self._check_tokens(len(prompt))
            return prompt
        if len(prompt) < IN_THREAD:
            return encode(tokenizer, prompt, special=special)
        self._check_characters(tokenizer, len(prompt))
        pool = None if len(prompt) <= SLICE else _long_texts
        return await asyncio.get_running_loop().run_in_executor(pool, self._encode_long, tokenizer, prompt, special)

    def _encode_long(self, tokenizer: Tokenizer, prompt: str, special: bool) -> tuple[int, ...]:
        if len(prompt) > SLICE:
            tokens = 0
            for start in range(0, len(prompt), SLICE):
                tokens += len(encode(tokenizer, prompt[start : start + SLICE], special=False))
                self._check_tokens(tokens)
        return encode(tokenizer, prompt, special=special)

    def _check_tokens(self, tokens: int) -> None:
        if self.context_length and tokens > FITTING * self.context_length:
            raise PromptTooLong(
                f"has {tokens} tokens or more; the target holds {self.context_length}, text included; shorten it",
                field=FIELD,
            )

    def _check_characters(self, tokenizer: Tokenizer, characters: int) -> None:
        most = MAX_CHARACTERS
        if self.context_length:
            self._longest_token = self._longest_token or max(map(len, tokenizer.get_vocab()), default=1)
            most = min(most, max(IN_THREAD, self.context_length * self._longest_token))
        if characters > most:
            raise PromptTooLong(f"has {characters} characters; at most {most} can fit here; shorten it", field=FIELD)


def checked(prompt: str | Sequence[int], field: str) -> str | tuple[int, ...]:
    """Return a text as it is, and token ids as a tuple.

    Raises:
        InvalidArgument: it is neither; `field` is named.
    """
    if isinstance(prompt, str):
        require_text(prompt, field)
        return prompt
    listed = isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, bytes | bytearray | memoryview)
    require(listed, field, f"is {type(prompt).__name__}; give text, or a sequence of token ids")
    tokens = tuple(prompt)
    require_tokens(tokens, field)
    return tokens


def encode(tokenizer: Tokenizer, text: str, *, special: bool) -> tuple[int, ...]:
    """Return the token ids of a text of any length, in this thread; other threads run meanwhile."""
    # Of a batch: unlike a single text's, its encoding lets go of Python, and leaves out where each token came from.
    return tuple(tokenizer.encode_batch_fast([text], add_special_tokens=special)[0].ids)


async def indexed_prediction(tokenizer: Tokenizer, prediction: Prediction) -> SuffixIndex | None:
    """Return the index of a text that is expected, for drafts; None where it is empty.

    Raises:
        InvalidArgument: it is neither text nor token ids, is too long, or has a token that the tokenizer does not know.
    """
    if prediction is None or isinstance(prediction, SuffixIndex):
        return prediction
    prediction = checked(prediction, PREDICTION)
    _check_length(prediction)
    if len(prediction) < IN_THREAD:
        return _index(tokenizer, prediction)
    return await asyncio.to_thread(_index, tokenizer, prediction)


def _check_length(prediction: str | tuple[int, ...]) -> None:
    is_text = isinstance(prediction, str)
    limit, unit = (MAX_PREDICTED_CHARACTERS, "characters") if is_text else (MAX_PREDICTED_TOKENS, "tokens")
    require(len(prediction) <= limit, PREDICTION, f"has {len(prediction)} {unit}; {limit} at most")


def _index(tokenizer: Tokenizer, prediction: str | tuple[int, ...]) -> SuffixIndex | None:
    tokens = encode(tokenizer, prediction, special=False) if isinstance(prediction, str) else prediction
    _check_length(tokens)
    vocab_size = tokenizer.get_vocab_size()
    known = all(0 <= token < vocab_size for token in tokens)
    require(known, PREDICTION, f"has a token that is not in 0..{vocab_size - 1}")
    return SuffixIndex([np.array(tokens, dtype=np.uint32)]) if tokens else None

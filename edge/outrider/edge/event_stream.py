"""Tokens as text, as they come, up to a stop string that only this side can see; events of a text, and its deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from tokenizers import Tokenizer

from outrider.drafters.token_text import TokenDecoder, special_tokens
from outrider.proto.errors import DeadlineExceeded
from outrider.proto.session import EdgeStatistics
from outrider.proto.types import CommittedToken, FinishReason, Provenance, TokenFacts, token_ids

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tokens:
    """Committed tokens, which stay part of the text.

    Attributes:
        position: absolute position of tokens[0].
        tokens: [n] tokens, each with its id and what was asked for of it.
        provenance: [n] whether each was an accepted draft or the target's own.
        pieces: [n] text that each adds for certain; late while a character, a run of byte tokens or a stop string may
            go on.
        prompt: [p - 1] what the model says of the prompt's tokens after the first, in the first event of a text where
            that was asked for; else empty.
    """

    position: int
    tokens: tuple[CommittedToken, ...]
    provenance: tuple[Provenance, ...]
    pieces: tuple[str, ...]
    prompt: tuple[TokenFacts, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of the tokens, [n]."""
        return token_ids(self.tokens)

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Finished:
    """End of the text.

    Attributes:
        reason: why the text ended.
        text: only what was still held back.
        statistics: counts of the text.
        seconds: time from `generate` to now.
        first_token_s: time from `generate` to the first token, in seconds.
        stop_string: the stop string that ended it; None: another reason did.
        prompt_tokens: number of tokens before the text.
    """

    reason: FinishReason
    text: str
    statistics: EdgeStatistics
    seconds: float
    first_token_s: float
    stop_string: str | None = None
    prompt_tokens: int = 0


Event = Tokens | Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """Whole text at once, with `tokens` [n], `provenance` [n] and `prompt` as in `Tokens`."""

    prompt_tokens: int
    tokens: tuple[CommittedToken, ...]
    provenance: tuple[Provenance, ...]
    text: str
    finish_reason: FinishReason
    statistics: EdgeStatistics
    seconds: float
    first_token_s: float
    prompt: tuple[TokenFacts, ...] = ()

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids of the tokens, [n]."""
        return token_ids(self.tokens)


class TextStream:
    """Decoder of one text, token by token; a piece that was returned never changes.

    A stop string is never emitted, also where it spans tokens: text that could be its beginning is held back until
    it turns out not to be.

    Args:
        tokenizer: the target's.
        stop: strings that end the text.
        shown: special tokens that the text has by their names, unlike all others.
        min_tokens: tokens before which no stop string ends the text; one that is complete by then never does.
        before: tokens before the text, a character of which its first tokens may complete.

    Attributes:
        stopped_by: the stop string that ended the text; None: none has.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        shown: Collection[int] = (),
        min_tokens: int = 0,
        before: Sequence[int] = (),
    ) -> None:
        self.stopped_by: str | None = None
        self._decoder = TokenDecoder(tokenizer, special_tokens(tokenizer).difference(shown), before)
        self._stop = stop
        self._decoded = ""
        self._taken = 0
        self._early_tokens = min_tokens  # still to come, in which no stop string may end
        self._early = 0  # length of the text of those that have come

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.stopped_by is not None

    def push(self, tokens: tuple[int, ...]) -> tuple[str, ...]:
        """Return the text that each of `tokens` adds for certain, as far as the token that completes a stop string.

        Fewer pieces than tokens mean that the rest of the tokens are not part of the text.
        """
        pieces: list[str] = []
        for token in tokens:
            if self.stopped:
                break
            pieces.append(self._push_one(token))
        return tuple(pieces)

    def _push_one(self, token: int) -> str:
        early, self._early_tokens = self._early_tokens > 0, max(0, self._early_tokens - 1)
        self._decoded += self._decoder.push(token)
        if not self._stop:
            return self._take(len(self._decoded))
        rest = self._decoder.rest().rstrip("\N{REPLACEMENT CHARACTER}")  # of a character that may still come
        if early:
            self._early = len(self._decoded) + len(rest)
        return self._take(self._final_length(rest))

    def finish(self) -> str:
        """Return the rest, held back as the possible beginning of a stop string or of a character."""
        if self.stopped:
            return ""
        rest = self._decoder.rest()
        self._final_length(rest)
        if not self.stopped:
            self._decoded += rest
        return self._take(len(self._decoded))

    def _take(self, until: int) -> str:
        piece = self._decoded[self._taken : until]
        self._taken = max(self._taken, until)
        return piece

    def _final_length(self, rest: str) -> int:
        """Return the length of the text that no later token can change; `rest` is what the decoder holds back."""
        text = self._decoded + rest
        start = max(self._taken, self._early)
        found = [(at, stop) for stop in self._stop if (at := text.find(stop, max(0, start - len(stop) + 1))) >= 0]
        if found:
            at, self.stopped_by = min(found, key=lambda each: each[0])
            self._decoded = text[:at]
            return at
        held = max((_overlap(self._decoded, stop) for stop in self._stop), default=0)
        return max(self._taken, len(self._decoded) - held)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


async def collect(events: AsyncGenerator[Event], on_event: Callable[[Event], None] = lambda _: None) -> Completion:
    """Return the whole text; `on_event` sees each event as it comes."""
    tokens: list[CommittedToken] = []
    provenance: list[Provenance] = []
    text = ""
    prompt: tuple[TokenFacts, ...] = ()
    async with aclosing(events):
        async for event in events:
            on_event(event)
            text += event.text
            if isinstance(event, Tokens):
                tokens += event.tokens
                provenance += event.provenance
                prompt = prompt or event.prompt
            else:
                return Completion(
                    prompt_tokens=event.prompt_tokens,
                    tokens=tuple(tokens),
                    provenance=tuple(provenance),
                    text=text,
                    finish_reason=event.reason,
                    statistics=event.statistics,
                    seconds=event.seconds,
                    first_token_s=event.first_token_s,
                    prompt=prompt,
                )
    raise AssertionError("a text ends with Finished or an error")


async def within(waited_for: Awaitable[T], deadline: float | None) -> T:
    """Wait for a result; raises `DeadlineExceeded` at the monotonic time `deadline`, or never where that is None."""
    if deadline is None:
        return await waited_for
    try:
        async with asyncio.timeout(deadline - time.monotonic()):
            result = await waited_for
            if time.monotonic() >= deadline:  # what was there already has not waited
                raise TimeoutError
            return result
    except TimeoutError as error:
        raise DeadlineExceeded("the time allowed for the whole text is over", field="deadline_s") from error

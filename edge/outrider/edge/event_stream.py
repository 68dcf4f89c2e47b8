"""Events of a text, as they come and as a whole, and its deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

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

"""Events that a generation yields as they come, deadlines, and whole texts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from outrider.edge.decoding import Decoding
from outrider.edge.text import TextStream
from outrider.proto.errors import DeadlineExceeded
from outrider.proto.session import Done, EdgeStatistics, Emit
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
        """Text of all pieces."""
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
    """

    reason: FinishReason
    text: str
    statistics: EdgeStatistics
    seconds: float
    first_token_s: float
    stop_string: str | None = None


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


async def stream_events(
    decoding: Decoding, items: AsyncGenerator[Emit | Done], text: TextStream, began: float, deadline_s: float | None
) -> AsyncGenerator[Event]:
    """Yield the events of a text; leaving early closes its items.

    Args:
        decoding: the text's decoding, which is stopped where `text` sees a stop string.
        items: committed tokens of `decoding`, and at last Done.
        text: makes text of tokens.
        began: monotonic time of the text's beginning, in seconds.
        deadline_s: allowed seconds from there on; None: no limit.

    Raises:
        DeadlineExceeded: the time is over; what came until then has been yielded.
        OutriderError: the text cannot be finished anywhere.
    """
    first_token_s = 0.0
    async with aclosing(_until(items, None if deadline_s is None else began + deadline_s)) as timed:
        async for item in timed:
            if isinstance(item, Emit) and text.stopped:
                continue  # it was on its way when the stop string was seen
            if isinstance(item, Emit):
                first_token_s = first_token_s or time.monotonic() - began
                event = _tokens_event(item, text)
                if text.stopped:
                    decoding.stop(FinishReason.STOP_STRING)
                yield event
            elif item.error is not None:
                raise item.error
            else:
                rest = text.finish()
                reason = FinishReason.STOP_STRING if text.stopped else item.finish or FinishReason.CANCELLED
                seconds = time.monotonic() - began
                yield Finished(reason, rest, decoding.machine.statistics, seconds, first_token_s, text.stopped_by)
                return


async def collect(events: AsyncGenerator[Event], on_event: Callable[[Event], None] = lambda _: None) -> Completion:
    """Return the whole text; `on_event` sees each event as it comes."""
    positions: list[int] = []
    tokens: list[CommittedToken] = []
    provenance: list[Provenance] = []
    text = ""
    prompt: tuple[TokenFacts, ...] = ()
    async with aclosing(events):
        async for event in events:
            on_event(event)
            text += event.text
            if isinstance(event, Tokens):
                positions.append(event.position)
                tokens += event.tokens
                provenance += event.provenance
                prompt = prompt or event.prompt
            else:
                return Completion(
                    prompt_tokens=positions[0] if positions else 0,
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


async def within(waited_for: Awaitable[T], seconds: float | None) -> T:
    """Wait for a result; raises `DeadlineExceeded` after `seconds`, or never where that is None."""
    try:
        async with asyncio.timeout(seconds):
            return await waited_for
    except TimeoutError as error:
        raise DeadlineExceeded("the time allowed for the whole text is over", field="deadline_s") from error


async def _until(items: AsyncGenerator[Emit | Done], until: float | None) -> AsyncGenerator[Emit | Done]:
    """Yield the same items, or raise `DeadlineExceeded` once the monotonic clock passes `until`."""
    async with aclosing(items):
        while True:
            left_s = None if until is None else max(0.0, until - time.monotonic())
            try:
                yield await within(anext(items), left_s)
            except StopAsyncIteration:
                return


def _tokens_event(item: Emit, text: TextStream) -> Tokens:
    """Return the event of emitted tokens, as far as a stop string lets them be part of the text."""
    pieces = text.push(token_ids(item.tokens))
    n = len(pieces)
    provenance = tuple(Provenance.DRAFT if drafted else Provenance.TARGET for drafted in item.drafted[:n])
    return Tokens(item.start, item.tokens[:n], provenance, pieces, item.prompt)

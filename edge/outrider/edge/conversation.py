"""Several turns on one session: each sends only what is new."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from types import AsyncGeneratorType, TracebackType
from typing import Any, Protocol, Self, cast

from outrider.drafters.suffix_index import SuffixIndex
from outrider.edge.decoding import Decoding, Observer
from outrider.edge.event_stream import Completion, Event, Finished, Tokens, collect, stream_events, within
from outrider.edge.pool.prediction import Prediction
from outrider.edge.pool.preparation import Ready
from outrider.edge.pool.text_drafters import TextDrafters
from outrider.edge.request import RequestOptions, checked_sampling, checked_stop
from outrider.edge.text import TextStream
from outrider.proto.errors import InvalidArgument
from outrider.proto.session import EdgeSession, SharedMeasurements
from outrider.proto.types import Open, Sampling


class _Client(Protocol):
    """The part of `outrider.edge.client.Client`, which imports this module, that a conversation needs."""

    async def prepare(self) -> Ready: ...

    async def find(self) -> Ready: ...

    async def predicted(self, prediction: Prediction) -> SuffixIndex | None: ...

    def decode(self, tokens: Sequence[int]) -> str: ...

    def open(self, prompt: tuple[int, ...], sampling: Sampling) -> Open: ...

    def other_drafters(
        self, decoding: Decoding, frame: Open, prediction: SuffixIndex | None
    ) -> TextDrafters | None: ...

    def begin(self, frame: Open, observer: Observer | None, prediction: SuffixIndex | None) -> Decoding: ...

    def measured(self, sampling: Sampling) -> SharedMeasurements: ...

    def report(self, session: str, machine: EdgeSession, seconds: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Transcript:
    """Conversation so far.

    Attributes:
        tokens: [n] ids, prompts and texts in order.
        text: text of the tokens, without special ones.
    """

    tokens: tuple[int, ...]
    text: str


class Conversation:
    """Turns of one session, one after the other; made by `Client.conversation`; a context manager.

    The verifier keeps its cache between turns, and the drafter keeps its own, so that a turn costs the uplink, the
    target and the drafter only what is new. A turn gives the text of `Client.generate` with the whole transcript and
    the new prompt as its prompt: the same tokens with the same seed. Penalties that count text count that of the turn,
    and `max_tokens` and stop strings are the turn's own.

    The transcript is the edge's. Where the stream has broken, or the verifier has drained, restarted or needed the
    memory, the next turn sends all of it to whichever verifier there is; that takes longer, and nothing else changes.

    It holds exactly what the user was given: the prompt of every turn, and the tokens of every event that was yielded.
    So a turn that ends with a stop string ends with the token that completed it, and one that is left early ends with
    the last event; what the verifier decoded beyond is forgotten on both sides. EOS is part of it. A turn that was left
    or failed before its first event leaves no trace, not even its prompt.
    """

    def __init__(
        self,
        client: _Client,
        sampling: Sampling,
        *,
        stop: tuple[str, ...],
        keep_s: float,
        observer: Observer | None,
        options: RequestOptions,
    ) -> None:
        if not keep_s >= 0:
            raise InvalidArgument("must be 0 seconds or more", field="keep_s")
        self._client = client
        self._sampling = sampling
        self._stop = stop
        self._keep_s = keep_s
        self._observer = observer
        self._options = options
        self._tokens: list[int] = []
        self._decoding: Decoding | None = None
        self._turn: AsyncGenerator[Event] | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        await self._client.prepare()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End the session here and at the verifier; the transcript can still be read."""
        await self._leave_turn()
        self._closed = True
        decoding, self._decoding = self._decoding, None
        if decoding is not None:
            await decoding.aclose()

    @property
    def transcript(self) -> Transcript:
        """The conversation so far, a running turn included."""
        return Transcript(tuple(self._tokens), self._client.decode(self._tokens) if self._tokens else "")

    async def say(
        self,
        prompt: str | Sequence[int] = "",
        sampling: Sampling | None = None,
        *,
        stop: str | Sequence[str] | None = None,
        deadline_s: float | None = None,
        prediction: Prediction = None,
        **overrides: Any,
    ) -> AsyncGenerator[Event]:
        """Decode one turn; leaving the loop early cancels it on both sides, and the next turn goes on.

        Args:
            prompt: new text or token ids; empty: the text goes on. Text is encoded by itself, so that no
                token of the transcript ever changes.
            sampling: replaces the conversation's; `overrides` replace single ones, such as `max_tokens=64`.
            stop: replaces the conversation's.
            deadline_s: seconds for this turn.
            prediction: as in `Client.generate`, for this turn.
            overrides: fields of `Sampling`.

        Yields:
            `Tokens` as they are committed, then `Finished`, with the statistics of this turn.

        Raises:
            InvalidArgument: bad parameters or prompt, with the field named; or the conversation is closed, or another
                task is in the middle of a turn.
            DeadlineExceeded: whatever came in time has been yielded.
            OutriderError: the turn cannot be finished anywhere.
        """
        if self._closed:
            raise InvalidArgument("is closed; begin another", field="conversation")
        await self._leave_turn()
        wanted = checked_sampling(sampling or self._sampling, overrides)
        stops = self._stop if stop is None else checked_stop(stop)
        turn = self._turn = self._one_turn(prompt, wanted, stops, deadline_s, prediction)
        async with aclosing(turn):
            async for event in turn:
                yield event

    async def complete(
        self,
        prompt: str | Sequence[int] = "",
        sampling: Sampling | None = None,
        *,
        stop: str | Sequence[str] | None = None,
        deadline_s: float | None = None,
        prediction: Prediction = None,
        **overrides: Any,
    ) -> Completion:
        """Decode one turn and return all of it; prompt tokens are all that came before the text."""
        turn = self.say(prompt, sampling, stop=stop, deadline_s=deadline_s, prediction=prediction, **overrides)
        return await collect(turn)

    # --- one turn ---

    async def _leave_turn(self) -> None:
        """End a turn whose loop was left; Python itself closes a generator that was left only some time later."""
        turn = self._turn
        if turn is None:
            return
        if cast("AsyncGeneratorType[Event, None]", turn).ag_running:
            raise InvalidArgument("another task is in the middle of one; wait for it or cancel it", field="turn")
        self._turn = None
        await turn.aclose()

    async def _one_turn(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        stop: tuple[str, ...],
        deadline_s: float | None,
        prediction: Prediction,
    ) -> AsyncGenerator[Event]:
        began = time.monotonic()
        ready = await within(self._client.find(), deadline_s)
        start = len(self._tokens)
        new = await within(ready.encode_prompt(prompt, special=start == 0), deadline_s)
        decoding = await self._begin(start, new, sampling, await self._client.predicted(prediction))
        self._tokens += new
        said = reported = False
        text = TextStream(ready.tokenizer, stop, min_tokens=sampling.min_tokens, before=self._tokens)
        try:
            async with aclosing(stream_events(decoding, decoding.turn(), text, began, deadline_s)) as events:
                async for event in events:
                    said = True
                    if isinstance(event, Tokens):
                        self._tokens += event.ids
                    elif isinstance(event, Finished):
                        self._client.report(decoding.session, decoding.machine, event.seconds)
                        reported = True
                    yield event
        finally:
            if not reported:
                self._client.report(decoding.session, decoding.machine, time.monotonic() - began)
            if not said:
                del self._tokens[start:]

    async def _begin(
        self, start: int, prompt: tuple[int, ...], sampling: Sampling, prediction: SuffixIndex | None
    ) -> Decoding:
        frame = self._options.applied_to(self._client.open((*self._tokens, *prompt), sampling))
        if self._decoding is not None:
            others = self._client.other_drafters(self._decoding, frame, prediction)
            if self._decoding.may_take(others, prediction):
                self._decoding.begin_turn(start, prompt, sampling, self._client.measured(sampling), others)
                return self._decoding
            decoding, self._decoding = self._decoding, None  # another session
            await decoding.aclose()
        self._decoding = self._client.begin(replace(frame, keep_s=self._keep_s), self._observer, prediction)
        return self._decoding

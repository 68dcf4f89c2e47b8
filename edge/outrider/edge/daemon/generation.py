"""The texts of one request: their decoding, and what each of their events adds to an answer in any API."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing, closing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from outrider.drafters.retrieval import PredictionCount
from outrider.drafters.token_text import TokenText
from outrider.edge.daemon.api_access import RETRY_AFTER_END_S, SHUTTING_DOWN, Limiter
from outrider.edge.daemon.body_reading import IgnoreUnknown
from outrider.edge.daemon.cloud import Cloud
from outrider.edge.daemon.daemon_metrics import HttpMetrics, TextObserver, Usage, metrics_of
from outrider.edge.daemon.http_errors import ApiError, from_outrider
from outrider.edge.daemon.parsed_request import ParsedRequest
from outrider.edge.edge_metrics import EdgeMetrics
from outrider.edge.event_stream import Event, Finished, Tokens
from outrider.edge.request import ANYBODY, Tenant
from outrider.edge.tool_calls.reading import CallBegun, Part, Said, merged
from outrider.proto.errors import InvalidArgument, Unavailable
from outrider.proto.plumbing.access import Key, Limits
from outrider.proto.types import MAX_ISOLATION_BYTES, FinishReason

WATCH_EVERY_S = 0.25
_GRAMMAR = "sampling.grammar"
REVOKED = ApiError(401, "the API key has been revoked", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

Item = tuple[int, Event]


@dataclass(frozen=True, slots=True)
class Service:
    """Parts that all requests share.

    Attributes:
        request_timeout_s: time for a whole answer.
        unknown_fields: ignores fields that the schema does not know; None: they are errors.
    """

    cloud: Cloud
    metrics: EdgeMetrics
    http_metrics: HttpMetrics
    limiter: Limiter
    request_timeout_s: float
    key_limits: Limits = field(default_factory=Limits)
    unknown_fields: IgnoreUnknown | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One addition to a text of an answer.

    Attributes:
        choice: number of the text.
        parts: text for people and calls of functions, in their order.
        events: tokens and the end that the parts were made of.
        finish: reason for the end of the text, by OpenAI's name; None: it goes on.
    """

    choice: int
    parts: Sequence[Part]
    events: Sequence[Event]
    finish: Literal["stop", "length", "tool_calls"] | None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Said))

    @property
    def tokens(self) -> list[Tokens]:
        return [event for event in self.events if isinstance(event, Tokens)]

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; None: another reason did, or it goes on."""
        last = self.events[-1]
        return last.stop_string if isinstance(last, Finished) else None


def joined(steps: Sequence[Step]) -> Step:
    """Return all steps of a text as one: first what it says, then its calls."""
    parts = sorted((part for step in steps for part in step.parts), key=lambda part: not isinstance(part, Said))
    events = [event for step in steps for event in step.events]
    return Step(steps[0].choice, merged(parts), events, steps[-1].finish)


def tenant_of(key: Key | None) -> Tenant:
    """Return whom the texts of an API key of the daemon's are for; None: it has no keys.

    The mark is keyed by the hash of the key's secret, which only the file of keys holds: a verifier learns which texts
    are one tenant's, after a restart too, and nothing else.
    """
    if key is None:
        return ANYBODY
    mark = hmac.digest(bytes.fromhex(key.sha256), b"outrider isolation", hashlib.sha256)
    return Tenant(mark[:MAX_ISOLATION_BYTES], key.learning)


class Generation:
    """The texts of one request while they are decoded.

    Args:
        service: decodes and counts them.
        request: what the client wants.
        tokens: text of single tokens.
        state: what the guard noted of the request: see `Guard`.
    """

    def __init__(self, service: Service, request: ParsedRequest, tokens: TokenText, state: dict[str, Any]) -> None:
        self.request = request
        self.tokens = tokens
        self.request_id: str = state["request_id"]
        self._service = service
        self._key: Key | None = state["key"]
        self._began: float = state["began"]
        self._revoked: Callable[[], bool] = state["revoked"]
        self._first_token_s = 0.0  # 0: there is none yet
        self._observers = [TextObserver(service.metrics, service.cloud.lost) for _ in request.choices]
        self._parsers = [request.tools.parser() for _ in request.choices] if request.tools else []
        self._called: set[int] = set()  # choices with calls
        self._completion_tokens = 0
        self._cached_tokens: dict[int, int] = {}  # by prompt
        self._predicted = PredictionCount(request.prediction) if request.prediction is not None else None

    async def items(self) -> AsyncGenerator[Item]:
        """Yield (choice, event) of all texts, and count their tokens against the key's limits.

        The first error ends all texts, and so does leaving early. A slow reader holds them back.

        Raises:
            ApiError: the key has been revoked.
            Unavailable: the daemon is shutting down.
            OutriderError: a text cannot be finished, the key has no tokens left, or the cloud is away before any has
                begun.
        """
        queue: asyncio.Queue[Item | Exception] = asyncio.Queue(maxsize=2 * len(self._observers))
        left = len(self._observers)
        with ExitStack() as admitted:
            limits, key, now = self._service.key_limits, self._key, time.monotonic()
            tickets = [admitted.enter_context(closing(limits.admit(key, now))) for _ in range(left)] if key else []
            tasks = [asyncio.create_task(self._decode(choice, queue)) for choice in range(left)]
            tasks.append(asyncio.create_task(self._watch(queue)))
            try:
                while left:
                    item = await queue.get()
                    if isinstance(item, Exception):
                        raise item
                    choice, event = item
                    self._first_token_s = self._first_token_s or self._seconds
                    if tickets and isinstance(event, Tokens):
                        tickets[choice].spend(len(event.tokens), time.monotonic())
                    if isinstance(event, Finished):
                        left -= 1
                        self._service.cloud.ended(self._observers[choice].statistics)
                    yield item
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _decode(self, choice: int, queue: asyncio.Queue[Item | Exception]) -> None:
        request, text = self.request, self.request.choices[choice]
        events = self._service.cloud.client.generate(
            text.prompt,
            text.sampling,
            stop=request.stop,
            deadline_s=self._service.request_timeout_s,
            observer=self._observers[choice],
            logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            request_id=self.request_id,
            prediction=request.prediction,
            shown=request.tools.shown if request.tools else (),
            prompt_logprobs=request.prompt_scores,
            tenant=tenant_of(self._key),
            service=request.service or (self._key.service if self._key is not None else None),
        )
        try:
            async with aclosing(events):
                async for event in events:
                    await queue.put((choice, request.shown(event)))
        except Exception as error:  # whatever it is, it is for the reader
            if isinstance(error, InvalidArgument) and error.field == _GRAMMAR:
                await queue.put(from_outrider(error, request.grammar_field))
            else:
                await queue.put(error)

    async def _watch(self, queue: asyncio.Queue[Item | Exception]) -> None:
        """End the texts when the daemon ends, their key is revoked, or none begins while the cloud is away for long."""
        error: Exception | None = None
        while error is None:
            try:
                async with asyncio.timeout(WATCH_EVERY_S):
                    await self._service.limiter.cut.wait()
                error = Unavailable(SHUTTING_DOWN, retry_after_s=RETRY_AFTER_END_S)
            except TimeoutError:
                error = None if self._first_token_s else self._service.cloud.hopeless()
                if self._revoked():
                    error = REVOKED
        await queue.put(error)

    def step(self, choice: int, event: Event) -> Step:
        """Count an event in, find the calls in its text, and return what it adds to the answer."""
        finish: Literal["stop", "length", "tool_calls"] | None = None
        parts = self._parts(choice, event)
        if isinstance(event, Tokens):
            self._completion_tokens += len(event.tokens)
            if self._predicted is not None:
                self._predicted.take(event.ids)
        else:
            prompt, cached = choice // self.request.texts_per_prompt, event.statistics.cached_tokens
            self._cached_tokens[prompt] = min(cached, self._cached_tokens.get(prompt, cached))
            finish = "tool_calls" if choice in self._called else "stop"
            finish = "length" if event.reason is FinishReason.LENGTH else finish
        return Step(choice, parts, [event], finish)

    def _parts(self, choice: int, event: Event) -> list[Part]:
        tools = self.request.tools
        if tools is None:
            return [Said(event.text)] if event.text else []
        parser = self._parsers[choice]
        parts = [*parser.take(event.text), *(parser.end() if isinstance(event, Finished) else [])]
        for at, part in enumerate(parts):
            if isinstance(part, CallBegun):
                parts[at] = replace(part, id=tools.format.new_id())
                self._called.add(choice)
        return merged(parts)

    @property
    def usage(self) -> Usage:
        cached = sum(self._cached_tokens.values())
        return Usage(self.request.prompt_tokens, self._completion_tokens, cached, self._predicted)

    def account(self) -> None:
        """Count a request that was answered in full."""
        self._service.http_metrics.finished(self.usage, self._first_token_s, self._seconds)

    def metrics(self) -> dict[str, Any]:
        """Return the `metrics` object of the answer."""
        return metrics_of(self._observers, self.request.seed)

    def speculation(self, choice: int, events: Sequence[Event] = ()) -> dict[str, Any]:
        """Return the `speculation` object of a chunk with these events."""
        return self._observers[choice].live(events)

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self._began

"""Endpoints for texts as ASGI: a request in any API is read, decoded, and answered at once or as a stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send

from outrider.edge.daemon.answers import Answer, Piece
from outrider.edge.daemon.body_reading import read_request
from outrider.edge.daemon.cloud import Served
from outrider.edge.daemon.generation import Generation, Item, Service, Step, joined
from outrider.edge.daemon.http_errors import DEFECT, ApiError, from_outrider, json_bytes, json_response, renamed
from outrider.edge.daemon.parsed_request import parse
from outrider.edge.daemon.schema import ChatRequest, CompletionRequest, Strict
from outrider.proto.errors import OutriderError
from outrider.proto.plumbing.logs import about

LATE_S = 5.0  # beyond the deadline, for a client that reads slowly
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # a proxy must not collect the pieces
]

R = TypeVar("R", bound=Strict)

log = logging.getLogger(__name__)


class Adapted(NamedTuple):
    """A request of any API as one of OpenAI's, and the maker of its answer in the API's own form."""

    request: ChatRequest | CompletionRequest
    answer: Callable[[Generation], Answer]


@dataclass(frozen=True)
class TextEndpoint(Generic[R]):
    """One endpoint for texts.

    Attributes:
        service: decodes and counts the texts.
        kind: what a request may say.
        adapt: adapts a request, given the state of its scope.
        names: the API's own names of OpenAI's fields, for errors.
    """

    service: Service
    kind: type[R]
    adapt: Callable[[R, Mapping[str, Any]], Adapted]
    names: Mapping[str, str] = field(default_factory=dict)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, which ends when its client leaves."""
        with self.service.limiter.enter(scope["state"]["key"]) as take_bytes:
            body = await read_request(self.kind, HttpRequest(scope, receive), take_bytes, self.service.unknown_fields)
            try:
                adapted = self.adapt(body, scope["state"])
                served = self.service.cloud.serving()
                served.check_model(adapted.request.model)
                await _while_connected(receive, self.respond(adapted, served, scope, receive, send))
            except OutriderError as error:
                raise renamed(from_outrider(error), self.names) from error
            except ApiError as error:
                raise renamed(error, self.names) from error

    async def respond(self, adapted: Adapted, served: Served, scope: Scope, receive: Receive, send: Send) -> None:
        """Decode the texts of a request and send its answer."""
        request = await parse(adapted.request, served)
        generation = Generation(self.service, request, served.tokens, scope["state"])
        answer = adapted.answer(generation)
        try:
            async with (
                asyncio.timeout(self.service.request_timeout_s + LATE_S),
                aclosing(generation.items()) as items,
            ):
                if adapted.request.stream:
                    await self._stream(answer, generation, items, send)
                else:
                    await json_response(await _whole(answer, generation, items))(scope, receive, send)
        except TimeoutError as error:
            raise ApiError(504, "the client reads too slowly", code="deadline_exceeded") from error

    async def _stream(self, answer: Answer, generation: Generation, items: AsyncGenerator[Item], send: Send) -> None:
        first = await anext(items)
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        async with aclosing(self._frames(answer, generation, first, items)) as frames:
            async for frame in frames:
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _frames(
        self, answer: Answer, generation: Generation, first: Item, items: AsyncGenerator[Item]
    ) -> AsyncGenerator[bytes]:
        """Yield each piece as it comes; an error is the last of them, since the status has gone before it."""
        item: Item | None = first
        try:
            for piece in answer.begin():
                yield _frame(piece)
            while item is not None:
                for piece in answer.take(generation.step(*item)):
                    yield _frame(piece)
                item = await anext(items, None)
            generation.account()
            for piece in answer.end():
                yield _frame(piece)
        except OutriderError as error:
            failure = from_outrider(error)
        except ApiError as error:
            failure = error
        except Exception:  # a stream's top: its client must not take half a text for the whole
            log.exception("a stream failed", extra=about(session=generation.request_id))
            failure = DEFECT
        else:
            return
        for piece in answer.fail(renamed(failure, self.names)):
            yield _frame(piece)


def _frame(piece: Piece) -> bytes:
    """Return one server-sent event, named by its type where it has one."""
    if isinstance(piece, str):
        return b"data: " + piece.encode() + b"\n\n"
    name = b"event: " + piece["type"].encode() + b"\n" if "type" in piece else b""
    return name + b"data: " + json_bytes(piece) + b"\n\n"


async def _whole(answer: Answer, generation: Generation, items: AsyncGenerator[Item]) -> dict[str, Any]:
    steps: list[list[Step]] = [[] for _ in generation.request.choices]
    async for choice, event in items:
        steps[choice].append(generation.step(choice, event))
    body = answer.whole([joined(of_choice) for of_choice in steps])
    generation.account()
    return body


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do `work` unless the client leaves first, which cancels it; the request's body must have been read."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass

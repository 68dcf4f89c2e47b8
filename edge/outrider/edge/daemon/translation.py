"""Other APIs in front of chats: their requests become chats, and the pieces of a chat's answer become their events."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider.edge.daemon.body_reading import checked, read_request
from outrider.edge.daemon.http_errors import ApiError, json_bytes, json_response
from outrider.edge.daemon.schema import ChatRequest, Strict
from outrider.edge.daemon.text_streams import Item, Reply, TextEndpoint

Piece = dict[str, Any]  # an event of a stream, whose `type` is its name

W = TypeVar("W", bound=Strict)


class Translation(ABC):
    """One request of another API as a chat, and its answer in the making.

    Attributes:
        names: this API's names of a chat's fields, for errors.
        chat: the request as a chat.
    """

    names: ClassVar[Mapping[str, str]]
    chat: ChatRequest

    @abstractmethod
    def begin(self, usage: dict[str, Any]) -> list[Piece]:
        """Return the events before the text, given the chat's usage so far."""

    @abstractmethod
    def take(self, choice: dict[str, Any]) -> list[Piece]:
        """Return the events of what a chunk's choice adds: text, calls of functions, and at last the reason of the end.

        Its `delta` may have several calls, each of which begins with its id and its function's name.
        """

    @abstractmethod
    def end(self, usage: dict[str, Any], metrics: dict[str, Any]) -> list[Piece]:
        """Return the events after the text, with which `body` is whole."""

    @abstractmethod
    def fail(self, error: ApiError) -> list[Piece]:
        """Return the last events of an answer that cannot be finished."""

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """Return the whole answer after its end."""


@dataclass(frozen=True, slots=True)
class TranslatedReply(Reply):
    """The sending of a chat's answer in another API's format."""

    translation: Translation

    async def whole(self, items: AsyncGenerator[Item]) -> Response:
        """Return the answer when its text has ended."""
        answer = await self._whole(items)
        (choice,) = answer["choices"]
        self.translation.begin(answer["usage"])
        self.translation.take({**choice, "delta": choice["message"]})
        self.translation.end(answer["usage"], answer["metrics"])
        return json_response(self.translation.body())

    async def _pieces(self, first: Item, items: AsyncGenerator[Item]) -> AsyncGenerator[bytes]:
        translation = self.translation
        for frame in _frames(translation.begin(self.answer.usage)):
            yield frame
        async for chunk in self._chunks(first, items):
            for choice in chunk["choices"]:
                for frame in _frames(translation.take(choice)):
                    yield frame
        self.generation.account(self.answer.usage)
        for frame in _frames(translation.end(self.answer.usage, self.generation.metrics())):
            yield frame

    def _failure(self, error: ApiError) -> bytes:
        return b"".join(_frames(self.translation.fail(renamed(error, self.translation.names))))


def _frames(pieces: Iterable[Piece]) -> list[bytes]:
    """Return server-sent events with their names."""
    return [b"event: " + piece["type"].encode() + b"\ndata: " + json_bytes(piece) + b"\n\n" for piece in pieces]


@dataclass(frozen=True)
class TranslatedEndpoint(Generic[W]):
    """An endpoint of another API as ASGI, in front of the endpoint of chats.

    Attributes:
        chats: answers the chats.
        kind: what a request may say.
        translate: makes a chat of a request, given the state of its scope.
    """

    chats: TextEndpoint[ChatRequest]
    kind: type[W]
    translate: Callable[[W, Mapping[str, Any]], Translation]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, which ends when its client leaves."""
        service = self.chats.service
        with service.limiter.enter(scope["state"]["key"]) as place:
            options = await read_request(self.kind, HttpRequest(scope, receive), place, service.unknown_fields)
            translation = self.translate(options, scope["state"])
            reply = functools.partial(TranslatedReply, translation=translation)
            try:
                await self.chats.respond(translation.chat, reply, scope, receive, send)
            except ApiError as error:
                raise renamed(error, translation.names) from error


def as_chat(fields: dict[str, Any], names: Mapping[str, str]) -> ChatRequest:
    """Return the chat with these fields, without those that are None.

    Raises:
        ApiError: 400 that names the first field at fault as the other API does.
    """
    try:
        return checked(ChatRequest, {name: value for name, value in fields.items() if value is not None})
    except ApiError as error:
        raise renamed(error, names) from error


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Return an error that names the fields of another API instead of a chat's."""
    path = error.param or ""
    field = path.partition(".")[0].partition("[")[0]
    if field not in names:
        return error
    name = names[field]
    message = name + error.message.removeprefix(path) if path and error.message.startswith(path) else error.message
    made = ApiError(error.status, message, param=name, code=error.code)
    made.headers = error.headers
    return made


def invalid(field: str, message: str) -> ApiError:
    """Return the error of a field at fault."""
    return ApiError(400, f"{field}: {message}", param=field, code="invalid_value")


def string_in(value: Mapping[str, Any], name: str, where: str) -> str:
    """Return the string of a field of the object at `where`; raise `ApiError` 400 where it is none."""
    text = value.get(name)
    if not isinstance(text, str):
        raise invalid(f"{where}.{name}", "must be a string")
    return text


def type_of(value: Any, where: str) -> str:
    """Return the `type` of the object at `where`; raise `ApiError` 400 where it has none."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        raise invalid(where, "is no object with a type")
    return kind


def joined_text(value: Any, where: str, items: str, text_of: Callable[[Any, str], str]) -> str:
    """Return a string, or the text of a list of such `items`, a line each; raise `ApiError` 400 where it is neither."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid(where, f"must be a string or a list of {items}")
    return "\n".join(text_of(item, f"{where}[{at}]") for at, item in enumerate(value))


def called_arguments(calls: Iterable[Mapping[str, Any]] | None) -> list[tuple[str, str, str]]:
    """Return (id, name, arguments) of the calls in a delta; those that go on have neither id nor name."""
    return [
        (call.get("id") or "", call["function"].get("name") or "", call["function"].get("arguments") or "")
        for call in calls or ()
    ]

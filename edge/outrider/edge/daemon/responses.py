"""OpenAI's Responses API: its schema, a request as a chat, and the answer as a response, whole and in events."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from outrider.edge.daemon.api_access import RESPONSE, RESPONSES
from outrider.edge.daemon.http_errors import ApiError, json_response
from outrider.edge.daemon.response_store import KeptItem, KeptResponse, ResponseStore
from outrider.edge.daemon.schema import ChatRequest, Ignored, Strict, refuse, unless, within
from outrider.edge.daemon.text_streams import TextEndpoint
from outrider.edge.daemon.translation import (
    Piece,
    TranslatedEndpoint,
    Translation,
    as_chat,
    called_arguments,
    invalid,
    joined_text,
    string_in,
    type_of,
)
from outrider.proto.types import MAX_TOKEN_ID

MAX_METADATA = 16

_STATELESS = "send the conversation as input, or give previous_response_id"

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
PAGE_ITEMS, MAX_PAGE_ITEMS = 20, 100
_LIMIT = re.compile("[1-9][0-9]{0,2}")


def _input(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise refuse("must be a string or a list of items")
    return value


def _function(value: Any) -> Any:
    """Refuse a tool that is no function, whatever else it has."""
    if isinstance(value, dict) and isinstance(value.get("type"), str) and value["type"] != "function":
        raise refuse(f"is of type {value['type'][:40]!r}; there are only functions here, which your program runs")
    return value


class FunctionTool(Strict):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def for_chat(self) -> dict[str, Any]:
        """The tool in the form of chats."""
        return {"type": "function", "function": self.model_dump(exclude={"type"}, exclude_none=True)}


class TextFormat(Strict):
    """Format that the text must have."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> Self:
        if self.type == "json_schema" and self.schema_ is None:
            raise refuse("schema is missing")
        return self

    @property
    def for_chat(self) -> dict[str, Any]:
        """The format as a chat's `response_format`."""
        if self.type != "json_schema":
            return {"type": self.type}
        return {"type": self.type, "json_schema": {"name": self.name or "answer", "schema": self.schema_}}


class TextOptions(Strict):
    """Options of the text."""

    format: TextFormat | None = None
    verbosity: Ignored


class Reasoning(Strict):
    """Options of reasoning, which is a matter of the target's chat template."""

    effort: str | None = None
    summary: Ignored
    generate_summary: Ignored


class ResponsesRequest(Strict):
    """The body of POST /v1/responses."""

    model: Annotated[str, Field(min_length=1)]
    input: Annotated[Any, BeforeValidator(_input)]  # a string or a list of items
    instructions: str | None = None
    previous_response_id: Annotated[str | None, Field(max_length=200)] = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int | None, Field(ge=1, le=MAX_TOKEN_ID)] = None
    temperature: Annotated[float | None, within("temperature")] = None
    top_p: Annotated[float | None, within("top_p")] = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    include: list[str] | None = None
    text: TextOptions | None = None
    tools: list[Annotated[FunctionTool, BeforeValidator(_function)]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    metadata: Annotated[dict[str, str] | None, Field(max_length=MAX_METADATA)] = None
    truncation: Literal["auto", "disabled"] | None = None
    background: Annotated[Any, unless(False, why="is not supported here; leave it out, and stream")] = None
    conversation: Annotated[Any, unless(why=f"is not supported here; {_STATELESS}")] = None
    prompt: Annotated[Any, unless(why=f"is not supported here; {_STATELESS}")] = None
    # vLLM's
    seed: Annotated[int | None, Field(ge=-(1 << 63), lt=1 << 64)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=MAX_TOKEN_ID)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None
    # OpenAI's book-keeping
    max_tool_calls: Ignored
    moderation: Ignored
    prompt_cache_key: Ignored
    prompt_cache_options: Ignored
    prompt_cache_retention: Ignored
    safety_identifier: Ignored
    service_tier: Ignored
    stream_options: Ignored
    user: Ignored

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text comes with the log probabilities of its tokens."""
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)


def new_id(prefix: str) -> str:
    """Return a fresh id that nobody can guess."""
    return f"{prefix}_{uuid.uuid4().hex}"


def read_items(value: str | list[Any]) -> list[KeptItem]:
    """Return the items of a request's input, each with an id; a string is a user's message.

    Raises:
        ApiError: 400 that names the item at fault.
    """
    if isinstance(value, str):
        return [message("user", [{"type": "input_text", "text": value}])]
    read = [_item(item, f"input[{at}]") for at, item in enumerate(value)]
    return [item for item in read if item is not None]


def message(role: str, parts: Sequence[dict[str, Any]], item_id: str = "", status: str = "completed") -> KeptItem:
    """Return a message's item."""
    item_id = item_id or new_id("msg")
    return {"id": item_id, "type": "message", "status": status, "role": role, "content": list(parts)}


def function_call(item_id: str, call_id: str, name: str, arguments: str, status: str = "completed") -> KeptItem:
    """Return the item of a call."""
    called = {"call_id": call_id, "name": name, "arguments": arguments}
    return {"id": item_id, "type": "function_call", "status": status, **called}


def as_messages(items: Iterable[KeptItem], instructions: str | None) -> list[dict[str, Any]]:
    """Return the messages of a chat; calls belong to the assistant's message before them, as the model wrote them."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        if item["type"] == "message":
            text = "\n".join(part[_TEXTS[part["type"]]] for part in item["content"])
            messages.append({"role": item["role"], "content": text})
        elif item["type"] == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
        else:
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant"})
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
    return messages


def _item(value: Any, where: str) -> KeptItem | None:
    """Return one item as it is kept; None: it says nothing to the model."""
    if not isinstance(value, dict):
        raise invalid(where, "must be an object")
    item_id = value["id"] if isinstance(value.get("id"), str) else ""
    match value.get("type", "message"):
        case "message":
            return _message(value, where, item_id)
        case "function_call":
            call_id, name, arguments = (string_in(value, name, where) for name in ("call_id", "name", "arguments"))
            _check_arguments(arguments, where)
            return function_call(item_id or new_id("fc"), call_id, name, arguments)
        case "function_call_output":
            output = joined_text(value.get("output"), f"{where}.output", "parts", _part)
            kept = {"id": item_id or new_id("fco"), "type": "function_call_output", "status": "completed"}
            return {**kept, "call_id": string_in(value, "call_id", where), "output": output}
        case "reasoning":  # of another model: this target's template says what becomes of its own
            return None
        case "item_reference":
            raise invalid(where, "refers to an item by its id; send the item itself, or give previous_response_id")
    raise invalid(where, f"is of type {str(value['type'])[:40]!r}, which is not supported here; leave it out")


def _message(value: dict[str, Any], where: str, item_id: str) -> KeptItem:
    role, content = value.get("role"), value.get("content")
    if role not in _ROLES:
        raise invalid(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise invalid(f"{where}.content", "must be a string or a list of parts")
    kind = "output_text" if role == "assistant" else "input_text"
    parts: list[dict[str, Any]] = []
    for at, part in enumerate(content):
        text = _part(part, f"{where}.content[{at}]")
        parts.append({"type": kind, "text": text} | ({"annotations": []} if role == "assistant" else {}))
    return message(role, parts, item_id)


def _part(part: Any, where: str) -> str:
    kind = type_of(part, where)
    if kind not in _TEXTS:
        raise invalid(where, f"is of type {kind[:40]!r}; this target reads text only")
    return string_in(part, _TEXTS[kind], where)


def _check_arguments(arguments: str, where: str) -> None:
    try:
        fine = isinstance(json.loads(arguments or "{}"), dict)
    except (ValueError, RecursionError):
        fine = False
    if not fine:
        raise invalid(f"{where}.arguments", "must be a JSON object, as a string")


def chat_tool_choice(choice: Any) -> Any:
    """Return a choice among tools in the form of chats.

    Raises:
        ApiError: 400, it names a tool that is no function.
    """
    match choice:
        case None | "none" | "auto" | "required":
            return choice
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
        case {"type": "allowed_tools", "mode": "auto" | "required" as mode, "tools": list(tools)}:
            named = [chat_tool_choice(tool) for tool in tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": named}}
    raise _no_choice()


def _no_choice() -> ApiError:
    forms = "'none', 'auto', 'required', {'type': 'function', 'name': …} or an object of allowed_tools"
    return invalid("tool_choice", f"must be {forms}")


def owner_of(state: Mapping[str, Any]) -> str:
    """Return whose responses a request may see: its key's, or everybody's where no key is asked for."""
    return state["key"].sha256 if state["key"] is not None else ""


class ResponsesTranslation(Translation):
    """One response in the making.

    Args:
        request: what the client wants.
        store: keeps the response, if it is to be kept.
        owner: whose responses it may follow.

    Raises:
        ApiError: 400 that names the field at fault, 404 the previous response is not here.
    """

    names = _NAMES

    def __init__(self, request: ResponsesRequest, store: ResponseStore, owner: str) -> None:
        self._request = request
        self._store = store
        self._owner = owner
        self._items = read_items(request.input)
        previous = request.previous_response_id
        history = [] if previous is None else store.history(owner, previous, time.monotonic())
        self.chat = _chat(request, [*history, *self._items])
        self._id = new_id("resp")
        self._created_at = int(time.time())
        self._sequence = 0
        self._output: list[KeptItem] = []
        self._open: _OpenItem | None = None
        self._finish_reason = ""
        self._outcome: dict[str, Any] = {"status": "in_progress", "usage": None}

    def body(self) -> dict[str, Any]:
        """Return the response as far as it has come."""
        request = self._request
        text = request.text.model_dump(by_alias=True, exclude_none=True) if request.text is not None else {}
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_at,
            "model": request.model,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "output": list(self._output),
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": request.reasoning and request.reasoning.effort, "summary": None},
            "store": request.store is not False,
            "temperature": 1.0 if request.temperature is None else request.temperature,
            "text": {"format": {"type": "text"}, **text},
            "tool_choice": "auto" if request.tool_choice is None else request.tool_choice,
            "tools": [tool.model_dump() for tool in request.tools or ()],
            "top_logprobs": request.top_logprobs or 0,
            "top_p": 1.0 if request.top_p is None else request.top_p,
            "truncation": "disabled",
            "background": False,
            **self._outcome,
        }

    def begin(self, usage: dict[str, Any]) -> list[Piece]:  # noqa: ARG002 - it is known at the end
        """Return the events before the text."""
        return [self._piece(name, response=self.body()) for name in ("response.created", "response.in_progress")]

    def take(self, choice: dict[str, Any]) -> list[Piece]:
        """Return the events of text and of calls, each of which is an item of its own."""
        delta, pieces = choice["delta"], []
        text, logprobs = delta.get("content") or "", (choice.get("logprobs") or {}).get("content") or []
        if text or logprobs:
            pieces += self._take_text(text, logprobs)
        for call_id, name, arguments in called_arguments(delta.get("tool_calls")):
            if call_id:
                pieces += [*self._close(), *self._begin(_OpenCall(len(self._output), call_id, name))]
            if arguments:
                assert self._open is not None  # noqa: S101 - a call begins with its id
                pieces.append(self._piece(**self._open.add(arguments, [])))
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        return pieces

    def end(self, usage: dict[str, Any], metrics: dict[str, Any]) -> list[Piece]:
        """Close what is open, keep the response, and return the last events."""
        cut = self._finish_reason == "length"
        pieces = self._close("incomplete" if cut else "completed")
        if not self._output:  # an empty text
            pieces += [*self._begin(_OpenMessage(0)), *self._close("incomplete" if cut else "completed")]
        self._outcome = {
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "completed_at": None if cut else int(time.time()),
            "usage": _usage(usage),
            "metrics": metrics,
        }
        body = self.body()
        if body["store"]:
            self._store.keep(self._owner, body, self._items, time.monotonic())
        return [*pieces, self._piece(f"response.{body['status']}", response=body)]

    def fail(self, error: ApiError) -> list[Piece]:
        """Return the event of a response that failed, which is not kept."""
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
        self._outcome = {"status": "failed", "error": {"code": code, "message": error.message}, "usage": None}
        return [self._piece("response.failed", response=self.body())]

    def _take_text(self, text: str, logprobs: list[Any]) -> list[Piece]:
        pieces: list[Piece] = []
        if not isinstance(self._open, _OpenMessage):
            pieces += [*self._close(), *self._begin(_OpenMessage(len(self._output)))]
        assert self._open is not None  # noqa: S101 - just begun
        return [*pieces, self._piece(**self._open.add(text, logprobs))]

    def _begin(self, item: _OpenItem) -> list[Piece]:
        self._open = item
        return [self._piece(**event) for event in item.begin()]

    def _close(self, status: str = "completed") -> list[Piece]:
        item, self._open = self._open, None
        if item is None:
            return []
        self._output.append(item.item(status))
        return [self._piece(**event) for event in item.end(status)]

    def _piece(self, type: str, **fields: Any) -> Piece:  # noqa: A002 - the field's name
        self._sequence += 1
        return {"type": type, "sequence_number": self._sequence - 1, **fields}


class _OpenMessage:
    """The output item to which the text that is being streamed is added."""

    def __init__(self, at: int) -> None:
        self._id = new_id("msg")
        self._at = at
        self._where = {"item_id": self._id, "output_index": at, "content_index": 0}
        self._text = ""
        self._logprobs: list[Any] = []

    def item(self, status: str) -> KeptItem:
        return message("assistant", [self._part] if status != "in_progress" else [], self._id, status)

    def begin(self) -> list[Piece]:
        return [
            {"type": "response.output_item.added", "output_index": self._at, "item": self.item("in_progress")},
            {"type": "response.content_part.added", **self._where, "part": self._part},
        ]

    def add(self, text: str, logprobs: list[Any]) -> Piece:
        self._text += text
        self._logprobs += logprobs
        return {"type": "response.output_text.delta", **self._where, "delta": text, "logprobs": logprobs}

    def end(self, status: str) -> list[Piece]:
        whole = {"text": self._text, "logprobs": self._logprobs}
        return [
            {"type": "response.output_text.done", **self._where, **whole},
            {"type": "response.content_part.done", **self._where, "part": self._part},
            {"type": "response.output_item.done", "output_index": self._at, "item": self.item(status)},
        ]

    @property
    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": list(self._logprobs)}


class _OpenCall:
    """The item of a function's call whose arguments go on."""

    def __init__(self, at: int, call_id: str, name: str) -> None:
        self._id = new_id("fc")
        self._at = at
        self._call_id = call_id
        self._name = name
        self._arguments = ""

    def item(self, status: str) -> KeptItem:
        return function_call(self._id, self._call_id, self._name, self._arguments, status)

    def begin(self) -> list[Piece]:
        return [{"type": "response.output_item.added", "output_index": self._at, "item": self.item("in_progress")}]

    def add(self, text: str, logprobs: list[Any]) -> Piece:  # noqa: ARG002 - calls have none
        self._arguments += text
        where = {"item_id": self._id, "output_index": self._at}
        return {"type": "response.function_call_arguments.delta", **where, "delta": text}

    def end(self, status: str) -> list[Piece]:
        where = {"item_id": self._id, "output_index": self._at}
        called = {"name": self._name, "arguments": self._arguments}
        return [
            {"type": "response.function_call_arguments.done", **where, **called},
            {"type": "response.output_item.done", "output_index": self._at, "item": self.item(status)},
        ]


_OpenItem = _OpenMessage | _OpenCall


def _chat(request: ResponsesRequest, items: list[KeptItem]) -> ChatRequest:
    form = request.text.format if request.text is not None else None
    return as_chat(
        {
            "model": request.model,
            "messages": as_messages(items, request.instructions),
            "stream": request.stream,
            "max_completion_tokens": request.max_output_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "top_k": request.top_k,
            "min_p": request.min_p,
            "seed": request.seed,
            "logprobs": request.wants_logprobs or None,
            "top_logprobs": request.top_logprobs,
            "response_format": form.for_chat if form is not None else None,
            "reasoning_effort": request.reasoning.effort if request.reasoning is not None else None,
            "tools": [tool.for_chat for tool in request.tools] if request.tools else None,
            "tool_choice": chat_tool_choice(request.tool_choice) if request.tools else None,
            "parallel_tool_calls": request.parallel_tool_calls,
        },
        _NAMES,
    )


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return a chat's counts of tokens by the names of responses."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


class ResponsesApi:
    """The handlers of the Responses API, with a store of their own; `chats` answers the chats."""

    def __init__(self, chats: TextEndpoint[ChatRequest]) -> None:
        self._chats = chats
        self._store = ResponseStore()

    def routes(self) -> list[Route]:
        """Return the routes."""
        create = TranslatedEndpoint(self._chats, ResponsesRequest, self._translated)
        return [
            Route(RESPONSES, create, methods=["POST"]),
            Route(RESPONSE, self._response, methods=["GET"]),
            Route(RESPONSE, self._delete, methods=["DELETE"]),
            Route(RESPONSE + "/input_items", self._input_items, methods=["GET"]),
        ]

    def _translated(self, request: ResponsesRequest, state: Mapping[str, Any]) -> ResponsesTranslation:
        return ResponsesTranslation(request, self._store, owner_of(state))

    def _find(self, request: HttpRequest) -> KeptResponse:
        return self._store.find(owner_of(request.scope["state"]), request.path_params["response_id"], time.monotonic())

    async def _response(self, request: HttpRequest) -> Response:
        return json_response(self._find(request).body)

    async def _delete(self, request: HttpRequest) -> Response:
        response_id = request.path_params["response_id"]
        self._store.delete(owner_of(request.scope["state"]), response_id, time.monotonic())
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def _input_items(self, request: HttpRequest) -> Response:
        """Answer with a page of the items that one response was asked with, the latest first unless asked otherwise."""
        items = list(self._find(request).items)
        asked = request.query_params
        if asked.get("order", "desc") == "desc":
            items.reverse()
        if (after := asked.get("after")) is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise invalid("after", "is no item of this response's input")
            items = items[ids.index(after) + 1 :]
        limit = asked.get("limit", str(PAGE_ITEMS))
        if not (_LIMIT.fullmatch(limit) and int(limit) <= MAX_PAGE_ITEMS):
            raise invalid("limit", f"must be 1 to {MAX_PAGE_ITEMS}")
        page = items[: int(limit)]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        body = {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(page) < len(items)}
        return json_response(body)

"""OpenAI's Responses API: its schema, a request as a chat, and its answer, whole and in events."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from outrider.edge.daemon.answers import EventAnswer, Piece, chat_logprobs
from outrider.edge.daemon.api_access import RESPONSE, RESPONSES
from outrider.edge.daemon.body_reading import as_chat, joined_text, string_in, type_of
from outrider.edge.daemon.daemon_metrics import Usage
from outrider.edge.daemon.endpoints import Adapted, TextEndpoint
from outrider.edge.daemon.generation import Generation, Service, Step
from outrider.edge.daemon.http_errors import ApiError, invalid, json_response
from outrider.edge.daemon.response_store import KeptItem, KeptResponse, ResponseStore
from outrider.edge.daemon.schema import ChatRequest, ServiceField, Strict, refuse, unless, within
from outrider.edge.tool_calls.reading import CallArguments, CallBegun, Said
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
    verbosity: Any = None  # which changes nothing, and comes back in the response


class Reasoning(Strict):
    """Options of reasoning, which is a matter of the target's chat template."""

    ignored = frozenset(("generate_summary", "summary"))
    effort: str | None = None


class ResponsesRequest(Strict):
    """The body of POST /v1/responses."""

    ignored = frozenset(
        (
            *("max_tool_calls", "moderation", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"),
            *("safety_identifier", "service_tier", "stream_options", "user"),
        )
    )
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
    service: ServiceField = None  # our own
    # vLLM's
    seed: Annotated[int | None, Field(ge=-(1 << 63), lt=1 << 64)] = None
    top_k: Annotated[int | None, Field(ge=-1, le=MAX_TOKEN_ID)] = None
    min_p: Annotated[float | None, Field(ge=0, le=1)] = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the text comes with the log probabilities of its tokens."""
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)


def new_id(prefix: str) -> str:
    """Return a fresh id that nobody can guess."""
    return f"{prefix}_{uuid.uuid4().hex}"


def read_items(value: str | list[Any]) -> list[KeptItem]:
    """Return the items of an input, each with an id; raise `ApiError` 400 that names the item at fault."""
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
    """Return a choice among tools in the form of chats; raise `ApiError` 400 where it names no function."""
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


class ResponseAnswer(EventAnswer):
    """One response in the making.

    Args:
        request: what the client wants.
        items: the items of its input.
        store: keeps the response, if it is to be kept.
        owner: whose response it is.
        generation: its text.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        items: list[KeptItem],
        store: ResponseStore,
        owner: str,
        generation: Generation,
    ) -> None:
        self._request = request
        self._items = items
        self._store = store
        self._owner = owner
        self._generation = generation
        self._id = new_id("resp")
        self._created_at = int(time.time())
        self._sequence = 0
        self._output: list[KeptItem] = []
        self._open: KeptItem = {}  # the item that goes on, whose number is that of those before it; empty: none does
        self._cut = False
        self._outcome: dict[str, Any] = {"status": "in_progress", "usage": None}

    def body(self) -> dict[str, Any]:
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

    def begin(self) -> Iterable[Piece]:
        for name in ("response.created", "response.in_progress"):
            yield self._piece(name, response=self.body())

    def take(self, step: Step) -> Iterable[Piece]:
        """Return the events of text and of calls, each of which is an item of its own."""
        logprobs = chat_logprobs(step, self._generation.tokens) if self._generation.request.logprobs else []
        if logprobs and not step.text and self._open.get("type") != "function_call":
            yield from self._add_text("", logprobs)
        for part in step.parts:
            match part:
                case Said(text):
                    yield from self._add_text(text, logprobs)
                    logprobs = []
                case CallBegun(_, name, call_id):
                    yield from self._close("completed")
                    self._open = function_call(new_id("fc"), call_id, name, "", "in_progress")
                    yield self._piece("response.output_item.added", output_index=len(self._output), item=self._open)
                case CallArguments(_, text):
                    self._open["arguments"] += text
                    yield self._piece("response.function_call_arguments.delta", **self._where, delta=text)
        self._cut = step.finish == "length"

    def end(self) -> Iterable[Piece]:
        """Close what is open, keep the response, and return the last events."""
        if not self._output and not self._open:  # an empty text
            yield from self._begin_message()
        status = "incomplete" if self._cut else "completed"
        yield from self._close(status)
        self._outcome = {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if self._cut else None,
            "completed_at": None if self._cut else int(time.time()),
            "usage": _usage(self._generation.usage),
            "metrics": self._generation.metrics(),
        }
        body = self.body()
        if body["store"]:
            self._store.keep(self._owner, body, self._items, time.monotonic())
        yield self._piece(f"response.{status}", response=body)

    def fail(self, error: ApiError) -> Iterable[Piece]:
        """Return the event of a response that failed, which is not kept."""
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
        self._outcome = {"status": "failed", "error": {"code": code, "message": error.message}, "usage": None}
        yield self._piece("response.failed", response=self.body())

    def _add_text(self, text: str, logprobs: list[Any]) -> Iterable[Piece]:
        if self._open.get("type") != "message":
            yield from self._close("completed")
            yield from self._begin_message()
        (part,) = self._open["content"]
        part["text"] += text
        part["logprobs"] += logprobs
        yield self._piece("response.output_text.delta", **self._where, delta=text, logprobs=logprobs)

    def _begin_message(self) -> Iterable[Piece]:
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self._open = message("assistant", [part], status="in_progress")
        item = {**self._open, "content": []}
        yield self._piece("response.output_item.added", output_index=len(self._output), item=item)
        yield self._piece("response.content_part.added", **self._where, part=part)

    def _close(self, status: str) -> Iterable[Piece]:
        item, where = self._open, self._where
        if not item:
            return
        item["status"] = status
        if item["type"] == "message":
            (part,) = item["content"]
            yield self._piece("response.output_text.done", **where, text=part["text"], logprobs=part["logprobs"])
            yield self._piece("response.content_part.done", **where, part=part)
        else:
            called = {"name": item["name"], "arguments": item["arguments"]}
            yield self._piece("response.function_call_arguments.done", **where, **called)
        yield self._piece("response.output_item.done", output_index=len(self._output), item=item)
        self._output.append(item)
        self._open = {}

    @property
    def _where(self) -> dict[str, Any]:
        """The place of the open item, and of its content."""
        place = {"item_id": self._open.get("id"), "output_index": len(self._output)}
        return place | ({"content_index": 0} if self._open.get("type") == "message" else {})

    def _piece(self, kind: str, **fields: Any) -> Piece:
        self._sequence += 1
        return {"type": kind, "sequence_number": self._sequence - 1, **fields}


def _chat(request: ResponsesRequest, items: list[KeptItem]) -> ChatRequest:
    form = request.text.format if request.text is not None else None
    return as_chat(
        model=request.model,
        messages=as_messages(items, request.instructions),
        stream=request.stream,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=request.seed,
        logprobs=request.wants_logprobs or None,
        top_logprobs=request.top_logprobs,
        response_format=form.for_chat if form is not None else None,
        reasoning_effort=request.reasoning.effort if request.reasoning is not None else None,
        tools=[tool.for_chat for tool in request.tools] if request.tools else None,
        tool_choice=chat_tool_choice(request.tool_choice) if request.tools else None,
        parallel_tool_calls=request.parallel_tool_calls,
        service=request.service,
    )


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached, "cache_write_tokens": 0},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.completion,
    }


class ResponsesApi:
    """The handlers of the Responses API, with a store of their own."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = ResponseStore()

    def routes(self) -> list[Route]:
        create = TextEndpoint(self._service, ResponsesRequest, self._adapt, _NAMES)
        return [
            Route(RESPONSES, create, methods=["POST"]),
            Route(RESPONSE, self._response, methods=["GET"]),
            Route(RESPONSE, self._delete, methods=["DELETE"]),
            Route(RESPONSE + "/input_items", self._input_items, methods=["GET"]),
        ]

    def _adapt(self, request: ResponsesRequest, state: Mapping[str, Any]) -> Adapted:
        owner, previous = owner_of(state), request.previous_response_id
        items = read_items(request.input)
        history = [] if previous is None else self._store.history(owner, previous, time.monotonic())
        chat = _chat(request, [*history, *items])
        return Adapted(chat, partial(ResponseAnswer, request, items, self._store, owner))

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

"""Anthropic's API: its schema, a request as a chat, and its answer as a message, whole and in events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from outrider.edge.daemon.answers import EventAnswer, Piece
from outrider.edge.daemon.body_reading import as_chat, joined_text, string_in, type_of
from outrider.edge.daemon.cloud import Served
from outrider.edge.daemon.endpoints import Adapted, TextEndpoint
from outrider.edge.daemon.generation import Generation, Service, Step
from outrider.edge.daemon.http_errors import MESSAGES, NO_THREADS, ApiError, error_body, invalid, json_response
from outrider.edge.daemon.parsed_request import parse
from outrider.edge.daemon.schema import (
    MAX_MESSAGES,
    ChatRequest,
    ServiceField,
    Stops,
    Strict,
    refuse,
    unless,
    within,
)
from outrider.edge.tool_calls.reading import CallArguments, CallBegun, Said
from outrider.proto.types import MAX_TOKEN_ID

COUNT_TOKENS = MESSAGES + "/count_tokens"
_FAILED = "Error: "  # chats have no field for a tool that failed
_SILENT = ("thinking", "redacted_thinking")  # of other models: this target's template says what becomes of its own
_NAMES = {"stop": "stop_sequences", "response_format": "output_config.format", "prompt": "messages"}
_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


def _function(value: Any) -> Any:
    """Refuse a tool that Anthropic runs, whatever else it has."""
    if isinstance(value, dict) and value.get("type", "custom") not in ("custom", None):
        raise refuse(f"is of type {str(value['type'])[:40]!r}; there are only tools here that your program runs")
    return value


class ClientTool(Strict):
    """A tool that the client runs."""

    ignored = frozenset(
        ("allowed_callers", "cache_control", "defer_loading", "eager_input_streaming", "input_examples")
    )
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None

    @property
    def for_chat(self) -> dict[str, Any]:
        """The tool in the form of chats."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, **described, "parameters": self.input_schema}}


class ChoiceOfTool(Strict):
    """Whether the model uses tools, and which."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @property
    def for_chat(self) -> Any:
        """The choice in the form of chats."""
        if self.type == "tool":
            return {"type": "function", "function": {"name": self.name or ""}}
        return "required" if self.type == "any" else self.type


class OutputFormat(Strict):
    """Format that the text must have."""

    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Strict):
    """Options of the text."""

    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(Strict):
    """The body of POST /v1/messages/count_tokens: what becomes of the prompt."""

    ignored = frozenset(("cache_control", "context_management", "speed", "thinking"))
    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[Any], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[Any] | None = None
    tools: list[Annotated[ClientTool, BeforeValidator(_function)]] | None = None
    tool_choice: ChoiceOfTool | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest):
    """The body of POST /v1/messages."""

    ignored = CountRequest.ignored | {"inference_geo", "metadata", "service_tier"}
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)]
    stream: bool | None = None
    stop_sequences: Stops = None
    temperature: Annotated[float | None, within("temperature", high=1.0)] = None
    top_p: Annotated[float | None, within("top_p")] = None
    top_k: Annotated[int | None, Field(ge=0, le=MAX_TOKEN_ID)] = None
    seed: Annotated[int | None, Field(ge=-(1 << 63), lt=1 << 64)] = None  # vLLM's
    service: ServiceField = None  # our own
    thread: Any = None
    container: Annotated[Any, unless()] = None
    mcp_servers: Annotated[Any, unless([])] = None


def as_messages(system: str | list[Any] | None, messages: list[Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat; raise `ApiError` 400 that names the part at fault."""
    made: list[dict[str, Any]] = []
    if system:
        made.append({"role": "system", "content": _text(system, "system")})
    for at, message in enumerate(messages):
        where = f"messages[{at}]"
        if not isinstance(message, dict):
            raise invalid(where, "must be an object")
        content = message.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list):
            raise invalid(f"{where}.content", "must be a string or a list of blocks")
        match message.get("role"):
            case "user":
                made += _user(blocks, f"{where}.content")
            case "assistant":
                made.append(_assistant(blocks, f"{where}.content"))
            case "system":
                made.append({"role": "system", "content": _text(blocks, f"{where}.content")})
            case _:
                raise invalid(f"{where}.role", "must be user or assistant")
    if made[-1]["role"] == "assistant":
        raise invalid(f"messages[{len(messages) - 1}]", "is the assistant's; the last one must be the user's")
    return made


def _user(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    """Return the results of tools, each a message, and what the user says after them."""
    made, texts = [], []
    for at, block in enumerate(blocks):
        here = f"{where}[{at}]"
        if type_of(block, here) == "tool_result":
            text = _text(block.get("content") or "", f"{here}.content")
            if block.get("is_error") is True:
                text = _FAILED + text
            made.append({"role": "tool", "tool_call_id": string_in(block, "tool_use_id", here), "content": text})
        else:
            texts.append(_block_text(block, here))
    if texts or not made:
        made.append({"role": "user", "content": "\n".join(texts)})
    return made


def _assistant(blocks: list[Any], where: str) -> dict[str, Any]:
    texts, calls = [], []
    for at, block in enumerate(blocks):
        here = f"{where}[{at}]"
        kind = type_of(block, here)
        if kind == "tool_use":
            if not isinstance(block.get("input"), dict):
                raise invalid(f"{here}.input", "must be an object")
            arguments = json.dumps(block["input"], ensure_ascii=False)
            function = {"name": string_in(block, "name", here), "arguments": arguments}
            calls.append({"id": string_in(block, "id", here), "type": "function", "function": function})
        elif kind not in _SILENT:
            texts.append(_block_text(block, here))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    return {**message, "tool_calls": calls} if calls else message


def _block_text(block: Any, where: str) -> str:
    kind = type_of(block, where)
    if kind != "text":
        raise invalid(where, f"is of type {kind[:40]!r}, which cannot stand here; this target reads text only")
    return string_in(block, "text", where)


_text = partial(joined_text, items="blocks", text_of=_block_text)


class MessageAnswer(EventAnswer):
    """One message in the making."""

    def __init__(self, request: CountRequest, generation: Generation) -> None:
        self._model = request.model
        self._generation = generation
        self._content: list[dict[str, Any]] = []
        self._arguments = ""  # of the tool use that goes on, as JSON
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self._metrics: dict[str, Any] = {}

    def body(self) -> dict[str, Any]:
        return {
            "id": f"msg_{self._generation.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._content,
            **self._end,
            "usage": self._usage,
            **({"metrics": self._metrics} if self._metrics else {}),
        }

    def begin(self) -> Iterable[Piece]:
        """Return the events before the text; tokens that were cached are known at the end."""
        yield {"type": "message_start", "message": self.body()}
        yield {"type": "ping"}

    def take(self, step: Step) -> Iterable[Piece]:
        """Return the events of text and of uses of tools, each of which is a block of its own."""
        for part in step.parts:
            match part:
                case Said(text):
                    if not self._content or self._content[-1]["type"] != "text":
                        yield from self._begin({"type": "text", "text": ""})
                    self._content[-1]["text"] += text
                    yield self._delta({"type": "text_delta", "text": text})
                case CallBegun(_, name, call_id):
                    yield from self._begin({"type": "tool_use", "id": call_id, "name": name, "input": {}})
                case CallArguments(_, text):
                    self._arguments += text
                    yield self._delta({"type": "input_json_delta", "partial_json": text})
        if step.finish is not None:
            reason = "stop_sequence" if step.stop_string is not None else _REASONS[step.finish]
            self._end = {"stop_reason": reason, "stop_sequence": step.stop_string}

    def end(self) -> Iterable[Piece]:
        if not self._content:  # clients take its text for granted
            yield from self._begin({"type": "text", "text": ""})
        yield from self._close()
        self._metrics = self._generation.metrics()
        yield {"type": "message_delta", "delta": self._end, "usage": self._usage, "metrics": self._metrics}
        yield {"type": "message_stop"}

    def fail(self, error: ApiError) -> Iterable[Piece]:
        yield error_body(error, self._generation.request_id)

    def _begin(self, block: dict[str, Any]) -> Iterable[Piece]:
        yield from self._close()
        self._content.append(block)
        yield {"type": "content_block_start", "index": len(self._content) - 1, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> Piece:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _close(self) -> Iterable[Piece]:
        if not self._content:
            return
        if self._content[-1]["type"] == "tool_use":
            self._content[-1]["input"] = _input(self._arguments)
            self._arguments = ""
        yield {"type": "content_block_stop", "index": len(self._content) - 1}

    @property
    def _usage(self) -> dict[str, Any]:
        """Counts of tokens, of which input tokens are those that were not cached."""
        usage = self._generation.usage
        return {
            "input_tokens": usage.prompt - usage.cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached,
            "output_tokens": usage.completion,
        }


def prompt_chat(request: CountRequest, **more: Any) -> ChatRequest:
    """Return the chat with a request's prompt and `more` fields; raise `ApiError` 400 that names one at fault."""
    choice, config = request.tool_choice, request.output_config
    if choice is not None and request.tools:
        more["tool_choice"] = choice.for_chat
        more["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
    return as_chat(
        model=request.model,
        messages=as_messages(request.system, request.messages),
        reasoning_effort=config.effort if config is not None else None,
        tools=[tool.for_chat for tool in request.tools] if request.tools else None,
        **more,
    )


def _message(request: MessagesRequest, state: Mapping[str, Any]) -> Adapted:  # noqa: ARG001 - for APIs that need it
    if request.thread is not None:
        message = "thread: conversations are not kept here; leave it out, and send all messages"
        raise ApiError(400, message, param="thread", code=NO_THREADS)
    form = request.output_config.format if request.output_config is not None else None
    named = {"name": "answer", "schema": form.schema_} if form is not None else None
    chat = prompt_chat(
        request,
        stream=request.stream,
        max_completion_tokens=request.max_tokens,
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        service=request.service,
        response_format={"type": "json_schema", "json_schema": named} if named is not None else None,
    )
    return Adapted(chat, partial(MessageAnswer, request))


def _input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call; those of one that was cut off are none."""
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        parsed = {}
    return parsed if isinstance(parsed, dict) else {}


class _CountEndpoint(TextEndpoint[CountRequest]):
    """Counts the tokens of a prompt."""

    async def respond(self, adapted: Adapted, served: Served, scope: Scope, receive: Receive, send: Send) -> None:
        parsed = await parse(adapted.request, served)
        await json_response({"input_tokens": parsed.prompt_tokens})(scope, receive, send)


def _counted(request: CountRequest, state: Mapping[str, Any]) -> Adapted:  # noqa: ARG001
    return Adapted(prompt_chat(request), partial(MessageAnswer, request))


def messages_routes(service: Service) -> list[Route]:
    """Return the routes."""
    create = TextEndpoint(service, MessagesRequest, _message, _NAMES)
    count = _CountEndpoint(service, CountRequest, _counted, _NAMES)
    return [Route(MESSAGES, create, methods=["POST"]), Route(COUNT_TOKENS, count, methods=["POST"])]

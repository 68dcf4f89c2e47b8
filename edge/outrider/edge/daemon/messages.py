"""Anthropic's API: its schema, a request as a chat, and the chat's answer as a message, whole and in events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from starlette.requests import Request as HttpRequest
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from outrider.edge.daemon.body_reading import read_request
from outrider.edge.daemon.http_errors import MESSAGES, NO_THREADS, ApiError, error_body, from_outrider, json_response
from outrider.edge.daemon.schema import MAX_MESSAGES, ChatRequest, Ignored, Stops, Strict, refuse, unless, within
from outrider.edge.daemon.text_streams import TextEndpoint
from outrider.edge.daemon.translation import (
    Piece,
    TranslatedEndpoint,
    Translation,
    as_chat,
    called_arguments,
    invalid,
    joined_text,
    renamed,
    string_in,
    type_of,
)
from outrider.proto.errors import OutriderError
from outrider.proto.types import MAX_TOKEN_ID

COUNT_TOKENS = MESSAGES + "/count_tokens"
_FAILED = "Error: "  # chats have no field for a tool that failed
_SILENT = ("thinking", "redacted_thinking")  # of other models: this target's template says what becomes of its own
NAMES = {"stop": "stop_sequences", "response_format": "output_config.format", "prompt": "messages"}


def _function(value: Any) -> Any:
    """Refuse a tool that Anthropic runs, whatever else it has."""
    if isinstance(value, dict) and value.get("type", "custom") not in ("custom", None):
        raise refuse(f"is of type {str(value['type'])[:40]!r}; there are only tools here that your program runs")
    return value


class ClientTool(Strict):
    """A tool that the client runs."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    allowed_callers: Ignored
    cache_control: Ignored
    defer_loading: Ignored
    eager_input_streaming: Ignored
    input_examples: Ignored

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

    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[Any], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[Any] | None = None
    tools: list[Annotated[ClientTool, BeforeValidator(_function)]] | None = None
    tool_choice: ChoiceOfTool | None = None
    output_config: OutputConfig | None = None
    thinking: Ignored
    # Anthropic's book-keeping
    cache_control: Ignored
    context_management: Ignored
    speed: Ignored


class MessagesRequest(CountRequest):
    """The body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKEN_ID)]
    stream: bool | None = None
    stop_sequences: Stops = None
    temperature: Annotated[float | None, within("temperature", high=1.0)] = None
    top_p: Annotated[float | None, within("top_p")] = None
    top_k: Annotated[int | None, Field(ge=0, le=MAX_TOKEN_ID)] = None
    seed: Annotated[int | None, Field(ge=-(1 << 63), lt=1 << 64)] = None  # vLLM's
    thread: Any = None
    container: Annotated[Any, unless()] = None
    mcp_servers: Annotated[Any, unless([])] = None
    # Anthropic's book-keeping
    inference_geo: Ignored
    metadata: Ignored
    service_tier: Ignored


def as_messages(system: str | list[Any] | None, messages: list[Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat.

    Raises:
        ApiError: 400 that names the part at fault.
    """
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


class MessagesTranslation(Translation):
    """One message in the making; `state` is that of the request's scope.

    Raises:
        ApiError: 400 that names the field at fault.
    """

    names = NAMES

    def __init__(self, request: MessagesRequest, state: Mapping[str, Any]) -> None:
        self.chat = _message_chat(request)
        self._model = request.model
        self._request_id = state["request_id"]
        self._content: list[dict[str, Any]] = []
        self._arguments = ""  # of the tool use that goes on, as JSON
        self._usage: dict[str, Any] = {}
        self._metrics: dict[str, Any] = {}
        self._finish_reason = ""
        self._stop_sequence: str | None = None

    def body(self) -> dict[str, Any]:
        """Return the message as far as it has come."""
        return {
            "id": f"msg_{self._request_id}",
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(self._content),
            **self._end,
            "usage": self._usage,
            **({"metrics": self._metrics} if self._metrics else {}),
        }

    def begin(self, usage: dict[str, Any]) -> list[Piece]:
        """Return the events before the text; tokens that were cached are known at the end."""
        self._usage = _usage(usage)
        return [{"type": "message_start", "message": self.body()}, {"type": "ping"}]

    def take(self, choice: dict[str, Any]) -> list[Piece]:
        """Return the events of text and of uses of tools, each of which is a block of its own."""
        delta, pieces = choice["delta"], []
        if text := delta.get("content"):
            if not self._content or self._content[-1]["type"] != "text":
                pieces += [*self._close(), *self._begin({"type": "text", "text": ""})]
            self._content[-1]["text"] += text
            pieces.append(self._delta({"type": "text_delta", "text": text}))
        for call_id, name, arguments in called_arguments(delta.get("tool_calls")):
            if call_id:
                block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
                pieces += [*self._close(), *self._begin(block)]
            if arguments:
                self._arguments += arguments
                pieces.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
        self._finish_reason = choice.get("finish_reason") or self._finish_reason
        self._stop_sequence = choice.get("stop_reason") or self._stop_sequence
        return pieces

    def end(self, usage: dict[str, Any], metrics: dict[str, Any]) -> list[Piece]:
        """Close the last block and return the last events."""
        if not self._content:  # clients take its text for granted
            self._content.append({"type": "text", "text": ""})
            pieces = [{"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}]
        else:
            pieces = []
        self._usage, self._metrics = _usage(usage), metrics
        delta = {"type": "message_delta", "delta": self._end, "usage": self._usage, "metrics": metrics}
        return [*pieces, *self._close(), delta, {"type": "message_stop"}]

    def fail(self, error: ApiError) -> list[Piece]:
        """Return the event of an error."""
        return [error_body(error, self._request_id)]

    def _begin(self, block: dict[str, Any]) -> list[Piece]:
        self._content.append(block)
        return [{"type": "content_block_start", "index": len(self._content) - 1, "content_block": dict(block)}]

    def _delta(self, delta: dict[str, Any]) -> Piece:
        return {"type": "content_block_delta", "index": len(self._content) - 1, "delta": delta}

    def _close(self) -> list[Piece]:
        if not self._content:
            return []
        if self._content[-1]["type"] == "tool_use":
            self._content[-1]["input"] = _input(self._arguments)
            self._arguments = ""
        return [{"type": "content_block_stop", "index": len(self._content) - 1}]

    @property
    def _end(self) -> dict[str, Any]:
        reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
        reason = "stop_sequence" if self._stop_sequence is not None else reasons.get(self._finish_reason)
        return {"stop_reason": reason, "stop_sequence": self._stop_sequence}


def prompt_chat(request: CountRequest, **more: Any) -> ChatRequest:
    """Return the chat whose prompt is that of a request.

    Raises:
        ApiError: 400 that names the field at fault.
    """
    choice, config = request.tool_choice, request.output_config
    asked: dict[str, Any] = {
        "model": request.model,
        "messages": as_messages(request.system, request.messages),
        "reasoning_effort": config.effort if config is not None else None,
        "tools": [tool.for_chat for tool in request.tools] if request.tools else None,
    }
    if choice is not None and request.tools:
        asked["tool_choice"] = choice.for_chat
        asked["parallel_tool_calls"] = False if choice.disable_parallel_tool_use else None
    return as_chat({**asked, **more}, NAMES)


def _message_chat(request: MessagesRequest) -> ChatRequest:
    if request.thread is not None:
        message = "thread: conversations are not kept here; leave it out, and send all messages"
        raise ApiError(400, message, param="thread", code=NO_THREADS)
    form = request.output_config.format if request.output_config is not None else None
    named = {"name": "answer", "schema": form.schema_} if form is not None else None
    return prompt_chat(
        request,
        stream=request.stream,
        max_completion_tokens=request.max_tokens,
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        seed=request.seed,
        response_format={"type": "json_schema", "json_schema": named} if named is not None else None,
    )


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return a chat's counts of tokens by Anthropic's names, whose input tokens are those that were not cached."""
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
    }


def _input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call; those of one that was cut off are none."""
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        parsed = {}
    return parsed if isinstance(parsed, dict) else {}


def messages_routes(chats: TextEndpoint[ChatRequest]) -> list[Route]:
    """Return the routes; `chats` answers the chats."""
    create = TranslatedEndpoint(chats, MessagesRequest, MessagesTranslation)
    return [
        Route(MESSAGES, create, methods=["POST"]),
        Route(COUNT_TOKENS, CountEndpoint(chats), methods=["POST"]),
    ]


@dataclass(frozen=True)
class CountEndpoint:
    """Counts the tokens of a prompt, as ASGI; `chats` makes the prompt."""

    chats: TextEndpoint[ChatRequest]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        service = self.chats.service
        with service.limiter.enter(scope["state"]["key"]) as place:
            options = await read_request(CountRequest, HttpRequest(scope, receive), place, service.unknown_fields)
            served = service.cloud.serving()
            served.check_model(options.model)
            try:
                parsed = await self.chats.parse(prompt_chat(options), served)
            except OutriderError as error:
                raise renamed(from_outrider(error), NAMES) from error
            except ApiError as error:
                raise renamed(error, NAMES) from error
        await json_response({"input_tokens": parsed.prompt_tokens})(scope, receive, send)

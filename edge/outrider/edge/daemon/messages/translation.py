"""A request of Anthropic's API as a chat, and the chat's answer as its message, whole and in events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outrider.edge.daemon.errors import ApiError
from outrider.edge.daemon.messages.content import as_messages
from outrider.edge.daemon.messages.errors import NO_THREADS, error_body
from outrider.edge.daemon.messages.schema import CountRequest, MessagesRequest
from outrider.edge.daemon.schema import ChatRequest
from outrider.edge.daemon.translation import Piece, Translation, as_chat, called_arguments

NAMES = {"stop": "stop_sequences", "response_format": "output_config.format", "prompt": "messages"}


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

"""A request of the Responses API as a chat, and the chat's answer as a response, whole and in events."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from outrider.edge.daemon.errors import ApiError
from outrider.edge.daemon.responses.items import (
    KeptItem,
    as_messages,
    chat_tool_choice,
    function_call,
    message,
    new_id,
    read_items,
)
from outrider.edge.daemon.responses.schema import ResponsesRequest
from outrider.edge.daemon.responses.store import ResponseStore
from outrider.edge.daemon.schema import ChatRequest
from outrider.edge.daemon.translation import Piece, Translation, as_chat, called_arguments

_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}


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

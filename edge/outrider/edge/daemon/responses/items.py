"""Items of input and output: read from a request, and told to a chat as its messages."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from outrider.edge.daemon.errors import ApiError
from outrider.edge.daemon.translation import invalid, string_in, type_of

KeptItem = dict[str, Any]

_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}


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
            output = _text(value.get("output"), f"{where}.output")
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


def _text(value: Any, where: str) -> str:
    """Return the text of a string or of a list of parts."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid(where, "must be a string or a list of parts")
    return "\n".join(_part(part, f"{where}[{at}]") for at, part in enumerate(value))


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

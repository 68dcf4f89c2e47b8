"""Contents of Anthropic's messages as a chat's messages."""

from __future__ import annotations

import json
from typing import Any

from outrider.edge.daemon.translation import invalid, string_in, type_of

_FAILED = "Error: "  # chats have no field for a tool that failed
_SILENT = ("thinking", "redacted_thinking")  # of other models: this target's template says what becomes of its own


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


def _text(value: Any, where: str) -> str:
    """Return the text of a string or of a list of text blocks."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid(where, "must be a string or a list of blocks")
    return "\n".join(_block_text(block, f"{where}[{at}]") for at, block in enumerate(value))


def _block_text(block: Any, where: str) -> str:
    kind = type_of(block, where)
    if kind != "text":
        raise invalid(where, f"is of type {kind[:40]!r}, which cannot stand here; this target reads text only")
    return string_in(block, "text", where)

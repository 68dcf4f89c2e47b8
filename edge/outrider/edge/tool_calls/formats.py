"""Which format of calls a target speaks: said by the operator, or found in its chat template."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass

from outrider.edge.tool_calls import hermes, llama3, mistral
from outrider.edge.tool_calls.parts import CallParser

AUTO = "auto"
_KNOWS_TOOLS = re.compile(r"\btools\b")
_OF_OTHERS = ("<function=", "<arg_key>")  # inside <tool_call>, where Hermes has an object
_MISTRAL_ID = re.compile(r"[A-Za-z0-9]{9}")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Format in which a target calls functions.

    Attributes:
        name: as in `--tool-format`.
        markers: texts of the format that may be special tokens, which a text would otherwise not show.
        parser: makes the parser of a text, given the functions' names.
        new_id: makes the id of a call.
        old_id: makes an id that the format's templates take of a client's.
    """

    name: str
    markers: tuple[str, ...]
    parser: Callable[[Collection[str]], CallParser]
    new_id: Callable[[], str]
    old_id: Callable[[str], str]


def _openai_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _mistral_id() -> str:
    return secrets.token_hex(5)[:9]


def _as_mistral_id(given: str) -> str:
    """Return an id of nine letters and digits, the same for the same id."""
    return given if _MISTRAL_ID.fullmatch(given) else hashlib.sha256(given.encode(errors="replace")).hexdigest()[:9]


FORMATS = {
    each.name: each
    for each in (
        ToolFormat("hermes", (hermes.BEGIN, hermes.END), lambda _: hermes.HermesReader(), _openai_id, str),
        ToolFormat("llama3", (llama3.TAG,), llama3.Llama3Reader, _openai_id, str),
        ToolFormat(
            "mistral",
            (mistral.CALLS, mistral.CALL_ID, mistral.ARGS),
            lambda _: mistral.MistralReader(),
            _mistral_id,
            _as_mistral_id,
        ),
    )
}
NAMES = (AUTO, *FORMATS)


def knows_tools(template: str) -> bool:
    """Return whether a chat template shows functions to the model."""
    return _KNOWS_TOOLS.search(template) is not None


def format_of(template: str) -> ToolFormat | None:
    """Return the format that a chat template describes or writes; None: another, or none."""
    if mistral.CALLS in template:
        return FORMATS["mistral"]
    if hermes.BEGIN in template:
        return None if any(mark in template for mark in _OF_OTHERS) else FORMATS["hermes"]
    if llama3.TAG in template or ('"parameters": ' in template and "ipython" in template):
        return FORMATS["llama3"]
    return None

"""Schema of functions that a model may call, of the choice among them, and of calls in earlier turns."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from outrider.edge.daemon.strict import Strict, refuse

MAX_TOOLS = 128
MAX_DEPTH = 100  # of schemas and arguments
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


def _shallow(value: Any) -> Any:
    """Refuse JSON that is nested too deeply for all that walks through it later."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for each in level for inner in _inside(each)]
        if not level:
            return value
    raise refuse(f"is nested deeper than {MAX_DEPTH} levels; make it flatter")


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


class Function(Strict):
    """A function that the model may call; without `parameters` it takes none."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:/-]{1,128}$")]
    description: str | None = None
    parameters: Annotated[dict[str, Any] | None, BeforeValidator(_shallow)] = None
    strict: bool | None = None


class Tool(Strict):
    """A tool, which is always a function here."""

    type: Literal["function"]
    function: Function

    @property
    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates know it, its keys in the order of transformers' own schemas."""
        function = self.function
        described = {} if function.description is None else {"description": function.description}
        parameters = NO_PARAMETERS if function.parameters is None else function.parameters
        return {"type": "function", "function": {"name": function.name, **described, "parameters": parameters}}


class ToolChoice(Strict):
    """Whether the model calls functions, and which: `names`, or all where that is None."""

    mode: Literal["none", "auto", "required"]
    names: list[str] | None = None


def as_choice(value: Any) -> Any:
    """Return the fields of a `ToolChoice` that OpenAI's forms stand for."""
    match value:
        case None | ToolChoice():
            return value
        case "none" | "auto" | "required":
            return {"mode": value}
        case {"type": "function", "function": {"name": str(name)}}:
            return {"mode": "required", "names": [name]}
        case {"type": "allowed_tools", "allowed_tools": {"mode": "auto" | "required" as mode, "tools": list(tools)}}:
            if not tools:
                raise refuse("allows no tools; use 'none'")
            return {"mode": mode, "names": [_allowed(tool) for tool in tools]}
    forms = "'none', 'auto', 'required', {'type': 'function', 'function': {'name': …}} or an object of allowed_tools"
    raise refuse(f"must be {forms}")


def _allowed(tool: Any) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            return name
    raise refuse("has an allowed tool that is not {'type': 'function', 'function': {'name': …}}")


def _arguments(value: Any) -> Any:
    """Return the arguments of a call as templates want them: an object, which OpenAI writes as a string of JSON."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise refuse("must be a JSON object, as a string")
    return _shallow(value)


class Called(Strict):
    """The function of a call and its arguments, which become an object."""

    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_arguments)]


class ToolCall(Strict):
    """A call in an earlier turn of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: Called
    index: Annotated[Any, Field(default=None, exclude=True)]  # some clients leave it from the stream

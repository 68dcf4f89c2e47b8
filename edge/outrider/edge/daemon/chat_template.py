"""Messages to a prompt, by the target's own Jinja template, as transformers renders it, in a sandbox with limits.

A template comes with a model. The sandbox keeps it from Python's internals, and limits on output, sizes of strings,
numbers in calls and time keep it from the daemon's memory and time.
"""

from __future__ import annotations

import functools
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import FrameType
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from outrider.proto.errors import InvalidArgument

MAX_CHARACTERS = 4 << 20  # of a prompt, and of any string on the way to it
MAX_NUMBER = 1 << 20  # given to a function or filter: widths, repetitions
MAX_SECONDS = 2.0
FIELD = "chat_template"
_MULTIPLYING = {  # methods and filters that make much of little
    *("replace", "join", "format", "format_map", "expandtabs", "translate"),
    *("do_format", "do_replace", "do_join", "sync_do_join"),
}
_WIDE = re.compile(r"\d{6}")


class ChatTemplate:
    """One compiled template, safe for several threads.

    Args:
        source: text of the template.
        special_tokens: by the names that templates use, such as `bos_token`.

    Raises:
        InvalidArgument: not a template.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise InvalidArgument(f"cannot be compiled: {error}", field=FIELD) from error

    @classmethod
    def from_text(cls, text: str) -> ChatTemplate | None:
        """Read a `tokenizer_config.json` or a template file, given its content; None where it holds no template.

        Raises:
            InvalidArgument: not a template.
        """
        try:
            config = json.loads(text)
        except (ValueError, RecursionError):
            config = None
        if not isinstance(config, dict):
            return cls(text) if text.strip() else None
        template = config.get("chat_template")
        if isinstance(template, list):  # named ones
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template = named.get("default")
        if not isinstance(template, str) or not template.strip():
            return None
        tokens = {name: _token(value) for name, value in config.items() if name.endswith("_token")}
        return cls(template, {name: token for name, token in tokens.items() if token})

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """Return the prompt, ready for an answer by the assistant.

        Args:
            messages: plain JSON values, each of which has `role` and `content`.
            variables: more that a template may look at, such as `reasoning_effort`.

        Raises:
            InvalidArgument: the template refuses these messages, fails, or goes beyond a limit.
        """
        context = {**self._special_tokens, **variables, "messages": messages, "add_generation_prompt": True}
        try:
            with _time_limit(MAX_SECONDS):
                return _joined(self._template.generate(context))
        except (SecurityError, _LimitExceeded) as error:
            raise InvalidArgument(f"was stopped: {error}", field=FIELD) from error
        except jinja2.TemplateError as error:
            raise InvalidArgument(f"refuses these messages: {error}", field=FIELD) from error
        except Exception as error:  # the template's own doing, whatever it is
            raise InvalidArgument(f"fails on these messages: {type(error).__name__}: {error}", field=FIELD) from error


class _LimitExceeded(Exception):
    """A template wants more than it may have."""


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with sizes bounded as well."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        # `~` is not an operator to the sandbox; as `+` of strings it is.
        parsed = super()._parse(source, name, filename)
        visited: nodes.Template = _ConcatToAdd().visit(parsed)
        return visited

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            _check_number(left)
            _check_number(right, 64)
        elif operator == "%" and isinstance(left, str):
            raise _LimitExceeded("it formats with %, which can make strings of any length")
        elif operator == "*":
            _check_size(_size(left) * _size(right))
        elif operator == "+":
            _check_size(_size(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def call(self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps those that format
        _check_call(getattr(method, "__name__", ""), getattr(method, "__self__", ""), (*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)


class _ConcatToAdd(NodeTransformer):
    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 - jinja's name
        self.generic_visit(node)
        strings: list[nodes.Expr] = [
            nodes.Filter(part, "string", [], [], None, None, lineno=node.lineno) for part in node.nodes
        ]
        return functools.reduce(lambda left, right: nodes.Add(left, right, lineno=node.lineno), strings)


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters = {name: _bounded(function) for name, function in environment.filters.items()}
    environment.filters["tojson"] = _tojson
    environment.concat = _joined  # type: ignore[method-assign]  # joins what a block, macro or call has made
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's share of a chat, for training; here its content is just content."""

    tags = {"generation"}  # noqa: RUF012 - jinja reads a set

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        """Return only what is inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter with its arguments checked first."""

    @functools.wraps(function)  # and jinja's marks on it
    def filtered(*args: Any, **kwargs: Any) -> Any:
        _check_call(function.__name__, args[0] if args else "", (*args[1:], *kwargs.values()))
        return function(*args, **kwargs)

    return filtered


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # As transformers has it: Jinja's own escapes what HTML needs escaped.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(str(message)[:500])


def _strftime_now(style: str) -> str:
    return datetime.now().strftime(str(style)[:200])


def _joined(pieces: Any) -> str:
    whole: list[str] = []
    size = 0
    for piece in pieces:
        whole.append(piece)
        size += len(piece)
        _check_size(size)
    return "".join(whole)


def _check_size(characters: float) -> None:
    if characters > MAX_CHARACTERS:
        raise _LimitExceeded(f"it makes a string of more than {MAX_CHARACTERS} characters")


def _check_call(name: str, value: Any, args: tuple[Any, ...]) -> None:
    """Refuse huge numbers, as in `center` or `indent`, and what makes more of `value` than fits."""
    for arg in args:
        _check_number(arg)
    if name in _MULTIPLYING:
        _check_size(_product(value, args))


def _check_number(value: Any, limit: int = MAX_NUMBER) -> None:
    if isinstance(value, int | float) and abs(value) > limit:
        raise _LimitExceeded(f"it calculates with a number beyond {limit}")


def _size(value: Any) -> float:
    """Return characters or entries, or the number itself: the size that a product or a sum counts with."""
    if isinstance(value, str | bytes | list | tuple):
        return len(value)
    return abs(value) if isinstance(value, int | float) else 1


def _product(value: Any, args: tuple[Any, ...]) -> float:
    """Return an upper bound of the size that replacing, joining or formatting with `args` can make of `value`."""
    if isinstance(value, str) and _WIDE.search(value):
        raise _LimitExceeded("it formats to a width of more than five digits")
    whole = _size(value) + 1
    longest = max((_longest(arg) for arg in args), default=1)
    return whole * max(1, longest)


def _longest(value: Any) -> float:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list | tuple):
        return sum(len(entry) + 1 if isinstance(entry, str) else 16 for entry in value)
    return 16


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """End what this thread runs after `seconds`: Python asks at every line, and a loop has lines."""
    until = time.monotonic() + seconds

    def trace(frame: FrameType, event: str, argument: Any) -> Any:  # noqa: ARG001 - Python's signature
        if time.monotonic() > until:
            raise _LimitExceeded(f"it takes longer than {seconds:g} s")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _token(value: Any) -> str:
    """Return a special token of a tokenizer_config.json, which is its text or an object with it as `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""

"""Messages to a prompt, by the target's own Jinja template, as transformers renders it, in Jinja's sandbox.

A template comes with a model. The sandbox keeps it from Python's internals; time and memory are limited by the process
that renders (`process`), since single calls of C code can take any amount of either.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from outrider.proto.errors import InvalidArgument

MAX_CHARACTERS = 4 << 20  # of a prompt
FIELD = "chat_template"


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """The text of a template.

    Attributes:
        text: the template.
        special_tokens: special tokens by the names that templates use, such as `bos_token`.
        with_tools: another template for chats with tools; empty: it is the same.
    """

    text: str
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    with_tools: str = ""

    @classmethod
    def of(cls, text: str) -> TemplateSource | None:
        """Read a `tokenizer_config.json` or a template file, given its content; None where it holds no template."""
        try:
            config = json.loads(text)
        except (ValueError, RecursionError):
            config = None
        if not isinstance(config, dict):
            return cls(text) if text.strip() else None
        template, with_tools = config.get("chat_template"), ""
        if isinstance(template, list):  # named ones
            named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
            template, with_tools = named.get("default"), named.get("tool_use") or ""
        if not isinstance(template, str) or not template.strip():
            return None
        tokens = {name: _token(value) for name, value in config.items() if name.endswith("_token")}
        return cls(template, {name: token for name, token in tokens.items() if token}, str(with_tools))


class ChatTemplate:
    """One compiled template.

    Raises:
        InvalidArgument: not a template.
    """

    def __init__(self, source: TemplateSource) -> None:
        self._special_tokens = source.special_tokens
        try:
            self._template = _environment().from_string(source.text)
            self._with_tools = _environment().from_string(source.with_tools) if source.with_tools else self._template
        except Exception as error:  # Jinja's own kinds, and Python's for what is nested too deeply or too large
            raise InvalidArgument(f"cannot be compiled: {_words(error)}", field=FIELD) from error

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Return the prompt, ready for an answer by the assistant.

        Args:
            messages: plain JSON values, each of which has `role` and `content`.
            variables: more that a template may look at, such as `tools` and `reasoning_effort`.

        Raises:
            InvalidArgument: the template refuses these messages, fails, or makes too long a prompt.
        """
        context = {"tools": None, "documents": None, **self._special_tokens, **variables}
        context |= {"messages": messages, "add_generation_prompt": True}
        template = self._template if context["tools"] is None else self._with_tools
        try:
            prompt = template.render(context)
            prompt.encode()  # half a surrogate pair fails here
        except SecurityError as error:
            raise InvalidArgument(f"does what templates may not: {error}", field=FIELD) from error
        except jinja2.TemplateError as error:
            raise InvalidArgument(f"refuses these messages: {error}", field=FIELD) from error
        except MemoryError as error:
            raise InvalidArgument("needs more memory for these messages than it may have", field=FIELD) from error
        except Exception as error:  # the template's own doing, whatever it is
            raise InvalidArgument(f"fails on these messages: {_words(error)}", field=FIELD) from error
        if len(prompt) > MAX_CHARACTERS:
            raise InvalidArgument(
                f"makes a prompt of more than {MAX_CHARACTERS} characters; shorten the messages", field=FIELD
            )
        return prompt


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:500]}"


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's share of a chat, for training; here its content is just content."""

    tags = {"generation"}  # noqa: RUF012 - jinja reads a set

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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


def _token(value: Any) -> str:
    """Return a special token of a tokenizer_config.json, which is its text or an object with it as `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else ""

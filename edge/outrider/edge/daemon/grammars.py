"""Grammars of answers, by OpenAI's field for them and by those of vLLM, old and new."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from outrider.edge.daemon.strict import Strict, refuse
from outrider.proto.types import GrammarKind

MAX_WORDS = 1024  # to choose one of
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")
_GBNF = re.compile(r"^\s*root\s*::=", re.MULTILINE)

Source = tuple[GrammarKind, str]
Words = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_WORDS)]


def _schema(value: Any) -> Any:
    """Return a JSON schema as text."""
    if isinstance(value, dict | bool):
        return json.dumps(value, ensure_ascii=False)
    if not isinstance(value, str):
        raise refuse("must be a JSON schema, as an object or as text")
    return value


def _lark(value: Any) -> Any:
    if isinstance(value, str) and _GBNF.search(value):
        raise refuse("is in GBNF; grammars here are in Lark, and llguidance's gbnf_to_lark translates them")
    return value


SchemaText = Annotated[str | None, BeforeValidator(lambda value: None if value is None else _schema(value))]
Lark = Annotated[str | None, BeforeValidator(_lark)]


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`: the grammar of an answer, in one of these notations."""

    json_: Annotated[SchemaText, Field(alias="json")] = None
    regex: str | None = None
    choice: Words | None = None
    grammar: Lark = None
    json_object: bool | None = None

    def sources(self) -> list[Source]:
        """Return the grammars that are given, of which a request may have one."""
        made = sources_of(self.json_, self.regex, self.choice, self.grammar)
        return [*made, *([(GrammarKind.JSON_OBJECT, "")] if self.json_object else [])]


def sources_of(schema: str | None, regex: str | None, choice: list[str] | None, lark: str | None) -> list[Source]:
    """Return a grammar for each notation that is not None."""
    words = None if choice is None else "|".join(map(_escaped, choice))
    kinds = (
        (GrammarKind.JSON_SCHEMA, schema),
        (GrammarKind.REGEX, regex),
        (GrammarKind.REGEX, words),
        (GrammarKind.LARK, lark),
    )
    return [(kind, text) for kind, text in kinds if text is not None]


def _escaped(word: str) -> str:
    """Return a regular expression for exactly these characters; Python's escapes are not all those of llguidance."""
    return _SPECIAL.sub(lambda match: "\\" + match.group(), word)

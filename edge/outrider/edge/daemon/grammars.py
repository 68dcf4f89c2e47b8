"""Grammars of answers, by OpenAI's field for them and by those of vLLM, old and new."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field

from outrider.edge.daemon.errors import from_outrider
from outrider.edge.daemon.strict import Strict, refuse
from outrider.proto.errors import InvalidArgument
from outrider.proto.types import Grammar, GrammarKind

MAX_WORDS = 1024  # to choose one of
_SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")
_GBNF = re.compile(r"^\s*root\s*::=", re.MULTILINE)

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


class GivenGrammar(NamedTuple):
    """A grammar as a request gives it, and the name of the field that does."""

    field: str
    kind: GrammarKind
    text: str

    def grammar(self) -> Grammar:
        """Return the grammar for the verifier.

        Raises:
            ApiError: 400 that names the field: it is empty or too long.
        """
        try:
            return Grammar(self.kind, self.text)
        except InvalidArgument as error:
            raise from_outrider(error, self.field) from error


class StructuredOutputs(Strict):
    """vLLM's `structured_outputs`: the grammar of an answer, in one of these notations."""

    json_: Annotated[SchemaText, Field(alias="json")] = None
    regex: str | None = None
    choice: Words | None = None
    grammar: Lark = None
    json_object: bool | None = None

    def sources(self) -> list[GivenGrammar]:
        """Return the grammars that are given, of which a request may have one."""
        made = sources_of("structured_outputs.", self.json_, self.regex, self.choice, self.grammar)
        any_object = GivenGrammar("structured_outputs.json_object", GrammarKind.JSON_OBJECT, "")
        return [*made, *([any_object] if self.json_object else [])]


def sources_of(
    prefix: str, schema: str | None, regex: str | None, choice: list[str] | None, lark: str | None
) -> list[GivenGrammar]:
    """Return a grammar for each notation that is not None; the names of all their fields begin with `prefix`."""
    words = None if choice is None else "|".join(map(_escaped, choice))
    kinds = (
        ("json", GrammarKind.JSON_SCHEMA, schema),
        ("regex", GrammarKind.REGEX, regex),
        ("choice", GrammarKind.REGEX, words),
        ("grammar", GrammarKind.LARK, lark),
    )
    return [GivenGrammar(prefix + name, kind, text) for name, kind, text in kinds if text is not None]


def _escaped(word: str) -> str:
    """Return a regular expression for exactly these characters; Python's escapes are not all those of llguidance."""
    return _SPECIAL.sub(lambda match: "\\" + match.group(), word)

"""Grammars of calls, in llguidance's Lark: a text that must call functions, or may, and then calls them properly.

Free text ends where a call begins: at a special token, or at the first end of its marker otherwise. From there on the
grammar is that of the format, each function's arguments following its schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.edge.tool_calls.formats import (
    HERMES_CALL,
    HERMES_END,
    LLAMA3_CALL,
    MISTRAL_ARGUMENTS,
    MISTRAL_CALL,
    MISTRAL_CALL_ID,
)

# As the verifier has it for schemas alone: anything more, and a model that likes blanks goes on with them.
_BLANKS = r" |\n[ \t]{0,32}"
_TEXT = r"TEXT: /(.|\n)*/"
_NO_OBJECT = r"TEXT: /\s*([^\s{](.|\n)*)?/"  # where a text that is an object is a call
_NOTES = {"$comment", "$schema", "default", "deprecated", "description", "examples", "readOnly", "title", "writeOnly"}
_NAMED_SCHEMAS = {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
_PLAIN_VALUES = {"const", "enum", "required", "type"}


@dataclass(frozen=True, slots=True)
class CallableFunction:
    """A function in a grammar; arguments of one that is `strict` follow all of `schema` or are refused beforehand."""

    name: str
    schema: Mapping[str, Any]
    strict: bool


@dataclass(frozen=True, slots=True)
class CallRules:
    """Rules of the texts that a grammar allows.

    Attributes:
        functions: functions that may be called.
        must_call: whether a call has to come; else there may be text, or `answer`.
        max_calls: 1, or any number where that is None.
        answer: schema of a text without calls; None: any text.
        special: tokens of markers that are special tokens.
        template: the target's chat template, which tells between a format's variants.
    """

    functions: Sequence[CallableFunction]
    must_call: bool
    max_calls: int | None
    answer: Mapping[str, Any] | bool | None = None
    special: Mapping[str, int] = field(default_factory=dict)
    template: str = ""


def grammar_of(format_name: str, rules: CallRules) -> str:
    """Return the grammar in which a format's texts call functions by `rules`."""
    return "\n".join(_FORMATS[format_name](rules)) + "\n"


def slim(schema: Any) -> Any:
    """Return a schema without what says nothing about the values, such as descriptions."""
    if isinstance(schema, list):
        return [slim(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {}
    for key, value in schema.items():
        if key in _NAMED_SCHEMAS and isinstance(value, dict):
            made[key] = {name: slim(inner) for name, inner in value.items()}
        elif key not in _NOTES:
            made[key] = value if key in _PLAIN_VALUES else slim(value)
    return made


def _hermes(rules: CallRules) -> list[str]:
    begin, end = (_mark(rules, mark) for mark in (HERMES_CALL, HERMES_END))
    return [
        *_start(rules, begin, "rest", f'{begin} rest ("\\n" {begin} rest)*', _TEXT),
        f'rest: "\\n" object "\\n" {end}',
        *_objects(rules, "arguments"),
    ]


def _llama3(rules: CallRules) -> list[str]:
    tag = _mark(rules, LLAMA3_CALL)
    either = [] if rules.must_call else [f"{tag} object", "answer"]
    return [
        f"start: {' | '.join(['object', *either])}",
        *([] if rules.must_call else _answer(rules, _NO_OBJECT)),
        *_objects(rules, "parameters"),
    ]


def _mistral(rules: CallRules) -> list[str]:
    calls = _mark(rules, MISTRAL_CALL)
    if MISTRAL_ARGUMENTS in rules.template:
        call_id = f"({_mark(rules, MISTRAL_CALL_ID)} /[a-zA-Z0-9]{{9}}/)? " if MISTRAL_CALL_ID in rules.template else ""
        between = f"{call_id}{_mark(rules, MISTRAL_ARGUMENTS)}"
        named = [
            f"f{i}: {json.dumps(function.name)} {between} {_arguments(function)}"
            for i, function in enumerate(rules.functions)
        ]
        return [*_start(rules, calls, "object", f"({calls} object)+", _TEXT), _any_function(rules), *named]
    more = "" if rules.max_calls == 1 else ' (", " object)*'
    return [
        *_start(rules, calls, "rest", f"{calls} rest", _TEXT),
        f'rest: " "? "[" object{more} "]"',
        *_objects(rules, "arguments"),
    ]


_FORMATS: dict[str, Callable[[CallRules], list[str]]] = {"hermes": _hermes, "llama3": _llama3, "mistral": _mistral}


def _start(rules: CallRules, begin: str, rest: str, calls: str, text: str) -> list[str]:
    """Return the first rules: `calls`, or text and anywhere in it `begin`, which `rest` follows."""
    calls = f"{begin} {rest}" if rules.max_calls == 1 else calls
    if rules.must_call:
        return [f"start: {calls}"]
    if rules.answer is not None:
        return [f"start: answer | {calls}", *_answer(rules, text)]
    lazy = "" if begin.startswith("<[") else "[lazy]"
    start = f"start: TEXT | trigger {rest}" if rules.max_calls == 1 else f"start: (trigger {rest})* TEXT"
    return [start, f"trigger{lazy}: TEXT {begin}", text]


def _answer(rules: CallRules, text: str) -> list[str]:
    if rules.answer is None:
        return ["answer: TEXT", text]
    schema = {} if rules.answer is True else rules.answer
    return [f"answer: %json {_json(schema if isinstance(schema, bool) else {**_guided(strict=True), **schema})}"]


def _objects(rules: CallRules, key: str) -> list[str]:
    """Return the rule of a call's object, and one for each function, whose arguments are under `key`."""
    named = []
    for i, function in enumerate(rules.functions):
        # Lexemes as JSON has them, since an answer in JSON may begin the same way.
        words = ["{", '"name"', ": ", json.dumps(function.name), ", ", json.dumps(key), ": "]
        head = " ".join(map(json.dumps, words))
        named.append(f'f{i}: {head} {_arguments(function)} "}}"')
    return [_any_function(rules), *named]


def _any_function(rules: CallRules) -> str:
    return "object: " + " | ".join(f"f{i}" for i in range(len(rules.functions)))


def _arguments(function: CallableFunction) -> str:
    schema = {**_guided(strict=function.strict), "type": "object", **slim(dict(function.schema))}
    return f"%json {_json(schema)}"


def _guided(*, strict: bool) -> dict[str, Any]:
    """Return llguidance's own options in a schema: those that are not strict may have what it does not know."""
    options: dict[str, Any] = {"whitespace_pattern": _BLANKS}
    return {"x-guidance": options if strict else {**options, "lenient": True, "coerce_one_of": True}}


def _mark(rules: CallRules, marker: str) -> str:
    token = rules.special.get(marker)
    return json.dumps(marker) if token is None else f"<[{token}]>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)

"""Strangers' grammars: refused by name, or compiled, and then with the same masks however a text came there."""

from __future__ import annotations

import atexit
import functools
import json
import random
import zlib
from typing import Any

import numpy as np
from refusals import check_refusal

from outrider.cloud.grammar.grammar import GrammarMatcher, Grammars
from outrider.cloud.models.family_index import target_folder, tokenizer_file
from outrider.proto.errors import InvalidArgument
from outrider.proto.types import Grammar, GrammarKind

MAX_LENGTH = 1024
VOCAB, EOS = 8192, 0
STEPS = 6
ANSWER_WITHIN_S = 300.0
_KINDS = list(GrammarKind)
_SCHEMAS: tuple[Any, ...] = (
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}}, "required": ["a"]},
    {"type": "array", "items": {"enum": ["x", 1, None]}, "minItems": 1, "maxItems": 4, "uniqueItems": True},
    {"anyOf": [{"type": "string", "pattern": "^[a-z]{2,5}$"}, {"const": {"k": [1, 2]}}]},
    {"$defs": {"n": {"type": ["object", "null"], "properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
    {"type": "string", "format": "date-time", "maxLength": 40},
    {"allOf": [{"type": "number", "multipleOf": 0.5}, {"exclusiveMaximum": 9}], "x-guidance": {}},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "propertyNames": {"pattern": "b+"}},
    True,
)
_REGEXES = ("[a-z ]{3,40}", r"(\d+|x)*y?", r"a(?i:bc)\.[^\n]{0,9}", "(?:é|ü)+", r"\w+@\w+\.(org|net)")
_LARKS = (
    'start: "a" b+\nb: /[0-9]{1,3}/ | "(" start ")"',
    'start: item ("," item)*\nitem: WORD\nWORD: /[a-z]+/\n%ignore / +/',
    'start: %json {"type": "object"}',
)
_PIECES = (
    *'{}[]()"|*+?^$\\,:~&',
    *('"type"', '"$ref"', '"#"', '"pattern"', '"allOf"', '"anyOf"', '"oneOf"', '"not"', '"maxItems"', '"items"'),
    *("{0,9}", "(?i)", "[^", "\\d", "\\p{L}", "\\u0000", "1e9", "-1", "4294967296", "null", "start:", "%ignore", "\n"),
)


@functools.cache
def _grammars() -> Grammars:
    tokenizer_json = tokenizer_file(target_folder("reference")).read_text(encoding="utf-8")
    made = Grammars(tokenizer_json, VOCAB, frozenset({EOS}))
    atexit.register(made.close)
    return made


def seeds() -> list[bytes]:
    """Return grammars of every kind."""
    texts = {
        GrammarKind.JSON_OBJECT: ("",),
        GrammarKind.JSON_SCHEMA: tuple(map(json.dumps, _SCHEMAS)),
        GrammarKind.REGEX: _REGEXES,
        GrammarKind.LARK: _LARKS,
    }
    return [bytes([_KINDS.index(kind)]) + text.encode() for kind, some in texts.items() for text in some]


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Change a schema where it says something, or put pieces of grammars into the text."""
    kind, text = data[:1], data[1:].decode(errors="replace")
    if kind == bytes([_KINDS.index(GrammarKind.JSON_SCHEMA)]) and rng.random() < 0.6:
        try:
            return kind + json.dumps(_changed(rng, json.loads(text))).encode()
        except (ValueError, RecursionError):
            pass
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, end = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        end = min(end, at + rng.choice((0, 0, 1, 8)))
        text = text[:at] + rng.choice((rng.choice(_PIECES), text[at:end] * 2, "")) + text[end:]
    return kind + text.encode(errors="replace")


def _changed(rng: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.8:
        key = rng.choice(list(value))
        if rng.random() < 0.15:
            return {k: v for k, v in value.items() if k != key}
        return value | {key: _changed(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return [*value[:at], _changed(rng, value[at]), *value[at + rng.randrange(2) :]]
    others = (0, -1, 1.5, 1 << 40, "", "x", "a{3}", "#/$defs/n", None, True, False, [], {}, *_SCHEMAS)
    return rng.choice(others)


def try_input(data: bytes) -> None:
    """Compile one grammar, and follow it for some tokens; the first byte chooses its kind."""
    if not data:
        return
    try:
        grammar = Grammar(_KINDS[data[0] % len(_KINDS)], data[1:].decode(errors="replace"))
        _follow(grammar, random.Random(zlib.crc32(data)))
    except InvalidArgument as error:
        check_refusal(error)


def _follow(grammar: Grammar, rng: random.Random) -> None:
    matcher = _matcher(grammar, ())
    text: tuple[int, ...] = ()
    for _ in range(STEPS):
        (row,) = _rows(matcher, ())
        allowed = np.flatnonzero(row)
        token = int(rng.choice(allowed))
        if token == EOS:
            break
        wrong = int(rng.randrange(VOCAB))
        drafted = matcher.ask((token, wrong), lambda: None).result(ANSWER_WITHIN_S)
        assert len(drafted.tokens) == len(drafted.block) + 1, "one row more than drafts"
        assert all(drafted.tokens[j][draft] for j, draft in enumerate(drafted.block)), "a draft that is not allowed"
        assert (drafted.tokens[0] == row).all(), "drafts change what may follow the text"
        matcher.advance((token,))
        text += (token,)
    if text:
        resumed = _rows(_matcher(grammar, text), ())
        assert (resumed[0] == _rows(matcher, ())[0]).all(), "a resumed text may go on otherwise"


def _matcher(grammar: Grammar, committed: tuple[int, ...]) -> GrammarMatcher:
    return _grammars().begin(grammar, committed).result(ANSWER_WITHIN_S)


def _rows(matcher: GrammarMatcher, block: tuple[int, ...]) -> np.ndarray:
    rows: np.ndarray = matcher.ask(block, lambda: None).result(ANSWER_WITHIN_S).tokens
    return rows

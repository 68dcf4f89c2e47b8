"""Grammars of calls: texts that follow them are calls by the functions' schemas, and nothing else is let through."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer
from written_answer import WrittenAnswer

from outrider.cloud.grammar.grammar_compiler import compile_grammar, make_tokenizer
from outrider.cloud.models.family_index import target_folder, tokenizer_file
from outrider.edge.tool_calls.call_grammar import CallableFunction, CallRules, grammar_of, slim
from outrider.edge.tool_calls.formats import FORMATS
from outrider.proto.errors import InvalidArgument
from outrider.proto.types import Grammar, GrammarKind

MARKERS = [marker for each in FORMATS.values() for marker in each.markers]
TOKENIZER = Tokenizer.from_file(str(tokenizer_file(target_folder("reference"))))
SPECIAL = Tokenizer.from_str(TOKENIZER.to_str())
SPECIAL.add_special_tokens(MARKERS)
TRIES = [
    make_tokenizer(each.to_str(), each.get_vocab_size(), {each.token_to_id("<|end|>")}) for each in (TOKENIZER, SPECIAL)
]
ADD = {
    "type": "object",
    "properties": {"a": {"type": "integer", "description": "first"}, "title": {"type": "string"}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTIONS = [CallableFunction("add", ADD, strict=True), CallableFunction("now", {}, strict=False)]
NEW = "[TOOL_CALLS][ARGS]"
ONE = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "title": "é"}}\n</tool_call>',
    "llama3": '{"name": "add", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]',
    "mistral, newer": '[TOOL_CALLS]add[ARGS]{"a": 1}',
}
TWO = {
    "hermes": ONE["hermes"] + '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
    "mistral": ONE["mistral"][:-1] + ', {"name": "now", "arguments": {"x": [1]}}]',
    "mistral, newer": ONE["mistral, newer"] + "[TOOL_CALLS]now[ARGS]{}",
}
TEXT = "Hello, [world] <b>\n"


def grammar(case: str, tokenizer: Tokenizer = SPECIAL, **rules: Any) -> Grammar:
    name, _, newer = case.partition(", ")
    special = {mark: tokenizer.token_to_id(mark) for mark in MARKERS} if tokenizer is SPECIAL else {}
    template = NEW if newer else "[TOOL_CALLS]"
    rules = {"functions": FUNCTIONS, "must_call": True, "max_calls": None, "special": special, **rules}
    return Grammar(GrammarKind.LARK, grammar_of(name, CallRules(template=template, **rules)))


def follows(grammar: Grammar, text: str, tokenizer: Tokenizer = SPECIAL) -> bool:
    """Return whether a text is one of the grammar's, from its first token to its last."""
    matcher = compile_grammar(grammar, TRIES[tokenizer is SPECIAL])
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    return all(map(matcher.consume_token, tokens)) and matcher.is_accepting()


def broken(case: str) -> dict[str, str]:
    """Return texts that call badly, by what is wrong with each."""
    text = ONE[case]
    return {
        "another type": text.replace('"a": 1', '"a": "1"'),
        "another function": text.replace("add", "sub"),
        "a key too many": text.replace('"a": 1', '"a": 1, "b": 2'),
        "a key too few": text.replace('"a": 1', ""),
        "no end": text.partition('"a": 1')[0],
    }


@pytest.mark.parametrize("tokenizer", [SPECIAL, TOKENIZER], ids=["special", "plain"])
@pytest.mark.parametrize("case", sorted(ONE))
def test_a_required_call_is_a_call_by_its_schema_and_nothing_else(case, tokenizer) -> None:
    rule = grammar(case, tokenizer)
    assert follows(rule, ONE[case], tokenizer)
    assert case not in TWO or follows(rule, TWO[case], tokenizer)
    for what, text in {**broken(case), "text": TEXT, "nothing": "", "text before": TEXT + ONE[case]}.items():
        assert not follows(rule, text, tokenizer), what


@pytest.mark.parametrize("case", sorted(ONE))
def test_free_text_turns_into_a_call_by_its_schema_where_one_begins(case) -> None:
    for tokenizer in (SPECIAL, TOKENIZER):
        rule = grammar(case, tokenizer, must_call=False)
        assert follows(rule, TEXT, tokenizer)
        assert follows(rule, ONE[case], tokenizer)
        assert case == "llama3" or follows(rule, TEXT + ONE[case], tokenizer)
        for what, text in broken(case).items():
            assert not follows(rule, text, tokenizer), what


@pytest.mark.parametrize("case", sorted(TWO))
def test_no_second_call_comes_where_one_is_the_limit(case) -> None:
    for must_call in (True, False):
        assert follows(grammar(case, must_call=must_call), TWO[case])
        single = grammar(case, must_call=must_call, max_calls=1)
        assert follows(single, ONE[case])
        assert not follows(single, TWO[case])


@pytest.mark.parametrize("case", sorted(ONE))
def test_an_answer_has_its_format_unless_functions_are_called(case) -> None:
    rule = grammar(case, must_call=False, answer={"type": "object", "properties": {"x": {"type": "null"}}})
    assert follows(rule, '{"x": null}')
    assert follows(rule, ONE[case])
    for text in ('{"x": 1}', TEXT, *broken(case).values()):
        assert not follows(rule, text)


@pytest.mark.parametrize("case", sorted(ONE))
def test_what_a_grammar_allows_its_format_reads_as_calls(case) -> None:
    for text, count in [(ONE[case], 1), *([(TWO[case], 2)] if case in TWO else [])]:
        parser = FORMATS[case.partition(",")[0]].parser(["add", "now"])
        answer = WrittenAnswer()
        answer.add(parser.take(text) + parser.end())
        assert [call.name for call in answer.calls] == ["add", "now"][:count]
        assert answer.text == ""


def test_a_function_that_is_not_strict_may_have_what_no_grammar_can_hold() -> None:
    odd = {"properties": {"a": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}}
    lenient = grammar("llama3", functions=[CallableFunction("add", odd, strict=False)])
    assert follows(lenient, '{"name": "add", "parameters": {"a": [1, 1]}}')
    with pytest.raises(InvalidArgument, match="uniqueItems"):
        follows(grammar("llama3", functions=[CallableFunction("add", odd, strict=True)]), "")


def test_what_only_describes_a_schema_costs_no_grammar_and_values_stay() -> None:
    schema: dict[str, Any] = {
        "description": "x",
        "properties": {"description": {"title": "y", "enum": [{"title": "kept"}]}, "b": {"anyOf": [{"default": 1}]}},
        "required": ["description"],
    }
    assert slim(schema) == {
        "properties": {"description": {"enum": [{"title": "kept"}]}, "b": {"anyOf": [{}]}},
        "required": ["description"],
    }
    assert json.dumps(schema).count("title") == 2, "the client's own stays as it is"

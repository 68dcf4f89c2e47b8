"""Parsers of calls: what each format's models write, cut anywhere, and what is no call after all."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pkgutil import iter_modules
from re._constants import ASSERT, ASSERT_NOT, BRANCH, MAX_REPEAT, MAXREPEAT, MIN_REPEAT, POSSESSIVE_REPEAT, SUBPATTERN
from re._parser import parse

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from written_answer import WrittenAnswer

from outrider.edge import tool_calls
from outrider.edge.tool_calls.formats import FORMATS, format_of, knows_tools
from outrider.edge.tool_calls.reading import MAX_HEAD, CallArguments, CallBegun, Said

NAMES = ("look_up", "add")
TRICKY = {"a": '}]"</tool_call>[TOOL_CALLS]\\', "b": [{"c": None}, 'é"'], "d": {}}
ARGUMENTS = json.dumps(TRICKY, ensure_ascii=False)
CALL = f'{{"name": "add", "arguments": {ARGUMENTS}}}'
LLAMA_CALL = f'{{"name": "add", "parameters": {ARGUMENTS}}}'
TURNED = f'{{"arguments": {ARGUMENTS}, "name": "add"}}'
ADD = ("add", TRICKY)
LONG_BLANK = " " * MAX_HEAD
LONG_NAME = "a" * MAX_HEAD
# format, text of the model, what it says, and the calls that it makes
TEXTS = [
    ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [ADD]),
    ("hermes", f"I look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>\n", "I look.", [ADD] * 2),
    ("hermes", f"<tool_call>{TURNED}</tool_call> And so on. ", " And so on. ", [ADD]),
    ("hermes", f"<tool_call>{CALL}", "", [ADD]),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>', "", [("unknown", {})]),
    ("hermes", f'<tool_call>{{"name": "add", "arguments": {json.dumps(ARGUMENTS)}}}</tool_call>', "", [ADD]),
    ("llama3", LLAMA_CALL, "", [ADD]),
    ("llama3", f" \n<|python_tag|>{LLAMA_CALL}; {LLAMA_CALL}", "", [ADD] * 2),
    ("llama3", f'{{"type": "function", "name": "add", "parameters": {ARGUMENTS}}}\n', "", [ADD]),
    ("llama3", '{"type": "function", "function": "add", "parameters": {}}', "", [("add", {})]),
    ("llama3", '<|python_tag|>{"name": "unknown", "parameters": {}}', "", [("unknown", {})]),
    ("mistral", f"[TOOL_CALLS] [{CALL}]", "", [ADD]),
    ("mistral", f'[TOOL_CALLS][{CALL[:-1]}, "id": "abc123456"}}, {TURNED}]', "", [ADD] * 2),
    (
        "mistral",
        f"Well. [TOOL_CALLS]add[ARGS]{ARGUMENTS}[TOOL_CALLS]look_up[ARGS]{{}}",
        "Well.",
        [ADD, ("look_up", {})],
    ),
    ("mistral", f"[TOOL_CALLS]add[CALL_ID]abc123456[ARGS]{ARGUMENTS}", "", [ADD]),
    (
        "hermes",
        f"Yes.  {LONG_BLANK}<tool_call>{CALL}{LONG_BLANK}</tool_call>",
        f"Yes.  {LONG_BLANK}</tool_call>",
        [ADD],
    ),
    ("hermes", f'<tool_call>{{"name": "{LONG_NAME}", "arguments": {{}}}}</tool_call>', "", [(LONG_NAME, {})]),
    ("llama3", f"{LLAMA_CALL}{LONG_BLANK};", f"{LONG_BLANK};", [ADD]),
    ("mistral", f"[TOOL_CALLS][{CALL}{LONG_BLANK}]", f"{LONG_BLANK}]", [ADD]),
]
# what is no call, and stays what it is
PLAIN = [
    *(
        (name, text)
        for name in FORMATS
        for text in ("", " ", "Hello\n\n", "a < b [c] {d}\n", "<tool_", "[TOOL", "{", " { ")
    ),
    ("hermes", "<tool_call>\n{'name': 'add', 'arguments': {}}\n</tool_call>\n"),
    ("hermes", "<tool_call> nothing </tool_call> more"),
    ("hermes", '<tool_call>{"name": "add"'),
    ("hermes", '<tool_call>{"name": "add", "arguments": 5}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {}, "name": 3}</tool_call>'),
    ("llama3", '{"answer": 5}\n'),
    ("llama3", '{"name": "Anna", "parameters": {}} is an object'),
    ("llama3", 'So: {"name": "add", "parameters": {}}'),
    ("llama3", '<|python_tag|>brave_search.call(query="x")'),
    ("llama3", '{"name": "add", "parameters": '),
    ("mistral", "[TOOL_CALLS] none of them"),
    ("mistral", '[TOOL_CALLS] [{"name": 3}]'),
    ("mistral", "[TOOL_CALLS][1, 2]"),
    ("mistral", "[TOOL_CALLS]add[ARGS]none"),
    ("mistral", f"[TOOL_CALLS]{' ' * 16_000}!"),
    ("mistral", f"[TOOL_CALLS]{'a' * 16_000}{{}}"),
    ("mistral", f"[TOOL_CALLS]{LONG_BLANK}[{CALL}]"),
    ("hermes", f"<tool_call>{LONG_BLANK}{CALL}"),
    ("hermes", f'<tool_call>{{"id": <tool_call>{CALL}</tool_call>'),
    ("llama3", f"{LONG_BLANK}{LLAMA_CALL}"),
]


def parsed(name: str, pieces: list[str]) -> WrittenAnswer:
    parser = FORMATS[name].parser(NAMES)
    answer = WrittenAnswer()
    for piece in pieces:
        answer.add(parser.take(piece))
    answer.add(parser.end())
    return answer


def cut(text: str, places: list[int]) -> list[str]:
    at = sorted(place % (len(text) + 1) for place in places)
    return [text[start:end] for start, end in zip([0, *at], [*at, len(text)], strict=True)]


@pytest.mark.parametrize(("name", "text", "said", "calls"), TEXTS)
def test_calls_are_found_with_the_text_around_them(name, text, said, calls) -> None:
    answer = parsed(name, [text])
    assert answer.text == said
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == calls


@pytest.mark.parametrize(("name", "text"), PLAIN)
def test_what_is_no_call_stays_text_to_the_last_character(name, text) -> None:
    assert parsed(name, [text]) == WrittenAnswer(text)


@settings(max_examples=150, deadline=None)
@given(
    case=st.sampled_from([*((name, text) for name, text, *_ in TEXTS), *PLAIN]),
    places=st.lists(st.integers(0, 400), max_size=12),
)
def test_a_text_means_the_same_however_it_is_cut(case, places) -> None:
    name, text = case
    whole = parsed(name, [text])
    assert parsed(name, cut(text, places)) == whole
    assert parsed(name, list(text)) == whole


def test_arguments_go_out_as_they_come() -> None:
    parser = FORMATS["hermes"].parser(NAMES)
    pieces = ["Yes. ", "<tool_call>", '\n{"name": "add", "arg', 'uments": {"a"', ": 1}", "}\n</tool_", "call>"]
    parts = [parser.take(piece) for piece in pieces]
    said, begun = [Said("Yes.")], [CallBegun(0, "add"), CallArguments(0, '{"a"')]
    assert parts == [said, [], [], begun, [CallArguments(0, ": 1}")], [], []]
    assert parser.end() == []


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "fo'),
        ("llama3", '{"name": "add", "parameters": {"a": "fo'),
        ("mistral", '[TOOL_CALLS][{"name": "add", "arguments": {"a": "fo'),
    ],
)
def test_arguments_that_break_off_are_those_of_the_call(name, broken) -> None:
    (call,) = parsed(name, [broken]).calls
    assert (call.name, call.arguments) == ("add", '{"a": "fo')


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{% if tools %}<tool_call>{{ tools }}</tool_call>{% endif %}", "hermes"),
        ("{% if tools %}{% endif %}[TOOL_CALLS] [", "mistral"),
        ("{{ tools }} '\"parameters\": ' {{ message.role == 'ipython' }}", "llama3"),
        ("{{ tools }}<|python_tag|>", "llama3"),
        ("{{ tools }}<tool_call><function=name>", None),
        ("{{ tools }}<tool_call>name<arg_key>", None),
        ("{{ tools }}", None),
    ],
)
def test_a_chat_template_tells_the_format(template, name) -> None:
    found = format_of(template)
    assert (found and found.name) == name
    assert knows_tools(template)
    assert not knows_tools("{{ messages }} with a toolset")


def test_ids_are_new_each_time_and_mistrals_have_nine_letters_or_digits() -> None:
    for form in FORMATS.values():
        assert len({form.new_id() for _ in range(100)}) == 100
    mistral, hermes = FORMATS["mistral"], FORMATS["hermes"]
    assert hermes.new_id().startswith("call_")
    assert hermes.old_id("call_1") == "call_1"
    for made in (mistral.new_id(), mistral.old_id("call_1"), mistral.old_id("é")):
        assert len(made) == 9
        assert made.isalnum()
    assert mistral.old_id("abcDEF123") == "abcDEF123"
    assert mistral.old_id("call_1") == mistral.old_id("call_1") != mistral.old_id("call_2")


def repeats_that_give_back(parsed) -> int:
    """Return how many parts of a parsed pattern may be repeated without end, and be tried again with fewer."""
    found = 0
    for kind, value in parsed:
        if kind in (MAX_REPEAT, MIN_REPEAT, POSSESSIVE_REPEAT):
            found += (kind is not POSSESSIVE_REPEAT and value[1] is MAXREPEAT) + repeats_that_give_back(value[2])
        elif kind is SUBPATTERN:
            found += repeats_that_give_back(value[-1])
        elif kind is BRANCH:
            found += sum(map(repeats_that_give_back, value[1]))
        elif kind in (ASSERT, ASSERT_NOT):
            found += repeats_that_give_back(value[1])
    return found


def test_no_pattern_of_a_reader_tries_two_repeats_in_each_others_places() -> None:
    assert repeats_that_give_back(parse(r"\s*([\w.:/-]+)\s*(?=\{)")) == 3, "as one was that held a daemon for 5 s"
    modules = [import_module(f"{tool_calls.__name__}.{info.name}") for info in iter_modules(tool_calls.__path__)]
    patterns = {each.pattern for module in modules for each in vars(module).values() if isinstance(each, re.Pattern)}
    assert len(patterns) >= 8
    assert [pattern for pattern in patterns if repeats_that_give_back(parse(pattern)) > 1] == []

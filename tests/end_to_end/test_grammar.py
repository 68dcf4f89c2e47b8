"""Texts that follow a grammar, over real gRPC: always valid, and the same bytes whatever is drafted or cut."""

from __future__ import annotations

import asyncio
import json
import math
import random
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from written_answer import WrittenAnswer

from outrider.cloud.grammar.grammar import GrammarMatcher, Grammars
from outrider.deploy.commands.edge_options import GrammarSettings
from outrider.edge import FinishReason, Grammar, GrammarKind, Sampling, Tokens
from outrider.edge.tool_calls.call_grammar import CallableFunction, CallRules, grammar_of
from outrider.edge.tool_calls.formats import FORMATS
from outrider.proto.errors import ConfigError, InvalidArgument
from outrider.proto.types import Patience

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 1, "maxItems": 1},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
PERSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps(SCHEMA))
GREEDY = Sampling(max_tokens=40, grammar=PERSON)
DRAWN = Sampling(max_tokens=40, grammar=PERSON, temperature=1.0, seed=11)
PROMPTS = ("A person, in JSON:\n", "def load(path):\n    return ")


def assert_valid(completion: Any) -> None:
    assert completion.finish_reason is FinishReason.EOS
    jsonschema.validate(json.loads(completion.text), SCHEMA)


@pytest.mark.usefixtures("all_drafts_pay")
async def test_every_text_is_valid_and_the_same_with_drafts_off_and_for_every_window(verifier, edge) -> None:
    wanted = ((PROMPTS[0], GREEDY), (PROMPTS[1], DRAWN))

    verified = 0
    async with edge(verifier, drafter="none") as client:
        expected = [await client.complete(*each) for each in wanted]
    for completion in expected:
        assert_valid(completion)
    for window in (1, 4, 16):
        patience = Patience(math.inf, min(window, 3))  # else a busy machine's drafts may all come too late
        async with edge(verifier, drafter="general", window=window, patience=patience) as client:
            together = await asyncio.gather(*(client.complete(*each) for each in wanted))
        assert [c.ids for c in together] == [c.ids for c in expected]
        verified += sum(c.statistics.verified for c in together)
    assert verified


@pytest.mark.usefixtures("all_drafts_pay")
async def test_a_required_call_is_one_by_its_schema_whatever_is_drafted(verifier, edge) -> None:
    rules = CallRules([CallableFunction("save", SCHEMA, strict=True)], must_call=True, max_calls=1)
    patience = Patience(math.inf, 3)
    async with (
        edge(verifier, drafter="none") as plain,
        edge(verifier, drafter="general", window=4, patience=patience) as drafting,
    ):
        control = await plain.complete(PROMPTS[0], max_tokens=12)
        for name in FORMATS:
            calls = Grammar(GrammarKind.LARK, grammar_of(name, rules))
            free = Grammar(GrammarKind.LARK, grammar_of(name, replace(rules, must_call=False)))
            wanted = [
                (PROMPTS[1], Sampling(max_tokens=80, grammar=calls, temperature=1.0, seed=3)),
                (PROMPTS[1], Sampling(max_tokens=12, grammar=free)),
            ]
            expected, drafted = [
                await asyncio.gather(*(client.complete(*each) for each in wanted)) for client in (plain, drafting)
            ]
            assert [each.ids for each in drafted] == [each.ids for each in expected]
            assert sum(each.statistics.verified for each in drafted)
            required, unforced = (each.text for each in drafted)
            (call,) = read_calls(name, required).calls
            assert call.name == "save"
            jsonschema.validate(json.loads(call.arguments), SCHEMA)
            assert not read_calls(name, control.text).calls
            assert unforced == read_calls(name, unforced).text, "a free text is its own"


def read_calls(name: str, text: str) -> WrittenAnswer:
    parser = FORMATS[name].parser(["save"])
    answer = WrittenAnswer()
    answer.add([*parser.take(text), *parser.end()])
    return answer


async def test_a_text_stays_valid_and_the_same_through_cut_streams(serving, edge, relay) -> None:
    dice, got, until_cut, resumes = random.Random(2), [], 3, 0
    async with serving(name="a") as first, serving(name="b") as second:
        async with edge(first, drafter="none") as client:
            expected = await client.complete(PROMPTS[0], DRAWN)
        async with (
            relay(first) as one,
            relay(second) as two,
            edge(one.address, two.address, drafter="general") as client,
        ):
            async for event in client.generate(PROMPTS[0], DRAWN):
                if not isinstance(event, Tokens):
                    resumes = event.statistics.resumes
                    break
                got += event.ids
                until_cut -= 1
                if until_cut == 0:
                    one.cut()
                    two.cut()
                    until_cut = dice.randint(1, 4)
    assert resumes >= 2
    assert tuple(got) == expected.ids


async def test_other_kinds_hold_too_and_sessions_without_a_grammar_are_undisturbed(verifier, edge) -> None:
    digits = Grammar(GrammarKind.REGEX, "(yes|no), [0-9]{3}")
    sentence = Grammar(GrammarKind.LARK, 'start: "The " WORD " is " WORD "."\nWORD: /[a-z]{1,8}/')

    async with edge(verifier, drafter="general") as client:
        alone = await client.complete("Once upon a time", max_tokens=12)
        free, number, said, limited = await asyncio.gather(
            client.complete("Once upon a time", max_tokens=12),
            client.complete("How many? ", grammar=digits, temperature=1.0, seed=3),
            client.complete("He said: ", grammar=sentence),
            client.complete("Any object: ", grammar=Grammar(GrammarKind.JSON_OBJECT), max_tokens=5),
        )
    assert free.ids == alone.ids
    assert re.fullmatch(digits.text, number.text)
    assert re.fullmatch(r"The [a-z]{1,8} is [a-z]{1,8}\.", said.text)
    assert limited.text.startswith("{")
    assert limited.finish_reason in (FinishReason.LENGTH, FinishReason.EOS)


async def test_a_bad_schema_is_refused_by_name_and_nothing_of_it_remains(serving, edge) -> None:
    async with serving(kv_tokens=2048, max_sessions=1) as address, edge(address, drafter="none") as client:
        for text in ('{"type": "wrong"}', '{"type":', '{"$ref": "#"}'):
            with pytest.raises(InvalidArgument) as refused:
                await client.complete("x", grammar=Grammar(GrammarKind.JSON_SCHEMA, text))
            assert refused.value.field == "sampling.grammar"
        assert len((await client.complete("x", max_tokens=3)).ids) == 3


async def test_every_token_has_the_models_own_log_probability_also_under_a_grammar(verifier, edge) -> None:
    async with edge(verifier, drafter="general") as client:
        free = await client.complete("Once upon", max_tokens=6, top_logprobs=3)
        held = await client.complete("Once upon", GREEDY, top_logprobs=3)
        silent = await client.complete("Once upon", max_tokens=6, logprobs=False)
        with pytest.raises(InvalidArgument) as refused:
            await client.complete("Once upon", max_tokens=6, logprobs=False, top_logprobs=1)
    assert refused.value.field == "top_logprobs"
    assert [(t.logp, t.logprob, t.top) for t in silent.tokens] == [(None, None, ())] * 6
    for completion in (free, held):
        assert all(token.logprob is not None and len(token.top) == 3 for token in completion.tokens)
    assert all((token.id, token.logprob) == token.top[0] for token in free.tokens), "greedy takes the likeliest"
    assert dict(held.tokens[0].top) == pytest.approx(dict(free.tokens[0].top)), "the grammar does not show"
    assert held.tokens[0].logprob < held.tokens[0].top[-1][1]


async def test_each_turn_of_a_conversation_has_its_own_grammar(verifier, edge) -> None:
    answer = Sampling(max_tokens=6, grammar=Grammar(GrammarKind.REGEX, "yes|no|perhaps"))

    async with edge(verifier, drafter="general") as client, client.conversation() as talk:
        said = []
        for prompt, sampling in (
            ("Is it so? ", answer),
            ("\nReally? ", answer),
            ("\nThen tell. ", Sampling(max_tokens=6)),
            ("\nIs it? ", answer),
        ):
            before = talk.transcript.tokens
            completion = await talk.complete(prompt, sampling)
            alone = await client.complete((*before, *client.encode(prompt)), sampling)
            assert completion.ids == alone.ids
            said.append(completion.text)
    assert {said[0], said[1], said[3]} <= {"yes", "no", "perhaps"}
    assert said[2] not in ("yes", "no", "perhaps")


def test_the_command_line_names_a_grammar_by_a_file(tmp_path) -> None:
    schema, lark = tmp_path / "s.json", tmp_path / "g.lark"
    schema.write_text(json.dumps(SCHEMA), encoding="utf-8")
    lark.write_text('start: "yes"', encoding="utf-8")

    def named(json_schema: Path | None = None, grammar_file: Path | None = None) -> Grammar | None:
        return GrammarSettings(json_schema=json_schema, grammar_file=grammar_file).grammar()

    assert named() is None
    assert named(json_schema=schema) == PERSON
    assert named(grammar_file=lark) == Grammar(GrammarKind.LARK, 'start: "yes"')
    with pytest.raises(ConfigError) as missing:
        named(grammar_file=tmp_path / "none")
    assert missing.value.field == "grammar_file"
    with pytest.raises(ConfigError, match="give one"):
        named(json_schema=schema, grammar_file=lark)


class Withheld(GrammarMatcher):
    """A grammar that takes as long as the test wants to say what may come."""

    gate = threading.Event()

    def _allowed(self, block: tuple[int, ...]) -> Any:
        assert self.gate.wait(120)
        return super()._allowed(block)


async def test_a_grammar_that_takes_its_time_holds_up_its_own_session_only(verifier, edge, monkeypatch) -> None:
    right = Grammars._resumed

    def slow(self: Grammars, *args: Any) -> GrammarMatcher:
        matcher = right(self, *args)
        matcher.__class__ = Withheld
        return matcher

    monkeypatch.setattr(Grammars, "_resumed", slow)

    Withheld.gate.clear()
    async with edge(verifier, drafter="general") as client:
        try:
            held_up = asyncio.create_task(client.complete(PROMPTS[0], GREEDY))
            for _ in range(3):
                assert len((await client.complete("Once upon a time", max_tokens=8)).ids) == 8
            assert not held_up.done()
        finally:
            Withheld.gate.set()
        assert_valid(await held_up)

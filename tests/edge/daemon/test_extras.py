"""Fields of vLLM and llama.cpp, each with its meaning or a refusal that says why."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from outrider.cloud.grammar.grammar_compiler import compile_grammar, make_tokenizer
from outrider.edge.daemon.schema import sources_of
from outrider.proto.errors import InvalidArgument
from outrider.proto.plumbing.access import Key, secret_sha256
from outrider.proto.testing import write_keys
from outrider.proto.types import Grammar, GrammarKind, ServiceGoal

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TEXT = '{"type": "object", "properties": {"a": {"type": "string"}}}'


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"structured_outputs": {"json": SCHEMA}}, Grammar(GrammarKind.JSON_SCHEMA, TEXT)),
        ({"structured_outputs": {"json": TEXT}}, Grammar(GrammarKind.JSON_SCHEMA, TEXT)),
        ({"structured_outputs": {"regex": "a+"}}, Grammar(GrammarKind.REGEX, "a+")),
        ({"structured_outputs": {"choice": ["yes", "no."]}}, Grammar(GrammarKind.REGEX, "yes|no\\.")),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar(GrammarKind.LARK, 'start: "a"')),
        ({"structured_outputs": {"json_object": True}}, Grammar(GrammarKind.JSON_OBJECT)),
        ({"guided_json": SCHEMA, "guided_decoding_backend": "auto"}, Grammar(GrammarKind.JSON_SCHEMA, TEXT)),
        ({"guided_regex": "a+"}, Grammar(GrammarKind.REGEX, "a+")),
        ({"guided_choice": ["yes", "no"]}, Grammar(GrammarKind.REGEX, "yes|no")),
        ({"guided_grammar": 'start: "a"'}, Grammar(GrammarKind.LARK, 'start: "a"')),
        ({"structured_outputs": None, "guided_json": None, "response_format": {"type": "text"}}, None),
    ],
)
def test_vllms_fields_for_structure_become_grammars(live, fields, grammar) -> None:
    for reply in (live.complete(**fields), live.chat(**fields)):
        assert (reply.status, reply.headers["X-Outrider-Ignored"]) == (200, None)
        assert live.client.asked[-1][1].grammar == grammar


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex", "guided_regex and guided_choice give more"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "one",
        ),
        ({"guided_grammar": 'root ::= "a"'}, "guided_grammar", "gbnf_to_lark"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"guided_regex": " "}, "guided_regex", "is empty"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar", "is empty"),
        ({"guided_json": 5}, "guided_json", "JSON schema"),
        ({"min_tokens": 17}, "min_tokens", "more than max_tokens, 16"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens", "more than max_tokens, 4"),
        ({"skip_special_tokens": False}, "skip_special_tokens", "must be true"),
        ({"prompt_logprobs": -1}, "prompt_logprobs", "greater than or equal to 0"),
        ({"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
        ({"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", "leave one out"),
        ({"max_tokens": 0}, "max_tokens", "without echo"),
        ({"service": "slow"}, "service", '"interactive", "batch" or figures'),
        ({"service": {"gap_ms": 0}}, "service", "gap_ms = 0; give milliseconds in 1..600000"),
        ({"service": {"gap": 5}}, "service", "its figures are gap_ms, first_token_ms"),
    ],
)
def test_what_would_mean_another_answer_is_refused_with_the_reason(live, fields, param, words) -> None:
    reply = live.complete(**fields)
    assert (reply.status, reply.error["param"]) == (400, param)
    assert words in reply.error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_json": SCHEMA}, "guided_json"),
        ({"guided_regex": "("}, "guided_regex"),
        ({"guided_choice": ["a"]}, "guided_choice"),
        ({"guided_grammar": "start: x"}, "guided_grammar"),
        ({"structured_outputs": {"json": SCHEMA}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_a_grammar_that_the_verifier_refuses_is_named_as_the_client_gave_it(live, fields, param) -> None:
    live.client.pieces = []
    for ask in (live.complete, live.chat):
        live.client.error = InvalidArgument("cannot be compiled", field="sampling.grammar")
        reply = ask(**fields)
        assert (reply.status, reply.error["param"]) == (400, param)
        assert reply.error["message"] == f"{param}: cannot be compiled"


@pytest.mark.parametrize(
    "fields",
    [
        {"min_tokens": 0, "cache_prompt": True, "skip_special_tokens": True, "spaces_between_special_tokens": False},
        {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ],
)
def test_what_changes_nothing_here_is_taken_without_a_word(live, fields) -> None:
    reply = live.complete(**fields)
    assert (reply.status, reply.headers["X-Outrider-Ignored"]) == (200, None)


GAP = ServiceGoal(gap_s=0.075)


def test_the_service_of_a_request_reaches_every_one_of_its_texts(live) -> None:
    live.complete(prompt=["a", "b"], n=2, service={"gap_ms": 75})
    live.chat(service="batch", stream=True)
    live.post("/v1/responses", {"model": "tiny", "input": "hi", "service": {"gap_ms": 75}})
    messages = [{"role": "user", "content": "hi"}]
    live.post("/v1/messages", {"model": "tiny", "max_tokens": 9, "messages": messages, "service": "interactive"})
    live.complete(service=None)
    asked = [options["service"] for _, _, options in live.client.asked]
    assert asked == [GAP] * 4 + [ServiceGoal(batch=True), GAP, ServiceGoal(), None]


def test_a_key_has_a_service_for_requests_that_ask_for_none(start, tmp_path) -> None:
    key = Key("alice", secret_sha256("alices"), service=ServiceGoal(batch=True))
    with start(api_keys=write_keys(tmp_path / "keys.toml", key)) as live:
        body = {"model": "tiny", "prompt": "a"}
        for more in ({}, {"service": {"gap_ms": 75}}):
            assert live.post("/v1/completions", body | more, Authorization="Bearer alices").status == 200
        assert [options["service"] for _, _, options in live.client.asked] == [ServiceGoal(batch=True), GAP]


def test_an_echoed_prompt_comes_before_each_text_whole_and_streamed(live) -> None:
    text = "".join(live.client.pieces)
    tokens = live.client.ready.tokenizer.encode("bcd", add_special_tokens=False).ids
    for prompt, written in ((["abc", "d"], ["abc", "abc", "d", "d"]), (tokens, ["bcd", "bcd"])):
        whole = live.complete(prompt=prompt, echo=True, n=2).json["choices"]
        assert [choice["text"] for choice in whole] == [each + text for each in written]
        streamed = [""] * len(written)
        for event in live.complete(prompt=prompt, echo=True, n=2, stream=True).events[:-1]:
            for choice in event["choices"]:
                streamed[choice["index"]] += choice["text"]
        assert streamed == [each + text for each in written]


def test_template_variables_of_a_request_reach_the_template(start, scripted) -> None:
    template = "{{ enable_thinking }} {{ verbosity }} {% for m in messages %}{{ m.content }}{% endfor %}{{ self }}"
    with start(scripted(chat_template=template)) as live:
        more = {"enable_thinking": False, "self": "x"}
        assert live.chat(chat_template_kwargs=more, verbosity="low").status == 200
        assert live.client.ready.tokenizer.decode(live.client.asked[-1][0]).startswith("False low hi")
        for own in ("messages", "tools", "add_generation_prompt"):
            reply = live.chat(chat_template_kwargs={own: 1})
            assert (reply.status, reply.error["param"]) == (400, "chat_template_kwargs")


def test_each_of_the_words_to_choose_from_is_matched_and_nothing_else(tokenizer_file) -> None:
    words = ["a.b", "x|y", "1+1=2?", "[ok] (no) {z} \\d ^$", "#tag & ~ok / a-b", 'say "é🦉"', "two words\nmore"]
    ((_, kind, pattern),) = sources_of("guided_", None, None, words, None)
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tries = make_tokenizer(tokenizer_file.read_text(), tokenizer.get_vocab_size(), {1})
    matcher = compile_grammar(Grammar(kind, pattern), tries)
    for word in (*words, "aXb", "x", "1+1=22"):
        match = matcher.deep_copy()
        fits = match.consume_tokens(tokenizer.encode(word, add_special_tokens=False).ids) and match.is_accepting()
        assert fits == (word in words), word


def test_a_chats_log_probabilities_have_the_entropy_where_it_is_known(live) -> None:
    for known in (None, 1.25):
        live.client.entropy = known
        reply = live.chat(logprobs=True)
        assert reply.status == 200, reply.body
        said = reply.json["choices"][0]["logprobs"]["content"]
        assert said
        assert all(entry.get("entropy") == known and ("entropy" in entry) == (known is not None) for entry in said)


# --- log probabilities of prompts in OpenAI's form, with echo, and in vLLM's ---

PROMPT = "Hello, world"


def ids(live, text: str = PROMPT) -> list[int]:
    return live.client.ready.tokenizer.encode(text).ids


def of_choice(live, **fields):
    reply = live.complete(**{"prompt": PROMPT, "echo": True, "max_tokens": 3, **fields})
    assert reply.status == 200, reply.body
    (choice,) = reply.json["choices"]
    return choice


@pytest.mark.parametrize("prompt", ["text", "tokens"])
def test_an_echoed_prompt_has_log_probabilities_before_those_of_the_text(live, prompt) -> None:
    tokens = ids(live)
    choice = of_choice(live, logprobs=2, prompt=tokens if prompt == "tokens" else PROMPT)
    said = choice["logprobs"]
    own, written = len(tokens), len(live.client.pieces)
    assert live.client.asked[-1][2]["prompt_logprobs"] == 2
    assert {len(entries) for entries in said.values()} == {own + written}
    assert said["token_logprobs"] == [None, *(-float(i) for i in range(1, own)), *[-0.5] * written]
    name = live.daemon.cloud.served.tokens.text
    assert said["tokens"][:own] == [name(token) for token in tokens]
    assert said["top_logprobs"][0] is None
    assert said["top_logprobs"][1] == {name(50): -0.1, name(51): -0.2, name(tokens[1]): -1.0}
    assert choice["text"] == PROMPT + "".join(live.client.pieces)
    offsets = said["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[own] == len(PROMPT)
    assert choice["text"][offsets[own - 1] : offsets[own]] == name(tokens[-1])


def test_a_stream_begins_with_the_prompt_and_has_the_same_in_all(live) -> None:
    whole = of_choice(live, logprobs=1)
    events = live.complete(prompt=PROMPT, echo=True, max_tokens=3, logprobs=1, stream=True).events[:-1]
    choices = [choice for event in events for choice in event["choices"]]
    assert choices[0]["text"].startswith(PROMPT)
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for name, entries in whole["logprobs"].items():
        assert [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"][name]] == entries


def test_no_token_of_text_is_shown_where_none_is_asked_for(live) -> None:
    for stream in (False, True):
        reply = live.complete(prompt=PROMPT, echo=True, max_tokens=0, logprobs=1, stream=stream)
        assert live.client.asked[-1][1].max_tokens == 1, "a verifier decodes one at least"
        choices = [c for e in reply.events[:-1] for c in e["choices"]] if stream else reply.json["choices"]
        assert "".join(choice["text"] for choice in choices) == PROMPT
        assert len(choices[0]["logprobs"]["tokens"]) == len(ids(live))
        assert choices[-1]["finish_reason"] == "length"
    plain = live.complete(prompt=PROMPT, echo=True, max_tokens=0).json
    assert (plain["choices"][0]["text"], plain["usage"]["completion_tokens"]) == (PROMPT, 0)
    assert live.client.asked[-1][2]["prompt_logprobs"] is None, "nobody asked for them"


def test_a_prompt_of_one_token_has_nothing_to_say(live) -> None:
    said = of_choice(live, prompt=[7], logprobs=1, max_tokens=0)["logprobs"]
    assert (said["token_logprobs"], said["top_logprobs"], said["text_offset"]) == ([None], [None], [0])


def test_vllms_field_names_tokens_by_id_with_their_ranks(live) -> None:
    tokens = ids(live)
    name = live.daemon.cloud.served.tokens.text
    completion = live.complete(prompt=PROMPT, prompt_logprobs=1, n=2).json
    for choice in completion["choices"]:
        first, second, *others = choice["prompt_logprobs"]
        assert first is None
        assert second == {
            "50": {"logprob": -0.1, "rank": 1, "decoded_token": name(50)},
            str(tokens[1]): {"logprob": -1.0, "rank": 3, "decoded_token": name(tokens[1])},
        }
        assert len(others) == len(tokens) - 2
        assert choice["logprobs"] is None
    chat = live.chat(prompt_logprobs=0).json
    prompt, _, options = live.client.asked[-1]
    assert options["prompt_logprobs"] == 0
    assert [entry and list(entry) for entry in chat["prompt_logprobs"]] == [None, *([str(t)] for t in prompt[1:])]
    assert "prompt_logprobs" not in live.chat().json


def test_each_field_gets_as_many_of_the_likeliest_as_it_asks_for(live) -> None:
    choice = of_choice(live, logprobs=1, prompt_logprobs=3)
    assert live.client.asked[-1][2]["prompt_logprobs"] == 3
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2, "one and the token itself"
    assert len(choice["prompt_logprobs"][1]) == 4

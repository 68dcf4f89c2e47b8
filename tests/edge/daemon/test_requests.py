"""Fields of requests, their limits, and malformed bodies, none of which is ever a 500."""

from __future__ import annotations

import itertools
import json
import socket
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from malformed_http import NEVER

from outrider.edge import prompts
from outrider.edge.daemon.body_reading import MAX_BYTES, MAX_LOGGED, IgnoreUnknown, checked
from outrider.edge.daemon.http_errors import ApiError
from outrider.edge.daemon.http_server import MAX_HEADER_BYTES
from outrider.edge.daemon.responses import MAX_METADATA, ResponsesRequest
from outrider.edge.daemon.schema import (
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TOOLS,
    MAX_WORDS,
    ChatRequest,
    CompletionRequest,
)
from outrider.edge.prompts import indexed_prediction
from outrider.proto.errors import InvalidArgument
from outrider.proto.types import MAX_GRAMMAR_BYTES, MAX_STOP_TOKENS, Grammar, GrammarKind, Sampling

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"model": "tiny", "messages": MESSAGES}
TEXT = {"model": "tiny", "prompt": "x"}


def refusal(kind, **fields) -> ApiError:
    with pytest.raises(ApiError) as caught:
        checked(kind, (CHAT if kind is ChatRequest else TEXT) | fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize("field", sorted(NEVER))
def test_a_value_out_of_range_or_of_another_type_is_refused_by_name(field) -> None:
    for kind, value in itertools.product((ChatRequest, CompletionRequest), NEVER[field]):
        if value not in ("another", "x" * 10_000):  # names that a model may have
            assert refusal(kind, **{field: value}).param.startswith(field), value


@pytest.mark.parametrize(
    ("kind", "field", "refused", "trivial"),
    [
        (ChatRequest, "functions", [{}], []),
        (ChatRequest, "function_call", {"name": "f"}, "auto"),
        (ChatRequest, "audio", {"voice": "x"}, None),
        (ChatRequest, "modalities", ["text", "audio"], ["text"]),
        (ChatRequest, "web_search_options", {}, None),
        (CompletionRequest, "suffix", "end", ""),
        (CompletionRequest, "best_of", 3, 1),
    ],
)
def test_what_is_not_done_here_is_refused_unless_it_asks_for_nothing(kind, field, refused, trivial) -> None:
    error = refusal(kind, **{field: refused})
    assert error.param == field
    assert len(error.message.split()) > 3, "it says why, or what to do"
    checked(kind, (CHAT if kind is ChatRequest else TEXT) | {field: trivial})


def test_null_means_left_out_and_book_keeping_is_ignored() -> None:
    nothing = dict.fromkeys(("temperature", "n", "stop", "seed", "logprobs", "stream_options", "response_format"))
    kept = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k"}
    request = checked(ChatRequest, CHAT | nothing | kept)
    assert (request.choices, request.temperature, request.stop) == (1, None, None)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0]"),
        ([{"role": "user", "content": None}], "messages[0]"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content"),
    ],
)
def test_a_turn_that_cannot_be_read_is_named(messages, param) -> None:
    assert refusal(ChatRequest, messages=messages).param == param


def test_text_parts_are_joined_and_roles_are_those_of_templates(live) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    turns = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    assert live.chat(messages=turns).status == 200
    prompt = live.client.asked[-1][0]
    assert live.client.ready.tokenizer.decode(prompt) == "system: be brief\nuser: one\ntwo\n"


def test_every_parameter_reaches_the_sampling(live) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": -1,
        "top_k": 40,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"5": 3.5, "6": -100},
        "stop_token_ids": [9],
        "ignore_eos": True,
        "min_tokens": 5,
        "no_repeat_ngram_size": 3,
        "max_completion_tokens": 7,
        "stop": "END",
        "n": 2,
    }
    assert live.chat(**fields).status == 200
    (_, first, options), (_, second, _) = live.client.asked[-2:]
    assert (first.temperature, first.top_p, first.top_k, first.min_p) == (0.5, 0.9, 40, 0.1)
    assert (first.repetition_penalty, first.presence_penalty, first.frequency_penalty) == (1.2, 0.5, -0.5)
    assert first.logit_bias == ((5, 3.5), (6, -100.0))
    assert (first.stop_tokens, first.ignore_eos, first.min_tokens, first.max_tokens) == ((9,), True, 5, 7)
    assert first.no_repeat_ngram_size == 3
    assert options["stop"] == ("END",)
    assert (first.seed, second.seed) == ((1 << 64) - 1, 0)


def test_defaults_are_those_of_openai(live) -> None:
    live.complete()
    _, completion, _ = live.client.asked[-1]
    live.chat()
    _, chat, _ = live.client.asked[-1]
    assert (completion.temperature, completion.top_p, completion.max_tokens) == (1.0, 1.0, 16)
    assert chat.max_tokens > 100_000  # as much as the context holds
    assert completion.seed != chat.seed


def test_response_formats_become_grammars(live) -> None:
    live.chat(response_format={"type": "json_object"})
    assert live.client.asked[-1][1].grammar.kind is GrammarKind.JSON_OBJECT
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    live.chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}})
    grammar = live.client.asked[-1][1].grammar
    assert (grammar.kind, json.loads(grammar.text)) == (GrammarKind.JSON_SCHEMA, schema)
    live.chat(response_format={"type": "text"})
    assert live.client.asked[-1][1].grammar is None


def test_prompts_may_be_texts_or_tokens_one_or_several(live) -> None:
    encode = live.client.ready.tokenizer.encode
    for prompt, expected in (
        ("some text", [tuple(encode("some text").ids)]),
        (["a", "b"], [tuple(encode("a").ids), tuple(encode("b").ids)]),
        ([5, 6], [(5, 6)]),
        ([[5], [6, 7]], [(5,), (6, 7)]),
    ):
        live.client.asked.clear()
        reply = live.complete(prompt=prompt, n=2)
        assert sorted(asked[0] for asked in live.client.asked) == sorted(expected * 2)
        assert [choice["index"] for choice in reply.json["choices"]] == list(range(2 * len(expected)))
        assert reply.json["usage"]["prompt_tokens"] == sum(map(len, expected))


# --- predictions ---


PREDICTION = {"type": "content", "content": "def main():"}


@pytest.mark.parametrize(
    ("prediction", "param"),
    [
        ("text", "prediction"),
        ({}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "text", "content": "x"}, "prediction.type"),
        ({"type": "content", "content": 3}, "prediction.content"),
        ({"type": "content", "content": None}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url"}]}, "prediction.content"),
        ({"type": "content", "content": [{"type": "refusal", "refusal": "no"}]}, "prediction.content"),
        ({"type": "content", "content": "x", "extra": 1}, "prediction.extra"),
    ],
)
def test_a_prediction_in_another_form_is_refused_by_name(prediction, param) -> None:
    assert refusal(ChatRequest, prediction=prediction).param == param


@pytest.mark.parametrize(
    ("field", "refused", "allowed"),
    [
        ("n", 2, 1),
        ("logprobs", True, False),
        ("presence_penalty", 0.5, -0.5),
        ("frequency_penalty", 0.5, 0.0),
        ("max_completion_tokens", 5, None),
    ],
)
def test_what_openai_refuses_beside_a_prediction_is_refused_by_name(field, refused, allowed) -> None:
    error = refusal(ChatRequest, prediction=PREDICTION, **{field: refused})
    assert error.param == field
    assert "does not go with prediction" in error.message
    checked(ChatRequest, CHAT | {"prediction": PREDICTION, field: allowed})
    checked(ChatRequest, CHAT | {field: refused, "prediction": None})


def test_parts_of_a_prediction_follow_each_other() -> None:
    parts = [{"type": "text", "text": "def main"}, {"type": "text", "text": "():"}]
    request = checked(ChatRequest, CHAT | {"prediction": {"type": "content", "content": parts}})
    assert request.prediction == checked(ChatRequest, CHAT | {"prediction": PREDICTION}).prediction


def test_usage_counts_the_tokens_of_a_prediction_that_the_text_has(live) -> None:
    def details(**fields):
        return live.chat(**fields).json["usage"].get("completion_tokens_details")

    for content, accepted in (("!", 1), ("! and more", 1), ("nothing of it", 0)):  # the answer's first token is `!`
        predicted = len(live.client.ready.tokenizer.encode(content, add_special_tokens=False).ids)
        counts = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": predicted - accepted}
        assert details(prediction={"type": "content", "content": content}) == counts
        assert len(live.client.asked[-1][2]["prediction"]) == predicted + 1
    assert details() is None
    assert details(prediction={"type": "content", "content": ""}) is None


# --- bodies that nobody should send ---

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
)
names = st.sampled_from(sorted({*ChatRequest.model_fields, *CompletionRequest.model_fields, "nonsense"}))


@settings(max_examples=120, deadline=None)
@given(kind=st.sampled_from([ChatRequest, CompletionRequest]), body=st.dictionaries(names, values, max_size=6))
def test_any_object_is_a_request_or_a_400_that_says_why(kind, body) -> None:
    try:
        refused, request = None, checked(kind, (CHAT if kind is ChatRequest else TEXT) | body)
    except ApiError as error:
        refused, request = error, None
    if refused is not None:
        assert (refused.status, refused.kind) == (400, "invalid_request_error")
        assert refused.message
    else:
        assert request.model == body.get("model", "tiny")


HOSTILE = [
    b"",
    b"null",
    b"[]",
    b'"x"',
    b"{",
    b"\xff\xfe{}",
    b"\x00" * 100,
    b'{"model":"tiny","prompt":"\\ud800"}',
    b'{"model":"tiny","prompt":"x","\\ud800":1}',
    b'{"model":"tiny","messages":[{"role":"user","content":"\\udfff"}]}',
    b'{"model":"tiny","prompt":"x","temperature":NaN}',
    b'{"model":"tiny","prompt":"x","temperature":1e999}',
    b'{"model":"tiny","prompt":"x","seed":' + b"9" * 100_000 + b"}",
    b'{"model":"tiny","prompt":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"metadata":' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    b'{"model":"tiny","prompt":[' + b"1," * 10 + b'"x"]}',
    b'{"model":"tiny","prompt":[]}',
    b'{"model":"tiny","prompt":[true]}',
]


def test_malformed_bodies_get_a_proper_4xx_each_and_the_daemon_goes_on(live) -> None:
    for body in HOSTILE:
        for path in ("/v1/chat/completions", "/v1/completions"):
            reply = live.post(path, body)
            assert reply.status in (400, 404), body[:200]
            assert reply.error["type"] == "invalid_request_error", body[:200]
    assert live.complete().status == 200


# --- what is at a limit is taken, and one more is refused by its name ---

MESSAGE = {"role": "user", "content": "x"}
BODIES: dict[type, dict[str, Any]] = {
    ChatRequest: {"model": "m", "messages": [MESSAGE]},
    CompletionRequest: {"model": "m", "prompt": "x"},
    ResponsesRequest: {"model": "m", "input": "x"},
}


def tool(number: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{number}", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("kind", "field", "value_of", "limit"),
    [
        (CompletionRequest, "n", int, MAX_CHOICES),
        (CompletionRequest, "prompt", lambda size: ["x"] * size, MAX_CHOICES),
        (CompletionRequest, "stop", lambda size: ["x"] * size, MAX_STOPS),
        (CompletionRequest, "stop", lambda size: "x" * size, MAX_STOP_CHARACTERS),
        (CompletionRequest, "guided_choice", lambda size: [str(word) for word in range(size)], MAX_WORDS),
        (ChatRequest, "messages", lambda size: [MESSAGE] * size, MAX_MESSAGES),
        (ChatRequest, "tools", lambda size: [tool(number) for number in range(size)], MAX_TOOLS),
        (ResponsesRequest, "metadata", lambda size: {str(key): "x" for key in range(size)}, MAX_METADATA),
    ],
)
def test_one_more_than_a_request_may_have_is_refused_by_name(kind, field, value_of, limit) -> None:
    checked(kind, BODIES[kind] | {field: value_of(limit)})
    with pytest.raises(ApiError) as caught:
        checked(kind, BODIES[kind] | {field: value_of(limit + 1)})
    assert (caught.value.status, (caught.value.param or "").partition("[")[0]) == (400, field)


def test_a_body_and_a_head_have_their_bytes_at_most(live) -> None:
    body = b'{"model":"tiny","prompt":"x","user":"' + b"x" * (MAX_BYTES - 40) + b'"}'
    assert live.post("/v1/completions", body + b" " * (MAX_BYTES - len(body))).status == 200
    assert live.post("/v1/completions", body + b" " * (MAX_BYTES + 1 - len(body))).status == 413
    for size, status in ((MAX_HEADER_BYTES // 2, 200), (8 * MAX_HEADER_BYTES, 400)):  # one that came at once is read
        with socket.create_connection(("127.0.0.1", live.port), timeout=60) as connection:
            connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * size + b"\r\n\r\n")
            assert connection.recv(12) == b"HTTP/1.1 %d" % status


def test_a_grammar_and_stop_tokens_have_their_size_at_most() -> None:
    Grammar(GrammarKind.REGEX, "x" * MAX_GRAMMAR_BYTES)
    Sampling(stop_tokens=tuple(range(MAX_STOP_TOKENS)))
    with pytest.raises(InvalidArgument, match="make it smaller") as caught:
        Grammar(GrammarKind.REGEX, "x" * (MAX_GRAMMAR_BYTES + 1))
    assert caught.value.field == "sampling.grammar"
    with pytest.raises(InvalidArgument) as caught:
        Sampling(stop_tokens=tuple(range(MAX_STOP_TOKENS + 1)))
    assert caught.value.field == "sampling.stop_tokens"


@pytest.mark.parametrize(
    ("prediction", "reason"),
    [
        ([1, 1 << 30], "not in 0"),
        ([-1], "not in 0"),
        ("def \ud800", "surrogate pair at character 4"),
        ("x" * (prompts.MAX_PREDICTED_CHARACTERS + 1), f"{prompts.MAX_PREDICTED_CHARACTERS} at most"),
        ((3,) * (prompts.MAX_PREDICTED_TOKENS + 1), f"{prompts.MAX_PREDICTED_TOKENS} at most"),
    ],
    ids=["large id", "negative id", "surrogate", "characters", "tokens"],
)
async def test_a_prediction_that_cannot_be_one_is_refused_with_the_reason(live, prediction, reason) -> None:
    tokenizer = live.client.ready.tokenizer
    with pytest.raises(InvalidArgument, match=reason) as caught:
        await indexed_prediction(tokenizer, prediction)
    assert caught.value.field == "prediction"
    if reason.endswith("at most"):  # of characters, whatever they are in tokens
        one: Any = SimpleNamespace(
            get_vocab_size=lambda: 8, encode_batch_fast=lambda *_, **__: [SimpleNamespace(ids=[3])]
        )
        assert await indexed_prediction(one, prediction[1:]) is not None


# --- unknown fields: ignored by name in a header and the log, or refused with --strict ---

HEADER = "X-Outrider-Ignored"


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_at_any_level_are_ignored_and_named_in_a_header(live, stream) -> None:
    messages = [{"role": "user", "content": "hi", "mood": 1}, {"role": "user", "content": "ho", "mood": 2}]
    reply = live.chat(messages=messages, temprature=1, stream=stream, stream_options={"include_magic": True})
    assert reply.status == 200
    assert reply.headers[HEADER].split(", ") == ["stream_options.include_magic", "messages[].mood", "temprature"]
    prompt = live.client.asked[-1][0]
    assert live.client.ready.tokenizer.decode(prompt) == "user: hi\nuser: ho\n"
    assert HEADER not in live.chat(messages=[{"role": "user", "content": "hi"}], stream=stream).headers


def test_an_unknown_field_does_not_hide_what_is_wrong_beside_it(live) -> None:
    reply = live.complete(nonsense=1, temperature=9)
    assert (reply.status, reply.error["param"]) == (400, "temperature")


def test_a_name_that_fits_no_header_is_not_repeated_there(live) -> None:
    odd = {"a\r\nSet-Cookie: x": 1, "ключ": 1, "x" * 500: 1, "": 1}
    reply = live.complete(**odd)
    assert (reply.status, reply.headers[HEADER]) == (200, "(a field with an odd name)")
    assert "Set-Cookie" not in reply.headers
    many = live.complete(**{f"field_{i}": i for i in range(1000)})
    assert many.headers[HEADER].endswith("and 992 more")


def test_each_ignored_name_is_logged_once_and_only_so_many_are(caplog) -> None:
    unknown = IgnoreUnknown()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    for _ in range(3):
        unknown.check(ChatRequest, body | {"temprature": 1})
    assert [record.message for record in caplog.records] == [
        "ignored fields of a request: temprature; --strict refuses them"
    ]
    for i in range(2 * MAX_LOGGED):
        unknown.check(ChatRequest, body | {f"field_{i}": 1})
    assert len(caplog.records) == MAX_LOGGED


def test_strict_refuses_unknown_fields_by_name(start) -> None:
    with start(strict=True) as live:
        reply = live.chat(temprature=1, messages=[{"role": "user", "content": "x", "mood": 1}])
        assert (reply.status, reply.error["code"]) == (400, "unknown_field")
        assert "temprature" in reply.error["message"]
        assert "messages[0].mood" in reply.error["message"]
        assert live.complete().status == 200

"""Fields of requests, their limits, and malformed bodies, none of which is ever a 500."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.edge.daemon.body_reading import checked
from outrider.edge.daemon.http_errors import ApiError
from outrider.edge.daemon.schema import ChatRequest, CompletionRequest
from outrider.proto.types import GrammarKind

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT = {"model": "tiny", "messages": MESSAGES}
TEXT = {"model": "tiny", "prompt": "x"}


def refusal(kind, **fields) -> ApiError:
    with pytest.raises(ApiError) as caught:
        checked(kind, (CHAT if kind is ChatRequest else TEXT) | fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("temperature", [-0.1, 2.1, "1", True, [], 10**400, 5e-324]),
        ("top_p", [0, 1.1, "x", 1e-300]),
        ("n", [0, 129, 1.5, "2"]),
        ("seed", [1 << 64, -(1 << 63) - 1, 1.0, "1"]),
        ("stop", ["", [""], ["a"] * 5, [1], 3, "x" * 5000]),
        ("max_tokens", [0, -1, 1 << 40, "9", 2.0]),
        ("presence_penalty", [-2.1, 2.1, 1e308]),
        ("frequency_penalty", [-2.1, 2.1, -1e308]),
        ("logit_bias", [{"x": 1}, {"-1": 1}, {"1": 101}, {"1": 1, "01": 1}, [], {"1": "1"}]),
        ("top_k", [-2, 1.5]),
        ("min_p", [-0.1, 1.1]),
        ("repetition_penalty", [0, 3, 1e-300]),
        ("stop_token_ids", [[-1], [1 << 40], 5, ["1"]]),
        ("stream", [1, "true"]),
        ("response_format", ["json", {"type": "xml"}, {"type": "json_schema"}, {"type": "text", "json_schema": {}}]),
        ("model", ["", None, 3]),
    ],
)
def test_a_value_out_of_range_or_of_another_type_is_refused_by_name(field, bad) -> None:
    for kind in (ChatRequest, CompletionRequest):
        for value in bad:
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


def test_unknown_fields_are_all_named() -> None:
    error = refusal(ChatRequest, temprature=1, max_token=5)
    assert (error.code, "temprature" in error.message, "max_token" in error.message) == ("unknown_field", True, True)
    assert refusal(ChatRequest, messages=[{"role": "user", "content": "x", "mood": 1}]).param == "messages[0].mood"


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


def test_a_prediction_that_is_too_long_is_a_400_by_name(live) -> None:
    reply = live.chat(prediction={"type": "content", "content": "x" * (1 << 21)})
    assert (reply.status, reply.json["error"]["param"]) == (400, "prediction")
    assert "characters" in reply.json["error"]["message"]


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


def mutations(count: int) -> list[bytes]:
    """Bodies of requests with bytes changed, cut, doubled; the same ones every time."""
    random.seed(5)
    rich = {**CHAT, "temperature": 0.5, "stop": ["a"], "logit_bias": {"5": 1}, "stream": False, "n": 2}
    whole = json.dumps(rich).encode()
    bodies = []
    for _ in range(count):
        body = bytearray(whole)
        for _ in range(random.randint(1, 4)):
            at = random.randrange(len(body))
            match random.randrange(4):
                case 0:
                    body[at] = random.randrange(256)
                case 1:
                    del body[at : at + random.randint(1, 9)]
                case 2:
                    body[at:at] = body[at : at + random.randint(1, 9)]
                case 3:
                    body[at:at] = random.choice([b"NaN", b"1e999", b"\\ud800", b"null", b"[" * 9, b"9" * 5000])
            if not body:
                break
        bodies.append(bytes(body))
    return bodies


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


def test_hundreds_of_malformed_bodies_get_a_proper_4xx_each_and_the_daemon_goes_on(live) -> None:
    statuses = set()
    for body in [*HOSTILE, *mutations(150)]:
        for path in ("/v1/chat/completions", "/v1/completions"):
            reply = live.post(path, body)
            if reply.status != 200:
                assert reply.error["type"] == "invalid_request_error", body[:200]
            statuses.add(reply.status)
    assert statuses <= {200, 400, 404}
    assert {400, 404} <= statuses
    assert live.complete().status == 200

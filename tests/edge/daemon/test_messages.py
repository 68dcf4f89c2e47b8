"""Anthropic's API: messages and their events, stop reasons, counts, errors; `make clients` runs its own client."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.proto.errors import Unavailable
from outrider.proto.types import FinishReason, GrammarKind

TEXT = "Hello, world"


@pytest.fixture
def ask(live) -> Any:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "tiny", "max_tokens": 50, "messages": messages}
    return lambda **fields: live.post("/v1/messages", {**body, **fields}, anthropic_version="2023-06-01")


def text(of_block: str) -> dict[str, str]:
    return {"type": "text", "text": of_block}


def prompt(live) -> str:
    return live.client.ready.tokenizer.decode(live.client.asked[-1][0])


def test_a_message_has_anthropics_fields(ask) -> None:
    reply = ask(system="Be brief.", metadata={"user_id": "x"})
    made = reply.json
    assert made.pop("metrics")["speculative_decoding"]
    assert made.pop("id") == f"msg_{reply.headers['request-id']}"
    usage = made.pop("usage")
    assert usage.pop("input_tokens") > 3
    assert usage == {"output_tokens": 3, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    assert made == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": TEXT}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
    }


def test_events_come_in_anthropics_order_with_the_counts_at_the_end(ask) -> None:
    start, ping, begin, *deltas, stop, delta, end = ask(stream=True).named_events
    assert (start["type"], start["message"]["content"], start["message"]["stop_reason"]) == ("message_start", [], None)
    assert start["message"]["usage"]["input_tokens"] > 0
    assert ping == {"type": "ping"}
    assert begin == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert [piece["delta"] for piece in deltas] == [
        {"type": "text_delta", "text": text} for text in ("Hello", ", ", "world")
    ]
    assert stop == {"type": "content_block_stop", "index": 0}
    assert delta["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert delta["usage"]["output_tokens"] == 3
    assert "speculative_decoding" in delta["metrics"]
    assert end == {"type": "message_stop"}


def test_the_reason_of_the_end_and_the_stop_sequence_are_named(live, ask) -> None:
    live.client.reason = FinishReason.LENGTH
    assert ask().json["stop_reason"] == "max_tokens"
    live.client.reason, live.client.stop_string = FinishReason.STOP_STRING, "END"
    for made in (ask(stop_sequences=["END"]).json, ask(stop_sequences=["END"], stream=True).named_events[-2]["delta"]):
        assert (made["stop_reason"], made["stop_sequence"]) == ("stop_sequence", "END")
    assert live.client.asked[-1][2]["stop"] == ("END",)


def test_an_empty_text_is_a_block_too(live, ask) -> None:
    live.client.pieces = []
    assert ask().json["content"] == [{"type": "text", "text": ""}]
    assert [event["type"] for event in ask(stream=True).named_events][2:4] == [
        "content_block_start",
        "content_block_stop",
    ]


def test_blocks_become_the_turns_of_a_chat(live, ask) -> None:
    ask(
        system=[text("One.") | {"cache_control": {"type": "ephemeral"}}, text("Two.")],
        messages=[
            {"role": "user", "content": [text("a"), text("b")]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "secret"}, text("c")]},
            {"role": "user", "content": "d"},
        ],
        thinking={"type": "disabled"},
    )
    rendered = prompt(live)
    assert "secret" not in rendered
    live.chat(
        messages=[
            {"role": "system", "content": "One.\nTwo."},
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
        ]
    )
    assert rendered == prompt(live)


def test_every_parameter_reaches_the_sampling(live, ask) -> None:
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    assert ask(temperature=0.5, top_p=0.9, top_k=7, seed=3, output_config=form).status == 200
    _, sampling, _ = live.client.asked[-1]
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 7, 3)
    assert (sampling.max_tokens, sampling.grammar.kind) == (50, GrammarKind.JSON_SCHEMA)


def test_tokens_are_counted_without_a_text(live, ask) -> None:
    counted = live.post("/v1/messages/count_tokens", {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]})
    assert live.client.asked == []
    assert counted.json == {"input_tokens": ask().json["usage"]["input_tokens"]}
    wrong = live.post("/v1/messages/count_tokens", {"model": "tiny", "messages": []})
    assert (wrong.status, wrong.json["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [3]}, "messages[0]: must be an object"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role: must be user or assistant"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: must be a string or a list of blocks"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "messages[0].content[0]: is of type 'image'",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text: must be a string",
        ),
        (
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            "the last one must be the user's",
        ),
        ({"system": [{"type": "image"}]}, "system[0]: is of type 'image'"),
        ({"temperature": 1.5}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "only tools here"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"messages": [{"role": "user", "content": "x" * (5 << 20)}]}, "shorten"),
    ],
)
def test_what_cannot_be_done_is_refused_in_anthropics_words(ask, fields, words) -> None:
    reply = ask(**fields)
    assert reply.status == 400
    error = reply.json
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert words in error["error"]["message"]
    assert error["request_id"] == reply.headers["request-id"] == reply.headers["X-Request-Id"]


def test_a_thread_is_refused_so_that_clients_send_all_messages(ask) -> None:
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        error = ask(thread=thread).json["error"]
        assert error["details"] == {"error_code": "thread_unsupported_request"}
        assert "send all messages" in error["message"]
    assert ask(thread=None).status == 200


def test_other_errors_have_anthropics_statuses_and_types(live, ask, start, tmp_path) -> None:
    live.client.pieces, live.client.error = [], Unavailable("away")
    for stream in (False, True):
        away = ask(stream=stream)
        assert (away.status, away.json["error"]["type"]) == (529, "overloaded_error")
        assert int(away.headers["Retry-After"]) >= 1
    assert ask(model="claude").json["error"]["type"] == "not_found_error"
    assert live.get("/v1/messages").json["error"]["type"] == "invalid_request_error"
    assert live.get("/v1/messages").status == 405
    assert live.get("/v1/messages", Origin="https://evil.example").json["error"]["type"] == "permission_error"


def test_an_error_in_midstream_is_the_last_event(live, ask) -> None:
    live.client.error = Unavailable("the cloud is gone")
    *_, last = ask(stream=True).named_events
    assert (last["type"], last["error"]["type"]) == ("error", "overloaded_error")
    assert "the cloud is gone" in last["error"]["message"]

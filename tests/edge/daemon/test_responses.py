"""The Responses API: its objects and events as OpenAI's own client reads them, and what is kept for successors."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest
from openai import NotFoundError, OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from outrider.edge.daemon.http_errors import ApiError
from outrider.edge.daemon.response_store import ResponseStore
from outrider.edge.daemon.responses import KeptItem, message
from outrider.proto.errors import Unavailable
from outrider.proto.plumbing.access import Key, new_secret, secret_sha256
from outrider.proto.types import FinishReason, GrammarKind

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
TEXT = "Hello, world"


@pytest.fixture
def ask(live) -> Any:
    return lambda **fields: live.post("/v1/responses", {"model": "tiny", "input": "hi", **fields})


@pytest.fixture
def openai(live) -> Any:
    with OpenAI(base_url=f"{live.url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def prompts(live) -> list[str]:
    """Return the prompts of all texts so far."""
    return [live.client.ready.tokenizer.decode(prompt) for prompt, _, _ in live.client.asked]


def events(reply) -> list[dict[str, Any]]:
    """Return the events of a stream, each of which is of OpenAI's shape."""
    read = reply.named_events
    for event in read:
        EVENTS.validate_python(event)
    assert [event["sequence_number"] for event in read] == list(range(len(read)))
    return read


def test_openais_client_reads_a_response_and_its_stream(live, openai) -> None:
    whole = openai.responses.create(model="tiny", input="hi", instructions="Be brief.", metadata={"a": "b"})
    assert whole.output_text == TEXT
    assert (whole.status, whole.usage.output_tokens, whole.usage.input_tokens_details.cached_tokens) == (
        "completed",
        3,
        0,
    )
    assert whole.usage.total_tokens == whole.usage.input_tokens + 3
    assert (whole.metadata, whole.instructions, whole.store) == ({"a": "b"}, "Be brief.", True)
    with openai.responses.stream(model="tiny", input="hi", instructions="Be brief.") as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert texts == ["Hello", ", ", "world"]
    assert final.output_text == TEXT
    assert final.usage == whole.usage
    assert prompts(live)[0] == prompts(live)[1]


def test_events_come_in_openais_order_and_end_with_the_whole_response(ask) -> None:
    streamed = events(ask(stream=True))
    kinds = [event["type"].removeprefix("response.") for event in streamed]
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added"),
        *("output_text.delta",) * 3,
        *("output_text.done", "content_part.done", "output_item.done", "completed"),
    ]
    assert streamed[0]["response"]["status"] == "in_progress"
    assert streamed[2]["item"]["content"] == []
    assert streamed[3]["part"]["text"] == ""
    assert streamed[7]["text"] == streamed[8]["part"]["text"] == TEXT
    whole = streamed[-1]["response"]
    assert whole["output"] == [streamed[9]["item"]]
    Response.model_validate(whole, strict=True)
    assert whole["metrics"]["speculative_decoding"]["num_spec_steps"] == 0
    plain = ask().json
    Response.model_validate(plain, strict=True)
    assert set(plain) == set(whole)


def test_a_text_that_was_cut_is_incomplete_and_an_empty_one_a_message(live, ask) -> None:
    live.client.reason = FinishReason.LENGTH
    for reply in (ask(max_output_tokens=3).json, events(ask(max_output_tokens=3, stream=True))[-1]["response"]):
        assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert reply["output"][0]["status"] == "incomplete"
    live.client.renew()
    live.client.pieces = []
    assert ask().json["output"][0]["content"][0]["text"] == ""
    assert [event["type"] for event in events(ask(stream=True))][-4:-1] == [
        f"response.{name}" for name in ("output_text.done", "content_part.done", "output_item.done")
    ]


def test_an_error_in_midstream_is_a_failed_response_that_is_not_kept(live, ask) -> None:
    live.client.error = Unavailable("the cloud is gone")
    *_, last = events(ask(stream=True))
    assert last["type"] == "response.failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "the cloud is gone"}
    assert live.get(f"/v1/responses/{last['response']['id']}").status == 404
    live.client.pieces = []
    assert ask(stream=True).status == 503


def test_a_successor_has_the_prompt_of_the_whole_conversation(live, openai) -> None:
    """Its prompt begins with that of its predecessor and the answer, which the verifier has cached."""
    first = openai.responses.create(model="tiny", input="one", instructions="Only here.")
    second = openai.responses.create(model="tiny", input="two", previous_response_id=first.id)
    with openai.responses.stream(model="tiny", input="three", previous_response_id=second.id) as stream:
        third = stream.get_final_response()
    live.chat(
        messages=[
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": TEXT},
            {"role": "user", "content": "two"},
            {"role": "assistant", "content": TEXT},
            {"role": "user", "content": "three"},
        ]
    )
    tokens = [prompt for prompt, _, _ in live.client.asked]
    assert tokens[2] == tokens[3]
    assert tokens[2][: len(tokens[1])] == tokens[1]
    assert "Only here" in prompts(live)[0]
    assert "Only here" not in prompts(live)[1], "instructions are those of one response"
    assert openai.responses.retrieve(third.id).output_text == TEXT


def test_kept_responses_are_listed_by_their_input_and_deleted(live, openai) -> None:
    items = [{"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "input_text", "text": "b"}]}]
    made = openai.responses.create(model="tiny", input=items)
    listed = [item.content[0].text for item in openai.responses.input_items.list(made.id, limit=1)]
    assert listed == ["b", "a"]
    assert [i.content[0].text for i in openai.responses.input_items.list(made.id, order="asc")] == ["a", "b"]
    for limit in ("0", "101", "0100999", "9" * 5_000, "-1", "1e1", "٣"):
        refused = live.get(f"/v1/responses/{made.id}/input_items?limit={quote(limit)}")
        assert (refused.status, refused.error["param"]) == (400, "limit")
    assert len(live.get(f"/v1/responses/{made.id}/input_items?limit=100").json["data"]) == 2
    assert live.get(f"/v1/responses/{made.id}/input_items?after=x").error["param"] == "after"
    openai.responses.delete(made.id)
    with pytest.raises(NotFoundError):
        openai.responses.retrieve(made.id)
    with pytest.raises(NotFoundError) as caught:
        openai.responses.create(model="tiny", input="x", previous_response_id=made.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")
    assert "send the whole conversation as input" in caught.value.message
    unkept = openai.responses.create(model="tiny", input="x", store=False)
    assert live.get(f"/v1/responses/{unkept.id}").status == 404
    assert 'route="/v1/responses/{response_id}",status="404"' in live.get("/metrics").body.decode()


def test_a_key_never_finds_the_responses_of_another(start, tmp_path) -> None:
    mine, other = new_secret(), new_secret()
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(Key(name, secret_sha256(s)).toml() for name, s in (("alice", mine), ("bob", other))))
    keys.chmod(0o600)
    with start(api_keys=keys) as live:
        as_mine, as_other = ({"Authorization": f"Bearer {secret}"} for secret in (mine, other))
        body = {"model": "tiny", "input": "hi"}
        made = live.post("/v1/responses", body, **as_mine).json["id"]
        assert live.get(f"/v1/responses/{made}", **as_mine).status == 200
        assert live.get(f"/v1/responses/{made}/input_items", **as_other).status == 404
        assert live.get(f"/v1/responses/{made}", **as_other).status == 404
        assert live.request("DELETE", f"/v1/responses/{made}", **as_other).status == 404
        assert live.post("/v1/responses", {**body, "previous_response_id": made}, **as_other).status == 404
        assert live.post("/v1/responses", {**body, "previous_response_id": made}, **as_mine).status == 200
        assert live.get(f"/v1/responses/{made}").status == 401


def test_a_request_id_does_not_choose_the_id_that_is_kept(live) -> None:
    given = live.post("/v1/responses", {"model": "tiny", "input": "hi"}, X_Request_Id="mine")
    assert given.headers["X-Request-Id"] == "mine"
    assert "mine" not in given.json["id"]


def test_every_parameter_reaches_the_sampling(live, ask) -> None:
    schema = {"type": "object", "properties": {}}
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}, "verbosity": "low"}
    sampled = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3}
    made = ask(max_output_tokens=9, text=form, truncation="auto", service_tier="auto", **sampled).json
    assert made["text"]["format"]["schema"] == schema
    _, sampling, _ = live.client.asked[-1]
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 7, 3)
    assert (sampling.max_tokens, sampling.grammar.kind) == (9, GrammarKind.JSON_SCHEMA)
    ask(text={"format": {"type": "json_object"}})
    assert live.client.asked[-1][1].grammar.kind is GrammarKind.JSON_OBJECT


def test_log_probabilities_come_with_the_text_where_they_are_included(ask) -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    part = ask(**asked).json["output"][0]["content"][0]
    assert [entry["logprob"] for entry in part["logprobs"]] == [-0.5] * 3
    streamed = events(ask(stream=True, **asked))
    deltas = [event["logprobs"] for event in streamed if event["type"].endswith("text.delta")]
    assert [entry for entries in deltas for entry in entries] == part["logprobs"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"input": 7}, "input", "a list of items"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [3]}, "input[0]", "object"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role", "one of user"),
        ({"input": [{"role": "user"}]}, "input[0].content", "list of parts"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "text only"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]", "previous_response_id"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0]", "web_search_call"),
        ({"input": [{"type": "function_call", "name": "f", "call_id": "c"}]}, "input[0].arguments", "string"),
        (
            {"input": [{"type": "function_call", "name": "f", "call_id": "c", "arguments": "[]"}]},
            "input[0].arguments",
            "JSON object",
        ),
        ({"background": True}, "background", "leave it out, and stream"),
        ({"conversation": "conv_1"}, "conversation", "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "only functions"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format", "schema is missing"),
        ({"previous_response_id": "resp_none"}, "previous_response_id", "not stored"),
        ({"input": "x" * (5 << 20)}, "input", "shorten"),
        ({"input": [{"role": "user", "content": ""}] * 5000}, "input", "4096"),
        ({"model": "gpt-5"}, "model", "no model"),
    ],
)
def test_what_cannot_be_done_is_refused_by_the_name_it_has_here(ask, fields, param, words) -> None:
    reply = ask(**fields)
    assert reply.error["param"] == param
    assert words in reply.error["message"]
    assert "messages:" not in reply.error["message"]


# --- the store: whole conversations, within limits of number, size and age, for one owner each ---


def said(role: str, text: str) -> KeptItem:
    return message(role, [{"type": "input_text", "text": text}])


def keep(store: ResponseStore, name: str, previous: str | None = None, owner: str = "me", now: float = 0.0) -> None:
    body: dict[str, Any] = {"id": name, "previous_response_id": previous, "output": [said("assistant", f"{name}!")]}
    store.keep(owner, body, [said("user", f"{name}?")], now)


def texts(store: ResponseStore, name: str, owner: str = "me", now: float = 0.0) -> list[str]:
    return [item["content"][0]["text"] for item in store.history(owner, name, now)]


def has(store: ResponseStore, name: str, owner: str = "me", now: float = 0.0) -> bool:
    try:
        store.find(owner, name, now)
    except ApiError:
        return False
    return True


def test_a_history_is_the_conversation_in_order_and_branches_share_its_beginning() -> None:
    store = ResponseStore()
    for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("d", "b")):
        keep(store, name, previous)
    assert texts(store, "c") == ["a?", "a!", "b?", "b!", "c?", "c!"]
    assert texts(store, "d") == ["a?", "a!", "b?", "b!", "d?", "d!"]


def test_a_conversation_without_its_beginning_is_refused_by_name() -> None:
    store = ResponseStore()
    keep(store, "a")
    keep(store, "b", "a")
    store.delete("me", "a", 0.0)
    with pytest.raises(ApiError, match="no response 'a' here"):
        store.history("me", "b", 0.0)


def test_the_least_recently_used_go_first_and_no_conversation_loses_its_beginning() -> None:
    store = ResponseStore(max_responses=4)
    for name, previous in (("a", None), ("x", None), ("b", "a"), ("c", "b"), ("y", "x")):
        keep(store, name, previous)
    assert len(store) == 4
    assert not has(store, "c"), "the end of the conversation that was used longest ago"
    assert texts(store, "y") == ["x?", "x!", "y?", "y!"]
    assert texts(store, "b") == ["a?", "a!", "b?", "b!"]
    keep(store, "z")
    assert has(store, "b")
    assert not has(store, "y")
    assert has(store, "x")


def test_the_owner_with_the_most_bytes_makes_room() -> None:
    store = ResponseStore(max_responses=5)
    keep(store, "mine")
    for at in range(20):
        keep(store, f"r{at}", owner="greedy")
    assert has(store, "mine")
    assert len(store) == 5
    assert has(store, "r19", owner="greedy")


def test_bytes_are_bounded_and_come_back() -> None:
    store = ResponseStore()
    keep(store, "a")
    one = store.num_bytes
    bounded = ResponseStore(max_bytes=3 * one)
    for at in range(10):
        keep(bounded, str(at))
        assert bounded.num_bytes <= 3 * one
    assert len(bounded) == 3
    for at in range(7, 10):
        bounded.delete("me", str(at), 0.0)
    assert (len(bounded), bounded.num_bytes) == (0, 0)
    keep(ResponseStore(max_bytes=1), "a")  # which is larger than all there may be


def test_what_was_not_used_for_long_is_forgotten_and_use_counts_for_all_before_it() -> None:
    store = ResponseStore(max_age_s=10)
    keep(store, "a")
    keep(store, "old")
    keep(store, "b", "a", now=8)
    assert texts(store, "b", now=17) == ["a?", "a!", "b?", "b!"]
    assert not has(store, "old", now=17)
    assert has(store, "a", now=26)
    assert not has(store, "a", now=28)
    assert len(store) == 0


def test_a_conversation_that_no_request_could_send_is_refused(monkeypatch) -> None:
    store = ResponseStore()
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        keep(store, name, previous)
    monkeypatch.setattr("outrider.edge.daemon.response_store.MAX_HISTORY_BYTES", store.num_bytes - 1)
    assert len(texts(store, "b")) == 4
    with pytest.raises(ApiError, match="begin another") as caught:
        store.history("me", "c", 0.0)
    assert (caught.value.status, caught.value.param) == (400, "previous_response_id")

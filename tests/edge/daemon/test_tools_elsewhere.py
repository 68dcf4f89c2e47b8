"""Functions in the Responses API and in Anthropic's: shown, called and answered as in chats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tool_templates import TEMPLATES

from outrider.proto.types import FinishReason

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
PIECES = [
    *("I ", "look", ".\n<tool_", 'call>\n{"name": "get_weather"', ', "arguments": {"city": ', '"Paris"}}\n</tool'),
    *("_call>\n<tool_call>", '{"name": "now", "arguments": {}}', "\n</tool_call>"),
]
CHAT_TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "Say.", "parameters": CITY}},
    {"type": "function", "function": {"name": "now", "parameters": NOTHING}},
]
RESPONSES_TOOLS = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]  # type: ignore[dict-item]
MESSAGES_TOOLS = [
    {"name": "get_weather", "description": "Say.", "input_schema": CITY},
    {"name": "now", "input_schema": NOTHING},
]


@pytest.fixture(scope="module")
def _hermes(start, scripted) -> Iterator[Any]:
    template = json.dumps({"chat_template": TEMPLATES["qwen"], "bos_token": "<s>", "eos_token": "</s>"})
    with start(scripted(chat_template=template)) as live:
        yield live


@pytest.fixture
def hermes(_hermes) -> Any:
    """A daemon whose target says something and calls two functions."""
    _hermes.client.renew()
    _hermes.client.pieces = PIECES
    return _hermes


def respond(live: Any, **fields: Any) -> Any:
    return live.post("/v1/responses", {"model": "tiny", "input": "Rain?", "tools": RESPONSES_TOOLS, **fields})


def say(live: Any, **fields: Any) -> Any:
    messages = [{"role": "user", "content": "Rain?"}]
    body = {"model": "tiny", "max_tokens": 50, "messages": messages, "tools": MESSAGES_TOOLS}
    return live.post("/v1/messages", {**body, **fields})


def last_prompt(live: Any) -> tuple[int, ...]:
    return live.client.asked[-1][0]


# --- responses ---


def test_calls_are_items_of_a_response_each_with_its_arguments(hermes) -> None:
    whole = Response.model_validate(respond(hermes).json, strict=True)
    said, weather, now = whole.output
    assert said.content[0].text.strip() == "I look."
    assert (weather.name, json.loads(weather.arguments)) == ("get_weather", {"city": "Paris"})
    assert (now.name, json.loads(now.arguments)) == ("now", {})
    assert weather.call_id != now.call_id
    assert [tool["name"] for tool in respond(hermes).json["tools"]] == ["get_weather", "now"]


def test_the_events_of_calls_come_in_openais_order(hermes) -> None:
    streamed = respond(hermes, stream=True).named_events
    for event in streamed:
        EVENTS.validate_python(event)
    kinds = [event["type"].removeprefix("response.") for event in streamed]
    once = [kind for at, kind in enumerate(kinds) if kind != kinds[at - 1]]
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert once == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done"),
        *call,
        *call,
        "completed",
    ]
    for at in (1, 2):
        of_item = [event for event in streamed if event.get("output_index") == at]
        deltas = "".join(event["delta"] for event in of_item if event["type"].endswith("arguments.delta"))
        assert deltas == of_item[-2]["arguments"] == of_item[-1]["item"]["arguments"]
        assert of_item[0]["item"]["arguments"] == ""
        assert of_item[0]["item"]["call_id"] == of_item[-1]["item"]["call_id"]
    assert streamed[-1]["response"]["output"] == [e["item"] for e in streamed if e["type"].endswith("item.done")]


@pytest.mark.parametrize("stream", [False, True])
def test_a_successor_shows_calls_and_outputs_as_a_chat_does(hermes, stream) -> None:
    reply = respond(hermes, stream=stream)
    first = reply.named_events[-1]["response"] if stream else reply.json
    said, *calls = first["output"]
    outputs = [{"type": "function_call_output", "call_id": call["call_id"], "output": "wet"} for call in calls]
    respond(hermes, previous_response_id=first["id"], input=outputs)
    kept = last_prompt(hermes)
    question = {"role": "user", "content": "Rain?"}
    respond(hermes, input=[question, *first["output"], *outputs])
    assert last_prompt(hermes) == kept
    hermes.chat(
        tools=CHAT_TOOLS,
        messages=[
            question,
            {
                "role": "assistant",
                "content": said["content"][0]["text"],
                "tool_calls": [
                    {"id": c["call_id"], "type": "function", "function": {k: c[k] for k in ("name", "arguments")}}
                    for c in calls
                ],
            },
            *({"role": "tool", "tool_call_id": each["call_id"], "content": "wet"} for each in outputs),
        ],
    )
    assert last_prompt(hermes) == kept


def test_a_call_that_was_cut_is_incomplete(hermes) -> None:
    hermes.client.pieces, hermes.client.reason = PIECES[:5], FinishReason.LENGTH
    for whole in (respond(hermes).json, respond(hermes, stream=True).named_events[-1]["response"]):
        assert whole["status"] == "incomplete"
        assert whole["output"][-1]["status"] == "incomplete"


def test_a_choice_among_functions_binds_a_response(hermes) -> None:
    chosen = {"type": "function", "name": "now"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [chosen]}
    for choice in ("required", chosen, allowed):
        assert respond(hermes, tool_choice=choice).json["tool_choice"] == choice
        assert hermes.client.asked[-1][1].grammar is not None, choice
    assert len(respond(hermes, tool_choice="auto").json["output"]) == 3
    assert hermes.client.asked[-1][1].grammar is None
    assert [item["type"] for item in respond(hermes, tool_choice="none").json["output"]] == ["message"]
    for wrong in ({"type": "file_search"}, "any", 3):
        assert respond(hermes, tool_choice=wrong).error["param"] == "tool_choice"


# --- messages ---


def test_calls_are_blocks_of_a_message_each_with_its_input(hermes) -> None:
    made = say(hermes).json
    said, weather, now = made["content"]
    assert said["text"].strip() == "I look."
    assert (weather["type"], weather["name"], weather["input"]) == ("tool_use", "get_weather", {"city": "Paris"})
    assert (now["name"], now["input"]) == ("now", {})
    assert weather["id"] != now["id"]
    assert made["stop_reason"] == "tool_use"


def test_the_events_of_calls_come_in_anthropics_order(hermes) -> None:
    streamed = say(hermes, stream=True).named_events
    starts = [event for event in streamed if event["type"] == "content_block_start"]
    assert [start["index"] for start in starts] == [0, 1, 2]
    assert (starts[1]["content_block"]["name"], starts[1]["content_block"]["input"]) == ("get_weather", {})
    of_call = [event for event in streamed if event.get("index") == 1]
    assert of_call[-1]["type"] == "content_block_stop"
    assert {event["delta"]["type"] for event in of_call[1:-1]} == {"input_json_delta"}
    assert json.loads("".join(event["delta"]["partial_json"] for event in of_call[1:-1])) == {"city": "Paris"}
    assert [event["type"] for event in streamed[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    assert streamed[-2]["delta"]["stop_reason"] == "tool_use"


def test_uses_and_results_of_tools_are_shown_as_in_a_chat(hermes) -> None:
    turns = [
        {"role": "user", "content": "Rain?"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Paris"}},
                {"type": "tool_use", "id": "b", "name": "now", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "wet"}]},
                {"type": "tool_result", "tool_use_id": "b", "content": "no clock", "is_error": True},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    assert say(hermes, messages=turns).status == 200
    shown = last_prompt(hermes)
    calls = [
        {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}},
        {"id": "b", "type": "function", "function": {"name": "now", "arguments": "{}"}},
    ]
    hermes.chat(
        tools=CHAT_TOOLS,
        messages=[
            turns[0],
            {"role": "assistant", "content": "I look.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "a", "content": "wet"},
            {"role": "tool", "tool_call_id": "b", "content": "Error: no clock"},
            {"role": "user", "content": "So?"},
        ],
    )
    assert last_prompt(hermes) == shown


def test_a_choice_among_tools_binds_a_message(hermes) -> None:
    for choice in (
        {"type": "any"},
        {"type": "tool", "name": "now"},
        {"type": "any", "disable_parallel_tool_use": True},
    ):
        assert say(hermes, tool_choice=choice).status == 200
        assert hermes.client.asked[-1][1].grammar is not None, choice
    assert len(say(hermes, tool_choice={"type": "auto"}).json["content"]) == 3
    assert hermes.client.asked[-1][1].grammar is None
    assert [block["type"] for block in say(hermes, tool_choice={"type": "none"}).json["content"]] == ["text"]
    assert "no_such" in say(hermes, tool_choice={"type": "tool", "name": "no_such"}).json["error"]["message"]


def test_a_target_without_tools_says_so_in_each_api(live) -> None:
    for reply in (respond(live), say(live)):
        assert reply.status == 400
        assert "shows no tools to the model" in reply.json["error"]["message"]


def test_what_follows_a_call_in_one_commit_is_no_part_of_its_arguments(hermes) -> None:
    hermes.client.pieces = ['<tool_call>\n{"name": "now", "arguments": {', "}}\n</tool_call> So."]
    for more in ({}, {"include": ["message.output_text.logprobs"]}):
        *_, call, said = respond(hermes, stream=True, **more).named_events[-1]["response"]["output"]
        assert (call["arguments"], said["content"][0]["text"]) == ("{}", " So.")
    deltas = [e for e in say(hermes, stream=True).named_events if e["type"] == "content_block_delta"]
    assert [delta["index"] for delta in deltas] == [0, 0, 1]

"""openai-python, Responses: OpenAI's own client, at /v1/responses."""

# /// script
# dependencies = ["openai==3.54.0"]
# ///

from __future__ import annotations

import json
from typing import Any

from cases import API_KEY, BASE_URL, MODEL, case, each_tool_url, run
from openai import NotFoundError, OpenAI

client = OpenAI(base_url=BASE_URL, api_key=API_KEY, max_retries=0)
QUESTION = "What is 2 + 3?"


def respond(**options: Any) -> Any:
    return client.responses.create(**{"model": MODEL, "input": QUESTION, "max_output_tokens": 16, **options})


@case("response")
def _response() -> None:
    response = respond(instructions="Be brief.", metadata={"a": "b"})
    assert response.output_text
    assert response.status in ("completed", "incomplete")
    assert response.usage.output_tokens >= 1


@case("stream")
def _stream() -> None:
    whole = respond(temperature=0.0, max_output_tokens=None)  # the client reads none that was cut as final
    asked: dict[str, Any] = {"model": MODEL, "input": QUESTION, "temperature": 0.0}
    with client.responses.stream(**asked) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert text == final.output_text == whole.output_text


@case("previous_response_id")
def _previous_response_id() -> None:
    first = respond(input="Say something about a house with many windows, and what one sees from each of them.")
    second = respond(input="And now?", previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens
    assert second.usage.input_tokens_details.cached_tokens > 0
    assert client.responses.retrieve(second.id).output_text == second.output_text
    assert [item.role for item in client.responses.input_items.list(second.id)] == ["user"]  # type: ignore[union-attr]
    client.responses.delete(first.id)
    try:
        respond(previous_response_id=second.id)
    except NotFoundError:
        return
    raise AssertionError("what was deleted is still known")


@case("json_schema")
def _json_schema() -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    assert set(json.loads(respond(text=form, max_output_tokens=200).output_text)) == {"ok"}


@case("logprobs")
def _logprobs() -> None:
    part = respond(include=["message.output_text.logprobs"], top_logprobs=2).output[0].content[0]
    assert len(part.logprobs[0].top_logprobs) == 2


@case("tools")
@each_tool_url
def _tools(url: str) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    weather = {"type": "function", "name": "get_weather", "description": "Say.", "parameters": city}
    at = OpenAI(base_url=url, api_key=API_KEY, max_retries=0)
    asked: dict[str, Any] = {"model": MODEL, "tools": [weather]}
    with at.responses.stream(input="Is it warm in Paris?", **asked) as stream:
        called = stream.until_done().get_final_response()
    (call,) = called.output
    assert (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Paris"})
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "warm"}
    answer = at.responses.create(input=[output], previous_response_id=called.id, **asked)
    assert "warm" in answer.output_text


if __name__ == "__main__":
    run("openai")

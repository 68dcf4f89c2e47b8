"""openai-python, tools: functions called by OpenAI's own client."""

# /// script
# dependencies = ["openai==3.54.0"]
# ///

from __future__ import annotations

import json
from typing import Any

import openai
from cases import API_KEY, MODEL, case, each_tool_url, run
from pydantic import BaseModel

QUESTION: list[Any] = [{"role": "user", "content": "Is it warm in Paris?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": CITY}}


class get_weather(BaseModel):  # noqa: N801 - the function's name
    """Say what the weather is like."""

    city: str


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=API_KEY, max_retries=0)


@case("tools")
@each_tool_url
def _tools(url: str) -> None:
    chats = client(url).chat.completions
    first = chats.create(model=MODEL, messages=QUESTION, tools=[TOOL]).choices[0]
    (call,) = first.message.tool_calls
    assert (first.finish_reason, json.loads(call.function.arguments)) == ("tool_calls", {"city": "Paris"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "warm"}
    answer = chats.create(model=MODEL, messages=[*QUESTION, first.message, result], tools=[TOOL])
    assert answer.choices[0].message.content == "It is said: warm"


@case("streamed tools")
@each_tool_url
def _streamed(url: str) -> None:
    with client(url).chat.completions.stream(model=MODEL, messages=QUESTION, tools=[TOOL], n=2) as stream:
        kinds = {event.type for event in stream}
        choices = stream.get_final_completion().choices
    assert "tool_calls.function.arguments.delta" in kinds
    assert [choice.message.tool_calls[0].function.name for choice in choices] == ["get_weather"] * 2


@case("parsed tools")
@each_tool_url
def _parsed(url: str) -> None:
    tool = openai.pydantic_function_tool(get_weather)  # strict
    answer = client(url).chat.completions.parse(model=MODEL, messages=QUESTION, tools=[tool])
    assert answer.choices[0].message.tool_calls[0].function.parsed_arguments == get_weather(city="Paris")


@case("several calls")
@each_tool_url
def _several(url: str) -> None:
    both = [{"role": "user", "content": "Is it warm in both?"}]
    message = client(url).chat.completions.create(model=MODEL, messages=both, tools=[TOOL]).choices[0].message
    assert len({call.id for call in message.tool_calls}) == 2


if __name__ == "__main__":
    run("openai")

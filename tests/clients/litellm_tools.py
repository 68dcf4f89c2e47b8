"""litellm, tools: functions called through litellm."""

# /// script
# dependencies = ["litellm==1.106.2", "mcp==2.3.0"]
# ///

from __future__ import annotations

import json
from typing import Any

import litellm
from cases import API_KEY, MODEL, case, each_tool_url, run

QUESTION: list[Any] = [{"role": "user", "content": "Is it warm in Paris?"}]
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": CITY}}


def chat(url: str, messages: list[Any], **options: Any) -> Any:
    model = f"openai/{MODEL}"
    return litellm.completion(model=model, api_base=url, api_key=API_KEY, messages=messages, tools=[TOOL], **options)


@case("tools")
@each_tool_url
def _tools(url: str) -> None:
    message = chat(url, QUESTION).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "warm"}
    assert chat(url, [*QUESTION, message, result]).choices[0].message.content == "It is said: warm"


@case("streamed tools")
@each_tool_url
def _streamed(url: str) -> None:
    whole = litellm.stream_chunk_builder(list(chat(url, QUESTION, stream=True)))
    (call,) = whole.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})


if __name__ == "__main__":
    run("litellm")

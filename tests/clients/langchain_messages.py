"""langchain-anthropic: ChatAnthropic at /v1/messages."""

# /// script
# dependencies = ["langchain-anthropic==1.7.7"]
# ///

from __future__ import annotations

from typing import Any

from cases import API_KEY, BASE_URL, MODEL, case, each_tool_url, run
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool

TURNS = [SystemMessage("Add numbers."), HumanMessage("2 + 3?"), AIMessage("5"), HumanMessage("4 + 4?")]


def chat(**options: Any) -> ChatAnthropic:
    where = {"base_url": BASE_URL.removesuffix("/v1"), "api_key": API_KEY, "max_retries": 0}
    return ChatAnthropic(**{"model": MODEL, "max_tokens": 12, **where, **options})  # type: ignore[arg-type]


@case("invoke")
def _invoke() -> None:
    answer = chat().invoke(TURNS)
    assert answer.text
    assert answer.usage_metadata["output_tokens"] >= 1  # type: ignore[index]


@case("stream")
def _stream() -> None:
    whole = chat(temperature=0).invoke(TURNS)
    assert "".join(piece.text for piece in chat(temperature=0).stream(TURNS)) == whole.text


@tool
def get_weather(city: str) -> str:
    """Say what the weather is like in a city."""
    return f"warm in {city}"


@case("bind_tools")
@each_tool_url
def _bind_tools(url: str) -> None:
    bound = chat(base_url=url.removesuffix("/v1"), max_tokens=200).bind_tools([get_weather])
    turns: list[Any] = [HumanMessage("Is it warm in Paris?")]
    pieces = list(bound.stream(turns))
    called = pieces[0]
    for piece in pieces[1:]:
        called += piece
    assert [call["args"] for call in called.tool_calls] == [{"city": "Paris"}]
    turns += [called, *(get_weather.invoke(call) for call in called.tool_calls)]
    assert "warm in Paris" in bound.invoke(turns).text


if __name__ == "__main__":
    run("langchain-anthropic")

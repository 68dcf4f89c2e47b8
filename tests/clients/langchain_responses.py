"""langchain-openai, Responses: ChatOpenAI with use_responses_api."""

# /// script
# dependencies = ["langchain-openai==1.7.3"]
# ///

from __future__ import annotations

from typing import Any

from cases import API_KEY, BASE_URL, MODEL, case, each_tool_url, run
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

TURNS = [SystemMessage("Add numbers."), HumanMessage("2 + 3?"), AIMessage("5"), HumanMessage("4 + 4?")]


def chat(**options: Any) -> ChatOpenAI:
    where = {"base_url": BASE_URL, "api_key": API_KEY, "max_retries": 0}
    return ChatOpenAI(**{"model": MODEL, "max_tokens": 16, "use_responses_api": True, **where, **options})  # type: ignore[arg-type]


@case("invoke")
def _invoke() -> None:
    answer = chat().invoke(TURNS)
    assert answer.text
    assert answer.usage_metadata["output_tokens"] >= 1  # type: ignore[index]


@case("stream")
def _stream() -> None:
    whole = chat(temperature=0).invoke(TURNS)
    assert "".join(piece.text for piece in chat(temperature=0).stream(TURNS)) == whole.text


@case("previous_response_id")
def _previous_response_id() -> None:
    first = chat().invoke("2 + 3?")
    second = chat(use_previous_response_id=True).invoke([HumanMessage("2 + 3?"), first, HumanMessage("And 4?")])
    assert second.text


@tool
def get_weather(city: str) -> str:
    """Say what the weather is like in a city."""
    return f"warm in {city}"


@case("bind_tools")
@each_tool_url
def _bind_tools(url: str) -> None:
    bound = chat(base_url=url, max_tokens=200).bind_tools([get_weather])
    turns: list[Any] = [HumanMessage("Is it warm in Paris?")]
    pieces = list(bound.stream(turns))
    called = pieces[0]
    for piece in pieces[1:]:
        called += piece
    assert [call["args"] for call in called.tool_calls] == [{"city": "Paris"}]
    turns += [called, *(get_weather.invoke(call) for call in called.tool_calls)]
    assert "warm in Paris" in bound.invoke(turns).text


if __name__ == "__main__":
    run("langchain-openai")

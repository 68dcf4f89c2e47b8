"""Cases that LangChain's chat models share, whatever API they speak."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cases import BASE_URL, case, each_tool_url
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool

TURNS = [SystemMessage("Add numbers."), HumanMessage("2 + 3?"), AIMessage("5"), HumanMessage("4 + 4?")]


@tool
def get_weather(city: str) -> str:
    """Say what the weather is like in a city."""
    return f"warm in {city}"


def declare(chat: Callable[..., BaseChatModel]) -> None:
    """Declare the cases of what `chat` makes of a base URL, which ends in `/v1`, and of a model's options."""

    @case("invoke")
    def _invoke() -> None:
        answer = chat(BASE_URL).invoke(TURNS)
        assert answer.text
        assert answer.usage_metadata["output_tokens"] >= 1  # type: ignore[index]

    @case("stream")
    def _stream() -> None:
        model = chat(BASE_URL, temperature=0)
        assert "".join(piece.text for piece in model.stream(TURNS)) == model.invoke(TURNS).text

    @case("bind_tools")
    @each_tool_url
    def _bind_tools(url: str) -> None:
        bound = chat(url, max_tokens=200).bind_tools([get_weather])
        turns: list[Any] = [HumanMessage("Is it warm in Paris?")]
        pieces = list(bound.stream(turns))
        called = pieces[0]
        for piece in pieces[1:]:
            called += piece
        assert [call["args"] for call in called.tool_calls] == [{"city": "Paris"}]
        turns += [called, *(get_weather.invoke(call) for call in called.tool_calls)]
        assert "warm in Paris" in bound.invoke(turns).text

"""langchain-openai, tools: `bind_tools`, structured output and an agent of LangGraph."""

# /// script
# dependencies = ["langchain-openai==1.7.3", "langchain==1.4.7", "langgraph==1.2.22"]
# ///

from __future__ import annotations

from typing import Any

from cases import API_KEY, MODEL, case, each_tool_url, run
from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

QUESTION = "Is it warm in Paris?"


@tool
def get_weather(city: str) -> str:
    """Say what the weather is like in a city."""
    return f"warm in {city}"


class Place(BaseModel):
    """A place."""

    city: str


def model(url: str, **options: Any) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=url, api_key=API_KEY, max_retries=0, **options)


@case("bind_tools")
@each_tool_url
def _bound(url: str) -> None:
    message = model(url).bind_tools([get_weather]).invoke(QUESTION)
    (call,) = message.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    assert not message.invalid_tool_calls


@case("streamed bind_tools")
@each_tool_url
def _streamed(url: str) -> None:
    chunks = list(model(url).bind_tools([get_weather]).stream(QUESTION))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    (call,) = whole.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})


@case("function_calling")
@each_tool_url
def _structured(url: str) -> None:
    structured = model(url).with_structured_output(Place, method="function_calling")
    assert structured.invoke(QUESTION) == Place(city="Paris")


@case("agent")
@each_tool_url
def _agent(url: str) -> None:
    agent = create_agent(model(url), [get_weather])
    *_, called, result, last = agent.invoke({"messages": [("user", QUESTION)]})["messages"]
    assert called.tool_calls
    assert result.content == "warm in Paris"
    assert last.content == "It is said: warm in Paris"


if __name__ == "__main__":
    run("langchain-openai")

"""langchain-openai, Responses: ChatOpenAI with use_responses_api."""

# /// script
# dependencies = ["langchain-openai==1.7.3"]
# ///

from __future__ import annotations

from typing import Any

from cases import API_KEY, BASE_URL, MODEL, case, run
from langchain_cases import declare
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI


def chat(url: str, **options: Any) -> ChatOpenAI:
    where = {"base_url": url, "api_key": API_KEY, "max_retries": 0}
    return ChatOpenAI(**{"model": MODEL, "max_tokens": 16, "use_responses_api": True, **where, **options})  # type: ignore[arg-type]


declare(chat)


@case("previous_response_id")
def _previous_response_id() -> None:
    first = chat(BASE_URL).invoke("2 + 3?")
    going_on = chat(BASE_URL, use_previous_response_id=True)
    assert going_on.invoke([HumanMessage("2 + 3?"), first, HumanMessage("And 4?")]).text


if __name__ == "__main__":
    run("langchain-openai")

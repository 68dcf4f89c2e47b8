"""langchain-anthropic: ChatAnthropic at /v1/messages."""

# /// script
# dependencies = ["langchain-anthropic==1.7.7"]
# ///

from __future__ import annotations

from typing import Any

from cases import API_KEY, MODEL, run
from langchain_anthropic import ChatAnthropic
from langchain_cases import declare


def chat(url: str, **options: Any) -> ChatAnthropic:
    where = {"base_url": url.removesuffix("/v1"), "api_key": API_KEY, "max_retries": 0}
    return ChatAnthropic(**{"model": MODEL, "max_tokens": 12, **where, **options})  # type: ignore[arg-type]


declare(chat)

if __name__ == "__main__":
    run("langchain-anthropic")

"""litellm: one interface to many servers."""

# /// script
# dependencies = ["litellm==1.106.2"]
# ///

from __future__ import annotations

import asyncio
from typing import Any

import litellm
from cases import API_KEY, BASE_URL, MODEL, QUESTION, case, run

ASKED: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": API_KEY, "max_tokens": 8}


@case("chat")
def _chat() -> None:
    assert litellm.completion(messages=QUESTION, **ASKED).usage.completion_tokens >= 1


@case("stream")
def _stream() -> None:
    assert list(litellm.completion(messages=QUESTION, stream=True, **ASKED))


@case("async")
def _async() -> None:
    assert asyncio.run(litellm.acompletion(messages=QUESTION, **ASKED)).usage.completion_tokens >= 1


@case("text completion")
def _text_completion() -> None:
    assert litellm.text_completion(prompt="x", **ASKED | {"model": f"text-completion-openai/{MODEL}"}).choices


if __name__ == "__main__":
    run("litellm")

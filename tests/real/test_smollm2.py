"""The model that a user meets first, by the commands and the API: sensible, exact, and able to call functions."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from measure_tools import WEATHER
from serving_daemon import serving

from outrider.deploy.cli import main

pytestmark = [pytest.mark.real, pytest.mark.timeout(900), pytest.mark.usefixtures("smollm2")]

NAME = "smollm2"
CAPITAL = "What is the capital of France?"
QUESTIONS = (CAPITAL, "Name three colours.", "Write a sentence about the sea.")
PROMPT = f"<|im_start|>user\n{CAPITAL}<|im_end|>\n<|im_start|>assistant\n"
TOKENS = 48


def run(*arguments: str, capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(["run", PROMPT, "--target", NAME, "--json", "--max-tokens", "64", *arguments]) == 0
    return json.loads(capfd.readouterr().out)


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def test_its_first_answer_is_sensible_ends_and_is_the_same_with_drafts(capfd) -> None:
    plain = run("--drafter", "none", capfd=capfd)
    assert "Paris" in plain["text"]
    assert plain["finish_reason"] == "eos"
    assert "<|im_end|>" not in plain["text"]
    drafted = run("--drafter", "ngram", capfd=capfd)
    assert drafted["tokens"] == plain["tokens"]


def test_the_api_answers_as_generate_of_transformers_does(library) -> None:
    model, tokenizer = library

    def by_library(question: str) -> str:
        encoded = tokenizer.apply_chat_template(
            chat(question), add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        generated = model.generate(**encoded, do_sample=False, max_new_tokens=TOKENS)
        return tokenizer.decode(generated[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True)

    async def by_api() -> list[str]:
        async with serving(NAME, threads=1, dtype="float32") as openai:
            create = openai.chat.completions.create
            replies = [
                await create(model=NAME, messages=chat(question), max_tokens=TOKENS, temperature=0)
                for question in QUESTIONS
            ]
            return [reply.choices[0].message.content for reply in replies]

    assert asyncio.run(by_api()) == [by_library(question) for question in QUESTIONS]


def test_it_calls_a_function_through_the_api() -> None:
    async def called() -> Any:
        async with serving(NAME, threads=1) as openai:
            return await openai.chat.completions.create(
                model=NAME,
                messages=chat("What is the weather in Paris?"),
                tools=[WEATHER],
                tool_choice="required",
                parallel_tool_calls=False,
                max_tokens=80,
                temperature=0,
            )

    (choice,) = asyncio.run(called()).choices
    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", {"city": "Paris"})

"""Targets that speak each format, from their tokens to OpenAI's client and back: question, call, result, answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from loop_thread import LoopThread
from openai import OpenAI
from speaking_target import ARGUMENTS, MODEL, SpeakingTarget
from tool_templates import TEMPLATES

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def client(request, tokenizer_file, tmp_path_factory) -> Iterator[OpenAI]:
    target = SpeakingTarget(request.param, tokenizer_file, tmp_path_factory.mktemp("target"))
    loop = LoopThread()
    url = loop.run(target.start())
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as made:
        yield made
    loop.run(target.stop())
    loop.close()


def asked(client: OpenAI, messages: list[Any], streamed: bool, **options: Any) -> Any:
    request: Any = {"model": MODEL, "messages": messages, "tools": [TOOL], **options}
    if not streamed:
        return client.chat.completions.create(**request).choices[0]
    with client.chat.completions.stream(**request) as stream:
        return stream.until_done().get_final_completion().choices[0]


@pytest.mark.parametrize("streamed", [True, False])
def test_a_question_becomes_a_call_and_its_result_an_answer(client, streamed) -> None:
    messages: list[Any] = [{"role": "user", "content": "Is it warm in Paris?"}]
    choice = asked(client, messages, streamed, logprobs=True)
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)
    assert len(choice.logprobs.content) > 5, "each token of a call has its log probability"
    messages += [choice.message.model_dump(exclude_none=True)]
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "warm"}]
    answer = asked(client, messages, streamed)
    assert (answer.finish_reason, answer.message.tool_calls) == ("stop", None)
    assert answer.message.content == "It is said: warm"


@pytest.mark.parametrize("streamed", [True, False])
def test_two_calls_are_two_with_ids_of_their_own(client, streamed) -> None:
    choice = asked(client, [{"role": "user", "content": "Is it warm in both?"}], streamed)
    calls = choice.message.tool_calls
    assert [call.function.arguments for call in calls] == [ARGUMENTS] * 2
    assert len({call.id for call in calls}) == 2


def test_a_stop_string_and_a_limit_cut_a_call_where_they_cut_any_text(client) -> None:
    messages = [{"role": "user", "content": "Is it warm?"}]
    stopped = asked(client, messages, False, stop='"Par')
    assert stopped.message.tool_calls[0].function.arguments == '{"city": '
    assert stopped.finish_reason == "tool_calls"
    cut = asked(client, messages, False, max_tokens=24)
    assert cut.finish_reason == "length"
    if cut.message.tool_calls:
        assert not is_json(cut.message.tool_calls[0].function.arguments)


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True

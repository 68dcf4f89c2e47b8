"""The chat template of the fetched model: its own text without tools, and Hermes' form with them."""

from __future__ import annotations

import json

import pytest

from outrider.cloud.models.fetched_model import FETCHED
from outrider.edge.chat.template import ChatTemplate, TemplateSource
from outrider.edge.tool_calls.formats import format_of, knows_tools

OURS = FETCHED["smollm2"].chat_template
# As the GGUF has it.
MODELS_OWN = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    "' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n"
    "' + message['content'] + '<|im_end|>' + '\n"
    "'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n"
    "' }}{% endif %}"
)
DEFAULT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
USER = {"role": "user", "content": "Is it warm\n\n in Paris? "}
SYSTEM = {"role": "system", "content": "  Be brief.\n"}
SAID = {"role": "assistant", "content": "Yes: 'äö' <b> {{ 1 }}"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALL]}
ANSWER = {"role": "tool", "tool_call_id": "call_1", "content": "21"}


def render(template: str, *messages: dict, **variables: object) -> str:
    return ChatTemplate(TemplateSource(template)).render(messages, variables)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [USER],
        [SYSTEM, USER],
        [USER, SAID, USER],
        [SYSTEM, USER, SAID, USER],
        [USER, SYSTEM, USER],
        [SYSTEM],
        [{"role": "system", "content": ""}, {"role": "user", "content": ""}],
        [SAID],
        [USER, {**SAID, "tool_calls": []}, USER],
    ],
)
def test_without_tools_it_renders_what_the_models_own_template_does(messages) -> None:
    assert render(OURS, *messages) == render(MODELS_OWN, *messages)


def test_it_is_found_to_speak_hermes() -> None:
    assert knows_tools(OURS)
    assert format_of(OURS).name == "hermes"


@pytest.mark.parametrize(("messages", "system"), [([USER], DEFAULT), ([SYSTEM, USER], SYSTEM["content"])])
def test_functions_are_shown_after_the_system_prompt(messages, system) -> None:
    prompt = render(OURS, *messages, tools=[WEATHER])
    assert prompt.startswith(f"<|im_start|>system\n{system}\n\n")
    assert prompt.count("<|im_start|>system") == 1
    assert f"<tools>\n{json.dumps(WEATHER)}\n</tools>" in prompt
    assert prompt.endswith(f"<|im_end|>\n<|im_start|>user\n{USER['content']}<|im_end|>\n<|im_start|>assistant\n")


def test_calls_and_their_answers_are_turns_in_hermes_form() -> None:
    turns = render(OURS, USER, CALLING, ANSWER, tools=[WEATHER]).partition(USER["content"])[2]
    called = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
    assert turns == (
        f"<|im_end|>\n<|im_start|>assistant\n{called}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n21\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )

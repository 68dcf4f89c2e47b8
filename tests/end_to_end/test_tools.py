"""Calls of functions from OpenAI's client to a real verifier and back: what is insisted on is what comes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from command_processes import free_port
from openai import AsyncOpenAI, BadRequestError
from serving_daemon import client_of
from tool_templates import QWEN

from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.verifier_config import VerifierConfig
from outrider.edge import EdgeConfig

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True}}
CLOCK = {"type": "function", "function": {"name": "now"}}
ODD = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
ASKED: Any = {
    "model": "reference",
    "messages": [{"role": "user", "content": "Is it warm in Paris?"}],
    "tools": [WEATHER, CLOCK],
    "parallel_tool_calls": False,
    "max_tokens": 100,
    "temperature": 1.0,
    "seed": 4,
}


@asynccontextmanager
async def serving(tokenizer: Path, folder: Path) -> AsyncIterator[AsyncOpenAI]:
    template = folder / "template.jinja"
    template.write_text(QWEN)
    verifier = VerifierServer(VerifierConfig(threads=1, listen=f"127.0.0.1:{free_port()}"))
    edge = EdgeConfig(
        verifier=await verifier.start(), model="reference", tokenizer=tokenizer, chat_template=template, drafter="ngram"
    )
    async with client_of(verifier, edge) as openai:
        yield openai


async def test_what_a_client_insists_on_is_what_a_target_calls(tokenizer_file, tmp_path) -> None:
    async with serving(tokenizer_file, tmp_path) as openai:
        create = openai.chat.completions.create
        whole = await create(**ASKED, tool_choice="required")
        (choice,) = whole.choices
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        if call.function.name == "get_weather":
            jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
        async with openai.chat.completions.stream(**ASKED, tool_choice="required") as stream:
            streamed = (await stream.get_final_completion()).choices[0].message.tool_calls
        assert [each.function.arguments for each in streamed] == [call.function.arguments]

        named = {"type": "function", "function": {"name": "get_weather"}}
        (call,) = (await create(**ASKED, tool_choice=named)).choices[0].message.tool_calls
        assert call.function.name == "get_weather"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)

        free = (await create(**{**ASKED, "max_tokens": 8})).choices[0]
        assert free.message.tool_calls is None, "the target was not trained to call"

        odd = {"type": "function", "function": {"name": "f", "parameters": ODD, "strict": True}}
        for streams in (False, True):
            with pytest.raises(BadRequestError, match="uniqueItems") as refused:
                await create(**{**ASKED, "tools": [odd]}, tool_choice="required", stream=streams)
            assert refused.value.param == "tools"

"""OpenAI's own Python client against the daemon and a real verifier: the target's text, streamed and not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from command_processes import free_port
from fleets import fleet, run_by
from openai import APIError, AsyncOpenAI, BadRequestError
from scripted_drafters import FailingDrafter
from serving_daemon import client_of
from tool_templates import QWEN

from outrider.cloud.models.family_index import chat_template_json, target_folder
from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.verifier_config import VerifierConfig
from outrider.edge import Client, EdgeConfig
from outrider.edge.daemon import DaemonConfig
from outrider.edge.daemon.http_server import Daemon

MODEL = "reference"
PROMPT = "def main(argv):\n"
CHAT: list[Any] = [{"role": "user", "content": "What is 2 + 3?"}]


@dataclass
class Setting:
    """A verifier, a daemon over it, OpenAI's client, and the client whose texts the daemon's must equal."""

    verifier: VerifierServer
    daemon: Daemon
    url: str
    openai: AsyncOpenAI
    client: Client
    run: Callable[[Any], Any] = asyncio.run

    async def until(self, holds: Callable[[], object]) -> None:
        for _ in range(1500):
            if holds():
                return
            await asyncio.sleep(0.02)
        raise AssertionError("it never came to hold")


@asynccontextmanager
async def setting(tokenizer_file: Path, drafter: Any = None, **config: Any) -> AsyncIterator[Setting]:
    verifier = VerifierServer(VerifierConfig(threads=1, listen=f"127.0.0.1:{free_port()}"))
    edge = EdgeConfig(
        verifier=await verifier.start(),
        model=MODEL,
        tokenizer=tokenizer_file,
        chat_template=target_folder("reference") / "chat_template.jinja",
    )
    client = Client(edge, drafters=() if drafter is None else (drafter,))
    daemon = Daemon(DaemonConfig(listen="127.0.0.1:0", grace_s=0.1, **config), client)
    daemon.cloud.every_s = 0.1
    url = await daemon.start()
    openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    made = Setting(verifier, daemon, url, openai, client)
    try:
        await made.until(lambda: daemon.cloud.health.status != "unavailable")
        yield made
    finally:
        await openai.close()
        await daemon.stop()
        await verifier.stop(0)


@pytest.fixture(scope="module")
def at(tokenizer_file: Path) -> Iterator[Setting]:
    """One setting for all tests that do it no harm, on one event loop."""
    with asyncio.Runner() as runner:
        whole = setting(tokenizer_file)
        made = runner.run(whole.__aenter__())
        made.run = runner.run
        yield made
        runner.run(whole.__aexit__(None, None, None))


@pytest.mark.usefixtures("all_drafts_pay")
@run_by("at")
async def test_a_completion_is_the_sdks_text_streamed_and_not(at) -> None:
    for sampling in ({"temperature": 0.0, "seed": 0}, {"temperature": 1.0, "seed": 11, "top_p": 0.9}):
        expected = await at.client.complete(PROMPT, max_tokens=32, **sampling)
        asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 32, **sampling}
        for _ in range(5):  # on a busy machine no draft may be in time in one text
            whole = await at.openai.completions.create(**asked)
            if whole.metrics["speculative_decoding"]["num_accepted_draft_tokens"]:
                break
        assert whole.choices[0].text == expected.text
        assert whole.choices[0].finish_reason == "length"
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (expected.prompt_tokens, 32)
        metrics = whole.metrics["speculative_decoding"]
        assert metrics["num_accepted_draft_tokens"] <= metrics["num_draft_tokens"]
        histogram = metrics["acceptance_histogram"]
        assert sum(histogram) == metrics["num_spec_steps"]
        assert sum(j * count for j, count in enumerate(histogram)) == metrics["num_accepted_draft_tokens"] > 0
        assert whole.metrics["seed"] == sampling["seed"]
        options = {"include_usage": True}
        chunks = [chunk async for chunk in await at.openai.completions.create(
            **asked, stream=True, stream_options=options
        )]  # fmt: skip
        assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected.text
        assert chunks[-1].usage == whole.usage
        assert "speculative_decoding" in chunks[-1].metrics


@run_by("at")
async def test_a_chat_is_rendered_by_the_targets_template_and_streamed_in_openais_chunks(at) -> None:
    rendered = "<|user|>What is 2 + 3?<|assistant|>"
    ids = at.client.ready.tokenizer.encode(rendered, add_special_tokens=False).ids
    expected = await at.client.complete(ids, max_tokens=30, temperature=0.7, seed=3)
    asked: dict[str, Any] = {"model": MODEL, "messages": CHAT, "temperature": 0.7, "seed": 3}
    whole = await at.openai.chat.completions.create(**asked, max_completion_tokens=30)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].message.role == "assistant"
    assert whole.usage.prompt_tokens == len(ids)
    stream = await at.openai.chat.completions.create(**asked, max_tokens=30, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected.text
    *others, last = [chunk.choices[0].finish_reason for chunk in chunks]
    assert set(others) <= {None}
    assert last == whole.choices[0].finish_reason
    assert chunks[-1].metrics["seed"] == 3
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


@run_by("at")
async def test_choices_follow_the_seed_one_by_one_and_a_drawn_seed_repeats_the_text(at) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20}
    three = await at.openai.completions.create(**asked, seed=5, n=3)
    singles = [await at.client.complete(PROMPT, max_tokens=20, temperature=1, seed=5 + i) for i in range(3)]
    assert [choice.text for choice in three.choices] == [single.text for single in singles]
    assert three.usage.completion_tokens == 60
    stream = await at.openai.completions.create(**asked, seed=5, n=3, stream=True)
    texts = ["", "", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [single.text for single in singles]
    first = await at.openai.completions.create(**asked)
    again = await at.openai.completions.create(**asked, seed=first.metrics["seed"])
    assert again.choices[0].text == first.choices[0].text
    assert (await at.openai.completions.create(**asked)).metrics["seed"] != first.metrics["seed"]


@run_by("at")
async def test_log_probabilities_are_the_targets(at) -> None:
    expected = await at.client.complete(PROMPT, max_tokens=8, logprobs=True, top_logprobs=3)
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0}
    answer = await at.openai.completions.create(**asked, prompt=PROMPT, logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs.token_logprobs == pytest.approx([token.logprob for token in expected.tokens], rel=1e-4)
    assert "".join(logprobs.tokens) == expected.text
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:i])) for i in range(8)]
    for top, token, logprob in zip(logprobs.top_logprobs, logprobs.tokens, logprobs.token_logprobs, strict=True):
        assert 3 <= len(top) <= 4
        assert top[token] == pytest.approx(logprob, rel=1e-4)
    chat = await at.openai.chat.completions.create(**asked, messages=CHAT, logprobs=True, top_logprobs=2)
    content = chat.choices[0].logprobs.content
    assert len(content) == chat.usage.completion_tokens
    assert all(len(token.top_logprobs) == 2 for token in content)
    spoken = b"".join(bytes(token.bytes) for token in content if token.token != "<|end|>")
    assert spoken.decode() == chat.choices[0].message.content
    stream = await at.openai.chat.completions.create(**asked, messages=CHAT, logprobs=True, stream=True)
    streamed = [t async for c in stream if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert [t.logprob for t in streamed] == pytest.approx([t.logprob for t in content], rel=1e-4)


@run_by("at")
async def test_a_json_schema_binds_the_answer(at) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 2, 3]}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
    answer = await at.openai.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        seed=1,
        max_tokens=64,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    assert answer.choices[0].finish_reason == "stop"
    made = json.loads(answer.choices[0].message.content)
    assert set(made) == {"ok", "n"}


@pytest.mark.usefixtures("all_drafts_pay")
@run_by("at")
async def test_every_chunk_says_what_became_of_the_drafts(at) -> None:
    for _ in range(5):  # on a busy machine no draft may be in time in one text
        stream = await at.openai.completions.create(
            model=MODEL,
            prompt=PROMPT,
            max_tokens=60,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True, "include_speculation": True},  # type: ignore[typeddict-unknown-key]
        )
        chunks = [chunk async for chunk in stream]
        seen = [chunk.speculation for chunk in chunks]
        if any(piece["accepted"] for speculation in seen for piece in speculation["pieces"]):
            break
    for chunk, speculation in zip(chunks, seen, strict=True):
        text = chunk.choices[0].text if chunk.choices else ""
        assert "".join(piece["text"] for piece in speculation["pieces"]) == text
        assert speculation["drafter"].split(",")[0] == "general"
        assert speculation["window"] >= 0
    assert {piece["accepted"] for speculation in seen for piece in speculation["pieces"]} == {True, False}
    last = seen[-1]
    assert last["tokens"] == 60
    assert last["tokens_per_second"] > 0
    assert last["cloud_tokens_per_second"] > 0
    assert 0 < last["acceptance"] <= 1
    assert last["round_trip_ms"] > 0
    assert last["uplink_bytes"] > 0
    assert last["downlink_bytes"] > 0
    assert last["steps"] < 60


async def test_a_drafter_that_fails_leaves_the_text_and_health_says_degraded(tokenizer_file) -> None:
    async with setting(tokenizer_file, drafter=FailingDrafter(0)) as at:
        known = (await at.openai.models.retrieve(MODEL)).max_model_len
        assert known == at.verifier.rules.context_length, "before any text"
        asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
        answer = await at.openai.completions.create(**asked)
        assert answer.metrics["drafter_error"]
        assert answer.usage.completion_tokens == 20
        assert at.daemon.cloud.health.status == "degraded"
        again = await at.openai.completions.create(**asked)
        assert again.choices[0].text == answer.choices[0].text


@run_by("at")
async def test_a_prompt_beyond_the_context_and_tokens_beyond_the_vocabulary_are_400s(at) -> None:
    for prompt, code in (([5] * 5000, "context_length_exceeded"), ([9000], None), ("", None)):
        with pytest.raises(APIError) as caught:
            await at.openai.completions.create(model=MODEL, prompt=prompt)
        assert (caught.value.status_code, caught.value.param, caught.value.code) == (400, "prompt", code)
    with pytest.raises(APIError) as caught:
        await at.openai.chat.completions.create(model=MODEL, messages=CHAT * 900)
    assert caught.value.code == "context_length_exceeded"


async def test_a_verifier_that_dies_is_a_503_until_another_is_there(tokenizer_file, monkeypatch) -> None:
    monkeypatch.setattr("outrider.edge.daemon.cloud.WAIT_FOR_CLOUD_S", 0.3)

    async with setting(tokenizer_file) as at:
        asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 10, "temperature": 0}
        before = await at.openai.completions.create(**asked)
        where = at.client.config.verifier
        await at.verifier.stop(0)
        with pytest.raises(APIError) as caught:
            await at.openai.completions.create(**asked)
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["Retry-After"]) >= 1
        assert at.daemon.cloud.health.status == "unavailable"
        at.verifier = VerifierServer(VerifierConfig(threads=1, listen=where))
        await at.verifier.start()
        await at.until(lambda: at.daemon.cloud.health.status == "ok")
        after = await at.openai.completions.create(**asked)
        assert after.choices[0].text == before.choices[0].text
        await at.verifier.stop(0)


async def test_chat_template_and_context_length_come_with_the_lease(tmp_path) -> None:
    template = chat_template_json(MODEL)
    async with fleet("verifier", chat_template_json=template) as found:
        daemon = Daemon(DaemonConfig(listen="127.0.0.1:0"), found.client(tmp_path))
        url = await daemon.start()
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=60) as openai:
            context_length = found.verifiers["verifier"].rules.context_length
            assert (await openai.models.retrieve(MODEL)).max_model_len == context_length
            answer = await openai.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=4)
        assert answer.usage.completion_tokens == 4
        assert daemon.cloud.served.ready.chat_template == template
        await daemon.stop()


# --- calls of functions: what is insisted on is what comes ---

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

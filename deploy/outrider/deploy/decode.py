"""`outrider run`: prompts in, texts out, live or as JSON."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from rich.console import Console

from outrider.deploy.arguments import Given, read_stdin
from outrider.deploy.built_in_prompts import Prompt, read_prompts
from outrider.deploy.commands.edge_options import GrammarSettings, MarkSettings, PromptSettings, StopSettings
from outrider.deploy.credentials import api_key
from outrider.deploy.process.progress import waiting
from outrider.deploy.process.termination import temporary_folder
from outrider.deploy.show import LiveText, marks_of
from outrider.edge import Client, Completion, EdgeConfig, Sampling
from outrider.proto.errors import ConfigError
from outrider.proto.session.service_record import service_summary


def run(given: Given) -> int:
    """Run `outrider run`: an edge of a running cluster, or verifier and edge in this process with gRPC between them."""
    return asyncio.run(_decode(given))


@asynccontextmanager
async def _local_client(given: Given) -> AsyncIterator[Client]:
    from outrider.cloud.verifier_config import VerifierConfig
    from outrider.deploy.targets import with_target

    if given.fields(EdgeConfig)["model"]:
        raise ConfigError("goes with --coordinator; in this process --target names the target", field="model")
    config = with_target(given(VerifierConfig))
    with waiting(f"loading the target {config.target}"):
        from outrider.cloud.serving.verifier_server import VerifierServer  # imports torch

        server = VerifierServer(config)
    address = await server.start()
    try:
        with temporary_folder("outrider-run-") as folder:
            tokenizer = folder / "tokenizer.json"
            tokenizer.write_text(server.tokenizer_json, encoding="utf-8")
            async with Client(given(EdgeConfig, verifier=address, model=config.target, tokenizer=tokenizer)) as client:
                yield client
    finally:
        await server.stop()


@asynccontextmanager
async def _remote_client(given: Given) -> AsyncIterator[Client]:
    client = Client(given(EdgeConfig, api_key=api_key(given)))
    try:
        await client.find()  # and no more: the first text does not wait for a drafter
        yield client
    finally:
        await client.close()


async def _decode(given: Given) -> int:
    settings = given(PromptSettings)
    prompts = _prompts(settings)
    sampling = given(Sampling, grammar=given(GrammarSettings).grammar())
    stop = given(StopSettings).stop
    opening = _remote_client if given.fields(EdgeConfig)["coordinator"] else _local_client
    async with opening(given) as client:
        if settings.json:
            await _decode_json(client, prompts, sampling, stop, settings.sessions)
        else:
            await _decode_live(client, prompts, sampling, stop, given(MarkSettings))
    return 0


async def _decode_json(
    client: Client, prompts: list[Prompt], sampling: Sampling, stop: Sequence[str], sessions: int
) -> None:
    """Print an object for each prompt, in order; decode up to `sessions` at once."""
    room = asyncio.Semaphore(sessions)

    async def one(prompt: Prompt) -> str:
        async with room:
            completion = await client.complete(prompt.text, sampling, stop=stop)
        return json.dumps(_record(prompt, completion))

    for finished in [asyncio.create_task(one(prompt)) for prompt in prompts]:
        print(await finished, flush=True)


async def _decode_live(
    client: Client, prompts: list[Prompt], sampling: Sampling, stop: Sequence[str], marking: MarkSettings
) -> None:
    console, notes = Console(highlight=False), Console(highlight=False, stderr=True)
    live = LiveText(console, notes, marks_of(console, marking))
    for prompt in prompts:
        if len(prompts) > 1:
            notes.rule(f"{prompt.domain} {prompt.id}".strip())
        await live.decode(client, prompt.text, sampling, stop, prompt.text)
    legend = f"{live.legend}; " if live.legend else ""
    notes.print(f"({legend}drafter {client.drafter_name})")


def _record(prompt: Prompt, completion: Completion) -> dict[str, Any]:
    statistics = completion.statistics
    return {
        "id": prompt.id,
        "prompt_tokens": completion.prompt_tokens,
        "cached_tokens": completion.statistics.cached_tokens,
        "tokens": list(completion.ids),
        "text": completion.text,
        "accepted": statistics.accepted,
        "steps": statistics.steps,
        "seconds": round(completion.seconds, 4),
        "uplink_bytes": statistics.uplink_bytes,
        "downlink_bytes": statistics.downlink_bytes,
        "finish_reason": completion.finish_reason.name.lower(),
        **service_summary([statistics.service]),
    }


def _prompts(settings: PromptSettings) -> list[Prompt]:
    if settings.prompts is not None:
        return read_prompts(settings.prompts)
    text = read_stdin("prompt") if settings.prompt == "-" else settings.prompt
    if not text:
        raise ConfigError("is empty on standard input; give a text to continue", field="prompt")
    return [Prompt("1", text)]

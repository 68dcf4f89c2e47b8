"""`outrider run` and `outrider generate`: prompts in, texts out, as a person or as JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.deploy.options import connection, drafting, grammar
from outrider.deploy.prompts import Prompt, read_prompts
from outrider.deploy.show import LiveText, figures
from outrider.edge import Client, Completion, EdgeConfig, Sampling
from outrider.proto.errors import ConfigError


def run(options: argparse.Namespace) -> int:
    """`outrider run`: a verifier in this process, an edge in this process, gRPC between them."""
    return asyncio.run(_decode(options, _local_client(options)))


def generate(options: argparse.Namespace) -> int:
    """`outrider generate`: an edge against a running cluster."""
    return asyncio.run(_decode(options, _remote_client(options)))


@asynccontextmanager
async def _local_client(options: argparse.Namespace) -> AsyncIterator[Client]:
    try:
        from outrider.cloud.server import VerifierServer
        from outrider.deploy.servers import verifier_config
    except ImportError as error:
        raise ConfigError(f"needs {error.name}; pip install 'outrider[cloud]'", field="run") from error

    config = verifier_config(options)
    server = VerifierServer(config)
    address = await server.start()
    try:
        with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
            tokenizer = Path(folder) / "tokenizer.json"
            tokenizer.write_text(server.tokenizer_json, encoding="utf-8")
            async with Client(_edge_config(options, verifier=address, model=options.target, tokenizer=tokenizer)) as it:
                yield it
    finally:
        await server.stop()


@asynccontextmanager
async def _remote_client(options: argparse.Namespace) -> AsyncIterator[Client]:
    where = {"coordinator": options.coordinator, "model": options.model, "cache": options.cache}
    config = _edge_config(options, **where, **connection(options))
    async with Client(config) as client:
        yield client


def _edge_config(options: argparse.Namespace, **where: Any) -> EdgeConfig:
    return EdgeConfig(
        window=options.window,
        **drafting(options),
        **where,
    )


async def _decode(options: argparse.Namespace, opening: Any) -> int:
    prompts = _prompts(options)
    sampling = replace(sampling_of(options), grammar=grammar(options))
    async with opening as client:
        if options.json:
            await _decode_json(client, prompts, sampling, options)
        else:
            await _decode_live(client, prompts, sampling, options)
    return 0


async def _decode_json(client: Client, prompts: list[Prompt], sampling: Sampling, options: argparse.Namespace) -> None:
    """One object a prompt, in order; up to `--sessions` decode at once."""
    room = asyncio.Semaphore(options.sessions)

    async def one(prompt: Prompt) -> str:
        async with room:
            completion = await client.complete(prompt.text, sampling, stop=options.stop)
        return json.dumps(record(prompt, completion))

    for finished in [asyncio.create_task(one(prompt)) for prompt in prompts]:
        print(await finished, flush=True)


async def _decode_live(client: Client, prompts: list[Prompt], sampling: Sampling, options: argparse.Namespace) -> None:
    console = Console(highlight=False)
    live = LiveText(console)
    for prompt in prompts:
        if len(prompts) > 1:
            console.rule(f"{prompt.domain} {prompt.id}".strip())
        console.print(prompt.text, style="dim", end="", markup=False, soft_wrap=True)
        events = client.generate(prompt.text, sampling, stop=options.stop)
        completion = await client.collect(prompt.text, events, live.show)
        console.print(figures(completion), style="dim", markup=False, soft_wrap=True)
    console.print(f"({live.legend}; drafter {client.drafter_name})")


def record(prompt: Prompt, completion: Completion) -> dict[str, Any]:
    """The JSON object of one prompt."""
    statistics = completion.statistics
    return {
        "id": prompt.id,
        "prompt_tokens": completion.prompt_tokens,
        "tokens": list(completion.tokens),
        "text": completion.text,
        "accepted": statistics.accepted,
        "steps": statistics.steps,
        "seconds": round(completion.seconds, 4),
        "uplink_bytes": statistics.uplink_bytes,
        "downlink_bytes": statistics.downlink_bytes,
        "finish_reason": completion.finish_reason.name.lower(),
    }


def sampling_of(options: argparse.Namespace) -> Sampling:
    """The sampling parameters among the options."""
    return Sampling(
        temperature=options.temperature,
        seed=options.seed,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        max_tokens=options.max_tokens,
    )


def _prompts(options: argparse.Namespace) -> list[Prompt]:
    if options.prompt is not None and options.prompts is not None:
        raise ConfigError("give PROMPT or --prompts FILE, not both", field="prompt")
    if options.prompts is not None:
        return read_prompts(options.prompts, options.limit)
    text = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not text:
        raise ConfigError("is missing; give PROMPT, `-` for standard input, or --prompts FILE", field="prompt")
    return [Prompt("1", text)]

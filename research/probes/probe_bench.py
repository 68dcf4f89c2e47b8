"""`python -m research probes`: texts of a stock vLLM server over links, plain, by its own speculation, and by ours."""

from __future__ import annotations

import asyncio
import json
import shlex
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import aiohttp
from pydantic.dataclasses import dataclass as record_dataclass
from rich.console import Console

from outrider.bench.environment import Environment, environment
from outrider.bench.links import BenchLink, links_of
from outrider.bench.record import RECORD, Count, Metric, check_file, save
from outrider.bench.table import Block, Grid, draw, number
from outrider.cloud.models.family_index import load_tokenizer
from outrider.cloud.serving.server_loading import ModelTokens
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.arguments import Given
from outrider.deploy.built_in_prompts import DOMAINS, choose_prompts
from outrider.deploy.process.progress import say
from outrider.proto.errors import OutriderError, Unavailable
from research.probes.code_edits import ASK, code_edits
from research.probes.probe_costs import HEADINGS as PRICE_HEADINGS
from research.probes.probe_costs import LEGEND as PRICE_LEGEND
from research.probes.probe_costs import Price, price_blocks, prices
from research.probes.probe_doors import MODEL, Doors
from research.research_settings import PROBE_WORKS, ProbeSettings

# Ways with their servers, in the order in which these run, and their names in the table.
WAYS = {
    "stream": ("plain", "plain stream"),
    "here": ("plain", "ours, in the edge"),
    "beside": ("plain", "ours, beside it"),
    "ngram": ("ngram", "its n-grams"),
    "draft": ("draft", "its draft model"),
    "own": ("own", "ours, no vLLM"),
}
OURS = ("here", "beside", "own")
EDITS, OPEN, MODELLED, BARE = WORKS = PROBE_WORKS
WARM_UP = "def area(width, height):\n    if width < 0:\n        raise ValueError(width)\n    return width * height\n"
WARM_UP_TOKENS = 48
HEADINGS = ("texts", "link", "way", "tok/s", "/ stream", "least", "first, ms", "equal")
LEGEND = (
    "tok/s, / stream: tokens a second, and that over the plain stream's of the same text, means over texts; least: of "
    "one text; first: median time to the first text; equal: texts equal to the plain stream's"
)


@dataclass(frozen=True, slots=True)
class Task:
    """A text to write after a prompt [p] of token ids; `chat` is a body with the same prompt, and a prediction."""

    work: str
    name: str
    prompt: Sequence[int]
    chat: Mapping[str, Any] = field(default_factory=dict)


@record_dataclass(frozen=True, slots=True, config=RECORD)
class TextResult:
    """One text: seconds from the request to its first and last pieces; whether it is `equal` to the plain stream's."""

    work: str
    way: str
    link: str
    name: str
    tokens: Count
    first_s: Metric
    seconds: Metric
    equal: bool


@record_dataclass(frozen=True, slots=True, config=RECORD)
class ProbesRecord:
    """All texts, what probes cost, and what went wrong by way; edits have the names of their commits."""

    environment: Environment
    vllm: str
    results: tuple[TextResult, ...]
    failures: Mapping[str, str]
    prices: tuple[Price, ...] = ()


class ProbeBench:
    """A measurement in all ways over all links; the first task only warms up."""

    def __init__(self, options: ProbeSettings, tasks: Sequence[Task], tokenizer: Any, doors: Doors) -> None:
        self.results, self.failures, self.vllm = list[TextResult](), dict[str, str](), ""
        self.prices = list[Price]()
        self._options, self._tasks, self._tokenizer, self._doors = options, tasks, tokenizer, doors
        self._plain = dict[str, str]()  # the plain stream's first text of each task

    async def run(self) -> None:
        """Measure, one server after another, as often as is asked for; what fails is noted."""
        for server in list(dict.fromkeys(server for server, _ in WAYS.values())) * self._options.repeat:
            if ways := [way for way in WAYS if WAYS[way][0] == server and way in self._options.ways]:
                with self._noting(ways):
                    async with self._doors.server(server) as address:
                        if self._options.costs and server == "plain" and not self.prices:
                            await self._price(f"http://{address}")
                        for link, way in product(links_of(self._options), ways):
                            await self._in_one_way(address, way, link)

    async def _in_one_way(self, server: str, way: str, link: BenchLink) -> None:
        works = self._options.works
        if way not in OURS:  # these draft by themselves, or not at all
            works = tuple(dict.fromkeys(map(texts_of, works)))
        for work in works:
            began, drafter = time.monotonic(), {MODELLED: self._options.drafter, BARE: "none"}.get(work, "ngram")
            with self._noting([way]):
                async with self._doors.door(way, server, link, drafter) as url, aiohttp.ClientSession() as http:
                    await self._batch(http, url, server, (work, way, link.label))
            say(f"{link.label}, {WAYS[way][1]}, {work}: {time.monotonic() - began:.0f} s")

    async def _price(self, url: str) -> None:
        options = self._options
        vocab = ModelTokens.of(options.target_folder).vocab_size
        self.prices = await prices(url, vocab, options.costs, options.at_once)

    @contextmanager
    def _noting(self, ways: Sequence[str]) -> Iterator[None]:
        try:
            yield
        except (OutriderError, OSError, aiohttp.ClientError, TimeoutError) as error:
            self.failures |= {way: str(error) or type(error).__name__ for way in ways}

    async def _batch(self, http: aiohttp.ClientSession, url: str, server: str, kind: tuple[str, str, str]) -> None:
        work, way, _ = kind
        await written(http, url, way, self._tasks[0], WARM_UP_TOKENS)
        if way != "own":
            async with http.get(f"http://{server}/version") as answer:
                self.vllm = (await answer.json())["version"]
            async with http.post(f"http://{server}/reset_prefix_cache") as answer:
                if not (await answer.json())["success"]:
                    raise Unavailable("vLLM does not forget its cache")
        for task in self._tasks[1:]:
            if task.work == texts_of(work):
                text, first_s, seconds = await written(http, url, way, task, self._options.max_tokens)
                tokens = len(self._tokenizer.encode(text, add_special_tokens=False))
                plain = self._plain.setdefault(task.name, text) if way == "stream" else self._plain.get(task.name)
                self.results.append(TextResult(*kind, task.name, tokens, first_s, seconds, text == plain))


async def written(
    http: aiohttp.ClientSession, url: str, way: str, task: Task, max_tokens: int
) -> tuple[str, float, float]:
    """Return a greedy text, and the seconds to its first and last pieces."""
    chat = task.chat if way in OURS else None  # our chats alone take a prediction
    path, asked = ("/v1/chat/completions", chat) if chat else ("/v1/completions", {"prompt": list(task.prompt)})
    body = {**asked, "model": MODEL, "temperature": 0, "max_tokens": max_tokens, "stream": True}
    text, first_s, last_s, read, began = "", 0.0, 0.0, 0, time.perf_counter()
    async with http.post(url + path, json={**body, "stream_options": {"include_usage": True}}) as answer:
        if answer.status != 200:
            raise Unavailable(f"{answer.status} {(await answer.text())[:300]}")
        async for line in answer.content:
            chunk = json.loads(line[6:]) if line.startswith(b"data: {") else {"choices": ()}
            if "choices" not in chunk:
                raise Unavailable(str(chunk)[:300])
            read = (chunk.get("usage") or {}).get("prompt_tokens", read)
            for choice in chunk["choices"]:
                if piece := choice.get("text") or choice.get("delta", {}).get("content"):
                    last_s = time.perf_counter() - began
                    first_s, text = first_s or last_s, text + piece
    if read != len(task.prompt):
        raise Unavailable(f"{task.name} has {len(task.prompt)} tokens, and {read} were read")
    return text, first_s, last_s


def texts_of(work: str) -> str:
    """Return whose tasks a kind of work writes: edits, or the prompts that all others share."""
    return EDITS if work == EDITS else OPEN


def blocks_of(results: Sequence[TextResult]) -> Iterator[Block]:
    """Yield a block for each kind of texts over each link, with a row for each way; a text's speed is its median."""
    runs = dict[tuple[str, str], dict[str, dict[str, list[TextResult]]]]()
    for each in sorted(results, key=lambda each: (WORKS.index(each.work), list(WAYS).index(each.way))):
        if each.tokens:
            here = runs.setdefault((each.work, each.link), {})
            here.setdefault(each.way, {}).setdefault(each.name, []).append(each)

    def speeds(work: str, link: str, way: str) -> dict[str, float]:
        texts = runs.get((work, link), {}).get(way, {})
        return {name: median(each.tokens / each.seconds for each in group) for name, group in texts.items()}

    for (work, link), ways in runs.items():
        plain = speeds(texts_of(work), link, "stream")
        block = list[Sequence[str]]()
        for way, texts in ways.items():
            speed, every = speeds(work, link, way), [each for group in texts.values() for each in group]
            ratios = [speed[name] / plain[name] for name in speed if name in plain]
            ratio = [number(count(ratios) if ratios else None, 2) for count in (fmean, min)]
            first, equal = median(each.first_s for each in every), sum(each.equal for each in every)
            tail = f"{1e3 * first:.0f}", f"{equal} of {len(every)}"
            block.append((work, link, WAYS[way][1], f"{fmean(speed.values()):.1f}", *ratio, *tail))
        yield block


def tasks_of(options: ProbeSettings, tokenizer: Any) -> list[Task]:
    """Return what is to be written: a warm-up, then edits, then prompts."""

    def edit(name: str, question: str, before: str) -> Task:
        turns = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
        prediction = {"type": "content", "content": before}
        return Task(EDITS, name, prompt, {"messages": turns, "prediction": prediction})

    asked = options.repository if EDITS in options.works else None
    edits = code_edits(asked, options.revision, options.texts) if asked else ()
    prompts = choose_prompts(options.prompts, -(-options.texts // len(DOMAINS)))[: options.texts]
    return [
        edit("warm-up", ASK.format(before=WARM_UP, subject="Check the height too"), WARM_UP),
        *(edit(each.commit, each.question, each.before) for each in edits),
        *(Task(OPEN, prompt.id, tokenizer.encode(prompt.text, add_special_tokens=False)) for prompt in prompts),
    ]


def probes(given: Given) -> int:
    """Run `python -m research probes`."""
    options = given(ProbeSettings)
    if options.json is not None:
        check_file(options.json, "json")
    tokenizer = load_tokenizer(str(options.target_folder))
    tasks = tasks_of(options, tokenizer)
    with tempfile.TemporaryDirectory(prefix="outrider-probes-") as logs:
        bench = ProbeBench(options, tasks, tokenizer, Doors(options, Path(logs)))
        asyncio.run(bench.run())
    console = Console(width=100, highlight=False)
    if bench.prices:
        console.print(draw([Grid("", PRICE_HEADINGS, 1, list(price_blocks(bench.prices)))], PRICE_LEGEND))
    console.print(draw([Grid("", HEADINGS, 3, list(blocks_of(bench.results)))], LEGEND))
    for way, why in bench.failures.items():
        print(f"{WAYS[way][1]}: {why}")
    if options.json is not None:
        verifier = VerifierConfig(target=str(options.target_folder))
        more = {"drafter_version": None, "drafter_threads": 1, "max_tokens": options.max_tokens, "seed": 0}
        flags = shlex.split(options.vllm_flags)
        dtype = dict(pairwise(flags)).get("--dtype", "auto")
        made_in = environment(verifier, dtype, drafter=options.drafter, prompts=len(tasks) - 1, **more)
        record = ProbesRecord(made_in, bench.vllm, tuple(bench.results), bench.failures, tuple(bench.prices))
        save(record, options.json)
    return 1 if bench.failures else 0

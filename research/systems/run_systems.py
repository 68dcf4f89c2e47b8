"""Whole systems side by side: chats through one client, over emulated links, each system as its own users start it.

    .venv/bin/python research/systems/run_systems.py --model DIR --questions question.jsonl --json systems.json

README.md beside this file says what is started and how it is read. Everything listens on loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import StatisticsError, median

import psutil
from openai import AsyncOpenAI, OpenAIError
from tokenizers import Tokenizer

from outrider.bench.environment import environment
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.link.link_process import LinkProcess
from outrider.deploy.link.shape import LinkShape

CATEGORIES = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
OUTRIDER = "Outrider"
PLAIN = "plain"
READY_S, STOP_S = 300.0, 30.0
PAUSE_S = 0.5  # before a question, for the client to hear of a connection that the server has closed
UP_MBIT, DOWN_MBIT = 20.0, 100.0
VLLM_ENVIRONMENT = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
COLUMNS = ("system", "drafting", "tokens/s", "first token, ms", "gap, ms", "p95", "memory, MiB", "texts as plain")
# Tokens that a draft has where a system needs a number, and the n-gram that is looked up.
DRAFTS, NGRAM = 4, 3


@dataclass(frozen=True)
class System:
    """One way to serve the model.

    Attributes:
        drafting: how it drafts; `plain`: not at all.
        command: its server, with `{port}` for the port, and `{link}` where it has a link of its own.
        edge: command on the device, with `{port}` and the server's port as `{cloud}`. Empty: the client alone is the
            device, and the link is in front of the server.
    """

    name: str
    drafting: str
    command: Sequence[str]
    model: str
    edge: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Text:
    """One streamed answer; `seconds` [tokens] are the arrivals of its tokens after the request."""

    text: str
    seconds: Sequence[float]


@dataclass(frozen=True)
class Run:
    """All answers of one system over one link.

    Attributes:
        same: answers that are those of the system's own plain decoding over the same link; None: it was not run.
        server_mib: resident memory of the server's processes, shared pages counted once (PSS).
        device_mib: the same of processes on the device beside the client.
    """

    name: str
    drafting: str
    rtt_ms: float
    first_s: float
    gap_median_s: float
    gap_p95_s: float
    tokens_a_s: float
    tokens: int
    server_mib: float
    device_mib: float
    same: int | None
    texts: Sequence[Text]


def systems(options: argparse.Namespace, folder: Path) -> Iterator[System]:
    """Yield what the options name."""
    model, outrider = str(options.model), str(Path(sys.executable).parent / "outrider")
    listen = ["--host", "127.0.0.1", "--port", "{port}"]
    up = [outrider, "up", "--listen", "127.0.0.1:{port}", "--link", "{link}", "--target", model]
    up += [] if options.drafter == "auto" else ["--draft-with", options.drafter]
    up += [word for path in options.drafters for word in ("--drafters", str(path))]
    edge = [outrider, "edge", "--listen", "127.0.0.1:{port}", "--coordinator", "127.0.0.1:{cloud}", "--drafter"]
    yield System(OUTRIDER, PLAIN, up, model, [*edge, "none", "--drafts-here", "0"])
    yield System(OUTRIDER, f"drafter {options.drafter}", up, model, [*edge, options.drafter])
    if options.llama_server:
        looks_up = "--spec-type ngram-simple --spec-ngram-simple-size-n {} --spec-ngram-simple-size-m {}"
        ways = {PLAIN: [], "n-gram": looks_up.format(NGRAM, DRAFTS).split()}
        if options.draft_gguf:
            drafts = f"--spec-type draft-simple --spec-draft-n-max {DRAFTS} -md"
            ways["draft model"] = [*drafts.split(), str(options.draft_gguf)]
        for gguf, kind in ((options.gguf, ""), (options.gguf_8bit, ", 8-bit")):
            for way, words in ways.items() if gguf else ():
                serve = [str(options.llama_server), *listen, "-m", str(gguf), *words]
                yield System(f"llama-server{kind}", way, serve, model)
    if options.vllm_python:
        serve = [str(options.vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--model", model, *listen]
        serve += ["--dtype", "bfloat16", "--max-model-len", "2048"]
        ngram = {"method": "ngram", "prompt_lookup_min": NGRAM, "prompt_lookup_max": NGRAM}
        drafting: dict[str, dict[str, object]] = {"n-gram": {**ngram, "num_speculative_tokens": DRAFTS}}
        if options.draft_model:
            drafted = {"method": "draft_model", "model": str(options.draft_model), "num_speculative_tokens": DRAFTS}
            drafting["draft model"] = drafted
        yield System("vLLM", PLAIN, serve, model, environment=VLLM_ENVIRONMENT)
        for way, how in drafting.items():
            words = ["--speculative-config", json.dumps(how)]
            yield System("vLLM", way, [*serve, *words], model, environment=VLLM_ENVIRONMENT)
    if options.transformers:
        looked_up = _with_prompt_lookup(options.model, folder / "prompt-lookup")
        for way, path in ((PLAIN, model), ("prompt lookup", str(looked_up))):
            serve = [str(options.transformers), "serve", path, *listen, "--device", "cpu", "--dtype", "bfloat16"]
            yield System("transformers serve", way, serve, path, environment={"HF_HUB_OFFLINE": "1"})


def _with_prompt_lookup(model: Path, folder: Path) -> Path:
    """Return a copy of the model's folder whose texts transformers makes with prompt lookup."""
    shutil.copytree(model, folder)
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**settings, "prompt_lookup_num_tokens": DRAFTS, "max_matching_ngram_size": NGRAM}))
    return folder


def questions(path: Path, count: int, seed: int) -> list[str]:
    """Return the first turns of `count` questions of Spec-Bench's chat categories, from one after another."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    chance = random.Random(seed)
    return [
        str(chance.choice([row for row in rows if row["category"] == CATEGORIES[i % len(CATEGORIES)]])["turns"][0])
        for i in range(count)
    ]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@asynccontextmanager
async def running(
    command: Sequence[str], variables: Mapping[str, str], log: Path, **places: object
) -> AsyncIterator[psutil.Process]:
    """Run a command, and end it with all that it started."""
    words = list(command)
    for name, value in places.items():
        words = [word.replace(f"{{{name}}}", str(value)) for word in words]
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *words, stdout=output, stderr=output, env={**os.environ, **variables}, start_new_session=True
        )
    own = psutil.Process(process.pid)
    try:
        yield own
    finally:
        below = own.children(recursive=True) if own.is_running() else []
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        with suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), STOP_S)
        for left in (own, *below):
            with suppress(psutil.NoSuchProcess):
                left.kill()
        await process.wait()


def mib_of(process: psutil.Process | None) -> float:
    """Return the memory of a process and all below it, MiB, shared pages counted once."""
    if process is None:
        return 0.0
    total = 0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += each.memory_full_info().pss
    return total / 2**20


async def answer(client: AsyncOpenAI, model: str, question: str, max_tokens: int, tokenizer: Tokenizer) -> Text:
    """Stream one answer at T = 0; tokens are counted in the text so far, the same way for every system."""
    await asyncio.sleep(PAUSE_S)
    began = time.perf_counter()
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        temperature=0.0,
        stream=True,
    )
    pieces = [
        (time.perf_counter() - began, chunk.choices[0].delta.content or "") async for chunk in stream if chunk.choices
    ]
    text, seconds = "", list[float]()
    for arrival, piece in pieces:
        text += piece
        count = len(tokenizer.encode(text, add_special_tokens=False).ids)
        seconds += [arrival] * (count - len(seconds))
    return Text(text, seconds)


async def ready(client: AsyncOpenAI, model: str, processes: Sequence[psutil.Process], tokenizer: Tokenizer) -> None:
    """Wait for the first tokens, which warm up too."""
    until = time.monotonic() + READY_S
    while True:
        try:
            await answer(client, model, "Say hello.", 16, tokenizer)
            return
        except OpenAIError:
            if time.monotonic() > until or not all(map(psutil.Process.is_running, processes)):
                raise


async def measure(system: System, rtt_ms: float, asked: Sequence[str], options: argparse.Namespace, log: Path) -> Run:
    """Start a system, ask it all questions over one link, and stop it."""
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    shape = LinkShape.of(rtt_ms=rtt_ms, up_mbit=UP_MBIT, down_mbit=DOWN_MBIT)
    cloud, link = _free_port(), f"{rtt_ms},{UP_MBIT},{DOWN_MBIT}"
    async with (
        running(system.command, system.environment, log, port=cloud, link=link) as server,
        _device(system, cloud, shape, log) as (address, device),
        AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client,
    ):
        await ready(client, system.model, [each for each in (server, device) if each], tokenizer)
        texts = [await answer(client, system.model, each, options.max_tokens, tokenizer) for each in asked]
        return summed_up(system, rtt_ms, texts, mib_of(server), mib_of(device))


@asynccontextmanager
async def _device(
    system: System, cloud: int, shape: LinkShape, log: Path
) -> AsyncIterator[tuple[str, psutil.Process | None]]:
    """Yield the address that the client asks, and the process beside it on the device."""
    if system.edge:
        port = _free_port()
        async with running(system.edge, {}, log, port=port, cloud=cloud) as edge:
            yield f"127.0.0.1:{port}", edge
    else:
        async with LinkProcess(f"127.0.0.1:{cloud}", shape) as link:
            yield link.address, None


def summed_up(system: System, rtt_ms: float, texts: Sequence[Text], server_mib: float, device_mib: float) -> Run:
    """Sum the answers of one system over one link up."""
    arrivals = [text.seconds for text in texts if text.seconds]
    gaps = sorted(after - before for seconds in arrivals for before, after in pairwise(seconds))
    tokens = sum(map(len, arrivals))
    return Run(
        system.name,
        system.drafting,
        rtt_ms,
        median(seconds[0] for seconds in arrivals),
        median(gaps),
        gaps[int(0.95 * (len(gaps) - 1))],
        tokens / sum(seconds[-1] for seconds in arrivals),
        tokens,
        server_mib,
        device_mib,
        None,
        texts,
    )


def compared(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with the number of answers that are those of the system's own plain decoding."""
    plain = {(run.name, run.rtt_ms): run.texts for run in runs if run.drafting == PLAIN}

    def same(run: Run) -> int | None:
        texts = plain.get((run.name, run.rtt_ms))
        return None if texts is None else sum(a.text == b.text for a, b in zip(run.texts, texts, strict=True))

    return [replace(run, same=same(run)) for run in runs]


def page(runs: Sequence[Run]) -> str:
    """Return tables in Markdown, one for each link, with the quickest system first."""
    lines: list[str] = []
    for rtt_ms in dict.fromkeys(run.rtt_ms for run in runs):
        lines += [f"### {rtt_ms:g} ms round trip", "", f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
        here = [run for run in runs if run.rtt_ms == rtt_ms]
        for run in sorted(here, key=lambda run: -run.tokens_a_s):
            memory = f"{run.server_mib:.0f}" + (f" + {run.device_mib:.0f}" if run.device_mib else "")
            cells = (run.name, run.drafting, f"{run.tokens_a_s:.1f}", f"{1e3 * run.first_s:.0f}",
                     f"{1e3 * run.gap_median_s:.1f}", f"{1e3 * run.gap_p95_s:.1f}", memory,
                     "-" if run.same is None else f"{run.same} of {len(run.texts)}")  # fmt: skip
            lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def parsed() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the model, as transformers saves it")
    add("--questions", type=Path, required=True, help="question.jsonl of Spec-Bench")
    add("--drafter", default="auto", help="drafter of Outrider's edge and, unless auto, beside its target")
    add("--drafters", type=Path, nargs="*", default=[], help="folders of further drafter packages")
    add("--llama-server", type=Path, help="llama.cpp's server")
    add("--gguf", type=Path, help="the model in bfloat16 for it")
    add("--gguf-8bit", type=Path, help="the model in Q8_0 for it")
    add("--draft-gguf", type=Path, help="a draft model for it")
    add("--vllm-python", type=Path, help="Python that has vLLM's build for CPUs")
    add("--draft-model", type=Path, help="folder of a draft model for it")
    add("--transformers", type=Path, help="transformers' command")
    add("--only", default="", help="take only systems whose name has this in it")
    add("--rtt", type=float, nargs="+", default=[2.0, 30.0, 120.0], help="round trips, ms")
    add("--count", type=int, default=8, help="questions")
    add("--max-tokens", type=int, default=128, help="limit of an answer")
    add("--seed", type=int, default=1, help="seed of the choice of questions")
    add("--json", type=Path, help="file to write the record to")
    return parser.parse_args()


async def main() -> int:
    """Measure what the options name, print the tables and write the record; return 1 if a system failed."""
    options = parsed()
    asked = questions(options.questions, options.count, options.seed)
    runs, failed = list[Run](), 0
    with tempfile.TemporaryDirectory(prefix="outrider-systems-") as name:
        folder = Path(name)
        taken = [each for each in systems(options, folder) if options.only in each.name]
        for rtt_ms in options.rtt:
            for system in taken:
                log, began = folder / "log", time.monotonic()
                log.unlink(missing_ok=True)
                try:
                    run = await measure(system, rtt_ms, asked, options, log)
                except (OpenAIError, OSError, psutil.Error, StatisticsError) as error:
                    failed += 1
                    print(f"{system.name}, {system.drafting}: {error}\n{log.read_text(errors='replace')[-2000:]}")
                    continue
                runs.append(run)
                print(f"{rtt_ms:g} ms, {system.name}, {system.drafting}: {run.tokens_a_s:.1f} tokens/s, "
                      f"{time.monotonic() - began:.0f} s in all", file=sys.stderr)  # fmt: skip
    runs = compared(runs)
    print(page(runs))
    if options.json:
        made_in = environment(
            VerifierConfig(target=str(options.model)), "bfloat16", drafter=options.drafter, drafter_version=None,
            drafter_threads=None, prompts=options.count, max_tokens=options.max_tokens, seed=options.seed,
        )  # fmt: skip
        record = {"environment": asdict(made_in), "runs": [asdict(run) for run in runs]}
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))

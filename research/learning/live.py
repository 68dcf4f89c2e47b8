"""`learn`: `outrider up --learn`, and an edge at the end of an emulated link that nobody attends to."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.bench.environment import command_line
from outrider.bench.links import LinkRecord
from outrider.bench.record import check_file, save
from outrider.bench.table import Grid, draw
from outrider.cloud.learning.trainer_settings import TrainerSettings
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.arguments import Given
from outrider.deploy.link.link_process import LinkProcess
from outrider.deploy.link.shape import LinkShape
from outrider.deploy.process.termination import temporary_folder
from outrider.drafters.onnx import OnnxDrafter
from outrider.drafters.packages import MANIFEST, DrafterPackage, find_package, load_package, read_manifest
from outrider.drafters.protocol import Drafter
from outrider.edge import Client, Completion, EdgeConfig
from outrider.edge.link.control_client import CoordinatorClient
from outrider.proto.errors import ConfigError, Unavailable
from research.learning.learning_stream import StreamPlan, StreamWriter, domain_name
from research.learning.live_record import DecodedTexts, LearningDemo, OfferedVersion, ServingWindow
from research.research_settings import LearnDemoSettings
from research.text_writer import TextRequest

END_WITHIN_S = 60.0
REST_S = 15.0  # for steps of training that the stream's last texts allow
WARM_UP_TEXTS = 2  # before a measurement, so that an edge knows link, verifier and drafter
WINDOW_HEADINGS = ("texts", "served", "s", "tok/s", "tok/step", "T=0", "T=1", "steps", "version", "cache")


DecodedText = tuple[TextRequest, Completion]


@dataclass(frozen=True, slots=True)
class _Served:
    """A text of the stream: its request, its result, and when it ended, on the monotonic clock."""

    request: TextRequest
    result: Completion
    ended: float


@dataclass(frozen=True, slots=True)
class _Watch:
    """Everything that is looked at while the stream goes on.

    Attributes:
        package: drafter that learning began with.
        learned: folder of the trainer.
        cache: the edge's cache.
    """

    package: DrafterPackage
    learned: Path
    cache: Path
    control: CoordinatorClient

    async def window(self, served: Sequence[_Served], since: float, tokens: int) -> ServingWindow:
        """Return the window of texts that were just served; the stream began at time `since`, `tokens` ago."""
        files = {file.stat().st_ino: file.stat().st_size for file in self.cache.rglob("*") if file.is_file()}
        trainer = self._trainer()
        return ServingWindow(
            decoded=decoded_texts([(text.request, text.result) for text in served]),
            ended_s=round(served[-1].ended - since, 2),
            served=tokens,
            cached_bytes=sum(files.values()),  # a cache links equal files
            steps=trainer.get("step", 0),
            candidates=trainer.get("counts", {}).get("candidates", 0),
            published=trainer.get("counts", {}).get("versions", 0),
            versions=tuple(await self._versions()),
        )

    async def _versions(self) -> list[OfferedVersion]:
        """Return the known versions of the drafter, the first one first."""
        numbers = {self.package.version: 0}
        for manifest in self.learned.glob(f"drafters/*/*/{MANIFEST}"):
            published = read_manifest(manifest.parent)
            numbers[published.version] = published.sequence
        found = [
            OfferedVersion(
                numbers.get(each.version, 0), each.version, each.state, each.why, each.texts, round(each.difference, 4)
            )
            for each in (await self.control.status()).versions
            if each.drafter == self.package.name
        ]
        return sorted(found, key=lambda version: version.sequence)

    async def current(self) -> DrafterPackage:
        """Return the package of the version that edges draft with now."""
        found = (each.sequence for each in await self._versions() if each.state == "current")
        if sequence := next(found, 0):
            return load_package(self.learned / "drafters" / self.package.name / str(sequence))
        return self.package

    def _trainer(self) -> dict[str, Any]:
        """Return the state in the trainer's newest checkpoint; empty: there is none yet."""
        newest = max(self.learned.glob("checkpoint-*/state.json"), default=None)
        try:
            state: dict[str, Any] = json.loads(newest.read_text(encoding="utf-8")) if newest else {}
        except FileNotFoundError:  # the next one has just taken its place
            return self._trainer()
        return state


def learn_demo(given: Given) -> int:
    """Run `python -m research learn`; return 1 if learning changed a text."""
    options, trainer = given(LearnDemoSettings), given(TrainerSettings)
    if options.json:
        check_file(options.json, "json")
    if any(trainer.folder.glob("*")):
        raise ConfigError(f"{trainer.folder} is not empty; versions in it would be learned on", field="folder")
    record = asyncio.run(_run(given, options, trainer, Console(stderr=True, highlight=False)))
    Console(width=110, highlight=False).print(draw(grids(record)))
    if options.json:
        save(record, options.json)
    return int(record.identical < record.before.texts)


async def _run(given: Given, options: LearnDemoSettings, trainer: TrainerSettings, console: Console) -> LearningDemo:
    package, target = find_package(trainer.drafter), given(VerifierConfig).target
    shape = LinkShape.of(rtt_ms=options.rtt, up_mbit=options.up or None, down_mbit=options.down or None)
    with temporary_folder("outrider-bench-") as place:
        writer = StreamWriter(target, place)
        stream, fresh = (
            list(writer.requests(options.stream, StreamPlan(count, held_out, 0, length=options.max_tokens)))
            for count, held_out in ((options.texts, False), (options.fresh + WARM_UP_TEXTS, True))
        )
        async with _cluster(given, place) as coordinator, LinkProcess(coordinator, shape) as link:
            edge = given(EdgeConfig, coordinator=link.address, drafter=package.name, share_texts=True)
            edge = replace(edge, cache=place / "edge")
            measuring = replace(edge, share_texts=False)
            carried = await link.counters()
            control = CoordinatorClient(coordinator)
            watch = _Watch(package, trainer.folder.resolve(), edge.cache, control)
            windows = []
            async for window in _windows(edge, stream, options, watch):
                windows.append(window)
                console.print(f"{window.served} tokens: {_said(window.decoded)}")
            ended = await link.counters()
            await asyncio.sleep(REST_S)
            drafters = [OnnxDrafter(each, threads=edge.threads) for each in (package, await watch.current())]
            before, after = await _compared(measuring, drafters, fresh)
            await control.close()
    return LearningDemo(
        command=command_line(),
        target=target,
        drafter=package.name,
        stream=domain_name(options.stream),
        min_step_ms=options.min_step,
        link=LinkRecord(options.rtt, options.up or None, options.down or None),
        sessions=options.sessions,
        before=decoded_texts(before),
        after=decoded_texts(after),
        identical=sum(one[1].ids == other[1].ids for one, other in zip(before, after, strict=True)),
        windows=tuple(windows),
        uplink_bytes=ended.up_bytes - carried.up_bytes,
        downlink_bytes=ended.down_bytes - carried.down_bytes,
    )


@asynccontextmanager
async def _cluster(given: Given, place: Path) -> AsyncIterator[str]:
    """Run `outrider up --learn` in a process of its own, and yield the coordinator's address.

    Raises:
        Unavailable: it ends before it serves; its own line on standard error says why.
    """
    config = place / "up.toml"
    config.write_text("[up]\n" + "\n".join(up_options(given)) + "\n", encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "outrider.deploy", "up", "--config", str(config)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        if process.stdout is None or not (line := (await process.stdout.readline()).decode()):
            raise Unavailable("`outrider up --learn` does not start")
        yield line.split()[2].rstrip(",")  # coordinator on HOST:PORT, ...
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            await asyncio.wait_for(process.communicate(), END_WITHIN_S)
        except TimeoutError:
            process.kill()
            await process.wait()


def up_options(given: Given) -> Iterator[str]:
    """Yield the lines of the config file that `outrider up` gets: what this command was given, and what it is for.

    The edge speaks to the coordinator alone, which relays, so that one link carries all that it sends and fetches.
    """
    fixed = {"listen": "127.0.0.1:0", "learn": True, "relay": True, "draft-here": "off"}
    fixed |= {"pace": given(LearnDemoSettings).min_step}
    chosen = {
        argument.flag if argument.field.name != "threads" else "target-threads": given.values[argument.name]
        for argument in given.arguments
        if argument.kind in (TrainerSettings, VerifierConfig)
    }
    for flag, value in (fixed | chosen).items():
        if value not in (None, "", ()):
            yield f"{flag} = {json.dumps(value, default=str)}"


async def _compared(
    config: EdgeConfig, drafters: Sequence[Drafter], requests: Sequence[TextRequest]
) -> tuple[list[DecodedText], list[DecodedText]]:
    """Decode the requests by an edge with the first of two drafters and by one with the other, in turn.

    So both see the same load of the machine. The first requests only warm the edges up.
    """
    texts: tuple[list[DecodedText], list[DecodedText]] = [], []
    async with Client(config, drafters=drafters[:1]) as before, Client(config, drafters=drafters[1:]) as after:
        for number, request in enumerate(requests):
            for place in (0, 1) if number % 2 else (1, 0):
                result = await (before, after)[place].complete(request.prompt, request.sampling)
                texts[place].append((request, result))
    return texts[0][WARM_UP_TEXTS:], texts[1][WARM_UP_TEXTS:]


async def _windows(
    config: EdgeConfig, requests: Sequence[TextRequest], options: LearnDemoSettings, watch: _Watch
) -> AsyncIterator[ServingWindow]:
    """Decode the requests, some at once, and yield each window of texts that have ended one after the other."""
    room, served = asyncio.Semaphore(options.sessions), 0
    async with Client(config) as client:

        async def text(request: TextRequest) -> _Served:
            async with room:
                result = await client.complete(request.prompt, request.sampling)
            return _Served(request, result, time.monotonic())

        began = time.monotonic()
        tasks = [asyncio.create_task(text(request)) for request in requests]
        try:
            ended = asyncio.as_completed(tasks)
            while window := [await each for each in itertools.islice(ended, options.every)]:
                served += sum(len(each.result.tokens) for each in window)
                yield await watch.window(window, began, served)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def decoded_texts(texts: Sequence[DecodedText]) -> DecodedTexts:
    """Return what the texts took together."""
    statistics = [result.statistics for _, result in texts]
    tokens = sum(len(result.tokens) for _, result in texts)

    def hits(*, greedy: bool) -> float:
        own = [result.statistics for text, result in texts if (text.sampling.temperature == 0) is greedy]
        return sum(each.hits for each in own) / max(1, sum(each.compared for each in own))

    return DecodedTexts(
        texts=len(texts),
        tokens=tokens,
        tokens_per_second=round(tokens / sum(result.seconds for _, result in texts), 2),
        tokens_per_step=round(tokens / sum(each.steps for each in statistics), 3),
        greedy=round(hits(greedy=True), 4),
        sampled=round(hits(greedy=False), 4),
        steered=round(sum(each.steered_jobs > 0 for each in statistics) / len(statistics), 3),
    )


def grids(record: LearningDemo) -> list[Grid]:
    """Return the tables of a run: fresh texts with either drafter, the stream, and the versions at its end."""
    before, after = record.before, record.after
    rows = [
        [
            name,
            f"{each.tokens_per_second:.1f}",
            f"{each.tokens_per_step:.2f}",
            f"{each.greedy:.3f}",
            f"{each.sampled:.3f}",
        ]
        for name, each in (("before", before), ("after", after))
    ]
    speedup = after.tokens_per_second / before.tokens_per_second
    fresh = Grid(
        f"{before.texts} fresh texts of {record.stream}, in turn, at {record.link.rtt_ms:g} ms",
        ("", "tok/s", "tok/step", "T=0", "T=1"),
        1,
        [rows],
        f"{speedup:.2f} times as fast; {record.identical} of {before.texts} texts are the same",
    )
    served = [
        [
            str(window.decoded.texts),
            f"{window.served:,}",
            f"{window.ended_s:.0f}",
            f"{window.decoded.tokens_per_second:.1f}",
            f"{window.decoded.tokens_per_step:.2f}",
            f"{window.decoded.greedy:.3f}",
            f"{window.decoded.sampled:.3f}",
            str(window.steps),
            " ".join(f"{each.sequence} {each.state}" for each in window.versions if each.state != "retired"),
            f"{window.cached_bytes / 1e3:.0f} kB",
        ]
        for window in record.windows
    ]
    stream = Grid(f"the stream, {record.sessions} texts at once", WINDOW_HEADINGS, 0, [served])
    last = record.windows[-1].versions if record.windows else ()
    versions = Grid(
        f"versions of {record.drafter}",
        ("", "version", "state", "why"),
        4,
        [[[str(each.sequence), each.version, each.state, each.why] for each in last]],
        f"the link carried {record.uplink_bytes / 1e3:.0f} kB up and {record.downlink_bytes / 1e3:.0f} kB down",
    )
    return [fresh, stream, versions]


def _said(texts: DecodedTexts) -> str:
    return f"{texts.tokens_per_second:.1f} tokens/s, hits {texts.greedy:.3f} at T=0, {texts.sampled:.3f} at T=1"

"""`outrider bench`: ways of decoding the same prompts, side by side in one run, over emulated links."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from outrider.bench.bench_metrics import pooled
from outrider.bench.bench_results import Benchmark, BenchmarkRun, check_drawing, plot, tables
from outrider.bench.bench_settings import MODES, WARM_UP_TOKENS, BenchSettings, LinkListSettings
from outrider.bench.bench_verifier import VerifierProcess
from outrider.bench.environment import environment
from outrider.bench.links import BenchLink, links_of
from outrider.bench.record import check_file, save
from outrider.cloud.serving.steps import StepTiming
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.arguments import Given
from outrider.deploy.built_in_prompts import Prompt, held_out, read_prompts
from outrider.deploy.commands.decode_options import BuiltInPrompts
from outrider.deploy.link.link_process import LinkProcess
from outrider.deploy.process.termination import temporary_folder
from outrider.edge import Client, EdgeConfig, Sampling, Tokens
from outrider.edge.decoding import Observer
from outrider.proto.errors import ConfigError
from outrider.proto.session import EdgeStatistics
from outrider.proto.types import CloudFrame, Commit, Patience

WITH_DRAFTER_HERE = ("colocated", "outrider")
USUAL_ROWS = 17  # rows of a session in a step that reads no prompt


@dataclass(eq=False)
class Measured(Observer):
    """One decoded text, and what its session did when, in seconds of the monotonic clock.

    Attributes:
        prompt: its prompt.
        began_s: time of the request.
        tokens: [n] its tokens.
        arrivals: [n] seconds from the request until each token reached the user.
        statistics: counts of the edge's session.
        jobs: drafting jobs: begin, end, and drafted tokens.
        commits: commits, and when they came.
    """

    prompt: Prompt
    began_s: float = field(default_factory=time.monotonic)
    tokens: tuple[int, ...] = ()
    arrivals: tuple[float, ...] = ()
    statistics: EdgeStatistics = field(default_factory=EdgeStatistics)
    jobs: list[tuple[float, float, int]] = field(default_factory=list)
    commits: list[tuple[Commit, float]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.arrivals[-1]

    def drafted(self, began: float, ended: float, tokens: int) -> None:
        self.jobs.append((began, ended, tokens))

    def received(self, frame: CloudFrame, at: float) -> None:
        if isinstance(frame, Commit):
            self.commits.append((frame, at))


async def measure_text(client: Client, prompt: Prompt, sampling: Sampling) -> Measured:
    """Decode one prompt, and return what was observed."""
    text = Measured(prompt)
    async for event in client.generate(prompt.text, sampling, observer=text):
        if isinstance(event, Tokens):
            text.tokens += event.ids
            text.arrivals += (time.monotonic() - text.began_s,) * len(event.ids)
        else:
            text.statistics = event.statistics
    return text


@dataclass(frozen=True, slots=True)
class Known:
    """The target's own texts by the prompt's id, from before the links, and the drafter."""

    texts: Mapping[str, tuple[int, ...]]
    drafter: str
    drafter_version: str | None


@dataclass(slots=True)
class Case:
    """One mode over one link, with what was observed: texts, steps of the verifier, and bytes on an emulated link."""

    mode: str
    length: int | None
    link: BenchLink
    emulator: LinkProcess | None
    client: Client
    texts: list[Measured] = field(default_factory=list)
    steps: list[StepTiming] = field(default_factory=list)
    up_bytes: int = 0
    down_bytes: int = 0


def run_of(case: Case, sessions: int, known: Known) -> BenchmarkRun:
    """Return the run of a case whose texts were decoded, `sessions` at once."""
    texts = case.texts
    began_s, ended_s = min(text.began_s for text in texts), max(text.began_s + text.seconds for text in texts)
    # One at a time, texts of other modes are in between.
    together = pooled(texts, None if sessions == 1 else ended_s - began_s)
    tokens, counts = together["tokens"], [text.statistics for text in texts]
    gaps = sorted(b - a for text in texts for a, b in itertools.pairwise(text.arrivals)) or [0.0]
    # Steps of at least half of the sessions, those that read prompts left out.
    usual = [s for s in case.steps if 2 * s.sessions >= sessions and s.rows <= USUAL_ROWS * s.sessions]
    return BenchmarkRun(
        mode=case.mode,
        link=case.link.record,
        length=case.length,
        **together,
        rows_per_token=sum(count.steps + count.verified for count in counts) / tokens,
        cloud_drafting_ms_per_token=1e3 * sum(count.cloud_drafting_s for count in counts) / tokens,
        edge_drafting_ms_per_token=1e3 * sum(count.drafting_s + count.reading_s for count in counts) / tokens,
        ttft_ms_p50=1e3 * median(text.arrivals[0] for text in texts),
        token_gap_ms_p50=1e3 * gaps[round(0.5 * (len(gaps) - 1))],
        token_gap_ms_p99=1e3 * gaps[round(0.99 * (len(gaps) - 1))],
        uplink_bytes_per_token=case.up_bytes / tokens if case.emulator else None,
        downlink_bytes_per_token=case.down_bytes / tokens if case.emulator else None,
        overhead_ms_p50=1e3 * median(step.overhead_s for step in usual) if usual else None,
        identical_to_cloud=all(text.tokens == known.texts[text.prompt.id] for text in texts),
    )


def bench(given: Given) -> int:
    """Run `outrider bench`."""
    with temporary_folder("outrider-bench-") as folder:
        return asyncio.run(Bench(given, folder).run())


def drafting_here(given: Given, modes: Sequence[str]) -> dict[str, Any]:
    """Return the verifier's settings by which it drafts where a mode needs that, with the edge's drafter."""
    own = given.fields(VerifierConfig)
    if own["draft_here"] == "off" or not set(WITH_DRAFTER_HERE) & set(modes):
        if "colocated" in modes:
            raise ConfigError("is off, but colocated needs it; leave that out of --modes", field="draft_here")
        return {"draft_here": "off"}
    drafter = given.fields(EdgeConfig)["drafter"]
    named = drafter if drafter not in ("auto", "all", "none") and "," not in drafter else ""
    return {"draft_here": "on", "draft_with": own["draft_with"] or named}


def edge_settings(mode: str, length: int | None) -> dict[str, Any]:
    """Return an edge's settings that make a mode, with the `length` of its drafts where it has one."""
    match mode:
        case "cloud":
            return {"drafter": "none", "drafts_here": 0}
        case "sync":
            patience = Patience(math.inf, length or 0)
            return {"window": length, "patience": patience, "drafts_here": 0, "chains": True}
        case "colocated":
            return {"drafter": "none", "drafts_here": length}
        case "edge":
            return {"drafts_here": 0}
    return {}


class Bench:
    """One benchmark from its options to its record."""

    def __init__(self, given: Given, folder: Path) -> None:
        """Check the options; `folder` is for files of the run."""
        self._given = given
        self._options = options = given(BenchSettings)
        self._console = Console(stderr=True, highlight=False)
        self._links = links_of(given(LinkListSettings))
        prompts = given(BuiltInPrompts)
        self._prompts = held_out(prompts.per_domain) if prompts.prompts is None else read_prompts(prompts.prompts)
        self._sampling = given(Sampling)
        self._config = given(VerifierConfig, **drafting_here(given, options.modes), min_step_s=options.min_step / 1e3)
        if options.json:
            check_file(options.json, "json")
        if options.plot:
            check_drawing("plot")
            check_file(options.plot, "plot")
        self._verifier = VerifierProcess(self._config, folder / "tokenizer.json")

    async def run(self) -> int:
        """Measure all runs, print them and write the results; return 1 if texts differ."""
        options = self._options
        async with self._verifier:
            known = await self._learn()
            runs = [run for link in self._links for run in await self._over(link, known)]
        made_in = environment(
            self._config,
            self._verifier.precision,
            max_tokens=self._sampling.max_tokens,
            seed=self._sampling.seed,
            drafter=known.drafter,
            drafter_version=known.drafter_version,
            drafter_threads=self._given.fields(EdgeConfig)["threads"],
            prompts=len(self._prompts),
        )
        benchmark = Benchmark(made_in, options.min_step, self._sampling.temperature, options.sessions, tuple(runs))
        Console(width=100).print(tables(benchmark))
        if options.json:
            save(benchmark, options.json)
        if options.plot:
            plot(benchmark, options.plot)
        different = [run for run in runs if not run.identical_to_cloud]
        if different:
            self._say(f"{len(different)} runs have other texts than cloud streaming")
        return 1 if different else 0

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim")

    async def _client(self, stack: AsyncExitStack, address: str, mode: str, length: int | None = None) -> Client:
        """Return a client of `mode`, with the `length` of its drafts, that has decoded its first tokens.

        Raises:
            ConfigError: the verifier is to draft alone, and has given no drafts.
        """
        config = self._given(
            EdgeConfig,
            verifier=address,
            model=self._config.target,
            tokenizer=self._verifier.tokenizer,
            logprobs=not self._options.no_logprobs,
            **edge_settings(mode, length),
        )
        client = await stack.enter_async_context(Client(config))
        few = replace(self._sampling, max_tokens=WARM_UP_TOKENS, min_tokens=0)
        text = await measure_text(client, self._prompts[0], few)
        drafted = any(commit.verified_here for commit, _ in text.commits)
        if mode == "colocated" and len(text.tokens) == WARM_UP_TOKENS and not drafted:
            raise ConfigError("has given no drafts; leave colocated out of --modes, or see the log", field="draft_here")
        return client

    async def _together(self, client: Client, prompts: Sequence[Prompt], sessions: int) -> list[Measured]:
        """Decode prompts, `sessions` at once, and return them in their order."""
        room = asyncio.Semaphore(sessions)

        async def one(prompt: Prompt) -> Measured:
            async with room:
                return await measure_text(client, prompt, self._sampling)

        return list(await asyncio.gather(*map(one, prompts)))

    async def _learn(self) -> Known:
        """Get the target's texts straight from the verifier, and the name of the drafter."""
        self._say(f"{len(self._prompts)} prompts: the target's own texts")
        async with AsyncExitStack() as stack:
            client = await self._client(stack, self._verifier.address, "cloud")
            texts = await self._together(client, self._prompts, len(self._prompts))
            drafting = await self._client(stack, self._verifier.address, "edge")
            version = ", ".join(each.version for each in await drafting.versions()) or None
        return Known({text.prompt.id: text.tokens for text in texts}, drafting.drafter_name, version)

    async def _over(self, link: BenchLink, known: Known) -> list[BenchmarkRun]:
        """Return the runs over one link, one for each mode and each length of its drafts."""
        self._say(f"link {link.label}")
        options = self._options
        lengths = {"sync": options.sync_length, "colocated": options.colocated_length}
        emulator: LinkProcess | None = None
        address = self._verifier.address
        async with AsyncExitStack() as stack:
            if not link.is_none:
                emulator = LinkProcess(address, link.shape, link.trace, seed=self._sampling.seed)
                address = (await stack.enter_async_context(emulator)).address
            cases = [
                Case(mode, length, link, emulator, await self._client(stack, address, mode, length))
                for mode in MODES
                if mode in options.modes
                for length in lengths.get(mode, (None,))
            ]
            share = 1 if options.sessions == 1 else len(self._prompts)
            # Each prompt in all modes before the next one, so that a slow moment of the machine meets them all.
            for first in range(0, len(self._prompts), share):
                for case in cases:
                    await self._measure(case, self._prompts[first : first + share])
        return [run_of(case, options.sessions, known) for case in cases]

    async def _measure(self, case: Case, prompts: Sequence[Prompt]) -> None:
        """Decode prompts, and add what was observed to `case`."""
        if case.emulator and case.link.trace:
            await case.emulator.play(case.link.trace)  # each mode meets the same moments
        before = await case.emulator.counters() if case.emulator else None
        await self._verifier.step_timings()
        case.texts += await self._together(case.client, prompts, self._options.sessions)
        case.steps += await self._verifier.step_timings()
        if case.emulator and before:
            after = await case.emulator.counters()
            case.up_bytes += after.up_bytes - before.up_bytes
            case.down_bytes += after.down_bytes - before.down_bytes

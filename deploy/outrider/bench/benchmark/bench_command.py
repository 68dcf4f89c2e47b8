"""`outrider bench`: ways of decoding the same prompts, side by side in one run, over emulated links."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.bench.bench_metrics import grouped
from outrider.bench.bench_settings import MODES, WARM_UP_TOKENS, BenchSettings, LinkListSettings
from outrider.bench.benchmark.bench_record import Benchmark, BenchmarkRun
from outrider.bench.benchmark.bench_table import tables
from outrider.bench.benchmark.bench_verifier import VerifierProcess
from outrider.bench.benchmark.html_report import write_report
from outrider.bench.benchmark.measure import Bytes, Measured, measure_text, run_of, step_fields, timeline_of
from outrider.bench.environment import environment
from outrider.bench.links import BenchLink, links_of
from outrider.bench.plot import check_drawing
from outrider.bench.record import check_file, save
from outrider.cloud.serving.runner import StepTiming
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.arguments import Given
from outrider.deploy.built_in_prompts import Prompt, held_out, read_prompts
from outrider.deploy.commands.decode_options import BuiltInPrompts
from outrider.deploy.link.link_process import LinkProcess
from outrider.deploy.process.termination import temporary_folder
from outrider.edge import Client, EdgeConfig, Sampling
from outrider.proto.errors import ConfigError
from outrider.proto.types import Patience

WITH_DRAFTER_HERE = ("colocated", "outrider")
PLANNED = ("edge", "outrider")  # modes whose edges choose by their goal how many drafts to send
LENGTH_FIELDS = {"sync": "sync_length", "colocated": "drafts_here"}


@dataclass(frozen=True, slots=True)
class Known:
    """The target's own texts, from before the links, and the drafter."""

    texts: Mapping[str, tuple[int, ...]]
    drafter: str
    drafter_version: str | None

    def identical(self, texts: Sequence[Measured]) -> bool:
        return all(text.tokens == self.texts[text.prompt.id] for text in texts)


@dataclass(slots=True)
class MeasuredMode:
    """One mode over one link, with what was observed: texts, steps of the verifier, and bytes on an emulated link."""

    mode: str
    length: int
    link: BenchLink
    emulator: LinkProcess | None
    client: Client
    texts: list[Measured] = field(default_factory=list)
    steps: list[StepTiming] = field(default_factory=list)
    carried: Bytes | None = None


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


def edge_settings(mode: str, length: int) -> dict[str, Any]:
    """Return an edge's settings that make a mode, with the `length` of its drafts where it has one."""
    match mode:
        case "cloud":
            return {"drafter": "none", "drafts_here": 0}
        case "sync":
            return {"window": length, "patience": Patience(math.inf, length), "drafts_here": 0, "chains": True}
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
        if options.report:
            check_drawing("report")
        self._common: dict[str, Any] = {
            "min_step_ms": options.min_step,
            "temperature": self._sampling.temperature,
            "sessions": options.sessions,
        }
        self._verifier = VerifierProcess(self._config, folder / "tokenizer.json")

    async def run(self) -> int:
        """Measure all runs, print them and write the results; return 1 if texts differ."""
        async with self._verifier:
            known = await self._learn()
            if self._options.mixed:
                runs = await self._mixed(known)
            else:
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
        benchmark = Benchmark(made_in, tuple(runs))
        Console(width=100).print(tables(benchmark))
        if self._options.json:
            save(benchmark, self._options.json)
        if self._options.report:
            self._say(f"report: {write_report(benchmark, self._options.report)}")
        different = [run for run in runs if run.identical_to_cloud is False]
        if different:
            self._say(f"{len(different)} runs have other texts than cloud streaming")
        return 1 if different else 0

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim")

    def _arms(self) -> list[tuple[str, int]]:
        """Return each mode with each length of its drafts, 0 where it has none."""
        lengths = {"sync": self._options.sync_length, "colocated": self._options.colocated_length}
        return [(mode, length) for mode in MODES if mode in self._options.modes for length in lengths.get(mode, (0,))]

    # --- clients ---

    async def _join(self, stack: AsyncExitStack, link: BenchLink) -> tuple[LinkProcess | None, str]:
        """Return the emulator of the link, if there is anything to emulate, and the address for edges."""
        address = self._verifier.address
        if link.is_none:
            return None, address
        emulator = LinkProcess(address, link.shape, link.trace, seed=self._sampling.seed)
        await stack.enter_async_context(emulator)
        return emulator, emulator.address

    async def _client(self, stack: AsyncExitStack, address: str, mode: str, length: int = 0) -> Client:
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

    # --- before the links ---

    async def _learn(self) -> Known:
        """Get the target's texts straight from the verifier, and the name of the drafter."""
        self._say(f"{len(self._prompts)} prompts: the target's own texts")
        async with AsyncExitStack() as stack:
            client = await self._client(stack, self._verifier.address, "cloud")
            texts = await self._together(client, self._prompts, len(self._prompts))
            drafting = await self._client(stack, self._verifier.address, "edge")
        drafter = drafting.drafter
        version = drafter.version if drafter else None
        return Known({text.prompt.id: text.tokens for text in texts}, drafting.drafter_name, version)

    # --- one link ---

    async def _over(self, link: BenchLink, known: Known) -> list[BenchmarkRun]:
        """Return the runs over one link."""
        self._say(f"link {link.label}")
        async with AsyncExitStack() as stack:
            emulator, address = await self._join(stack, link)
            arms = [
                MeasuredMode(mode, length, link, emulator, await self._client(stack, address, mode, length))
                for mode, length in self._arms()
            ]
            share = 1 if self._options.sessions == 1 else len(self._prompts)
            # Each prompt in all modes before the next one, so that a slow moment of the machine meets them all.
            for first in range(0, len(self._prompts), share):
                for arm in arms:
                    await self._measure(arm, self._prompts[first : first + share])
        return [run for arm in arms for run in self._runs(arm, known)]

    async def _measure(self, arm: MeasuredMode, prompts: Sequence[Prompt]) -> None:
        """Decode prompts, and add what was observed to `arm`."""
        if arm.emulator and arm.link.trace:
            await arm.emulator.play(arm.link.trace)  # each mode meets the same moments
        before = await arm.emulator.counters() if arm.emulator else None
        await self._verifier.step_timings()
        arm.texts += await self._together(arm.client, prompts, self._options.sessions)
        arm.steps += await self._verifier.step_timings()
        if arm.emulator and before:
            after = await arm.emulator.counters()
            up, down = arm.carried or (0, 0)
            arm.carried = (up + after.up_bytes - before.up_bytes, down + after.down_bytes - before.down_bytes)

    def _fields(self, mode: str, length: int) -> dict[str, Any]:
        """Return the fields of a run by its mode, the length of its drafts, and the options."""
        fields: dict[str, Any] = {"goal": self._config.goal.name.lower() if mode in PLANNED else None}
        return fields | ({LENGTH_FIELDS[mode]: length} if mode in LENGTH_FIELDS else {}) | self._common

    def _runs(self, arm: MeasuredMode, known: Known) -> list[BenchmarkRun]:
        """Return a run of all prompts, and one of each domain where there are several."""
        texts, link = arm.texts, arm.link
        fields: dict[str, Any] = {
            **step_fields(arm.steps, self._options.sessions),
            "identical_to_cloud": known.identical(texts),
            **self._fields(arm.mode, arm.length),
        }
        timeline = timeline_of(texts[len(texts) // 2], link.shape.rtt_s / 2)
        runs = [run_of(arm.mode, link.record, texts, arm.carried, timeline=timeline, **fields)]
        by_domain = grouped(texts, lambda text: text.prompt.domain)
        if len(by_domain) > 1 and self._options.sessions == 1:
            for domain, own in by_domain.items():
                run = run_of(arm.mode, link.record, own, None, domain=domain, **fields)
                runs.append(replace(run, token_gaps_ms=None))
        return runs

    # --- many sessions on unlike links ---

    async def _mixed(self, known: Known) -> list[BenchmarkRun]:
        """Run all sessions at once, with the links dealt out among them."""
        sessions, record = self._options.sessions, self._links[0].record
        record = replace(record, rtt_ms=0.0, trace=",".join(link.label for link in self._links))
        runs = []
        for mode, length in self._arms():
            if mode == "sync":
                continue  # a length for each link
            self._say(f"{sessions} sessions on {len(self._links)} links, {mode}")
            async with AsyncExitStack() as stack:
                addresses = [(await self._join(stack, link))[1] for link in self._links]
                clients = [await self._client(stack, address, mode, length) for address in addresses]
                chosen = zip(range(sessions), itertools.cycle(clients), itertools.cycle(self._prompts), strict=False)
                await self._verifier.step_timings()
                texts = await asyncio.gather(*(measure_text(c, prompt, self._sampling) for _, c, prompt in chosen))
                steps = await self._verifier.step_timings()
            fields = step_fields(steps, sessions) | self._fields(mode, length)
            identical = known.identical(texts)
            runs.append(run_of(mode, record, texts, None, identical_to_cloud=identical, **fields))
        return runs

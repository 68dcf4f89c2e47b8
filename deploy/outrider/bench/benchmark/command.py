"""`outrider bench`: ways of decoding the same prompts, side by side in one run, over emulated links."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from tokenizers import Tokenizer

from outrider.bench.benchmark.library import (
    LibraryProcess,
    LibraryText,
    check_sampling,
    drafter_folder_of,
    write_drafter,
)
from outrider.bench.benchmark.measure import Measured, measure_text
from outrider.bench.benchmark.record import Benchmark, BenchmarkRun
from outrider.bench.benchmark.replays import WARM_UP_TOKENS, Replays, fields_of
from outrider.bench.benchmark.report import write_report
from outrider.bench.benchmark.runs import (
    Bytes,
    costs_of,
    costs_together,
    library_run,
    run_of,
    step_fields,
    timeline_of,
    traces_of,
)
from outrider.bench.benchmark.table import tables
from outrider.bench.benchmark.verifier import VerifierProcess
from outrider.bench.commands import BenchSettings, LinkListSettings
from outrider.bench.environment import environment
from outrider.bench.links import BenchLink, links_of
from outrider.bench.metrics import grouped
from outrider.bench.outputs import check_file
from outrider.bench.plot import check_drawing
from outrider.bench.record import save
from outrider.bench.replay.optimum import colocated, pearl, pearl_length, synchronous
from outrider.bench.replay.traces import HitTrace
from outrider.bench.simulator.clock import Costs
from outrider.cloud.config import VerifierConfig
from outrider.cloud.family_index import resolve_target
from outrider.cloud.precision import dtype_of
from outrider.cloud.step_timing import StepTiming
from outrider.deploy.arguments import Given
from outrider.deploy.commands.decoding import BuiltInPrompts
from outrider.deploy.commands.operating import LinkSettings
from outrider.deploy.link.process import LinkProcess
from outrider.deploy.prompts import Prompt, held_out, read_prompts
from outrider.deploy.termination import temporary_folder
from outrider.drafters import embedded_packages
from outrider.edge import Client, EdgeConfig, Sampling
from outrider.proto.errors import ConfigError

MEASURED = ("cloud", "sync", "pearl", "colocated", "edge-chains", "edge", "chains", "outrider")
ALONE = ("sync", "pearl")  # modes of one link, not of several at once
WITH_DRAFTER_HERE = ("colocated", "chains", "outrider")
WITHOUT_EDGES = ("cloud", "colocated")  # that draft, and so take time from the steps on the same cores
LIBRARY = ("hf-generate", "hf-assisted")
SAMPLE_LENGTH = 4  # drafts before every step where the verifier's drafting is timed


@dataclass(frozen=True, slots=True)
class Known:
    """Data from before the links: the texts, the drafter's hits in them, and the costs of the machines.

    Attributes:
        colocated_length: drafts before every step of a drafter beside the target; 0: the verifier has none.
    """

    texts: Mapping[str, tuple[int, ...]]
    traces: Sequence[HitTrace]
    costs: Costs
    drafter: str
    drafter_version: str | None
    colocated_length: int = 0

    def identical(self, texts: Sequence[Measured]) -> bool:
        """Return whether each text is the target's own."""
        return all(text.tokens == self.texts[text.prompt.id] for text in texts)


@dataclass(slots=True)
class MeasuredMode:
    """One mode over one link, with what was observed: texts, steps of the verifier, and bytes on an emulated link."""

    mode: str
    link: BenchLink
    emulator: LinkProcess | None
    client: Client
    texts: list[Measured] = field(default_factory=list)
    steps: list[StepTiming] = field(default_factory=list)
    carried: Bytes | None = None


def described(costs: Costs) -> str:
    """Return the costs of steps and drafting, for a progress line."""
    return (
        f"step {costs.step_s * 1e3:.1f} ms + {costs.row_s * 1e3:.2f} ms a row, {costs.commit_s * 1e3:.1f} ms between "
        f"steps, drafting {costs.drafting_s * 1e3:.2f} ms a token, beside the target {costs.drafting_here_s * 1e3:.2f}"
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


def edge_settings(mode: str, length: int) -> dict[str, Any]:
    """Return an edge's settings that make a mode, with the `length` of its drafts where it has one."""
    match mode:
        case "cloud":
            return {"drafter": "none", "drafts_here": 0}
        case "sync":
            return {"window": length, "patience": synchronous(length).patience, "drafts_here": 0, "chains": True}
        case "pearl":
            policy = pearl(length)
            most = policy.max_drafts
            blocks = {"window": f"pearl:{length}", "patience": policy.patience, "max_drafts": most}
            return {**blocks, "drafts_here": 0, "chains": True}
        case "colocated":
            return {"drafter": "none", "drafts_here": length}
        case "edge" | "edge-chains":
            return {"drafts_here": 0, "chains": mode == "edge-chains"}
        case "chains":
            return {"chains": True}
    return {}


class Bench:
    """One benchmark from its options to its record."""

    def __init__(self, given: Given, folder: Path) -> None:
        """Check the options; `folder` is for files of the run."""
        self._given = given
        self._folder = folder
        self._options = options = given(BenchSettings)
        self._console = Console(stderr=True, highlight=False)
        self._links = links_of(given(LinkListSettings), given.fields(LinkSettings)["tun"], options.loss)
        prompts = given(BuiltInPrompts)
        self._prompts = held_out(prompts.per_domain) if prompts.prompts is None else read_prompts(prompts.prompts)
        self._sampling = given(Sampling)
        self._config = given(VerifierConfig, **drafting_here(given, options.modes), min_step_s=options.min_step / 1e3)
        self._check_library(given.fields(EdgeConfig)["drafter"])
        if options.replay_edges and not options.mixed:
            raise ConfigError("replays sessions on unlike links; give --mixed, too", field="replay_edges")
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
            hf_drafter=str(self._options.hf_drafter) if self._options.hf_drafter else None,
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

    @property
    def _drafts_here(self) -> bool:
        """Whether the verifier has a drafter of its own."""
        return self._config.draft_here == "on"

    # --- clients ---

    async def _join(self, stack: AsyncExitStack, link: BenchLink) -> tuple[LinkProcess | None, str]:
        """Return the emulator of the link, if there is anything to emulate, and the address for edges."""
        address = self._verifier.address
        if link.is_none:
            return None, address
        emulator = LinkProcess(address, link.shape, link.trace, seed=self._sampling.seed, faults=link.faults)
        await stack.enter_async_context(emulator)
        return emulator, emulator.address

    async def _client(self, stack: AsyncExitStack, address: str, mode: str, length: int = 0) -> Client:
        """Return a client of `mode`, with the `length` of its drafts, that has decoded its first tokens."""
        config = self._given(
            EdgeConfig,
            verifier=address,
            model=self._config.target,
            tokenizer=self._verifier.tokenizer,
            logprobs=not self._options.no_logprobs,
            **edge_settings(mode, length),
        )
        client = await stack.enter_async_context(Client(config))
        await measure_text(client, self._prompts[0], replace(self._sampling, max_tokens=WARM_UP_TOKENS, min_tokens=0))
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
        """Get the target's texts straight from the verifier, and the costs from a few drafted ones."""
        self._say(f"{len(self._prompts)} prompts: the target's own texts, and the drafter's hits in them")
        verifier = self._verifier
        async with AsyncExitStack() as stack:
            client = await self._client(stack, verifier.address, "cloud")
            plain = await self._together(client, self._prompts, len(self._prompts))
        async with AsyncExitStack() as stack:
            client = await self._client(stack, verifier.address, "edge")
            await verifier.step_timings()
            drafted = await self._together(client, self._prompts[:4], 1)
            steps = await verifier.step_timings()
            name, drafter = client.drafter_name, client.drafter
            traces = []
            if drafter is not None:
                traces = await asyncio.to_thread(traces_of, plain, client, drafter, self._sampling)
        round_trip_s = min(text.statistics.round_trip_s for text in drafted)
        costs = costs_of(drafted, steps, min_step_s=self._config.min_step_s, round_trip_s=round_trip_s)
        if self._drafts_here:
            costs = replace(costs, drafting_here_s=await self._drafting_here_s())
        self._say(f"{described(costs)}, gRPC and event loops {round_trip_s * 1e3:.2f} ms a round trip")
        texts = {text.prompt.id: text.tokens for text in plain}
        known = Known(texts, traces, costs, name, drafter.version if drafter else None)
        return replace(known, colocated_length=self._colocated_length(known))

    async def _drafting_here_s(self) -> float:
        """Return the time of a token that the verifier's own drafter drafts, seconds.

        Raises:
            ConfigError: it has no drafter of its own.
        """
        async with AsyncExitStack() as stack:
            client = await self._client(stack, self._verifier.address, "colocated", SAMPLE_LENGTH)
            texts = await self._together(client, self._prompts[:4], 1)
        # The first commits hold the reading of the prompt.
        commits = [commit for text in texts for commit, _ in text.commits[2:]]
        drafts = sum(commit.verified_here for commit in commits)
        if not drafts:
            raise ConfigError("has given no drafts; leave colocated out of --modes, or see the log", field="draft_here")
        return sum(commit.timing.drafting_s for commit in commits) / drafts

    # --- one link ---

    async def _over(self, link: BenchLink, known: Known) -> list[BenchmarkRun]:
        """Return the runs over one link: measured ones, replayed ones, and those of transformers."""
        self._say(f"link {link.label}")
        modes = self._options.modes
        lengths = self._lengths(link, known)
        async with AsyncExitStack() as stack:
            emulator, address = await self._join(stack, link)
            arms = [
                MeasuredMode(mode, link, emulator, await self._client(stack, address, mode, lengths.get(mode, 0)))
                for mode in MEASURED
                if mode in modes
            ]
            library = self._library_modes(link)
            tokenizer = Tokenizer.from_file(str(self._verifier.tokenizer)) if library else None
            prompt_ids = [tokenizer.encode(prompt.text).ids for prompt in self._prompts] if tokenizer else []
            models = {mode: await self._library(stack, mode, known.drafter, prompt_ids[0]) for mode in library}
            by_library: dict[str, list[LibraryText]] = {mode: [] for mode in models}
            share = 1 if self._options.sessions == 1 else len(self._prompts)
            # Each prompt in all modes before the next one, so that a slow moment of the machine meets them all.
            for first in range(0, len(self._prompts), share):
                for arm in arms:
                    await self._measure(arm, self._prompts[first : first + share])
                for mode, model in models.items():
                    by_library[mode] += [await model.text(ids) for ids in prompt_ids[first : first + share]]
        runs = [run for arm in arms for run in self._runs(arm, known, lengths)]
        runs += self._replayed(link, known, lengths)
        return runs + [library_run(mode, texts, **self._common) for mode, texts in by_library.items()]

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

    def _runs(self, arm: MeasuredMode, known: Known, lengths: Mapping[str, int]) -> list[BenchmarkRun]:
        """Return a run of all prompts, and one of each domain where there are several."""
        texts, link = arm.texts, arm.link
        fields: dict[str, Any] = {
            **step_fields(arm.steps, self._options.sessions),
            "identical_to_cloud": known.identical(texts),
            **fields_of(arm.mode, lengths, self._config.goal),
            **self._common,
        }
        timeline = timeline_of(texts[len(texts) // 2], link.shape.rtt_s / 2)
        runs = [run_of(arm.mode, link.record, texts, arm.carried, timeline=timeline, **fields)]
        by_domain = grouped(texts, lambda text: text.prompt.domain)
        if len(by_domain) > 1 and self._options.sessions == 1:
            for domain, own in by_domain.items():
                run = run_of(arm.mode, link.record, own, None, domain=domain, **fields)
                runs.append(replace(run, token_gaps_ms=None))
        return runs

    # --- replay ---

    def _replays(self, known: Known) -> Replays:
        config, logprobs = self._config, not self._options.no_logprobs
        chains = tuple(mode for mode in self._options.modes if mode.endswith("chains"))
        return Replays(known.traces, known.costs, config.goal, self._drafts_here, config.draft_price, logprobs, chains)

    def _lengths(self, link: BenchLink, known: Known) -> dict[str, int]:
        """Return the drafts of each mode that has a length; 0: it is left out."""
        blocks = self._options.pearl_length or pearl_length(known.costs) if "pearl" in self._options.modes else 0
        return {"sync": self._sync_length(link, known), "pearl": blocks, "colocated": known.colocated_length}

    def _sync_length(self, link: BenchLink, known: Known) -> int:
        if self._options.sync_length or "sync" not in self._options.modes:
            return self._options.sync_length
        return self._replays(known).best_length(synchronous, link)

    def _colocated_length(self, known: Known) -> int:
        """Return the best number of drafts before every step, which no link changes."""
        if self._options.colocated_length or "colocated" not in self._options.modes:
            return self._options.colocated_length
        return self._replays(known).best_length(colocated, self._links[0])

    def _replayed(self, link: BenchLink, known: Known, lengths: Mapping[str, int]) -> list[BenchmarkRun]:
        alone = self._options.sessions == 1 and link.faults is None  # a replay knows no packets
        if "optimum" not in self._options.modes or not alone or not known.traces:
            return []
        replays = self._replays(known)
        return [replays.optimum(link, self._common), *replays.modes(link, lengths, self._common)]

    # --- many sessions on unlike links ---

    async def _mixed(self, known: Known) -> list[BenchmarkRun]:
        """Run all sessions at once, with the links dealt out among them."""
        sessions, record = self._options.sessions, self._links[0].record
        record = replace(record, rtt_ms=0.0, trace=",".join(link.label for link in self._links))
        runs, alone = [], list[StepTiming]()
        lengths = {"colocated": known.colocated_length}
        for mode in (mode for mode in MEASURED if mode in self._options.modes and mode not in ALONE):
            self._say(f"{sessions} sessions on {len(self._links)} links, {mode}")
            async with AsyncExitStack() as stack:
                addresses = [(await self._join(stack, link))[1] for link in self._links]
                clients = [await self._client(stack, address, mode, lengths.get(mode, 0)) for address in addresses]
                chosen = zip(range(sessions), itertools.cycle(clients), itertools.cycle(self._prompts), strict=False)
                await self._verifier.step_timings()
                texts = await asyncio.gather(*(measure_text(c, prompt, self._sampling) for _, c, prompt in chosen))
                steps = await self._verifier.step_timings()
            if mode in WITHOUT_EDGES:
                alone += steps
            identical = known.identical(texts)
            fields = step_fields(steps, sessions) | fields_of(mode, lengths, self._config.goal) | self._common
            runs.append(run_of(mode, record, texts, None, identical_to_cloud=identical, **fields))
        if self._options.replay_edges and known.traces:
            replays = replace(self._replays(known), costs=costs_together(known.costs, alone, sessions))
            self._say(f"edges on machines of their own, and {described(replays.costs)}")
            modes = self._options.modes
            runs += await asyncio.to_thread(replays.together, self._links, sessions, modes, record, self._common)
        return runs

    # --- the library ---

    def _check_library(self, drafter: str) -> None:
        """Refuse now rather than at the end what transformers cannot run."""
        modes = {mode for link in self._links for mode in self._library_modes(link)}
        if modes:
            check_sampling(self._sampling)
        if "hf-assisted" in modes and (self._options.hf_drafter or drafter != "auto"):
            self._assistant(drafter)

    def _library_modes(self, link: BenchLink) -> list[str]:
        """Return the modes of transformers to run beside `link`: it knows neither links nor a shortest step."""
        runs = link.is_none and not self._config.min_step_s
        return [mode for mode in LIBRARY if mode in self._options.modes and runs]

    def _assistant(self, drafter: str) -> Path:
        if self._options.hf_drafter is None and drafter in embedded_packages():
            return write_drafter(drafter, self._folder / "assistant")
        return drafter_folder_of(self._options.hf_drafter)

    async def _library(self, stack: AsyncExitStack, mode: str, drafter: str, warm_up: Sequence[int]) -> LibraryProcess:
        process = LibraryProcess(
            Path(resolve_target(self._config.target)),
            self._sampling,
            assistant_folder=self._assistant(drafter) if mode == "hf-assisted" else None,
            threads=self._config.torch_threads,
            dtype=dtype_of(self._verifier.precision),
        )
        await stack.enter_async_context(process)
        await process.text(warm_up, WARM_UP_TOKENS)
        return process

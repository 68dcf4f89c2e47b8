"""`outrider bench`: ways of decoding the same prompts, side by side in one run, over emulated links."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.bench.benchmark.library import LibraryProcess, LibraryText, drafter_folder_of
from outrider.bench.benchmark.measure import Measured, measure_text
from outrider.bench.benchmark.record import Benchmark, Run
from outrider.bench.benchmark.report import write_report
from outrider.bench.benchmark.runs import (
    Bytes,
    costs_of,
    library_run,
    replayed_run,
    run_of,
    step_fields,
    timeline_of,
    traces_of,
)
from outrider.bench.benchmark.table import tables
from outrider.bench.benchmark.verifier import VerifierProcess
from outrider.bench.commands import BenchSettings, LinkListSettings
from outrider.bench.environment import Environment, environment
from outrider.bench.links import BenchLink, links_of
from outrider.bench.record import save
from outrider.bench.replay.optimum import best_in_hindsight, best_synchronous, synchronous
from outrider.bench.replay.traced import Policy, ShapeAt, replay
from outrider.bench.replay.traces import HitTrace
from outrider.bench.simulator.costs import Costs
from outrider.cloud.config import VerifierConfig
from outrider.cloud.family_index import drafter_folder, resolve_target
from outrider.cloud.step_timing import StepTiming
from outrider.deploy.arguments import Given
from outrider.deploy.commands.decoding import BuiltInPrompts
from outrider.deploy.link.process import LinkProcess
from outrider.deploy.prompts import Prompt, held_out, read_prompts
from outrider.edge import Client, EdgeConfig, Sampling

MEASURED = ("cloud", "sync", "outrider")
LIBRARY = ("hf-generate", "hf-assisted")
WARM_UP_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Known:
    """Data from before the links: the texts, the drafter's hits in them, and the costs of the machines."""

    texts: dict[str, tuple[int, ...]]
    traces: list[HitTrace]
    costs: Costs
    drafter: str
    drafter_version: str | None


@dataclass(frozen=True, slots=True)
class Seen:
    """Observations of each mode over one link: texts, steps of the verifier, and bytes on the link."""

    texts: dict[str, list[Measured]]
    steps: dict[str, list[StepTiming]]
    carried: dict[str, Bytes]
    by_library: dict[str, list[LibraryText]]


def bench(given: Given) -> int:
    """Run `outrider bench`."""
    return asyncio.run(Bench(given).run())


class Bench:
    """One benchmark from its options to its record."""

    def __init__(self, given: Given) -> None:
        options = given(BenchSettings)
        self._given = given
        self._options = options
        self._console = Console(stderr=True, highlight=False)
        self._links = links_of(given(LinkListSettings))
        self._modes = options.modes
        prompts = given(BuiltInPrompts)
        self._prompts = held_out(prompts.per_domain) if prompts.prompts is None else read_prompts(prompts.prompts)
        self._sampling = given(Sampling)
        self._verifier = given(VerifierConfig, min_step_s=options.min_step / 1e3)
        self._goal = self._verifier.goal.name.lower()
        drafter = given.fields(EdgeConfig)["drafter"]
        self._min_step_s = options.min_step / 1e3
        assisted = any("hf-assisted" in self._library_modes(link) for link in self._links)
        if assisted and drafter != "auto":
            drafter_folder_of(options.hf_drafter or drafter_folder(drafter))  # fails now rather than at the end
        self._common = {
            "min_step_ms": options.min_step,
            "temperature": self._sampling.temperature,
            "sessions": options.sessions,
        }

    async def run(self) -> int:
        """Measure all runs, print them and write the results; return 1 if texts differ."""
        runs: list[Run] = []
        with tempfile.TemporaryDirectory(prefix="outrider-bench-") as folder:
            async with VerifierProcess(self._verifier, Path(folder) / "tokenizer.json") as verifier:
                known = await self._learn(verifier)
                if self._options.mixed:
                    runs += await self._mixed(verifier, known)
                else:
                    for link in self._links:
                        self._say(f"link {link.label}")
                        runs += await self._over(link, verifier, known)
        benchmark = Benchmark(self._environment(known.drafter, known.drafter_version), tuple(runs))
        Console(width=100).print(tables(benchmark))
        if self._options.json:
            save(benchmark, self._options.json)
        if self._options.report:
            self._say(f"report: {write_report(benchmark, self._options.report)}")
        different = [run for run in runs if run.identical_to_cloud is False]
        if different:
            self._say(f"{len(different)} runs have other texts than cloud streaming")
        return 1 if different else 0

    def _library_modes(self, link: BenchLink) -> list[str]:
        """Return the modes of transformers to run beside `link`: it knows neither links nor a shortest step."""
        return [mode for mode in LIBRARY if mode in self._modes and link.is_none and not self._min_step_s]

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim")

    # --- clients ---

    def _edge(self, verifier: VerifierProcess, address: str, mode: str, length: int = 0) -> EdgeConfig:
        options = self._options
        policy = synchronous(length) if mode == "sync" else None
        chosen: dict[str, Any] = {"drafter": "none"} if mode == "cloud" else {}
        if mode == "sync":
            chosen = {"window": length}
        return self._given(
            EdgeConfig,
            verifier=address,
            model=self._verifier.target,
            tokenizer=verifier.tokenizer,
            patience=policy.patience if policy else None,
            logprobs=not options.no_logprobs,
            **chosen,
        )

    @asynccontextmanager
    async def _link(self, link: BenchLink, verifier: VerifierProcess) -> AsyncIterator[LinkProcess | None]:
        if link.is_none:
            yield None
            return
        async with LinkProcess(verifier.address, link.shape, link.trace, seed=self._sampling.seed) as process:
            yield process

    # --- before the links ---

    async def _learn(self, verifier: VerifierProcess) -> Known:
        """Get the target's texts straight from the verifier, and the costs from a few drafted ones."""
        self._say(f"{len(self._prompts)} prompts: the target's own texts, and the drafter's hits in them")
        async with Client(self._edge(verifier, verifier.address, "cloud")) as client:
            plain = await self._together(client, self._prompts, len(self._prompts))
        async with Client(self._edge(verifier, verifier.address, "outrider")) as client:
            await measure_text(client, self._prompts[0], replace(self._sampling, max_tokens=WARM_UP_TOKENS))
            await verifier.step_timings()
            drafted = [await measure_text(client, prompt, self._sampling) for prompt in self._prompts[:4]]
            steps = await verifier.step_timings()
            version = client.drafter.version if client.drafter else None
            traces = []
            if client.drafter is not None:
                traces = await asyncio.to_thread(traces_of, plain, client, client.drafter, self._sampling)
        round_trip_s = min(text.statistics.round_trip_s for text in drafted)
        costs = costs_of(drafted, steps, min_step_s=self._min_step_s, round_trip_s=round_trip_s)
        self._say(
            f"step {costs.step_s * 1e3:.1f} ms + {costs.row_s * 1e3:.2f} ms a row, drafting "
            f"{costs.drafting_s * 1e3:.2f} ms a token, gRPC and event loops {round_trip_s * 1e3:.2f} ms a round trip"
        )
        return Known({text.prompt.id: text.tokens for text in plain}, traces, costs, client.drafter_name, version)

    # --- one link ---

    async def _over(self, link: BenchLink, verifier: VerifierProcess, known: Known) -> list[Run]:
        shape_at = link.shape_at
        length = self._sync_length(known, shape_at) if "sync" in self._modes else 0
        async with AsyncExitStack() as stack:
            process = await stack.enter_async_context(self._link(link, verifier))
            address = process.address if process else verifier.address
            clients = {}
            for mode in (mode for mode in MEASURED if mode in self._modes):
                client = await stack.enter_async_context(Client(self._edge(verifier, address, mode, length)))
                await measure_text(client, self._prompts[0], replace(self._sampling, max_tokens=WARM_UP_TOKENS))
                clients[mode] = client
            library = {
                mode: await stack.enter_async_context(self._library(mode, known.drafter, self._prompt_ids(verifier)[0]))
                for mode in self._library_modes(link)
            }
            seen = await self._measure(clients, library, process, link, verifier)
        runs = []
        for mode, measured in seen.texts.items():
            fields: dict[str, object] = {
                **step_fields(seen.steps[mode], self._options.sessions),
                "identical_to_cloud": self._identical(measured, known),
                "goal": self._goal if mode == "outrider" else None,
                "sync_length": length if mode == "sync" else None,
            }
            runs += self._runs(mode, link, measured, seen.carried.get(mode), fields)
        runs += self._replayed(link, known, shape_at)
        return runs + [library_run(mode, texts, **self._common) for mode, texts in seen.by_library.items()]

    async def _measure(
        self,
        clients: dict[str, Client],
        library: dict[str, LibraryProcess],
        process: LinkProcess | None,
        link: BenchLink,
        verifier: VerifierProcess,
    ) -> Seen:
        """Decode each prompt in all modes before the next, so that a slow moment of the machine meets them all."""
        seen = Seen({mode: [] for mode in clients}, {mode: [] for mode in clients}, {}, {mode: [] for mode in library})
        prompt_ids = self._prompt_ids(verifier) if library else []
        share = 1 if self._options.sessions == 1 else len(self._prompts)
        for first in range(0, len(self._prompts), share):
            for mode, client in clients.items():
                if process and link.trace:
                    await process.play(link.trace)  # each mode meets the same moments
                before = await process.counters() if process else None
                await verifier.step_timings()
                seen.texts[mode] += await self._together(
                    client, self._prompts[first : first + share], self._options.sessions
                )
                seen.steps[mode] += await verifier.step_timings()
                if process and before:
                    after = await process.counters()
                    up, down = seen.carried.get(mode, (0, 0))
                    seen.carried[mode] = (
                        up + after.up_bytes - before.up_bytes,
                        down + after.down_bytes - before.down_bytes,
                    )
            for mode, model in library.items():
                seen.by_library[mode] += [await model.text(ids) for ids in prompt_ids[first : first + share]]
        return seen

    async def _together(self, client: Client, prompts: Sequence[Prompt], sessions: int) -> list[Measured]:
        """Decode prompts, `sessions` at once, and return them in their order."""
        room = asyncio.Semaphore(sessions)

        async def one(prompt: Prompt) -> Measured:
            async with room:
                return await measure_text(client, prompt, self._sampling)

        return list(await asyncio.gather(*(one(prompt) for prompt in prompts)))

    def _runs(
        self, mode: str, link: BenchLink, texts: list[Measured], carried: Bytes | None, fields: dict[str, object]
    ) -> list[Run]:
        """Return a run of all prompts, and one of each domain where there are several."""
        timeline = timeline_of(texts[len(texts) // 2], link.shape.rtt_s / 2)
        runs = [run_of(mode, link.record, texts, carried, timeline=timeline, **fields, **self._common)]
        domains = list(dict.fromkeys(text.prompt.domain for text in texts))
        if len(domains) > 1 and self._options.sessions == 1:
            for domain in domains:
                in_domain = [text for text in texts if text.prompt.domain == domain]
                runs.append(run_of(mode, link.record, in_domain, None, domain=domain, **fields, **self._common))
        return runs

    def _identical(self, texts: Sequence[Measured], known: Known) -> bool:
        return all(text.tokens == known.texts[text.prompt.id] for text in texts)

    # --- replay ---

    def _sync_length(self, known: Known, shape_at: ShapeAt) -> int:
        if self._options.sync_length:
            return int(self._options.sync_length)
        length, _ = best_synchronous(known.traces, shape_at, known.costs, warm_up_tokens=WARM_UP_TOKENS)
        return length

    def _replayed(self, link: BenchLink, known: Known, shape_at: ShapeAt) -> list[Run]:
        if "optimum" not in self._modes or self._options.sessions > 1 or not known.traces:
            return []
        goal = self._verifier.goal
        best = best_in_hindsight(known.traces, shape_at, known.costs, warm_up_tokens=WARM_UP_TOKENS)
        runs = [replayed_run("optimum", link.record, best.outcomes, **self._common)]
        logprobs = not self._options.no_logprobs
        policies = {
            "cloud": Policy(drafting=False, logprobs=logprobs),
            "outrider": Policy(goal=goal, logprobs=logprobs),
        }
        for mode, policy in policies.items():
            outcomes = replay(known.traces, shape_at, known.costs, policy, warm_up_tokens=WARM_UP_TOKENS)
            runs.append(
                replayed_run(
                    mode, link.record, outcomes, goal=self._goal if mode == "outrider" else None, **self._common
                )
            )
        return runs

    # --- many sessions on unlike links ---

    async def _mixed(self, verifier: VerifierProcess, known: Known) -> list[Run]:
        """Run all sessions at once, with the links dealt out among them."""
        runs = []
        for mode in (mode for mode in ("cloud", "outrider") if mode in self._modes):
            self._say(f"{self._options.sessions} sessions on {len(self._links)} links, {mode}")
            async with AsyncExitStack() as stack:
                clients, processes = [], []
                for link in self._links:
                    process = await stack.enter_async_context(self._link(link, verifier))
                    address = process.address if process else verifier.address
                    client = await stack.enter_async_context(Client(self._edge(verifier, address, mode)))
                    await measure_text(client, self._prompts[0], replace(self._sampling, max_tokens=WARM_UP_TOKENS))
                    clients.append(client)
                    processes.append(process)
                texts = await self._deal(clients)
            fields = {"identical_to_cloud": self._identical(texts, known)}
            record = replace(self._links[0].record, rtt_ms=0.0, trace=",".join(link.label for link in self._links))
            runs.append(run_of(mode, record, texts, None, **fields, **self._common))
        return runs

    async def _deal(self, clients: Sequence[Client]) -> list[Measured]:
        async def one(i: int) -> Measured:
            prompt = self._prompts[i % len(self._prompts)]
            return await measure_text(clients[i % len(clients)], prompt, self._sampling)

        return list(await asyncio.gather(*(one(i) for i in range(self._options.sessions))))

    # --- the library ---

    @asynccontextmanager
    async def _library(self, mode: str, drafter: str, warm_up: Sequence[int]) -> AsyncIterator[LibraryProcess]:
        options = self._options
        assistant = (options.hf_drafter or drafter_folder(drafter)) if mode == "hf-assisted" else None
        async with LibraryProcess(
            Path(resolve_target(self._verifier.target)),
            Sampling(
                temperature=self._sampling.temperature,
                max_tokens=self._sampling.max_tokens,
                seed=self._sampling.seed,
            ),
            assistant_folder=drafter_folder_of(assistant) if mode == "hf-assisted" else None,
            threads=self._verifier.threads,
            dtype=self._verifier.dtype,
        ) as process:
            await process.text(warm_up, WARM_UP_TOKENS)
            yield process

    def _prompt_ids(self, verifier: VerifierProcess) -> list[tuple[int, ...]]:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(verifier.tokenizer))
        return [tuple(tokenizer.encode(prompt.text).ids) for prompt in self._prompts]

    def _environment(self, drafter: str, version: str | None) -> Environment:
        options = self._options
        return environment(
            target=self._verifier.target,
            dtype=self._verifier.dtype,
            max_tokens=self._sampling.max_tokens,
            seed=self._sampling.seed,
            drafter=drafter,
            drafter_version=version,
            target_threads=self._verifier.threads or None,
            drafter_threads=self._given.fields(EdgeConfig)["threads"],
            prompts=len(self._prompts),
            hf_drafter=str(options.hf_drafter) if options.hf_drafter else None,
        )

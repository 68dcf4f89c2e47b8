"""`outrider demo`: the whole system compared with cloud streaming on the same verifier."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rich import box
from rich.console import Console
from rich.table import Table

from outrider.cloud.config import VerifierConfig
from outrider.deploy.arguments import Given
from outrider.deploy.cluster import LocalCluster, local_cluster
from outrider.deploy.commands.decoding import BuiltInPrompts, DemoSettings
from outrider.deploy.commands.edge import StopSettings
from outrider.deploy.prompts import Prompt, held_out, read_prompts
from outrider.deploy.show import LiveText
from outrider.edge import Client, Completion, EdgeConfig, Sampling
from outrider.edge.control import CoordinatorClient


@dataclass(slots=True)
class ComparedTexts:
    """Texts of one domain, by both ways of decoding."""

    outrider: list[Completion] = field(default_factory=list)
    cloud: list[Completion] = field(default_factory=list)

    def row(self) -> tuple[str, ...]:
        """Return the cells of a row of the table."""
        tokens = sum(len(c.tokens) for c in self.outrider)
        statistics = [c.statistics for c in self.outrider]
        hits, compared = sum(s.hits for s in statistics), sum(s.compared for s in statistics)
        up, down = sum(s.uplink_bytes for s in statistics), sum(s.downlink_bytes for s in statistics)
        down_cloud = sum(c.statistics.downlink_bytes for c in self.cloud)
        speed, speed_of_cloud = _tokens_per_s(self.outrider), _tokens_per_s(self.cloud)
        return (
            f"{speed:.1f}",
            f"{speed_of_cloud:.1f}",
            f"{speed / speed_of_cloud:.2f}",
            f"{sum(s.steps for s in statistics) / tokens:.3f}",
            f"{hits / compared:.3f}" if compared else "-",
            f"{up / tokens:.1f}",
            f"{down / tokens:.1f}",
            f"{down_cloud / tokens:.1f}",
            f"{self.identical}/{len(self.outrider)}",
        )

    @property
    def identical(self) -> int:
        """Number of texts that equal cloud streaming's."""
        return sum(ours.ids == theirs.ids for ours, theirs in zip(self.outrider, self.cloud, strict=True))


def demo(given: Given) -> int:
    """Run `outrider demo`; return 1 unless every text is identical."""
    return asyncio.run(_demo(given))


async def _demo(given: Given) -> int:
    console = Console(highlight=False)
    console.print("starting a local Ray cluster, a verifier and the coordinator …")
    async with local_cluster(given(VerifierConfig), verifiers=given(DemoSettings).verifiers) as cluster:
        console.print(f"coordinator on {cluster.coordinator}; verifiers: {', '.join(cluster.actors)}\n")
        accumulators = await _compare(cluster, given, console)
        precision = await _precision(cluster)
    console.print(_table(accumulators, given, precision))
    if any(accumulator.identical < len(accumulator.outrider) for accumulator in accumulators.values()):
        console.print("the texts differ from cloud streaming", style="bold red")
        return 1
    console.print("every text is identical to cloud streaming of the same target")
    return 0


async def _compare(cluster: LocalCluster, given: Given, console: Console) -> dict[str, ComparedTexts]:
    live = LiveText(console)
    accumulators: dict[str, ComparedTexts] = {}
    sampling, stop, quiet = given(Sampling), given(StopSettings).stop, given(DemoSettings).quiet
    speculating = given(EdgeConfig, coordinator=cluster.coordinator)
    streaming = EdgeConfig(coordinator=cluster.coordinator, drafter="none", drafts_here=0, cache=speculating.cache)
    async with Client(speculating) as ours, Client(streaming) as cloud:
        await ours.complete("warming up", Sampling(max_tokens=16))
        await cloud.complete("warming up", Sampling(max_tokens=16))
        if not quiet:
            console.print(f"drafter {ours.drafter_name}; {live.legend}")
        for prompt in _prompts(given(BuiltInPrompts)):
            accumulator = accumulators.setdefault(prompt.domain or "prompts", ComparedTexts())
            if quiet:
                accumulator.outrider.append(await ours.complete(prompt.text, sampling, stop=stop))
            else:
                console.rule(f"{prompt.domain} {prompt.id}".strip())
                accumulator.outrider.append(await live.decode(ours, prompt, sampling, stop, prompt.text[-400:]))
            accumulator.cloud.append(await cloud.complete(prompt.text, sampling, stop=stop))
    return accumulators


def _prompts(settings: BuiltInPrompts) -> list[Prompt]:
    return held_out(settings.per_domain) if settings.prompts is None else read_prompts(settings.prompts)


async def _precision(cluster: LocalCluster) -> str:
    """Return what the verifiers compute in, which `--dtype auto` has chosen."""
    coordinator = CoordinatorClient(cluster.coordinator)
    try:
        status = await coordinator.status()
    finally:
        await coordinator.close()
    return ", ".join(sorted({verifier.precision for verifier in status.verifiers}))


def _table(accumulators: dict[str, ComparedTexts], given: Given, precision: str) -> Table:
    sampling = given(Sampling)
    table = Table(
        box=box.SIMPLE,
        padding=0,
        title=f"T = {sampling.temperature:g}, {sampling.max_tokens} tokens per prompt, {precision}",
        caption="cloud: the same verifier without drafts; accept: chance that a draft is right, given those before it; "
        "up, down, cloud B: bytes per token; same: texts identical to cloud streaming",
    )
    headings = ("tok/s", "cloud", "ratio", "steps/tok", "accept", "up B", "down B", "cloud B", "same")
    table.add_column("domain")
    for heading in headings:
        table.add_column(heading, justify="right")
    for domain, accumulator in accumulators.items():
        table.add_row(domain, *accumulator.row())
    if len(accumulators) > 1:
        together = ComparedTexts(
            [c for accumulator in accumulators.values() for c in accumulator.outrider],
            [c for accumulator in accumulators.values() for c in accumulator.cloud],
        )
        table.add_section()
        table.add_row("all", *together.row())
    return table


def _tokens_per_s(completions: list[Completion]) -> float:
    return sum(len(c.tokens) for c in completions) / sum(c.seconds for c in completions)

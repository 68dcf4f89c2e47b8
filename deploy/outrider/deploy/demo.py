"""`outrider demo`: the whole system compared with cloud streaming on the same verifier."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from outrider.cloud.models.family_index import embedded_targets
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.arguments import Given
from outrider.deploy.built_in_prompts import Prompt, choose_prompts, held_out, read_prompts
from outrider.deploy.commands.decode_options import BuiltInPrompts, DemoSettings
from outrider.deploy.commands.serving_options import ConditionSettings
from outrider.deploy.link.shape import LinkShape
from outrider.deploy.local.local_cluster import local_cluster
from outrider.deploy.process.progress import waiting
from outrider.deploy.show import LiveText
from outrider.deploy.targets import with_target
from outrider.edge import Client, Completion, EdgeConfig, Sampling
from outrider.edge.chat.rendering import TemplateProcess
from outrider.edge.link.control_client import CoordinatorClient
from outrider.proto.cluster_status import VerifierStatus

QUESTIONS = Path(__file__).parent / "questions.jsonl"
CHEAP_STEP_MS = 15.0
BUSY = 2.0  # load of each core, from which results say more about the machine


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
        return (
            f"{_tokens_per_s(self.outrider):.1f}",
            f"{_tokens_per_s(self.cloud):.1f}",
            f"{self.ratio:.2f}",
            f"{sum(s.steps for s in statistics) / tokens:.3f}",
            f"{hits / compared:.3f}" if compared else "-",
            f"{up / tokens:.1f}",
            f"{down / tokens:.1f}",
            f"{down_cloud / tokens:.1f}",
            f"{self.identical}/{len(self.outrider)}",
        )

    @property
    def ratio(self) -> float:
        """Speed of Outrider over that of cloud streaming."""
        return _tokens_per_s(self.outrider) / _tokens_per_s(self.cloud)

    @property
    def identical(self) -> int:
        """Number of texts that equal cloud streaming's."""
        return sum(ours.ids == theirs.ids for ours, theirs in zip(self.outrider, self.cloud, strict=True))


def demo(given: Given) -> int:
    """Run `outrider demo`; return 1 unless every text is identical."""
    return asyncio.run(_demo(given))


async def _demo(given: Given) -> int:
    console = Console(highlight=False)
    config = with_target(given(VerifierConfig))
    conditions = demo_conditions(given, config.target)
    console.print(f"Outrider and plain cloud streaming of {config.target}: {conditions.words}", style="bold")
    if conditions.pace:
        console.print("(emulated, in place of a larger target far away; --pace 0 --link 0: neither)")
    elif conditions.link:
        console.print("(the link is emulated; --link 0: none)")
    config = replace(config, min_step_s=conditions.pace / 1e3)
    bare = None
    async with local_cluster(config, verifiers=conditions.verifiers, link=conditions.link) as cluster:
        compared = await _compare(cluster.coordinator, config.target, given, console)
        if conditions.pace and cluster.near is not None:
            with waiting("the same on bare loopback, at the target's own speed"):
                near = await cluster.near()
                bare = _together(await _compare(near, config.target, given, None))
        verifiers = await _verifiers(cluster.coordinator)
    precision = ", ".join(sorted({each.precision for each in verifiers}))
    console.print(_table(compared, bare, given(Sampling), f"{conditions.words}; {precision}"))
    if not all(texts.identical == len(texts.outrider) for texts in (*compared.values(), *([bare] if bare else []))):
        console.print("the texts differ from cloud streaming", style="bold red")
        return 1
    console.print("every text is identical to cloud streaming of the same target")
    step_ms = 1e3 * max(each.step_s for each in verifiers)
    for line in _reasons(_together(compared), bare, conditions, step_ms):
        console.print(line)
    return 0


def demo_conditions(given: Given, target: str) -> ConditionSettings:
    """Return the conditions that are asked for; an embedded target is paced, since its own steps are too quick."""
    paced = target in embedded_targets()
    fields: dict[str, Any] = (
        {"pace": 30.0, "link": LinkShape(0.02)} if paced else {"pace": 0.0, "link": LinkShape(0.03)}
    )
    asked = given.fields(ConditionSettings)
    return ConditionSettings(**fields | {name: value for name, value in asked.items() if value is not None})


def _reasons(
    compared: ComparedTexts, bare: ComparedTexts | None, conditions: ConditionSettings, step_ms: float
) -> Iterator[str]:
    """Yield what the ratios mean; `step_ms` is the time of a step of the target at its own speed."""
    yield f"{conditions.words}: {compared.ratio:.2f} times the speed of cloud streaming"
    if bare is not None:
        yield f"bare loopback, target at its own speed: {bare.ratio:.2f} times"
    no_gain = not conditions.pace if bare is None else bare.ratio < compared.ratio
    if no_gain and step_ms < CHEAP_STEP_MS:
        yield (
            f"A step of this small target takes about {step_ms:.0f} ms on these cores, which drafts share: little to "
            "save. Those of larger targets take tens of ms, on cores of their own, which is what --pace stands for."
        )
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > BUSY * cores:
        yield f"This machine is busy, which slows drafts more than paced steps: load {load:.1f} on {cores} cores."


async def _compare(coordinator: str, target: str, given: Given, console: Console | None) -> dict[str, ComparedTexts]:
    """Decode all prompts both ways, and show them on `console`; None: nowhere."""
    live = LiveText(console) if console is not None and not given(DemoSettings).quiet else None
    compared: dict[str, ComparedTexts] = {}
    sampling = given(Sampling)
    speculating = given(EdgeConfig, coordinator=coordinator)
    streaming = EdgeConfig(coordinator=coordinator, drafter="none", drafts_here=0, cache=speculating.cache)
    async with Client(speculating) as ours, Client(streaming) as cloud:
        for client in (ours, cloud):
            await client.complete("warming up", Sampling(max_tokens=16))
        if live is not None and console is not None:
            console.print(f"drafter {ours.drafter_name}" + (f"; {live.legend}" if live.legend else ""))
        for prompt, shown, tokens in await _prompts(given(BuiltInPrompts), target, ours):
            texts = compared.setdefault(prompt.domain or "prompts", ComparedTexts())
            if live is None or console is None:
                texts.outrider.append(await ours.complete(tokens, sampling))
            else:
                console.rule(f"{prompt.domain} {prompt.id}".strip())
                console.print(shown, style="dim", end="", markup=False, soft_wrap=True)
                texts.outrider.append(await live.decode(ours, tokens, sampling, (), ""))
            with waiting("the same by cloud streaming") if live is not None else nullcontext():
                texts.cloud.append(await cloud.complete(tokens, sampling))
            if live is not None and console is not None:
                plain = texts.cloud[-1]
                line = f"by cloud streaming: {plain.seconds:.2f} s ({len(plain.tokens) / plain.seconds:.1f}/s)"
                console.print(line, style="dim", markup=False)
    return compared


async def _prompts(settings: BuiltInPrompts, target: str, client: Client) -> list[tuple[Prompt, str, tuple[int, ...]]]:
    """Return the prompts, what is shown of each, and their tokens.

    A target with a chat template is asked by it; an embedded one, which knows no chats to speak of, goes on with texts.
    """
    ready = await client.find()
    template = None if target in embedded_targets() else await TemplateProcess.of(ready.chat_template)
    built_in = held_out(settings.per_domain) if template is None else choose_prompts(QUESTIONS, settings.per_domain)
    prompts = built_in if settings.prompts is None else read_prompts(settings.prompts)
    if template is None:
        return [(each, each.text[-400:], await ready.encode_prompt(each.text, special=True)) for each in prompts]
    try:
        asked = [await template.render([{"role": "user", "content": each.text}]) for each in prompts]
    finally:
        await template.close()
    return [
        (each, f"{each.text}\n", await ready.encode_prompt(text, special=False))
        for each, text in zip(prompts, asked, strict=True)
    ]


async def _verifiers(address: str) -> Sequence[VerifierStatus]:
    coordinator = CoordinatorClient(address)
    try:
        return (await coordinator.status()).verifiers
    finally:
        await coordinator.close()


def _together(compared: Mapping[str, ComparedTexts]) -> ComparedTexts:
    return ComparedTexts(
        [text for texts in compared.values() for text in texts.outrider],
        [text for texts in compared.values() for text in texts.cloud],
    )


def _table(
    compared: Mapping[str, ComparedTexts], bare: ComparedTexts | None, sampling: Sampling, conditions: str
) -> Table:
    table = Table(
        box=box.SIMPLE,
        padding=0,
        title=f"{conditions}; T = {sampling.temperature:g}, at most {sampling.max_tokens} tokens a text",
        caption="cloud: the same verifier without drafts; accept: chance that a draft is right, given those before it; "
        "up, down, cloud B: bytes per token; same: texts identical to cloud streaming",
    )
    headings = ("tok/s", "cloud", "ratio", "steps/tok", "accept", "up B", "down B", "cloud B", "same")
    table.add_column("domain")
    for heading in headings:
        table.add_column(heading, justify="right")
    for domain, texts in compared.items():
        table.add_row(domain, *texts.row())
    if len(compared) > 1:
        table.add_section()
        table.add_row("all", *_together(compared).row())
    if bare is not None:
        table.add_section()
        table.add_row("bare loopback", *bare.row())
    return table


def _tokens_per_s(completions: list[Completion]) -> float:
    return sum(len(c.tokens) for c in completions) / sum(c.seconds for c in completions)

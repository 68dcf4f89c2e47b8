"""`outrider copy-bench`: texts that repeat most of a local document, with and without drafts copied from it.

The document is the edge's alone. The verifier has a drafter of its own, which some modes use, so that the records show
whom a session prefers where the edge's copies hit more than either end's models.

A small target cannot be relied on to edit a file when asked to. So the document is made from the text: the target's own
answer, of which a share of the tokens is replaced, inserted or deleted in runs. The text that comes is this document
with edits, as it would be after a prompt that asks for them; the prompt itself does not hold it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass
from rich.console import Console

from outrider.bench.benchmark.measure import Measured, measure_text
from outrider.bench.benchmark.verifier import VerifierProcess
from outrider.bench.commands import CopySettings, LinkListSettings
from outrider.bench.edits import edited
from outrider.bench.environment import Environment, environment
from outrider.bench.links import BenchLink, LinkRecord, link_name, links_of
from outrider.bench.outputs import check_file
from outrider.bench.record import RECORD, Count, Metric, save
from outrider.bench.table import Grid, draw, number
from outrider.cloud.config import VerifierConfig
from outrider.deploy.arguments import Given
from outrider.deploy.commands.decoding import BuiltInPrompts
from outrider.deploy.link.process import LinkProcess
from outrider.deploy.prompts import Prompt, held_out, read_prompts
from outrider.deploy.termination import temporary_folder
from outrider.drafters.search import RETRIEVAL
from outrider.edge import Client, EdgeConfig, Sampling

WARM_UP_TOKENS = 24
MODES = {
    "cloud": "cloud streaming",
    "drafter": "edge",
    "colocated": "beside the target",
    "both": "both ends",
    "copied": "edge, copying",
    "both-copied": "both ends, copying",
}
"""Titles of the modes; the edge has a document in the last two."""


@dataclass(frozen=True, slots=True, config=RECORD)
class CopyRun:
    """One mode over one link.

    Attributes:
        run: length of edits in tokens; 0: a mode without a document.
        retrieval_share: share of the tokens that came while the copying drafter was the edge's active one.
        here_share: share of the tokens that the verifier's own drafter drafted.
    """

    mode: str
    link: LinkRecord
    run: Count
    tokens: Count
    tokens_per_second: Metric
    steps_per_token: Metric
    retrieval_share: Metric
    here_share: Metric
    identical: bool


@dataclass(frozen=True, slots=True, config=RECORD)
class CopyRecord:
    """All runs, and what made them.

    Attributes:
        edited: share of tokens in which documents differ from the texts.
        drafts_here: drafts before every step where the verifier's drafter is alone.
    """

    environment: Environment
    edited: Metric
    min_step_ms: Metric
    temperature: Metric
    max_drafts: Count
    drafts_here: Count
    runs: Sequence[CopyRun]


def copy_bench(given: Given) -> int:
    """Run `outrider copy-bench`; return 1 if texts differ."""
    options, links = given(CopySettings), links_of(given(LinkListSettings))
    if options.json:
        check_file(options.json, "json")
    with temporary_folder("outrider-copy-") as folder:
        record = asyncio.run(_Bench(given, options, folder).run(links))
    Console(width=100, highlight=False).print(table(record))
    if options.json:
        save(record, options.json)
    return 0 if all(run.identical for run in record.runs) else 1


class _Bench:
    def __init__(self, given: Given, options: CopySettings, folder: Path) -> None:
        prompts = given(BuiltInPrompts)
        self._given, self._options, self._folder = given, options, folder
        self._prompts = held_out(prompts.per_domain) if prompts.prompts is None else read_prompts(prompts.prompts)
        self._sampling = given(Sampling)
        self._config = given(
            VerifierConfig, min_step_s=options.min_step / 1e3, max_drafts=options.max_drafts, draft_here="on"
        )
        self._verifier = VerifierProcess(self._config, folder / "tokenizer.json")

    async def run(self, links: Sequence[BenchLink]) -> CopyRecord:
        options = self._options
        async with self._verifier:
            plain = await self._write_documents()
            runs = [run for link in links for run in await self._over(link, plain)]
        made_in = environment(
            self._config,
            self._verifier.precision,
            max_tokens=self._sampling.max_tokens,
            seed=self._sampling.seed,
            drafter="auto",
            drafter_version=None,
            drafter_threads=1,
            prompts=len(self._prompts),
        )
        return CopyRecord(
            made_in,
            options.edited,
            options.min_step,
            self._sampling.temperature,
            options.max_drafts,
            options.colocated_drafts,
            tuple(runs),
        )

    async def _write_documents(self) -> dict[str, tuple[int, ...]]:
        """Decode every text, write its documents, one for each length of edits, and return the tokens by prompt."""
        async with AsyncExitStack() as stack:
            client = await self._client(stack, self._verifier.address, drafter="none", drafts_here=0)
            texts = await asyncio.gather(*(measure_text(client, prompt, self._sampling) for prompt in self._prompts))
            for run in self._options.run:
                self._documents(run).mkdir()
                for text in texts:
                    tokens = edited(text.tokens, self._options.edited, run, seed=self._sampling.seed)
                    path = self._documents(run) / f"{text.prompt.id.replace('/', '_')}.txt"
                    path.write_text(client.decode(tokens), encoding="utf-8")
        return {text.prompt.id: text.tokens for text in texts}

    def _documents(self, run: int) -> Path:
        return self._folder / f"run-{run}"

    async def _over(self, link: BenchLink, plain: Mapping[str, tuple[int, ...]]) -> list[CopyRun]:
        async with AsyncExitStack() as stack:
            address = self._verifier.address
            if not link.is_none:
                emulator = LinkProcess(address, link.shape, link.trace, seed=self._sampling.seed)
                address = (await stack.enter_async_context(emulator)).address
            arms = {
                ("cloud", 0): await self._client(stack, address, drafter="none", drafts_here=0),
                ("drafter", 0): await self._client(stack, address, drafts_here=0),
                ("colocated", 0): await self._client(
                    stack, address, drafter="none", drafts_here=self._options.colocated_drafts
                ),
                ("both", 0): await self._client(stack, address),
            }
            for run in self._options.run:
                document = (self._documents(run),)
                arms["copied", run] = await self._client(stack, address, draft_from=document, drafts_here=0)
                arms["both-copied", run] = await self._client(stack, address, draft_from=document)
            texts: dict[tuple[str, int], list[Measured]] = {arm: [] for arm in arms}
            # Each prompt in all modes before the next one, so that a slow moment of the machine meets them all.
            for prompt in self._prompts:
                for arm, client in arms.items():
                    texts[arm].append(await measure_text(client, prompt, self._sampling))
        return [_run_of(mode, link.record, run, found, plain) for (mode, run), found in texts.items()]

    async def _client(self, stack: AsyncExitStack, address: str, **chosen: Any) -> Client:
        """Return a client that has decoded its first tokens."""
        config = EdgeConfig(
            verifier=address,
            model=self._config.target,
            tokenizer=self._verifier.tokenizer,
            **chosen,
        )
        client = await stack.enter_async_context(Client(config))
        # Another text than those that are measured, so that nothing but the link and the drafter is known from it.
        warm_up = Prompt("warm-up", "Once upon a time there was")
        await measure_text(client, warm_up, replace(self._sampling, max_tokens=WARM_UP_TOKENS, min_tokens=0))
        return client


def _run_of(
    mode: str, link: LinkRecord, run: int, texts: Sequence[Measured], plain: Mapping[str, tuple[int, ...]]
) -> CopyRun:
    tokens = sum(len(text.tokens) for text in texts)
    return CopyRun(
        mode,
        link,
        run,
        tokens,
        round(tokens / sum(text.seconds for text in texts), 2),
        round(sum(text.statistics.steps for text in texts) / tokens, 4),
        round(sum(text.statistics.of(RETRIEVAL).committed for text in texts) / tokens, 4),
        round(sum(text.statistics.accepted_here for text in texts) / tokens, 4),
        all(text.tokens == plain[text.prompt.id] for text in texts),
    )


def table(record: CopyRecord) -> Any:
    """Return the table of all runs, a block for each link."""
    blocks: dict[str, list[tuple[str, ...]]] = {}
    for run in record.runs:
        cloud = next(other for other in record.runs if (other.mode, other.link) == ("cloud", run.link))
        blocks.setdefault(link_name(run.link), []).append(
            (
                link_name(run.link),
                MODES[run.mode] + (f", edits of {run.run}" if run.run else ""),
                number(run.tokens_per_second, 1),
                number(run.tokens_per_second / cloud.tokens_per_second, 2),
                number(run.steps_per_token, 3),
                f"{run.retrieval_share:.0%}",
                f"{run.here_share:.0%}",
                "yes" if run.identical else "NO",
            )
        )
    headings = ("link", "mode", "tokens/s", "of cloud", "steps/token", "retrieval", "here", "same text")
    title = f"Texts that repeat {1 - record.edited:.0%} of a local document, T = {record.temperature:g}"
    legend = (
        "edits of N: the document differs where N tokens in a row were replaced, inserted or deleted; retrieval: "
        "tokens that came while the edge drafted by copying; here: tokens that the verifier's own drafter drafted"
    )
    return draw([Grid(title, headings, 2, list(blocks.values()))], legend)

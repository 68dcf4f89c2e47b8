"""`python -m research eavesdropper`: how often sizes and times of TLS records name the prompt, and what it costs."""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass as record_dataclass
from rich.console import Console

from outrider.bench.bench_verifier import VerifierProcess
from outrider.bench.environment import machine
from outrider.bench.links import LinkRecord
from outrider.bench.record import RECORD, Count, Metric, check_file, save
from outrider.bench.table import Block, Grid, draw
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.arguments import Given
from outrider.deploy.built_in_prompts import DOMAINS, Prompt, held_out
from outrider.deploy.certs import issue
from outrider.deploy.link.link_process import LinkProcess
from outrider.deploy.link.shape import LinkShape
from outrider.deploy.process.progress import say
from outrider.edge.client import Client
from outrider.edge.edge_config import EdgeConfig
from outrider.proto.plumbing.tls import ServerTls
from outrider.proto.types import Sampling
from research.eavesdropper.guessing import accuracy
from research.eavesdropper.tap import Note, TapProcess
from research.research_settings import EavesdropperSettings

WORDS = {"cloud": "cloud streaming", "outrider": "Outrider", "quiet": "Outrider, `--quiet-wire`"}
OPTIONS: dict[str, dict[str, Any]] = {
    "cloud": {"drafter": "none", "drafts_here": 0},
    "outrider": {},
    "quiet": {"quiet_wire": True},
}
HEADINGS = ("T", "wire", "named", "tok/s", "/ usual", "bytes", "/ usual")
LEGEND = (
    "named: share of texts whose prompt the forest names; bytes: of TLS records a text, both ways; / usual: over "
    "Outrider's without --quiet-wire"
)


@record_dataclass(frozen=True, slots=True, config=RECORD)
class WireResult:
    """All texts of one wire at one temperature.

    Attributes:
        accuracy: share of the tested texts whose prompt was named.
        tokens_per_second: tokens of all texts over the seconds that they took together.
        bytes_per_text: mean of TLS record bytes both ways, until the wire is silent.
        records_per_text: mean number of records.
        equal: texts that are those of cloud streaming; None: none was compared, at T > 0 or without cloud streaming.
    """

    wire: str
    temperature: Metric
    link: LinkRecord
    texts: Count
    tested: Count
    accuracy: Metric
    tokens_per_second: Metric
    bytes_per_text: Metric
    records_per_text: Metric
    equal: Count | None


@record_dataclass(frozen=True, slots=True, config=RECORD)
class EavesdropperRecord:
    """The texts of each wire, `at_once` at a time, and what an eavesdropper makes of them."""

    environment: dict[str, Any]
    prompts: Count
    max_tokens: Count
    at_once: Count
    results: tuple[WireResult, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """One text of a prompt: its tokens, the seconds that its user waited, and the records that passed."""

    prompt: int
    run: int
    tokens: tuple[int, ...]
    seconds: float
    trace: list[Note]


class Wiretap:
    """Texts of 100 prompts, a few at once, each over a connection of its own that is tapped."""

    def __init__(self, options: EavesdropperSettings, prompts: Sequence[Prompt]) -> None:
        self._options, self._prompts = options, prompts
        self._greedy = dict[int, tuple[int, ...]]()

    async def run(self) -> list[WireResult]:
        """Measure each wire over one verifier."""
        options = self._options
        with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
            issued = issue(Path(folder), ("localhost", "127.0.0.1"))
            config = VerifierConfig(
                target=options.target,
                listen="127.0.0.1:0",
                threads=1,
                min_step_s=options.min_step / 1e3,
                quiet_beat_s=options.beat / 1e3,
                tls=ServerTls(issued.server_cert, issued.server_key),
            )
            tokenizer, shape = Path(folder) / "tokenizer.json", LinkShape.of(rtt_ms=options.rtt)
            async with VerifierProcess(config, tokenizer) as verifier, LinkProcess(verifier.address, shape) as link:
                edge = {"model": options.target, "tokenizer": tokenizer, "tls_ca": issued.ca}
                results = list[WireResult]()
                for temperature, wire in itertools.product(options.temperature, options.wires):
                    began = time.monotonic()
                    texts = await self._texts(link.address, edge | OPTIONS[wire], temperature)
                    results.append(self._result(wire, temperature, texts))
                    say(f"{WORDS[wire]}, T = {temperature:g}: {time.monotonic() - began:.0f} s")
                    if options.json is not None:  # each in turn, since all take long
                        record = EavesdropperRecord(
                            machine(), len(self._prompts), options.max_tokens, options.at_once, tuple(results)
                        )
                        save(record, options.json)
                return results

    async def _texts(self, address: str, edge: dict[str, Any], temperature: float) -> list[Text]:
        options = self._options
        asked = [*itertools.product(range(options.train + options.test), range(len(self._prompts)))]
        random.Random(options.seed).shuffle(asked)
        waiting, texts = iter(asked), list[Text]()
        async with TapProcess(address, options.at_once) as tap:

            async def ask(number: int) -> None:
                async with Client(EdgeConfig(verifier=tap.addresses[number], **edge)) as client:
                    await client.complete("Once", max_tokens=8)  # connects
                    await tap.trace(number)
                    for run, prompt in waiting:
                        # A seed comes twice in no two runs, whatever the wire.
                        seed = 1 + prompt + len(self._prompts) * run
                        sampling = Sampling(temperature=temperature, max_tokens=options.max_tokens, seed=seed)
                        done = await client.complete(self._prompts[prompt].text, sampling)
                        trace = await tap.trace(number)
                        texts.append(Text(prompt, run, done.ids, done.seconds, trace))

            await asyncio.gather(*map(ask, range(options.at_once)))
        return texts

    def _result(self, wire: str, temperature: float, texts: Sequence[Text]) -> WireResult:
        options = self._options
        if wire == "cloud" and not temperature:
            self._greedy = {text.prompt: text.tokens for text in texts}
        return WireResult(
            wire=wire,
            temperature=temperature,
            link=LinkRecord(options.rtt),
            texts=len(texts),
            tested=sum(text.run >= options.train for text in texts),
            accuracy=accuracy([(text.prompt, text.run, text.trace) for text in texts], options.train),
            tokens_per_second=sum(len(text.tokens) for text in texts) / sum(text.seconds for text in texts),
            bytes_per_text=sum(abs(size) for text in texts for _, size in text.trace) / len(texts),
            records_per_text=sum(len(text.trace) for text in texts) / len(texts),
            equal=None if temperature or not self._greedy else sum(t.tokens == self._greedy[t.prompt] for t in texts),
        )


def blocks_of(results: Sequence[WireResult]) -> list[Block]:
    """Return a block for each temperature, with a row for each wire."""
    blocks = list[Block]()
    for temperature, group in itertools.groupby(results, key=lambda result: result.temperature):
        rows = [*group]
        usual = next((row for row in rows if row.wire == "outrider"), rows[0])
        blocks.append(
            [
                (
                    f"{temperature:g}",
                    WORDS[row.wire],
                    f"{row.accuracy:.1%}",
                    f"{row.tokens_per_second:.1f}",
                    f"{row.tokens_per_second / usual.tokens_per_second:.2f}",
                    f"{row.bytes_per_text:,.0f}",
                    f"{row.bytes_per_text / usual.bytes_per_text:.2f}",
                )
                for row in rows
            ]
        )
    return blocks


def eavesdropper(given: Given) -> int:
    """Run `python -m research eavesdropper`."""
    options = given(EavesdropperSettings)
    if options.json is not None:
        check_file(options.json, "json")
    prompts = held_out(-(-options.prompts // len(DOMAINS)))[: options.prompts]
    results = asyncio.run(Wiretap(options, prompts).run())
    Console(width=100, highlight=False).print(draw([Grid("", HEADINGS, 2, blocks_of(results))], LEGEND))
    return 0

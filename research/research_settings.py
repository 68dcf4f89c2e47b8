"""Options of the commands of `python -m research`.

This module loads neither numpy nor torch, since help and completion read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.bench.bench_settings import LinkListSettings, listed
from outrider.cloud.learning.trainer_settings import TrainerSettings
from outrider.cloud.verifier_config import TARGET, VerifierConfig
from outrider.deploy.arguments import Command, Part, part
from outrider.edge.edge_config import EdgeConfig
from outrider.proto.settings import REQUIRED, Settings, at_least, between, option
from outrider.proto.types import Goal

SELECTORS = "selectors (the recorded drafters are one pool then, with the first window)"


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingSettings(Settings):
    """Texts that a target writes alone."""

    prompts: Path | None = option(None, "file of prompts, or folder of DOMAIN.jsonl; not set: built-in", metavar="PATH")
    per_domain: int = option(10, "prompts per domain", check=at_least(1))
    max_tokens: int = option(128, "tokens per text", check=at_least(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings(LinkListSettings):
    """A recording to replay, with windows or selectors."""

    traces: Path = option(REQUIRED, "file that `traces record` wrote", metavar="FILE", positional=True)
    rtt: tuple[float, ...] = (2.0, 10.0, 60.0, 200.0)
    window: tuple[str, ...] = listed(
        ("adaptive", "4", "8", "16"),
        "adaptive, N unverified tokens at most, or syncN: rounds of N drafts that wait for the verdict",
    )
    goal: Goal = option(Goal.LATENCY, "earliest tokens, or fewest target steps")
    min_step: float = option(
        0.0, "minimum time of a target step, to imitate a larger target", metavar="MS", check=at_least(0)
    )
    drafter: tuple[str, ...] = listed((), "recorded drafters to replay; not set: all")
    seed: int = option(0, "seed of the jitter", check=at_least(0))
    selector: tuple[str, ...] = listed(
        (),
        "static (each drafter alone), leader, hedge, metasd-bd; none named: windows as above",
        group=SELECTORS,
    )
    row: tuple[str, ...] = listed((), "domains to play, or mix; not set: all", group=SELECTORS)
    seeds: int = option(
        20, "number of runs, with different orders and random draws", group=SELECTORS, check=at_least(1)
    )
    json: Path | None = option(None, "file to write all results to")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnDemoSettings(Settings):
    """A cluster that learns, and an edge that decodes texts of one domain over an emulated link."""

    stream: Path = option(
        REQUIRED, "file of the domain to decode, as for `outrider train drafter`", metavar="FILE", positional=True
    )
    texts: int = option(400, "texts that the edge decodes", check=at_least(1))
    every: int = option(50, "texts of a line of the table", check=at_least(1))
    fresh: int = option(
        32, "texts to measure on afterwards, with the first drafter and the current version, in turn", check=at_least(2)
    )
    max_tokens: int = option(64, "tokens per text", check=at_least(1))
    sessions: int = option(4, "texts decoded at once", check=at_least(1))
    min_step: float = option(
        30.0, "minimum time of a target step, to imitate a larger target", metavar="MS", check=at_least(0)
    )
    rtt: float = option(10.0, "round-trip time of the link, ms", check=at_least(0))
    up: float = option(20.0, "rate from the edge, Mbit/s; 0: no limit", check=at_least(0))
    down: float = option(100.0, "rate to the edge, Mbit/s; 0: no limit", check=at_least(0))
    json: Path | None = option(None, "file to write the record to")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSettings(WritingSettings):
    """Drafters to record, and texts."""

    drafter: tuple[str, ...] = listed(
        ("general", "ngram"),
        "drafters: embedded names, package folders, NAME=FOLDER, ngram, or retrieval, which copies a document made of "
        "each text",
    )
    edited: float = option(
        0.1, "share of tokens in which the document of `retrieval` differs from the text", check=between(0, 1)
    )
    edits_of: int = option(4, "tokens that an edit of it replaces, inserts or deletes", metavar="N", check=at_least(1))
    temperature: float = option(0.0, "temperature; 0: greedy", metavar="T", check=at_least(0))
    seed: int = option(0, "seed of the noise; the same seed gives the same text", check=at_least(0))
    seeds: int = option(0, "texts per prompt, with seeds 1 to N; 0: one, with --seed", check=at_least(0))
    age: int = option(
        4, "positions by which vectors of steered drafters are older than the freshest; -1: none", check=at_least(-1)
    )
    output: Path = option(REQUIRED, ".jsonl with one trace per line; costs of the machines go to .costs.json beside it")


def loaded(*names: str, **defaults: Any) -> Part:
    """Choose options of a target that a command loads by itself; "target" names a group of options, too."""
    options = part(VerifierConfig, TARGET, flags={"threads": "threads"}, defaults=defaults)
    return tuple(argument for argument in options if argument.field.name in names)


REPLAY = Command("research.traces.replay:replay", (part(ReplaySettings),))
LEARN = Command(
    "research.learning.live:learn_demo",
    (
        part(LearnDemoSettings),
        part(TrainerSettings),
        loaded("target", "threads", threads=1),
        part(VerifierConfig, "steering"),
        part(EdgeConfig, "steering"),
    ),
)
# Records are compared between machines, so that their type must not follow the processor.
RECORD = Command(
    "research.traces.trace_recording:record",
    (
        part(RecordSettings),
        loaded("target", "dtype", "device", "threads", dtype="float32"),
        part(VerifierConfig, "steering"),
    ),
)
LINES = Command("research.lines:show")
WAY = Command("research.token_way:show")

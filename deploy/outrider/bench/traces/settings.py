"""Options of `outrider traces record` and `trees`. This module loads neither numpy nor torch, as help reads it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.bench.commands import WritingSettings, listed, loaded
from outrider.cloud.config import VerifierConfig
from outrider.deploy.arguments import Command, part
from outrider.proto.settings import REQUIRED, Settings, at_least, between, option


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TreesSettings(Settings):
    """A recording whose texts are verified by chains, trees, and trees merged of several drafters."""

    traces: Path = option(REQUIRED, "file written by `outrider traces record`", metavar="FILE", positional=True)
    drafter: tuple[str, ...] = listed((), "recorded drafters, the first of which leads; not set: all")
    max_drafts: int = option(16, "most drafts of a step", check=at_least(1))
    json: Path | None = option(None, "file to write all results to")


RECORD = Command(
    "outrider.bench.traces.record:record",
    (
        part(RecordSettings),
        loaded("target", "dtype", "device", "threads", "noise", dtype="float32"),
        part(VerifierConfig, "steering"),
    ),
)
TREES = Command("outrider.bench.traces.trees:trees", (part(TreesSettings),))

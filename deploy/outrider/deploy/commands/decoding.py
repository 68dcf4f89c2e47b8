"""Commands that decode with verifier and edge on one machine: run, demo."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.cloud.config import TARGET, VerifierConfig
from outrider.deploy.arguments import Command, part
from outrider.deploy.commands.conditions import Cable, ConditionSettings
from outrider.deploy.commands.edge import TEXTS, StopSettings, edge_part
from outrider.edge.config import DRAFTING
from outrider.proto.settings import Settings, at_least, option
from outrider.proto.types import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltInPrompts(Settings):
    """Built-in prompts, or others."""

    prompts: Path | None = option(None, "file of prompts instead of the built-in ones")
    per_domain: int = option(2, "built-in prompts per domain", check=at_least(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings(Settings):
    """Output and size of the demonstration."""

    quiet: bool = option(False, "print only the table")
    verifiers: int = option(1, "number of verifiers", check=at_least(1))


RUN = Command("outrider.deploy.decode:run", (*TEXTS, edge_part(DRAFTING), part(VerifierConfig, TARGET)))
DEMO = Command(
    "outrider.deploy.demo:demo",
    (
        part(ConditionSettings, defaults={"pace": 30.0, "link": Cable(20.0)}),
        part(BuiltInPrompts, defaults={"per_domain": 1}),
        part(DemoSettings),
        edge_part("cache"),
        part(Sampling, defaults={"max_tokens": 96}),
        part(StopSettings),
        edge_part(DRAFTING),
        part(VerifierConfig, TARGET),
    ),
)

"""Commands that decode prompts: run, demo."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.cloud.verifier_config import TARGET
from outrider.deploy.arguments import Command, part
from outrider.deploy.commands.edge_options import (
    CHOSEN,
    GrammarSettings,
    KeySettings,
    MarkSettings,
    PromptSettings,
    StopSettings,
    edge_part,
)
from outrider.deploy.commands.serving_options import ConditionSettings, found_target
from outrider.edge.edge_config import CONNECTION, DRAFTING, SHARING, EdgeConfig
from outrider.proto.plumbing.files import cache_folder
from outrider.proto.settings import Settings, at_least, option
from outrider.proto.types import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltInPrompts(Settings):
    """Built-in prompts, or others."""

    prompts: Path | None = option(None, "file of prompts instead of the built-in ones")
    per_domain: int = option(2, "built-in prompts per domain", check=at_least(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings(Settings):
    """Output of the demonstration."""

    quiet: bool = option(False, "print only the table")


RUN = Command(
    "outrider.deploy.decode:run",
    (
        part(PromptSettings),
        part(
            EdgeConfig,
            *("coordinator", "model", "cache", "service", DRAFTING, SHARING, CONNECTION),
            defaults={"cache": cache_folder},
            helps={"coordinator": "coordinator of a cluster, for its target; not set: --target, in this process"},
        ),
        part(KeySettings),
        part(MarkSettings),
        part(Sampling, *CHOSEN),
        part(StopSettings),
        part(GrammarSettings),
        found_target(TARGET),
    ),
)
DEMO = Command(
    "outrider.deploy.demo:demo",
    (
        part(
            ConditionSettings,
            defaults={"pace": None, "link": None},
            helps={
                "pace": "minimum time of a target step, in place of a larger target; 0: its own; not set: 30 for an "
                "embedded target, else 0",
                "link": "emulated link to the target: round trip, and rates from and to the edge in Mbit/s; 0: none; "
                "not set: 20 for an embedded target, else 30",
            },
        ),
        part(BuiltInPrompts, defaults={"per_domain": 1}),
        part(DemoSettings),
        edge_part("cache"),
        part(Sampling, "temperature", "seed", "max_tokens", defaults={"max_tokens": 160}),
        edge_part("drafter"),
        found_target(TARGET),
    ),
)

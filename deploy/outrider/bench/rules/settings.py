"""Options of `outrider rule-bench`. This module loads neither numpy nor torch, since help and completion read it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.bench.commands import WritingSettings, listed, loaded
from outrider.deploy.arguments import Command, part
from outrider.proto.settings import at_least, option


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSettings(WritingSettings):
    """Texts of the target, and what to judge on them."""

    drafter: str = option("general", "drafter: embedded name or package folder", metavar="NAME")
    lists: tuple[int, ...] = listed((1, 2, 4), "numbers of drafts a position", check=at_least(1))
    blocks: tuple[int, ...] = listed((4, 8), "lengths of chains to judge as blocks", check=at_least(1))
    stride: int = option(8, "tokens from the beginning of one such chain to the next", check=at_least(1))
    draws: int = option(32, "draws of the noise at each position", check=at_least(1))
    seed: int = option(0, "seed of all random numbers")
    json: Path | None = option(None, "file to write the record to")


RULE_BENCH = Command(
    "outrider.bench.rules.command:rule_bench",
    (part(RuleSettings), loaded("target", "threads", threads=1)),
)

"""Options of `outrider bench`.

This module loads neither numpy nor torch, since help and completion read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.cloud.verifier_config import HERE, SERVING, TARGET, VerifierConfig
from outrider.deploy.arguments import Command, part
from outrider.deploy.commands.decode_options import BuiltInPrompts
from outrider.deploy.commands.edge_options import CHOSEN
from outrider.edge.edge_config import RULES, EdgeConfig
from outrider.proto.errors import ConfigError
from outrider.proto.settings import Settings, at_least, between, option
from outrider.proto.types import Sampling

PER_LINK = "one for all links, or one for each"
MODES = ("cloud", "sync", "colocated", "edge", "outrider")
PICTURES = (".png", ".svg", ".pdf")
WARM_UP_TOKENS = 24  # of a client's first text, which do not count


def check_once(entries: Sequence[object], field: str) -> None:
    """Refuse a list that names something twice."""
    for entry in entries:
        if entries.count(entry) > 1:
            raise ConfigError(f"names {entry!r} twice; once is enough", field=field)


def listed(default: tuple[Any, ...], text: str, **more: Any) -> Any:
    """Declare a list with commas."""
    return option(default, text, metavar="LIST", many="commas", **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkListSettings(Settings):
    """Emulated links."""

    rtt: tuple[float, ...] = listed(
        (2.0, 30.0, 120.0), "round-trip times of the links, ms; 0: no link", check=at_least(0)
    )
    up: tuple[float, ...] = listed((20.0,), f"rates from the edge, Mbit/s; {PER_LINK}; 0: no limit", check=at_least(0))
    down: tuple[float, ...] = listed((100.0,), f"rates to the edge, Mbit/s; {PER_LINK}; 0: no limit", check=at_least(0))
    jitter: tuple[float, ...] = listed(
        (0.0,), f"maximum random delay each way (uniform), ms; {PER_LINK}", check=at_least(0)
    )
    trace: tuple[str, ...] = listed((), "traces of further links: built-in names, or CSV files")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings(Settings):
    """Ways of decoding to measure, and outputs."""

    sessions: int = option(1, "prompts decoded at once", check=at_least(1))
    min_step: float = option(
        0.0, "minimum time of a target step, to imitate a larger target", metavar="MS", check=at_least(0)
    )
    modes: tuple[str, ...] = listed(
        MODES,
        "ways of decoding: no drafts, rounds of drafts, a drafter beside the target, edges alone, both ends",
        choices=MODES,
    )
    sync_length: tuple[int, ...] = listed(
        (2, 4, 8), "draft tokens per round, each measured by itself", check=between(1, 255)
    )
    colocated_length: tuple[int, ...] = listed(
        (2, 4, 8),
        "drafts before each step of a drafter beside the target, each measured by itself",
        check=between(1, 255),
    )
    no_logprobs: bool = option(False, "leave log probabilities out of commits")
    json: Path | None = option(None, "file to write the record to")
    plot: Path | None = option(None, "picture to draw of tokens a second by round trip, such as speed.png")

    def check_together(self) -> None:
        """Refuse what is named twice, a mode without a length, and a picture in an unknown format."""
        for mode, lengths in (("sync", self.sync_length), ("colocated", self.colocated_length)):
            check_once(lengths, f"{mode}_length")
            if mode in self.modes and not lengths:
                raise ConfigError(f"is empty; name one or more, or leave {mode} out of --modes", field=f"{mode}_length")
        check_once(self.modes, "modes")
        if self.plot is not None and self.plot.suffix not in PICTURES:
            raise ConfigError(f"{self.plot} ends in none of {', '.join(PICTURES)}", field="plot")


BENCH = Command(
    "outrider.bench.bench_command:bench",
    (
        part(LinkListSettings),
        part(BuiltInPrompts),
        part(BenchSettings),
        part(Sampling, *CHOSEN),
        part(EdgeConfig, "drafter", "threads", "steering", "drafts_here", RULES),
        part(VerifierConfig, TARGET, SERVING),
        part(VerifierConfig, HERE, defaults={"draft_here": "on"}),
    ),
)

"""Settings of a trainer that learns while a fleet serves; help texts read them, so torch is not loaded here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.proto.settings import Settings, at_least, between, no_empty_text, option

LEARNING = "learning while serving"
RANK = 8
OWN: Mapping[
    str, Any
] = {  # of an edge that learns from its own texts, of which it has tokens and seeds, and fewer than a fleet
    "loss": "cce",
    "publish_every": 8,
    "min_keys": 1,
    "key_share": 1.0,
    "watched": True,
}
KEY_SHARE = 0.05  # of the sample of a class, which one key has at most
REHEARSED = 0.67  # of a batch; with a tenth, a stream of one domain cost the others .05 of their hits


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings(Settings):
    """The drafter that learns, from what, how fast, and with how much of a core.

    Attributes:
        loss: name of what the drafter minimises, see `losses.LOSSES`.
        rehearsed: share of a batch that is rehearsed.
        publish_every: steps between candidates for a new version.
        key_share: as in `Buffer`.
        rank: of the change of each matrix.
        texts: new texts that are enough for a step.
        positions: those of a step; half as many new ones are enough, too.
        watched: whether a version that drafts is compared with its parent on later texts, and retired if it hits less;
            where there is a coordinator, that does it.
    """

    drafter: str = option(
        "general",
        "drafter to train on from: embedded name or package folder",
        flag="learn-drafter",
        metavar="NAME",
        group=LEARNING,
        check=no_empty_text,
    )
    cpu_share: float = option(
        0.5, "share of one core that training may take", flag="learn-cpu-share", group=LEARNING, check=between(0, 1)
    )
    max_load: float = option(
        0.7,
        "share of the cores beside it that verifiers may take before training waits; 1: it never waits",
        flag="learn-max-load",
        group=LEARNING,
        check=between(0, 1),
    )
    folder: Path = option(
        Path("learned"), "folder for checkpoints and new versions", flag="learn-folder", metavar="DIR", group=LEARNING
    )
    rehearsal: tuple[Path, ...] = option(
        (),
        "folders of `outrider train teacher` to rehearse, so that what traffic does not have is not forgotten",
        flag="learn-rehearsal",
        metavar="DIR",
        group=LEARNING,
        many="words",
    )
    min_keys: int = option(
        8,
        "API keys that must have taught a version before edges get it, each a fiftieth of it",
        flag="learn-min-keys",
        group=LEARNING,
        check=at_least(1),
    )
    loss: str = "kl-tail"
    rate: float = 3e-3
    rehearsed: float = REHEARSED
    publish_every: int = 16
    seed: int = 0
    key_share: float = KEY_SHARE
    rank: int = RANK
    texts: int = 8
    positions: int = 2304
    warm_up_steps: int = 4
    checkpoint_every: int = 8
    watched: bool = False

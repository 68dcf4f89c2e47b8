"""Which process gets which signal, and when: drawn from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

KINDS = {"verifier": 0.4, "daemon": 0.25, "link": 0.2, "coordinator": 0.15}
KILLED = 0.75  # share of the signals; the others stop a process for a while
STOPPED_S = (0.05, 3.0)


@dataclass(frozen=True)
class Act:
    """One signal.

    Attributes:
        after_s: time since the act before, in seconds.
        member: name of the process.
        signal: KILL, or STOP followed by CONT.
        for_s: time until CONT, in seconds; 0 for KILL.
    """

    after_s: float
    member: str
    signal: Literal["KILL", "STOP"]
    for_s: float = 0.0


def acts(
    seed: int, members: dict[str, Sequence[str]], every_s: float, spared: frozenset[str] = frozenset()
) -> Iterator[Act]:
    """Draw acts without end; members in `spared` are stopped and never killed.

    Args:
        seed: seed of everything here.
        members: names of the processes of each kind.
        every_s: mean time between two acts, in seconds; they come at random.
        spared: names.
    """
    rng = random.Random(seed)
    while True:
        (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
        member = rng.choice(members[kind])
        after_s = rng.expovariate(1 / every_s)
        killed = rng.random() < KILLED
        for_s = math.exp(rng.uniform(*map(math.log, STOPPED_S)))
        yield Act(after_s, member, "KILL") if killed and member not in spared else Act(after_s, member, "STOP", for_s)

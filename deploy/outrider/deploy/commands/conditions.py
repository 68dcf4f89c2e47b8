"""Conditions under which a local cluster is tried: the price of its target, and the link to it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.proto.settings import Settings, at_least, option


@dataclass(frozen=True, slots=True)
class Cable:
    """A link of one shape, as `--link` names it; false where there is none.

    Attributes:
        rtt_ms: round-trip time.
        up_mbit, down_mbit: rates from and to the edge in Mbit/s; None: no limit.
    """

    rtt_ms: float = 0.0
    up_mbit: float | None = None
    down_mbit: float | None = None

    def __bool__(self) -> bool:
        return self != Cable()

    @property
    def words(self) -> str:
        """Name in outputs, such as `link 20 ms, 10/50 Mbit/s`."""
        rates = "" if self.up_mbit is None else f", {self.up_mbit:g}/{self.down_mbit:g} Mbit/s"
        return f"link {self.rtt_ms:g} ms{rates}" if self else "no link between"

    def __str__(self) -> str:
        numbers = (self.rtt_ms, self.up_mbit, self.down_mbit)
        return ",".join(f"{number:g}" for number in numbers if number is not None)


def parse_cable(text: str) -> Cable:
    """Read `MS` or `MS,UP,DOWN`; raise `ValueError` for anything else."""
    form = f"{text!r} is neither MS nor MS,UP,DOWN, such as 20 or 20,10,50"
    try:
        rtt_ms, *rates = map(float, text.split(","))
    except ValueError:
        raise ValueError(form) from None
    if len(rates) not in (0, 2) or not (0 <= rtt_ms < math.inf and all(0 < rate < math.inf for rate in rates)):
        raise ValueError(form)
    return Cable(rtt_ms, *rates)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionSettings(Settings):
    """The price of a local cluster's target, and the link to it."""

    pace: float = option(
        0.0, "minimum time of a target step, in place of a larger target; 0: its own", metavar="MS", check=at_least(0)
    )
    link: Cable = option(
        Cable(),
        "emulated link between edges and this cluster: round trip, and rates from and to the edge in Mbit/s; 0: none",
        metavar="MS[,UP,DOWN]",
        parse=parse_cable,
    )

    @property
    def words(self) -> str:
        """Both in outputs, such as `target paced at 30 ms, link 20 ms`."""
        paced = f"target paced at {self.pace:g} ms" if self.pace else "target at its own speed"
        return f"{paced}, {self.link.words}"

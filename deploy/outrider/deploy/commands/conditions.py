"""Conditions under which a local cluster is tried: the price of its target, and the link to it."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.deploy.link.shape import LinkShape
from outrider.proto.settings import Settings, at_least, option


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionSettings(Settings):
    """The price of a local cluster's target, and the link to it."""

    pace: float = option(
        0.0, "minimum time of a target step, in place of a larger target; 0: its own", metavar="MS", check=at_least(0)
    )
    link: LinkShape = option(
        LinkShape(),
        "emulated link between edges and this cluster: round trip, and rates from and to the edge in Mbit/s; 0: none",
        metavar="MS[,UP,DOWN]",
        parse=LinkShape.parse,
    )

    @property
    def words(self) -> str:
        """Both in outputs, such as `target paced at 30 ms, link 20 ms`."""
        paced = f"target paced at {self.pace:g} ms" if self.pace else "target at its own speed"
        return f"{paced}, {self.link.words}"

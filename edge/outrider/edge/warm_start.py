"""Beginning of a text's choice of drafter: the acceptance of each drafter in earlier texts of its kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outrider.edge.fleet_prior import FleetPrior
from outrider.proto.session import DrafterCounts

MIN_TRIALS = 32.0  # compared tokens; a drafter with fewer counts as unknown
_FADE = 0.95  # of earlier counts with every text of the kind


@dataclass(frozen=True, slots=True)
class TextKind:
    """Kind of text; texts of one kind predict each other."""

    prompt_class: int
    greedy: bool


@dataclass(slots=True)
class OwnTexts:
    """Hits of drafters in this edge's own texts, which never leave it; the fleet's hits add to them.

    Attributes:
        counts: hits and compared tokens, faded, by kind of text and name of the drafter.
    """

    counts: dict[tuple[TextKind, str], tuple[float, float]] = field(default_factory=dict)

    def learn(self, kind: TextKind, of_drafters: Mapping[str, DrafterCounts]) -> None:
        """Count in a text of that kind that has ended."""
        for name, found in of_drafters.items():
            hits, compared = self.counts.get((kind, name), (0.0, 0.0))
            self.counts[kind, name] = _FADE * hits + found.hits, _FADE * compared + found.compared

    def acceptances(self, kind: TextKind, drafters: Sequence[tuple[str, str]], fleet: FleetPrior) -> tuple[float, ...]:
        """Return the acceptance of each (name, version) for a selector's prior; empty where too little is known of all.

        A drafter that is unknown among known ones is taken for as good as they are on average, so that it is tried.
        """
        found = [self._acceptance(kind, name, fleet.acceptance_of(name, version)) for name, version in drafters]
        known = [rate for rate in found if rate is not None]
        if not known:
            return ()
        usual = sum(known) / len(known)
        return tuple(usual if rate is None else rate for rate in found)

    def _acceptance(self, kind: TextKind, name: str, fleet: tuple[float, float] | None) -> float | None:
        hits, compared = self.counts.get((kind, name), (0.0, 0.0))
        rate, trials = fleet or (0.0, 0.0)
        together = compared + trials
        return (hits + rate * trials) / together if together >= MIN_TRIALS else None

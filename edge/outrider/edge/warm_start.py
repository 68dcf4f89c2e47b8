"""Acceptance of each drafter in earlier texts, the fleet's and the edge's own, where a text's choice begins."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outrider.edge.features import TextFeatures
from outrider.proto.drafter_format import published_name
from outrider.proto.session import DrafterCounts
from outrider.proto.types import DrafterPrior, Lease, LeaseRequest

MIN_TRIALS = 32.0  # compared tokens; a drafter with fewer counts as unknown
_FADE = 0.95  # of earlier counts with every text of the kind
MAX_KEPT = 256  # kinds of text whose priors are kept
FleetPrior = Mapping[tuple[str, str], DrafterPrior]
"""Hits of drafters in other edges' texts of one kind, by name and version; empty: not known."""


class FleetPriors:
    """The newest priors of one coordinator, by model and kind of text."""

    def __init__(self) -> None:
        self._newest: OrderedDict[tuple[str, int, int], FleetPrior] = OrderedDict()

    def learn(self, request: LeaseRequest, lease: Lease) -> None:
        """Keep the prior of a lease; one without any drafter changes nothing."""
        if not lease.prior.drafters:
            return
        key = (lease.model, request.prompt_class, request.link_class)
        self._newest[key] = {(prior.drafter, prior.drafter_version): prior for prior in lease.prior.drafters}
        self._newest.move_to_end(key)
        while len(self._newest) > MAX_KEPT:
            self._newest.popitem(last=False)

    def of(self, model: str, features: TextFeatures) -> FleetPrior:
        """Return the prior for such a text, or else the newest one for the same kind of prompt, or for any."""
        prompt_class, link_class = features.prompt_class, features.link_class
        exact = self._newest.get((model, prompt_class, link_class))
        if exact is not None:
            return exact
        of_model = [(key, prior) for key, prior in reversed(self._newest.items()) if key[0] == model]
        of_prompt = [prior for (_, prompt, _), prior in of_model if prompt == prompt_class]
        of_any = [prior for (_, prompt, _), prior in of_model if prompt == 0]
        return next(iter([*of_prompt, *of_any]), {})


@dataclass(frozen=True, slots=True)
class TextKind:
    """Kind of text; texts of one kind predict each other."""

    prompt_class: int
    greedy: bool


@dataclass(slots=True)
class OwnTexts:
    """Hits of drafters in this edge's own texts, which never leave it; those of the fleet add to them.

    Attributes:
        counts: hits and compared tokens, faded, by kind of text and name of the drafter.
    """

    counts: dict[tuple[TextKind, str], tuple[float, float]] = field(default_factory=dict)

    def learn(self, kind: TextKind, of_drafters: Mapping[str, DrafterCounts]) -> None:
        """Count a text of that kind that has ended."""
        for name, found in of_drafters.items():
            hits, compared = self.counts.get((kind, name), (0.0, 0.0))
            self.counts[kind, name] = _FADE * hits + found.hits, _FADE * compared + found.compared

    def acceptances(self, kind: TextKind, drafters: Sequence[tuple[str, str]], fleet: FleetPrior) -> tuple[float, ...]:
        """Return the acceptance of each (name, version) for a selector's prior; empty where too little is known of all.

        An unknown drafter among known ones counts as their average, so that it is tried.
        """
        found = [self._acceptance(kind, name, fleet.get((published_name(name), version))) for name, version in drafters]
        known = [rate for rate in found if rate is not None]
        if not known:
            return ()
        usual = sum(known) / len(known)
        return tuple(usual if rate is None else rate for rate in found)

    def _acceptance(self, kind: TextKind, name: str, fleet: DrafterPrior | None) -> float | None:
        hits, compared = self.counts.get((kind, name), (0.0, 0.0))
        if fleet is not None:
            hits, compared = hits + fleet.acceptance * fleet.trials, compared + fleet.trials
        return hits / compared if compared >= MIN_TRIALS else None

"""The fleet's knowledge of drafters from leases, where a text's choice of drafter begins."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from outrider.edge.features import TextFeatures
from outrider.proto.types import DrafterPrior, Lease, LeaseRequest

MAX_KEPT = 256


@dataclass(frozen=True, slots=True)
class FleetPrior:
    """How often drafters hit in other edges' texts of one kind."""

    drafters: tuple[DrafterPrior, ...] = ()

    def acceptance_of(self, drafter: str, version: str) -> tuple[float, float] | None:
        """Return (share of hits, faded number of compared tokens); None: not known."""
        for prior in self.drafters:
            if (prior.drafter, prior.drafter_version) == (drafter, version):
                return prior.acceptance, prior.trials
        return None


NOT_KNOWN = FleetPrior()


class FleetPriors:
    """The newest answers of one coordinator, by model and kind of text."""

    def __init__(self) -> None:
        self._newest: OrderedDict[tuple[str, int, int], FleetPrior] = OrderedDict()

    def learn(self, request: LeaseRequest, lease: Lease) -> None:
        """Keep the prior of a lease; one without any drafter changes nothing."""
        if not lease.prior.drafters:
            return
        key = (lease.model, request.prompt_class, request.link_class)
        self._newest[key] = FleetPrior(lease.prior.drafters)
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
        return next(iter([*of_prompt, *of_any]), NOT_KNOWN)

"""Counts of speculation on edge and verifier, under vLLM's names; the label `part` says which of them counted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

SHARED = ("part", "model_name", "drafter")
GENERATED = ("outrider:generation_tokens", "Tokens committed.", SHARED)
SHOWN_POSITIONS = 16  # further ones appear once a draft there was accepted


@dataclass(slots=True)
class VerifiedDrafts:
    """Counts of verified drafts, written by one thread and read by any.

    A `Counter` for every position would cost a commit more than all other metrics together.

    Attributes:
        accepted_of: steps by the number of drafts that they accepted.
    """

    draft_tokens: int = 0
    accepted_of: list[int] = field(default_factory=lambda: [0] * (SHOWN_POSITIONS + 1))

    def count(self, verified: int, accepted: int) -> None:
        """Count a step that verified `verified` drafts, at least one, and accepted `accepted` of them."""
        self.draft_tokens += verified
        if accepted >= len(self.accepted_of):
            self.accepted_of += [0] * (accepted + 1 - len(self.accepted_of))
        self.accepted_of[accepted] += 1


class SpeculationMetrics(Collector):
    """Metrics of verified drafts by part, target and drafter.

    Raises:
        ValueError: the registry has these names already.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counted: dict[tuple[str, str, str], VerifiedDrafts] = {}
        registry.register(self)

    def labels(self, part: str, model: str, drafter: str) -> VerifiedDrafts:
        return self._counted.setdefault((part, model, drafter), VerifiedDrafts())

    def describe(self) -> Iterator[Metric]:
        return iter(_families())

    def collect(self) -> Iterator[Metric]:
        families = drafts, draft_tokens, accepted, per_position = _families()
        for labels, counted in list(self._counted.items()):
            accepted_of = list(counted.accepted_of)
            drafts.add_metric(labels, sum(accepted_of))
            draft_tokens.add_metric(labels, counted.draft_tokens)
            accepted.add_metric(labels, sum(number * steps for number, steps in enumerate(accepted_of)))
            for position in range(len(accepted_of) - 1):
                per_position.add_metric((*labels, str(position)), sum(accepted_of[position + 1 :]))
        return iter(families)


def _families() -> tuple[CounterMetricFamily, CounterMetricFamily, CounterMetricFamily, CounterMetricFamily]:
    prefix = "outrider:spec_decode_num"
    return (
        CounterMetricFamily(f"{prefix}_drafts", "Target steps that verified drafts.", labels=SHARED),
        CounterMetricFamily(f"{prefix}_draft_tokens", "Draft tokens verified.", labels=SHARED),
        CounterMetricFamily(f"{prefix}_accepted_tokens", "Draft tokens accepted.", labels=SHARED),
        CounterMetricFamily(
            f"{prefix}_accepted_tokens_per_pos",
            "Draft tokens accepted, by their position among those verified in one step, from 0.",
            labels=(*SHARED, "position"),
        ),
    )

"""What edge and verifier both count of speculation, under vLLM's names; the label `part` says who counted."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

SHARED = ("part", "model_name", "drafter")
GENERATED = ("outrider:generation_tokens", "Tokens committed.", SHARED)
SHOWN_POSITIONS = 16  # from the beginning; further ones once a draft there was accepted


class SpeculationMetrics:
    """Counters of the drafts that target steps verified.

    Raises:
        ValueError: the registry has these names already.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.drafts = Counter(
            "outrider:spec_decode_num_drafts", "Target steps that judged drafts.", SHARED, registry=registry
        )
        self.draft_tokens = Counter(
            "outrider:spec_decode_num_draft_tokens", "Draft tokens judged.", SHARED, registry=registry
        )
        self.accepted = Counter(
            "outrider:spec_decode_num_accepted_tokens", "Draft tokens accepted.", SHARED, registry=registry
        )
        self.accepted_per_position = Counter(
            "outrider:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their position among those judged in one step, from 0.",
            (*SHARED, "position"),
            registry=registry,
        )

    def labels(self, part: str, model: str, drafter: str) -> DraftCounters:
        """Return the counters of one part, target and drafter."""
        return DraftCounters(self, (part, model, drafter))


class DraftCounters:
    """`SpeculationMetrics` for one set of labels."""

    def __init__(self, metrics: SpeculationMetrics, labels: tuple[str, str, str]) -> None:
        self._drafts = metrics.drafts.labels(*labels)
        self._draft_tokens = metrics.draft_tokens.labels(*labels)
        self._accepted = metrics.accepted.labels(*labels)
        self._per_position = metrics.accepted_per_position
        self._labels = labels
        self._positions = [self._position(index) for index in range(SHOWN_POSITIONS)]

    def count(self, judged: int, accepted: int) -> None:
        """Count a step that verified `judged` drafts, at least one, and accepted `accepted` of them."""
        self._drafts.inc()
        self._draft_tokens.inc(judged)
        if accepted:
            self._accepted.inc(accepted)
            while accepted > len(self._positions):
                self._positions.append(self._position(len(self._positions)))
            for position in self._positions[:accepted]:
                position.inc()

    def _position(self, index: int) -> Counter:
        return self._per_position.labels(*self._labels, str(index))

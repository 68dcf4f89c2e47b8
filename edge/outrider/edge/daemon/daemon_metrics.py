"""Metrics of the daemon's requests, and of the drafts in one answer."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outrider.drafters.retrieval import PredictionCount
from outrider.edge.decoding import Subject
from outrider.edge.edge_metrics import EdgeMetrics, SessionObserver
from outrider.edge.event_stream import Event, Tokens
from outrider.proto.errors import OutriderError
from outrider.proto.plumbing.metrics import SECONDS
from outrider.proto.session import EdgeSession, EdgeStatistics
from outrider.proto.session.service_record import service_summary
from outrider.proto.types import CloudFrame, Commit, Provenance


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens of one request; those of a prompt count once, however many texts follow it.

    Attributes:
        prompt: tokens of the prompts.
        completion: tokens of the texts.
        cached: tokens of the prompts that the verifier had computed before any of these texts began.
        prediction: counts of a prediction's tokens, which are accepted if copying it on finds them in the text, whoever
            drafted them; None: there was none.
    """

    prompt: int
    completion: int
    cached: int
    prediction: PredictionCount | None


class HttpMetrics:
    """Metrics of one daemon's requests, shown by `registry`; `EdgeMetrics` counts their texts.

    Attributes:
        running: requests for texts that are being answered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.running = 0
        self._requests = Counter(
            "outrider:http_requests", "HTTP requests answered.", ("route", "status"), registry=registry
        )
        running = Gauge(
            "outrider:num_requests_running", "Requests for texts that are being answered.", registry=registry
        )
        running.set_function(lambda: self.running)
        self._first_token = Histogram(
            "outrider:http_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            registry=registry,
            buckets=SECONDS,
        )
        self._per_token = Histogram(
            "outrider:request_time_per_output_token_seconds",
            "Mean time between the tokens of a request, after its first.",
            registry=registry,
            buckets=SECONDS,
        )
        self._latency = Histogram(
            "outrider:e2e_request_latency_seconds",
            "From a request's arrival to its end.",
            registry=registry,
            buckets=(*SECONDS, 20.0, 50.0, 100.0, 200.0, 500.0),
        )
        self._prompt_tokens = Counter("outrider:prompt_tokens", "Tokens of prompts.", registry=registry)
        self._cached_tokens = Counter(
            "outrider:prompt_tokens_cached", "Those that the verifier had computed already.", registry=registry
        )

    def answered(self, route: str, status: int) -> None:
        """Count a request that has its status; `route` is one of the daemon's, never what a client wrote."""
        self._requests.labels(route, str(status)).inc()

    def finished(self, usage: Usage, first_token_s: float, seconds: float) -> None:
        self._prompt_tokens.inc(usage.prompt)
        self._cached_tokens.inc(usage.cached)
        self._first_token.observe(first_token_s)
        self._latency.observe(seconds)
        if usage.completion > 1:
            self._per_token.observe((seconds - first_token_s) / (usage.completion - 1))


class TextObserver(SessionObserver):
    """The metrics' observer of one text, which can be read while the text is decoded.

    Args:
        metrics: count the text.
        on_lost: called with the error when a stream is lost or refused.
    """

    def __init__(self, metrics: EdgeMetrics, on_lost: Callable[[OutriderError], None]) -> None:
        super().__init__(metrics)
        self.drafter = "none"
        self.max_verified = 0
        self._first_tokens = 0  # of the first commit, which no rate can count
        self._on_lost = on_lost

    @property
    def statistics(self) -> EdgeStatistics:
        """Statistics so far; all 0 before the text begins."""
        return self.machine.statistics if self.machine else EdgeStatistics()

    def began(self, subject: Subject, machine: EdgeSession, at: float) -> None:
        super().began(subject, machine, at)
        self.drafter = subject.drafter

    def received(self, frame: CloudFrame, at: float) -> None:
        super().received(frame, at)
        if isinstance(frame, Commit):
            self._first_tokens = self._first_tokens or len(frame.tokens)
            self.max_verified = max(self.max_verified, frame.verified)

    def lost(self, error: OutriderError, at: float) -> None:
        super().lost(error, at)
        self._on_lost(error)

    def live(self, events: Sequence[Event] = ()) -> dict[str, Any]:
        """Return the `speculation` object of a streamed chunk, with the text of `events` by origin.

        Both rates leave out the first commit, whose time is the prompt's. `cloud_tokens_per_second` is what the same
        tokens would have come at with one target step each, by the verifier's own times (`SessionObserver`).
        `accepted` counts drafts of this machine that became text, `accepted_cloud` those of the verifier's own drafter.
        """
        statistics = self.statistics
        counted = statistics.committed - self._first_tokens
        round_trip_s = self.machine.round_trip_s if self.machine else 0.0
        return {
            "pieces": _pieces(events),
            "tokens": statistics.committed,
            "accepted": statistics.accepted - statistics.accepted_cloud,
            "accepted_cloud": statistics.accepted_cloud,
            "tokens_per_second": round(counted / self.decoding_s, 2) if self.decoding_s else 0.0,
            "cloud_tokens_per_second": round(counted / self.cloud_s, 2) if self.cloud_s else None,
            "window": self.machine.in_flight if self.machine else 0,
            "acceptance": round(statistics.hits / statistics.compared, 4) if statistics.compared else None,
            "round_trip_ms": round(1000 * round_trip_s, 3) if round_trip_s else None,
            "drafter": "none" if statistics.drafter_error else self.drafter,
            "uplink_bytes": statistics.uplink_bytes,
            "downlink_bytes": statistics.downlink_bytes,
            "steps": statistics.steps,
        }


def metrics_of(observers: Sequence[TextObserver], seed: int) -> dict[str, Any]:
    """Return the `metrics` object of an answer: vLLM's `speculative_decoding` over all texts, and what repeats it.

    `acceptance_histogram[j]` counts the target steps that accepted exactly j drafts, up to `num_spec_tokens`, the most
    that one step verified. A request with this `seed` has the same texts again: the n-th choice has `seed` + n.
    """
    accepted_of: Counts[int] = Counts()
    for observer in observers:
        accepted_of.update(observer.accepted_of)
    steps = accepted_of.total()
    accepted = sum(j * count for j, count in accepted_of.items())
    verified = sum(observer.statistics.verified for observer in observers)
    most = max([0, *(observer.max_verified for observer in observers), *accepted_of])
    errors = [observer.statistics.drafter_error for observer in observers if observer.statistics.drafter_error]
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
            "draft_acceptance_rate": accepted / verified if verified else 0.0,
            "acceptance_histogram": [accepted_of[j] for j in range(most + 1)],
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": verified,
            "num_spec_tokens": most,
        },
        "seed": seed,
        "drafter": observers[0].drafter if observers else "none",
        "drafter_error": errors[0] if errors else None,
        **service_summary(observer.statistics.service for observer in observers),
    }


def _pieces(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return text by origin, neighbours of one origin together; text held back until the end counts as the target's."""
    pieces: list[dict[str, Any]] = []
    for event in events:
        ended = [(event.text, Provenance.TARGET)]
        marked = zip(event.pieces, event.provenance, strict=True) if isinstance(event, Tokens) else ended
        for text, provenance in marked:
            accepted = provenance is Provenance.DRAFT
            if pieces and pieces[-1]["accepted"] == accepted:
                pieces[-1]["text"] += text
            elif text:
                pieces.append({"text": text, "accepted": accepted})
    return pieces

"""A coordinator's metrics for Prometheus, counted by its service and its relay or read from them at a scrape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from outrider.coordinator.cluster import VerifierInfo, VerifierState
from outrider.coordinator.version_trials import VersionState
from outrider.proto.errors import OutriderError
from outrider.proto.status import RelayStatus, TrainerStatus, VersionStatus
from outrider.proto.types import LeaseRequest, SessionReport

MAX_MODELS = 64  # labels for models in reports, which come from strangers; further ones count as `other`
FORWARD_BOUNDS_S = (
    *(25e-6, 50e-6, 75e-6, 100e-6, 150e-6, 200e-6, 300e-6, 500e-6, 750e-6),
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0),
)
MODEL = "model_name"
_FLEET: tuple[tuple[type[GaugeMetricFamily | CounterMetricFamily], str, str, Callable[[VerifierInfo], float]], ...] = (
    (GaugeMetricFamily, "up", "1 if a verifier takes sessions.", lambda v: v.state is VerifierState.READY),
    (GaugeMetricFamily, "sessions", "Sessions that a verifier reports.", lambda v: v.sessions),
    (GaugeMetricFamily, "step_seconds", "Smoothed target step of a verifier.", lambda v: v.step_s),
    (GaugeMetricFamily, "kv_pages_free", "KV pages that no session holds.", lambda v: v.kv_pages_free),
    (CounterMetricFamily, "restarts", "Restarts of a verifier.", lambda v: v.restarts),
    (CounterMetricFamily, "fenced_reports", "Late reports of a former start, refused.", lambda v: v.fenced),
)
_TRAINER = {  # field of a trainer's status and meaning; a restart may take sums back to the last checkpoint
    "load": ("load", "Share of its node's cores that verifiers took lately."),
    "waited_seconds": ("waited_s", "Time that the next training step has waited for idle time."),
    "hurried_steps": ("hurried", "Training steps made without idle time."),
    "cpu_share": ("cpu_share", "Share of one core that training took lately."),
    "steps": ("steps", "Optimizer steps so far."),
    "positions_waiting": ("waiting", "Positions that are not learned from yet."),
    "candidate_texts": ("candidate_texts", "Texts that the version on trial was compared on."),
    "candidate_difference": ("candidate_difference", "Mean difference of hit rates of the version on trial."),
    "versions_published": ("published", "Versions that proved better."),
    "versions_dropped": ("dropped", "Versions that did not."),
}
_VERSION = {  # by field of a version's status
    "acceptance": "Share of hits of a version that edges are offered.",
    "share": "Share of the edges that are offered a version.",
    "texts": "Texts on which a version was compared with the one before it.",
    "difference": "Mean difference of hit rates between a version and the one before it.",
    "evidence": "Natural log of the wealth that bets on a version's being worse have made.",
}
_REPORTED = {  # by field of a report
    "committed_tokens": "Tokens committed in reported sessions.",
    "accepted_tokens": "Drafts accepted in reported sessions.",
    "drafted_tokens": "Tokens drafted in reported sessions.",
    "verified_tokens": "Drafts verified in reported sessions.",
    "steps": "Target steps of reported sessions.",
    "resumes": "Streams lost and opened again in reported sessions.",
    "uplink_bytes": "Bytes that edges sent in reported sessions.",
    "downlink_bytes": "Bytes that edges received in reported sessions.",
    "seconds": "Seconds from request to end, summed over reported sessions.",
}


class CoordinatorMetrics:
    """Leases by outcome and reports of finished sessions, in a registry of this coordinator alone."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._granted = _counter(self.registry, "coordinator_leases_granted", "Leases granted.", MODEL)
        self._reopened = _counter(
            self.registry, "coordinator_leases_reopened", "Leases granted to sessions that had a stream before.", MODEL
        )
        self._suspected = _counter(
            self.registry, "coordinator_leases_suspected", "Leases granted to leave a verifier that is silent.", MODEL
        )
        self._refused = _counter(self.registry, "coordinator_leases_refused", "Leases refused, by error.", "error")
        self._refused_calls = _counter(
            self.registry, "coordinator_refused_calls", "Calls answered with an error.", "error"
        )
        self._prefixes = _counter(
            self.registry,
            "coordinator_leases_by_prefix",
            "Leases at a verifier that took texts which begin alike (same), elsewhere (other), or none did (new).",
            "outcome",
        )
        self._sessions = _counter(
            self.registry, "coordinator_reported_sessions", "Finished sessions reported by edges.", MODEL
        )
        self._reported = {
            field: _counter(self.registry, f"coordinator_reported_{field}", meaning, MODEL)
            for field, meaning in _REPORTED.items()
        }
        self._models: set[str] = set()

    def grant(self, model: str, request: LeaseRequest) -> None:
        self._granted.labels(model).inc()
        self._reopened.labels(model).inc(request.epoch > 0)
        self._suspected.labels(model).inc(request.suspected)

    def place_prefix(self, known: int, most: int) -> None:
        """Count a lease at a verifier that took `known` beginnings of the text, where some verifier took `most`."""
        self._prefixes.labels("new" if not most else "same" if known == most else "other").inc()

    def refuse(self, error: OutriderError) -> None:
        self._refused.labels(type(error).__name__).inc()

    def refuse_call(self, error: OutriderError) -> None:
        self._refused_calls.labels(type(error).__name__).inc()

    def report(self, report: SessionReport) -> None:
        model = report.model
        if model not in self._models and len(self._models) >= MAX_MODELS:
            model = "other"
        self._models.add(model)
        self._sessions.labels(model).inc()
        for field, counter in self._reported.items():
            counter.labels(model).inc(getattr(report, field))


class FleetMetrics(Collector):
    """The present state of the fleet, read at each scrape; `drafters` returns the number of packages served."""

    def __init__(
        self,
        verifiers: Callable[[], tuple[VerifierInfo, ...]],
        trainers: Callable[[], tuple[TrainerStatus, ...]],
        drafters: Callable[[], int],
        versions: Callable[[], tuple[VersionStatus, ...]],
    ) -> None:
        self._verifiers = verifiers
        self._trainers = trainers
        self._drafters = drafters
        self._versions = versions

    def describe(self) -> Iterator[Metric]:
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        prefix, verifiers = "outrider:coordinator_verifier", self._verifiers()
        states = GaugeMetricFamily(f"{prefix}s", "Verifiers by state (ready, sick, draining, down).", labels=("state",))
        for state in VerifierState:
            states.add_metric((state.value,), sum(verifier.state is state for verifier in verifiers))
        yield states
        for kind, name, meaning, value in _FLEET:
            family = kind(f"{prefix}_{name}", meaning, labels=(MODEL, "verifier"))
            for verifier in verifiers:
                family.add_metric((verifier.model, verifier.name), value(verifier))
            yield family
        trainers = self._trainers()
        prefix = "outrider:coordinator_trainer"
        up = GaugeMetricFamily(f"{prefix}_up", "1 if a trainer answers.", labels=(MODEL,))
        for trainer in trainers:
            up.add_metric((trainer.model,), trainer.state not in ("loading", "down"))
        yield up
        for name, (field, meaning) in _TRAINER.items():
            shown = GaugeMetricFamily(f"{prefix}_{name}", meaning, labels=(MODEL,))
            for trainer in trainers:
                if trainer.drafter:  # it has answered once
                    shown.add_metric((trainer.model,), getattr(trainer, field))
            yield shown
        yield GaugeMetricFamily("outrider:coordinator_drafters", "Drafter packages served.", value=self._drafters())
        versions = self._versions()
        counts = GaugeMetricFamily(
            "outrider:coordinator_drafter_versions",
            "Versions of a drafter by state (current, former, retired).",
            labels=("drafter", "state"),
        )
        for name in dict.fromkeys(version.drafter for version in versions):
            for kept in VersionState:
                count = sum((version.drafter, version.state) == (name, kept) for version in versions)
                counts.add_metric((name, kept.value), count)
        yield counts
        for field, meaning in _VERSION.items():
            name = f"outrider:coordinator_drafter_version_{field}"
            shown = GaugeMetricFamily(name, meaning, labels=("drafter", "version"))
            for version in versions:
                if version.share:
                    shown.add_metric((version.drafter, version.version), getattr(version, field))
            yield shown


class RelayMetrics:
    """Counters of one relay. One event loop writes; any thread may read.

    The seconds of a frame count from its receipt until it is passed on, so that they show a slow receiver.

    Attributes:
        streams: number of streams being relayed.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.streams = 0
        streams = Gauge("outrider:relay_streams", "Decoding streams being relayed.", registry=registry)
        streams.set_function(lambda: self.streams)
        self.opened = _counter(registry, "relay_streams_opened", "Decoding streams relayed.")
        self.refused = _counter(registry, "relay_streams_refused", "Decoding streams refused: no lease, or full.")
        self.refused_half_open = _counter(
            registry, "relay_refused_half_open", "Those refused because their lease or address had too many not opened."
        )
        self.broken = _counter(registry, "relay_streams_broken", "Relayed streams that lost their verifier.")
        frames = _counter(registry, "relay_frames", "Frames relayed, by direction (up, down).", "direction")
        sizes = _counter(registry, "relay_bytes", "Bytes of frames relayed, by direction.", "direction")
        self._frames = {direction: frames.labels(direction) for direction in ("up", "down")}
        self._bytes = {direction: sizes.labels(direction) for direction in ("up", "down")}
        self._forward = Histogram(
            "outrider:relay_forward_seconds",
            "Latency that the relay adds to a frame, from its receipt until it is passed on.",
            registry=registry,
            buckets=FORWARD_BOUNDS_S,
        )

    def passed_on(self, direction: str, size: int, seconds: float) -> None:
        """Count a frame; the direction is `up` or `down`."""
        self._frames[direction].inc()
        self._bytes[direction].inc(size)
        self._forward.observe(seconds)

    def status(self) -> RelayStatus:
        return RelayStatus(
            streams=self.streams,
            streams_total=_total(self.opened),
            refused=_total(self.refused),
            broken=_total(self.broken),
            uplink_bytes=_total(self._bytes["up"]),
            downlink_bytes=_total(self._bytes["down"]),
            forward_p50_s=_quantile(self._forward, 0.5),
            forward_p99_s=_quantile(self._forward, 0.99),
        )


def _counter(registry: CollectorRegistry, name: str, meaning: str, *labels: str) -> Counter:
    return Counter(f"outrider:{name}", meaning, labels, registry=registry)


def _total(counter: Counter) -> int:
    return int(next(sample.value for family in counter.collect() for sample in family.samples))


def _quantile(histogram: Histogram, share: float) -> float:
    """Return the upper bound of the quantile's bucket; the last finite bound beyond it, 0 without values."""
    (family,) = histogram.collect()
    below = {float(sample.labels["le"]): sample.value for sample in family.samples if sample.name.endswith("_bucket")}
    count = max(below.values())
    least = share * count
    bound = next((bound for bound, values in below.items() if values >= least > 0), 0.0)
    return min(bound, max(filter(math.isfinite, below)))

"""A coordinator's metrics for Prometheus, counted by its service and its relay or read from them at a scrape."""

from __future__ import annotations

import math
from collections import Counter as Counts
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from outrider.coordinator.cluster import VerifierInfo, VerifierState
from outrider.coordinator.version_trials import VersionState
from outrider.proto.cluster_status import RelayStatus, TrainerStatus, VersionStatus
from outrider.proto.errors import OutriderError
from outrider.proto.types import LeaseRequest, SessionReport

MAX_MODELS = 64  # labels for models in reports, which come from strangers; further ones count as `other`
FORWARD_BOUNDS_S = (
    *(25e-6, 50e-6, 75e-6, 100e-6, 150e-6, 200e-6, 300e-6, 500e-6, 750e-6),
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0),
)
MODEL = "model_name"
_VERIFIER: dict[str, tuple[str, Callable[[VerifierInfo], float]]] = {
    "up": ("1 if a verifier takes sessions.", lambda v: v.state is VerifierState.READY),
    "sessions": ("Sessions that a verifier reports.", lambda v: v.sessions),
    "step_seconds": ("Smoothed target step of a verifier.", lambda v: v.step_s),
    "kv_pages_free": ("KV pages that no session holds.", lambda v: v.kv_pages_free),
    "restarts": ("Restarts of a verifier.", lambda v: v.restarts),
    "fenced_reports": ("Late reports of an earlier start, refused.", lambda v: v.fenced),
}
_COUNTED = ("restarts", "fenced_reports")
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
_COUNTERS = {  # meaning and label
    "leases_granted": ("Leases granted.", MODEL),
    "leases_reopened": ("Leases granted to sessions that had a stream before.", MODEL),
    "leases_suspected": ("Leases granted to leave a verifier that is silent.", MODEL),
    "leases_unkept": ("Leases granted where no verifier with room is expected to keep the gap asked for.", MODEL),
    "leases_refused": ("Leases refused, by error.", "error"),
    "refused_calls": ("Calls answered with an error.", "error"),
    "leases_by_prefix": (
        "Leases at a verifier that took texts which begin alike (same), elsewhere (other), or none did (new).",
        "outcome",
    ),
    "reported_sessions": ("Finished sessions reported by edges.", MODEL),
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
        reported = {f"reported_{field}": (meaning, MODEL) for field, meaning in _REPORTED.items()}
        self._counters = {
            name: _counter(self.registry, f"coordinator_{name}", *rest) for name, rest in (_COUNTERS | reported).items()
        }
        self._models: set[str] = set()

    def grant(self, model: str, request: LeaseRequest, *, kept: bool = True) -> None:
        self._counters["leases_granted"].labels(model).inc()
        self._counters["leases_reopened"].labels(model).inc(request.epoch > 0)
        self._counters["leases_suspected"].labels(model).inc(request.suspected)
        self._counters["leases_unkept"].labels(model).inc(not kept)

    def place_prefix(self, known: int, most: int) -> None:
        """Count a lease at a verifier that took `known` beginnings of the text, where some verifier took `most`."""
        self._counters["leases_by_prefix"].labels("new" if not most else "same" if known == most else "other").inc()

    def refuse(self, error: OutriderError) -> None:
        self._counters["leases_refused"].labels(type(error).__name__).inc()

    def refuse_call(self, error: OutriderError) -> None:
        self._counters["refused_calls"].labels(type(error).__name__).inc()

    def report(self, report: SessionReport) -> None:
        model = report.model
        if model not in self._models and len(self._models) >= MAX_MODELS:
            model = "other"
        self._models.add(model)
        self._counters["reported_sessions"].labels(model).inc()
        for field in _REPORTED:
            self._counters[f"reported_{field}"].labels(model).inc(getattr(report, field))


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
        verifiers, trainers, versions = self._verifiers(), self._trainers(), self._versions()
        states = {(state.value,): sum(v.state is state for v in verifiers) for state in VerifierState}
        yield _gauge("verifiers", "Verifiers by state (ready, sick, draining, down).", ("state",), states)
        for name, (meaning, value) in _VERIFIER.items():
            values = {(v.model, v.name): value(v) for v in verifiers}
            kind = CounterMetricFamily if name in _COUNTED else GaugeMetricFamily
            yield _gauge(f"verifier_{name}", meaning, (MODEL, "verifier"), values, kind)
        up = {(each.model,): each.state not in ("loading", "down") for each in trainers}
        yield _gauge("trainer_up", "1 if a trainer answers.", (MODEL,), up)
        known = [each for each in trainers if each.drafter]  # which have answered once
        for name, (field, meaning) in _TRAINER.items():
            yield _gauge(f"trainer_{name}", meaning, (MODEL,), {(each.model,): getattr(each, field) for each in known})
        yield _gauge("drafters", "Drafter packages served.", (), {(): self._drafters()})
        counts = Counts((version.drafter, version.state) for version in versions)
        names = dict.fromkeys(version.drafter for version in versions)
        by_state = {(name, state.value): counts[name, state.value] for name in names for state in VersionState}
        meaning = "Versions of a drafter by state (current, previous, retired)."
        yield _gauge("drafter_versions", meaning, ("drafter", "state"), by_state)
        offered = {(version.drafter, version.version): version for version in versions if version.share}
        for field, meaning in _VERSION.items():
            values = {labels: getattr(version, field) for labels, version in offered.items()}
            yield _gauge(f"drafter_version_{field}", meaning, ("drafter", "version"), values)


def _gauge(
    name: str,
    meaning: str,
    labels: tuple[str, ...],
    values: Mapping[Any, float],
    kind: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily,
) -> Metric:
    """Return a metric of the coordinator, with a value by the tuple of its labels."""
    family = kind(f"outrider:coordinator_{name}", meaning, labels=labels)
    for place, value in values.items():
        family.add_metric(place, value)
    return family


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

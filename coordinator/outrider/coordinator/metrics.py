"""A coordinator's metrics for Prometheus: counted by its service and its relay, or read from them at a scrape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from outrider.coordinator.cluster import VerifierInfo, VerifierState
from outrider.proto.errors import OutriderError
from outrider.proto.types import RelayStatus, SessionReport

MAX_MODELS = 64  # told apart in reports, which come from strangers; what comes after them is counted as `other`
FORWARD_BOUNDS_S = (
    *(25e-6, 50e-6, 75e-6, 100e-6, 150e-6, 200e-6, 300e-6, 500e-6, 750e-6),
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0),
)
_MODEL = ("model_name",)
_VERIFIER = ("model_name", "verifier")
_REPORTED = {  # by field of a report
    "committed_tokens": "Tokens committed in them.",
    "accepted_tokens": "Drafts accepted in them.",
    "drafted_tokens": "Tokens drafted in them.",
    "verified_tokens": "Drafts verified in them.",
    "steps": "Target steps taken in them.",
    "resumes": "Streams lost and opened again in them.",
    "uplink_bytes": "Bytes that edges sent in them.",
    "downlink_bytes": "Bytes that edges received.",
    "seconds": "Seconds from request to end of them.",
}


class CoordinatorMetrics:
    """Metrics of one coordinator: leases by outcome, and what finished sessions reported.

    Attributes:
        registry: of this coordinator alone.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._granted = self._counter("leases_granted", "Leases given out.", _MODEL)
        self._refused = self._counter("leases_refused", "Leases asked for in vain, by error.", ("error",))
        self._refused_calls = self._counter("refused_calls", "Calls answered with an error.", ("error",))
        self._sessions = self._counter("reported_sessions", "Finished sessions reported by edges.", _MODEL)
        self._reported = {
            field: self._counter(f"reported_{field}", meaning, _MODEL) for field, meaning in _REPORTED.items()
        }
        self._models: set[str] = set()

    def grant(self, model: str) -> None:
        """Count a lease that was given out."""
        self._granted.labels(model).inc()

    def refuse(self, error: OutriderError) -> None:
        """Count a lease that was asked for in vain."""
        self._refused.labels(type(error).__name__).inc()

    def refuse_call(self, error: OutriderError) -> None:
        """Count a call that was answered with an error."""
        self._refused_calls.labels(type(error).__name__).inc()

    def report(self, report: SessionReport) -> None:
        """Count a finished session."""
        model = report.model
        if model not in self._models and len(self._models) >= MAX_MODELS:
            model = "other"
        self._models.add(model)
        self._sessions.labels(model).inc()
        for field, counter in self._reported.items():
            counter.labels(model).inc(getattr(report, field))

    def _counter(self, name: str, meaning: str, labels: tuple[str, ...]) -> Counter:
        return Counter(f"outrider:coordinator_{name}", meaning, labels, registry=self.registry)


class FleetMetrics(Collector):
    """The fleet as it is, read when somebody asks.

    Args:
        verifiers: those known now.
        drafters: how many drafter packages are served now.
    """

    def __init__(self, verifiers: Callable[[], tuple[VerifierInfo, ...]], drafters: Callable[[], int]) -> None:
        self._verifiers = verifiers
        self._drafters = drafters

    def describe(self) -> Iterator[Metric]:
        """Name the metrics, without values."""
        states, of_verifiers, drafters = self._families()
        return iter((states, *of_verifiers, drafters))

    def collect(self) -> Iterator[Metric]:
        """Show the metrics as they are now."""
        states, of_verifiers, drafters = self._families()
        verifiers = self._verifiers()
        for state in VerifierState:
            states.add_metric((state.value,), sum(verifier.state is state for verifier in verifiers))
        for verifier in verifiers:
            up = float(verifier.state is VerifierState.READY)
            values = (up, verifier.sessions, verifier.step_s, verifier.kv_pages_free, verifier.restarts)
            for family, value in zip(of_verifiers, values, strict=True):
                family.add_metric((verifier.model, verifier.name), value)
        drafters.add_metric((), self._drafters())
        yield from (states, *of_verifiers, drafters)

    @staticmethod
    def _families() -> tuple[GaugeMetricFamily, tuple[GaugeMetricFamily | CounterMetricFamily, ...], GaugeMetricFamily]:
        prefix = "outrider:coordinator_verifier"
        states = GaugeMetricFamily(f"{prefix}s", "Verifiers by state (ready, draining, down).", labels=("state",))
        of_verifiers = (
            GaugeMetricFamily(f"{prefix}_up", "1 where a verifier takes sessions.", labels=_VERIFIER),
            GaugeMetricFamily(f"{prefix}_sessions", "Sessions that a verifier reports.", labels=_VERIFIER),
            GaugeMetricFamily(f"{prefix}_step_seconds", "Smoothed target step of a verifier.", labels=_VERIFIER),
            GaugeMetricFamily(f"{prefix}_kv_pages_free", "KV pages that no session holds.", labels=_VERIFIER),
            CounterMetricFamily(f"{prefix}_restarts", "Restarts seen of a verifier.", labels=_VERIFIER),
        )
        drafters = GaugeMetricFamily("outrider:coordinator_drafters", "Drafter packages served.", labels=())
        return states, of_verifiers, drafters


class RelayMetrics:
    """Counts of one relay since it began. One event loop writes; any thread may read.

    A frame's seconds are from having it to having passed it on; a receiver that reads slowly shows there.

    Attributes:
        streams: being relayed now.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.streams = 0
        streams = Gauge("outrider:relay_streams", "Decoding streams being relayed.", registry=registry)
        streams.set_function(lambda: self.streams)
        self.opened = Counter("outrider:relay_streams_opened", "Decoding streams relayed.", registry=registry)
        self.refused = Counter(
            "outrider:relay_streams_refused", "Decoding streams not relayed: no lease, or full.", registry=registry
        )
        self.broken = Counter(
            "outrider:relay_streams_broken", "Relayed streams that lost their verifier.", registry=registry
        )
        frames = Counter(
            "outrider:relay_frames", "Frames relayed, by direction (up, down).", ("direction",), registry=registry
        )
        sizes = Counter(
            "outrider:relay_bytes", "Bytes of frames relayed, by direction.", ("direction",), registry=registry
        )
        self._frames_up, self._frames_down = frames.labels("up"), frames.labels("down")
        self._bytes_up, self._bytes_down = sizes.labels("up"), sizes.labels("down")
        self._forward = Histogram(
            "outrider:relay_forward_seconds",
            "Latency that the relay adds to a frame: from having it to having passed it on.",
            registry=registry,
            buckets=FORWARD_BOUNDS_S,
        )

    def up(self, size: int, seconds: float) -> None:
        """Count a frame of `size` bytes that was passed on to a verifier."""
        self._frames_up.inc()
        self._bytes_up.inc(size)
        self._forward.observe(seconds)

    def down(self, size: int, seconds: float) -> None:
        """Count a frame of `size` bytes that was passed on to an edge."""
        self._frames_down.inc()
        self._bytes_down.inc(size)
        self._forward.observe(seconds)

    def status(self) -> RelayStatus:
        """Return what operators see."""
        return RelayStatus(
            streams=self.streams,
            streams_total=_total(self.opened),
            refused=_total(self.refused),
            broken=_total(self.broken),
            uplink_bytes=_total(self._bytes_up),
            downlink_bytes=_total(self._bytes_down),
            forward_p50_s=_quantile(self._forward, 0.5),
            forward_p99_s=_quantile(self._forward, 0.99),
        )


def _total(counter: Counter) -> int:
    return int(next(sample.value for family in counter.collect() for sample in family.samples))


def _quantile(histogram: Histogram, share: float) -> float:
    """Return the bound of the bucket that holds the quantile; the last finite one beyond it, 0 without values."""
    (family,) = histogram.collect()
    below = {float(sample.labels["le"]): sample.value for sample in family.samples if sample.name.endswith("_bucket")}
    count = max(below.values())
    least = share * count
    bound = next((bound for bound, values in below.items() if values >= least > 0), 0.0)
    return min(bound, max(filter(math.isfinite, below)))

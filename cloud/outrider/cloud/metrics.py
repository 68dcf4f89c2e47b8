"""A verifier's metrics for Prometheus: counted by its engine and its streams, or read from the engine at a scrape."""

from __future__ import annotations

from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outrider.proto.errors import OutriderError, ResourceExhausted
from outrider.proto.plumbing.metrics import SECONDS, TOKENS
from outrider.proto.speculation import GENERATED, SpeculationMetrics
from outrider.proto.types import Commit

PART = "verifier"
_WHOSE = ("model_name", "verifier")


class EngineState(Protocol):
    """State of an engine that a scrape reads; see `Engine`."""

    @property
    def session_count(self) -> int:
        """Sessions admitted at present."""

    @property
    def parked_count(self) -> int:
        """Sessions parked until their next turn."""

    @property
    def free_pages(self) -> int:
        """KV pages that no session holds."""

    @property
    def page_count(self) -> int:
        """KV pages in all."""

    @property
    def credit(self) -> int:
        """Unverified tokens that a session may have in flight."""

    @property
    def draining(self) -> bool:
        """Whether sessions are being sent away."""


class VerifierMetrics:
    """The metrics of one verifier, counted by the engine's thread and the server's loop; any thread may read them.

    Attributes:
        registry: Prometheus registry of this verifier alone.
    """

    def __init__(self, model: str, verifier: str) -> None:
        self.registry = CollectorRegistry()
        self._whose = (model, verifier)
        self._running = 0
        self._drafts = SpeculationMetrics(self.registry).labels(PART, model, "")  # only the edge knows the drafter
        self._generated = Counter(*GENERATED, registry=self.registry).labels(PART, model, "")
        self._finished = self._kinds("outrider:request_success", "Texts that have ended, by why.", "finished_reason")
        self._refused = self._kinds("outrider:verifier_refused_sessions", "Sessions refused, by error.", "error")
        self._failed = self._kinds("outrider:verifier_failed_sessions", "Sessions ended by an error.", "error")
        self.admitted = self._counter("outrider:verifier_admitted_sessions", "Sessions taken.")
        self._sheds = self._counter("outrider:verifier_sheds", "Sessions refused because the verifier was full.")
        self.goaways = self._counter("outrider:verifier_goaways", "Sessions sent elsewhere.")
        self.failed_steps = self._counter("outrider:verifier_failed_steps", "Target steps that failed.")
        self.batching_delays = self._counter("outrider:verifier_batching_delays", "Steps delayed for drafts of others.")
        self._vectors = self._counter("outrider:verifier_steering_vectors", "Steering vectors sent with commits.")
        self._vector_bytes = self._counter("outrider:verifier_steering_bytes", "Bytes of the numbers of these vectors.")
        self._rows = Histogram(
            "outrider:verifier_step_rows",
            "Rows of a target step; its count is the steps.",
            _WHOSE,
            registry=self.registry,
            buckets=TOKENS,
        ).labels(*self._whose)
        step = Histogram(
            "outrider:verifier_step_seconds",
            "Time of a target step: forward (the model), sample (logits to tokens), overhead (all else but waiting).",
            (*_WHOSE, "stage"),
            registry=self.registry,
            buckets=SECONDS,
        )
        self._forward, self._sample, self._overhead = (
            step.labels(*self._whose, stage) for stage in ("forward", "sample", "overhead")
        )
        self._waits = Histogram(
            "outrider:verifier_patience_seconds",
            "From a session's commit to its next step: its patience, batching delays, and other sessions' steps.",
            _WHOSE,
            registry=self.registry,
            buckets=SECONDS,
        ).labels(*self._whose)
        self._sessions_running = self._gauge("outrider:num_requests_running", "Sessions in the newest step.")
        self._sessions_waiting = self._gauge(
            "outrider:num_requests_waiting",
            "Sessions not in it: they wait for drafts, or have just ended.",
        )
        self._kv_usage = self._gauge("outrider:kv_cache_usage_perc", "Share of the KV pages in use, 0 to 1.")
        self._max_sessions = self._gauge("outrider:verifier_max_sessions", "Most sessions admitted at once.")
        self._kept = self._gauge("outrider:verifier_kept_sessions", "Sessions kept between the turns of conversations.")
        self._credit = self._gauge("outrider:verifier_credit_tokens", "Unverified tokens that a session may have.")
        pages = Gauge(
            "outrider:verifier_kv_pages",
            "KV pages, by state (used, free).",
            (*_WHOSE, "state"),
            registry=self.registry,
        )
        self._used_pages, self._free_pages = (pages.labels(*self._whose, state) for state in ("used", "free"))
        self._draining = self._gauge("outrider:verifier_draining", "1 while sessions are sent elsewhere.")

    def watch(self, engine: EngineState, *, max_sessions: int) -> None:
        """Read the state of `engine` whenever somebody asks for it."""
        self._max_sessions.set(max_sessions)
        self._sessions_running.set_function(lambda: min(self._running, engine.session_count))
        self._sessions_waiting.set_function(lambda: max(0, engine.session_count - self._running))
        self._kv_usage.set_function(lambda: 1 - engine.free_pages / engine.page_count)
        self._kept.set_function(lambda: engine.parked_count)
        self._credit.set_function(lambda: engine.credit)
        self._used_pages.set_function(lambda: engine.page_count - engine.free_pages)
        self._free_pages.set_function(lambda: engine.free_pages)
        self._draining.set_function(lambda: float(engine.draining))

    def step(self, sessions: int, rows: int, forward_s: float, sample_s: float, overhead_s: float) -> None:
        """Count a step for `sessions` sessions; times in seconds."""
        self._running = sessions
        self._rows.observe(rows)
        self._forward.observe(forward_s)
        self._sample.observe(sample_s)
        self._overhead.observe(overhead_s)

    def commit(self, commit: Commit) -> None:
        """Count a commit that goes to an edge."""
        if commit.tokens:
            self._generated.inc(len(commit.tokens))
            self._waits.observe(commit.timing.queue_s)
        if commit.verified:
            self._drafts.count(commit.verified, commit.accepted)
        if commit.steering is not None:
            self._vectors.inc()
            self._vector_bytes.inc(len(commit.steering.values))
        if commit.finish is not None:
            self._finished.labels(*self._whose, commit.finish.name.lower()).inc()

    def refuse(self, error: OutriderError) -> None:
        """Count a stream that was refused before a session was admitted."""
        self._refused.labels(*self._whose, type(error).__name__).inc()
        if isinstance(error, ResourceExhausted):
            self._sheds.inc()

    def fail(self, error: OutriderError) -> None:
        """Count a stream that was ended by an error."""
        self._failed.labels(*self._whose, type(error).__name__).inc()

    def _counter(self, name: str, meaning: str) -> Counter:
        return Counter(name, meaning, _WHOSE, registry=self.registry).labels(*self._whose)

    def _kinds(self, name: str, meaning: str, kind: str) -> Counter:
        return Counter(name, meaning, (*_WHOSE, kind), registry=self.registry)

    def _gauge(self, name: str, meaning: str) -> Gauge:
        return Gauge(name, meaning, _WHOSE, registry=self.registry).labels(*self._whose)

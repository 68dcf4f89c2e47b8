"""A verifier's metrics for Prometheus: counted by its engine and its streams, or read from the engine at a scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client import Metric as Family
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.registry import Collector

from outrider.cloud.learning.inclusion import LessonKind
from outrider.cloud.learning.lessons import Lost
from outrider.cloud.serving.sessions import Sessions
from outrider.cloud.serving.steps import StepTiming
from outrider.proto.errors import Fenced, OutriderError, ResourceExhausted
from outrider.proto.plumbing.metrics import SECONDS, TOKENS
from outrider.proto.session.service_record import ServiceRecord
from outrider.proto.speculation import GENERATED, SpeculationMetrics
from outrider.proto.types import Commit, class_of

PART = "verifier"
_WHOSE = ("model_name", "verifier")

Metric = TypeVar("Metric", Counter, Gauge, Histogram)


def _shown(name: str, meaning: str) -> Any:
    """Return a field of `VerifierCounts` that Prometheus shows under a name, which has this meaning."""
    return field(default=0, metadata={"name": name, "meaning": meaning})


@dataclass(slots=True)
class VerifierCounts:
    """Counts since the verifier started: each is written by one thread, and any may read it."""

    committed_tokens: int = 0
    admitted: int = _shown("verifier_admitted_sessions", "Sessions taken.")
    preempted: int = _shown("num_preemptions", "Sessions sent elsewhere because KV pages ran out.")
    shed: int = _shown("verifier_sheds", "Sessions refused because the verifier was full.")
    begun_tokens: int = _shown("prefix_cache_queries", "Tokens of transcripts when sessions or their turns begin.")
    cached_tokens: int = _shown("prefix_cache_hits", "Those that the KV cache held already.")
    goaways: int = _shown("verifier_goaways", "Sessions sent elsewhere.")
    fenced: int = _shown(
        "verifier_fenced_sessions",
        "Sessions sent elsewhere because the engine hung, or refused because a later stream has them.",
    )
    failed_steps: int = _shown("verifier_failed_steps", "Target steps that failed.")
    corrupted: int = _shown(
        "corrupted_requests", "Sessions ended because logits, or the scores made of them, were no numbers."
    )
    batching_delays: int = _shown("verifier_batching_delays", "Steps delayed for drafts of others.")
    vectors: int = _shown("verifier_steering_vectors", "Steering vectors sent with commits.")
    vector_bytes: int = _shown("verifier_steering_bytes", "Bytes of the numbers of these vectors.")
    drafting_here_s: float = _shown("verifier_drafting_seconds", "Time that the verifier's own drafter has worked.")
    drafted_here: int = _shown("verifier_own_drafts_made", "Tokens that its own drafter has proposed.")
    verified_here: int = _shown("verifier_own_drafts", "Drafts of its own drafter that were verified.")
    accepted_here: int = _shown("verifier_own_drafts_accepted", "Those that became text.")


class VerifierMetrics(Collector):
    """The metrics of one verifier, counted by the engine's thread and the server's loop; any thread may read them.

    Attributes:
        registry: Prometheus registry of this verifier alone.
        drafter_here: its own drafter, as name@version; empty: none that works.
    """

    def __init__(self, model: str, verifier: str) -> None:
        self.registry = CollectorRegistry()
        self.counts = VerifierCounts()
        self.drafter_here = ""
        self._model = model
        self._whose = (model, verifier)
        self._running = 0
        self.registry.register(self)
        self._drafts = SpeculationMetrics(self.registry).labels(PART, model, "")  # only the edge knows the drafter
        counter, gauge = partial(self._own, Counter), partial(self._own, Gauge)
        histogram = partial(self._own, Histogram)
        self._finished = counter("request_success", "Texts that have ended, by why.", labels=("finished_reason",))
        self._refused = counter("verifier_refused_sessions", "Sessions refused, by error.", labels=("error",))
        self._failed = counter("verifier_failed_sessions", "Sessions ended by an error.", labels=("error",))
        self.refused_half_open = counter(
            "verifier_refused_half_open",
            "Streams refused because their lease, key or address had too many that were not admitted.",
        )
        self.killed_grammars = counter(
            "verifier_killed_grammars", "Grammars refused because compiling them took too much time or memory."
        )
        self._services = counter(
            "verifier_service_texts",
            "Texts that asked for a service and have ended, by class (batch, interactive, figures) and outcome.",
            labels=("service", "outcome"),
        )
        self._lessons = counter(
            "verifier_lessons", "Verified positions kept for the trainer, by kind.", labels=("kind",)
        )
        self._lost = counter("verifier_lost_lessons", "Those that did not reach it, by why.", labels=("reason",))
        self._rows = histogram("verifier_step_rows", "Rows of a target step; its count is the steps.", buckets=TOKENS)
        step = histogram(
            "verifier_step_seconds",
            "Time of a target step: forward (the model), sample (logits to tokens), overhead (all else but waiting).",
            labels=("stage",),
            buckets=SECONDS,
        )
        self._forward, self._sample, self._overhead = (
            step.labels(*self._whose, stage) for stage in ("forward", "sample", "overhead")
        )
        self._waits = histogram(
            "verifier_patience_seconds",
            "From a session's commit to its next step: its patience, batching delays, and other sessions' steps.",
            buckets=SECONDS,
        )
        self._sick = gauge(
            "verifier_sick",
            "1 while the engine or the event loop hangs, or many steps fail or take ten times their median.",
        )
        self._sessions_running = gauge("num_requests_running", "Sessions in the newest step.")
        self._sessions_waiting = gauge(
            "num_requests_waiting", "Sessions not in it: they wait for drafts, or have just ended."
        )
        self._kv_usage = gauge("kv_cache_usage_perc", "Share of the KV pages in use, 0 to 1.")
        self._max_sessions = gauge("verifier_max_sessions", "Most sessions admitted at once.")
        self._kept = gauge("verifier_kept_sessions", "Sessions kept between the turns of conversations.")
        self._credit = gauge("verifier_credit_tokens", "Unverified tokens that a session may have.")
        self._pages = gauge("verifier_kv_pages", "KV pages, by state (used, free).", labels=("state",))
        self._drafting_queue = gauge("verifier_drafting_queue", "Jobs that wait for a thread of its own drafter.")
        self._drafter = gauge(
            "verifier_own_drafter", "1 while its own drafter works, 0 once it is given up.", labels=("drafter",)
        )
        self._draining = gauge("verifier_draining", "1 while sessions are sent elsewhere.")

    def describe(self) -> Iterator[Family]:
        return self.collect()

    def collect(self) -> Iterator[Family]:
        generated = CounterMetricFamily(GENERATED[0], GENERATED[1], labels=GENERATED[2])
        generated.add_metric((PART, self._model, ""), self.counts.committed_tokens)
        yield generated
        for each in fields(self.counts):
            if each.metadata:
                family = CounterMetricFamily(
                    f"outrider:{each.metadata['name']}", each.metadata["meaning"], labels=_WHOSE
                )
                family.add_metric(self._whose, getattr(self.counts, each.name))
                yield family

    def watch(self, sessions: Sessions) -> None:
        """Read the state of an engine whenever somebody asks for it."""
        backend = sessions.backend
        self._max_sessions.set(sessions.max_sessions)
        self._sessions_running.set_function(lambda: min(self._running, sessions.num_running))
        self._sessions_waiting.set_function(lambda: max(0, sessions.num_running - self._running))
        self._kv_usage.set_function(lambda: backend.capacity.used_pages / backend.capacity.pages)
        self._kept.set_function(lambda: sessions.num_parked)
        self._credit.set_function(lambda: sessions.credit)
        self._pages.labels(*self._whose, "used").set_function(lambda: backend.capacity.used_pages)
        self._pages.labels(*self._whose, "free").set_function(lambda: backend.capacity.free_pages)
        self._draining.set_function(lambda: float(sessions.draining))

    def begin_text(self, tokens: int, cached_tokens: int) -> None:
        self.counts.begun_tokens += tokens
        self.counts.cached_tokens += cached_tokens

    def step(self, timing: StepTiming) -> None:
        self._running = timing.sessions
        self._rows.observe(timing.rows)
        self._forward.observe(timing.forward_s)
        self._sample.observe(timing.sample_s)
        self._overhead.observe(timing.overhead_s)

    def commit(self, commit: Commit) -> None:
        counts = self.counts
        if commit.tokens:
            counts.committed_tokens += len(commit.tokens)
            self._waits.observe(commit.timing.queue_s)
        if commit.verified:
            self._drafts.count(commit.verified, commit.accepted)
            counts.verified_here += commit.verified_here
            counts.accepted_here += commit.accepted_here
        if commit.steering is not None:
            counts.vectors += 1
            counts.vector_bytes += len(commit.steering.values)
        if commit.finish is not None:
            self._finished.labels(*self._whose, commit.finish.name.lower()).inc()

    def end_service(self, record: ServiceRecord) -> None:
        """Count a text that has ended by what became of its service."""
        outcome = "missed" if record.missed else "kept"
        self._services.labels(*self._whose, class_of(record.goal).name.lower(), outcome).inc()

    def watch_drafting(self, drafter: str, queue: Callable[[], int]) -> None:
        """Show `drafter` (name@version) as the verifier's own; `queue` counts the jobs that wait for a thread."""
        self.drafter_here = drafter
        self._drafter.labels(*self._whose, drafter).set(1)
        self._drafting_queue.set_function(lambda: float(queue()))

    def stop_drafting(self) -> None:
        self._drafter.labels(*self._whose, self.drafter_here).set(0)
        self.drafter_here = ""

    def lessons(self, what: LessonKind | Lost, positions: int) -> None:
        """Count positions that were kept for the trainer, or did not reach it."""
        counter = self._lost if isinstance(what, Lost) else self._lessons
        counter.labels(*self._whose, what.name.lower()).inc(positions)

    def show_condition(self, *, sick: bool) -> None:
        self._sick.set(float(sick))

    def refuse(self, error: OutriderError) -> None:
        """Count a stream that was refused before a session was admitted."""
        self._refused.labels(*self._whose, type(error).__name__).inc()
        self.counts.fenced += isinstance(error, Fenced)
        self.counts.shed += isinstance(error, ResourceExhausted)

    def fail(self, error: OutriderError) -> None:
        """Count a stream that was ended by an error."""
        self._failed.labels(*self._whose, type(error).__name__).inc()

    def _own(
        self, kind: type[Metric], name: str, meaning: str, *, labels: tuple[str, ...] = (), **options: Any
    ) -> Metric:
        """Make a metric with this verifier's labels; one with further `labels` gets all of them from its user."""
        made = kind(f"outrider:{name}", meaning, (*_WHOSE, *labels), registry=self.registry, **options)
        return made if labels else made.labels(*self._whose)

"""A verifier's metrics for Prometheus: counted by its engine and its streams, or read from the engine at a scrape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outrider.cloud.learning.inclusion import LessonKind
from outrider.cloud.learning.lessons import Lost
from outrider.cloud.serving.runner import StepTiming
from outrider.cloud.serving.sessions import Sessions
from outrider.cloud.target.backend import Backend
from outrider.proto.errors import Fenced, OutriderError, ResourceExhausted
from outrider.proto.plumbing.metrics import SECONDS, TOKENS
from outrider.proto.speculation import GENERATED, SpeculationMetrics
from outrider.proto.types import Commit

PART = "verifier"
_WHOSE = ("model_name", "verifier")

Metric = TypeVar("Metric", Counter, Gauge, Histogram)


@dataclass(slots=True)
class OwnDrafts:
    """A verifier's own drafter and its work since the verifier started, as `VerifierStatus` has them."""

    drafter_here: str = ""
    committed_tokens: int = 0
    drafted_here: int = 0
    verified_here: int = 0
    accepted_here: int = 0
    drafting_here_s: float = 0.0


class VerifierMetrics:
    """The metrics of one verifier, counted by the engine's thread and the server's loop; any thread may read them.

    Attributes:
        registry: Prometheus registry of this verifier alone.
        own_drafts: work of its own drafter.
    """

    def __init__(self, model: str, verifier: str) -> None:
        self.registry = CollectorRegistry()
        self.own_drafts = OwnDrafts()
        self._whose = (model, verifier)
        self._running = 0
        self._drafts = SpeculationMetrics(self.registry).labels(PART, model, "")  # only the edge knows the drafter
        self._generated = Counter(*GENERATED, registry=self.registry).labels(PART, model, "")
        self._finished = self._own(
            Counter, "request_success", "Texts that have ended, by why.", labels=("finished_reason",)
        )
        self._refused = self._own(
            Counter, "verifier_refused_sessions", "Sessions refused, by error.", labels=("error",)
        )
        self._failed = self._own(Counter, "verifier_failed_sessions", "Sessions ended by an error.", labels=("error",))
        self.refused_half_open = self._own(
            Counter,
            "verifier_refused_half_open",
            "Streams refused because their lease, key or address had too many that were not admitted.",
        )
        self.admitted = self._own(Counter, "verifier_admitted_sessions", "Sessions taken.")
        self.preemptions = self._own(Counter, "num_preemptions", "Sessions sent elsewhere because KV pages ran out.")
        self._sheds = self._own(Counter, "verifier_sheds", "Sessions refused because the verifier was full.")
        self._prefix_queries = self._own(
            Counter, "prefix_cache_queries", "Tokens of transcripts when sessions or their turns begin."
        )
        self._prefix_hits = self._own(Counter, "prefix_cache_hits", "Those that the KV cache held already.")
        self.goaways = self._own(Counter, "verifier_goaways", "Sessions sent elsewhere.")
        self.fenced = self._own(
            Counter,
            "verifier_fenced_sessions",
            "Sessions sent elsewhere because the engine hung, or refused because a later stream has them.",
        )
        self._sick = self._own(
            Gauge,
            "verifier_sick",
            "1 while the engine or the event loop hangs, or many steps fail or take ten times their median.",
        )
        self.failed_steps = self._own(Counter, "verifier_failed_steps", "Target steps that failed.")
        self.corrupted = self._own(
            Counter, "corrupted_requests", "Sessions ended because logits, or the scores made of them, were no numbers."
        )
        self.killed_grammars = self._own(
            Counter, "verifier_killed_grammars", "Grammars refused because compiling them took too much time or memory."
        )
        self.batching_delays = self._own(Counter, "verifier_batching_delays", "Steps delayed for drafts of others.")
        self._vectors = self._own(Counter, "verifier_steering_vectors", "Steering vectors sent with commits.")
        self._vector_bytes = self._own(Counter, "verifier_steering_bytes", "Bytes of the numbers of these vectors.")
        self._drafting_here = self._own(
            Counter, "verifier_drafting_seconds", "Time that the verifier's own drafter has worked."
        )
        self._drafted_here = self._own(Counter, "verifier_own_drafts_made", "Tokens that its own drafter has proposed.")
        self._verified_here = self._own(Counter, "verifier_own_drafts", "Drafts of its own drafter that were verified.")
        self._accepted_here = self._own(Counter, "verifier_own_drafts_accepted", "Those that became text.")
        self._lessons = self._own(
            Counter, "verifier_lessons", "Verified positions kept for the trainer, by kind.", labels=("kind",)
        )
        self._lost_lessons = self._own(
            Counter, "verifier_lost_lessons", "Those that did not reach it, by why.", labels=("reason",)
        )
        self._rows = self._own(
            Histogram, "verifier_step_rows", "Rows of a target step; its count is the steps.", buckets=TOKENS
        )
        step = self._own(
            Histogram,
            "verifier_step_seconds",
            "Time of a target step: forward (the model), sample (logits to tokens), overhead (all else but waiting).",
            labels=("stage",),
            buckets=SECONDS,
        )
        self._forward, self._sample, self._overhead = (
            step.labels(*self._whose, stage) for stage in ("forward", "sample", "overhead")
        )
        self._waits = self._own(
            Histogram,
            "verifier_patience_seconds",
            "From a session's commit to its next step: its patience, batching delays, and other sessions' steps.",
            buckets=SECONDS,
        )
        self._sessions_running = self._own(Gauge, "num_requests_running", "Sessions in the newest step.")
        self._sessions_waiting = self._own(
            Gauge, "num_requests_waiting", "Sessions not in it: they wait for drafts, or have just ended."
        )
        self._kv_usage = self._own(Gauge, "kv_cache_usage_perc", "Share of the KV pages in use, 0 to 1.")
        self._max_sessions = self._own(Gauge, "verifier_max_sessions", "Most sessions admitted at once.")
        self._kept = self._own(Gauge, "verifier_kept_sessions", "Sessions kept between the turns of conversations.")
        self._credit = self._own(Gauge, "verifier_credit_tokens", "Unverified tokens that a session may have.")
        pages = self._own(Gauge, "verifier_kv_pages", "KV pages, by state (used, free).", labels=("state",))
        self._used_pages, self._free_pages = (pages.labels(*self._whose, state) for state in ("used", "free"))
        self._drafting_queue = self._own(
            Gauge, "verifier_drafting_queue", "Jobs that wait for a thread of its own drafter."
        )
        self._drafter = self._own(
            Gauge, "verifier_own_drafter", "1 while its own drafter works, 0 once it is given up.", labels=("drafter",)
        )
        self._draining = self._own(Gauge, "verifier_draining", "1 while sessions are sent elsewhere.")

    def watch(self, sessions: Sessions, backend: Backend, max_sessions: int) -> None:
        """Read the state of an engine whenever somebody asks for it."""
        self._max_sessions.set(max_sessions)
        self._sessions_running.set_function(lambda: min(self._running, sessions.num_running))
        self._sessions_waiting.set_function(lambda: max(0, sessions.num_running - self._running))
        self._kv_usage.set_function(lambda: backend.capacity.used_pages / backend.capacity.pages)
        self._kept.set_function(lambda: sessions.num_parked)
        self._credit.set_function(lambda: sessions.credit)
        self._used_pages.set_function(lambda: backend.capacity.used_pages)
        self._free_pages.set_function(lambda: backend.capacity.free_pages)
        self._draining.set_function(lambda: float(sessions.draining))

    def begin_text(self, tokens: int, cached_tokens: int) -> None:
        """Count a transcript that begins to be computed, and what the KV cache holds of it."""
        self._prefix_queries.inc(tokens)
        self._prefix_hits.inc(cached_tokens)

    def step(self, timing: StepTiming) -> None:
        """Count a step."""
        self._running = timing.sessions
        self._rows.observe(timing.rows)
        self._forward.observe(timing.forward_s)
        self._sample.observe(timing.sample_s)
        self._overhead.observe(timing.overhead_s)

    def commit(self, commit: Commit) -> None:
        """Count a commit that goes to an edge."""
        if commit.tokens:
            self._generated.inc(len(commit.tokens))
            self.own_drafts.committed_tokens += len(commit.tokens)
            self._waits.observe(commit.timing.queue_s)
        if commit.verified:
            self._drafts.count(commit.verified, commit.accepted)
            self._verified_here.inc(commit.verified_here)
            self._accepted_here.inc(commit.accepted_here)
            self.own_drafts.verified_here += commit.verified_here
            self.own_drafts.accepted_here += commit.accepted_here
        if commit.steering is not None:
            self._vectors.inc()
            self._vector_bytes.inc(len(commit.steering.values))
        if commit.finish is not None:
            self._finished.labels(*self._whose, commit.finish.name.lower()).inc()

    def watch_drafting(self, drafter: str, queue: Callable[[], int]) -> None:
        """Show `drafter` (name@version) as the verifier's own; `queue` counts the jobs that wait for a thread."""
        self.own_drafts.drafter_here = drafter
        self._drafter.labels(*self._whose, drafter).set(1)
        self._drafting_queue.set_function(lambda: float(queue()))

    def stop_drafting(self) -> None:
        """Show that the verifier's own drafter has been given up."""
        self._drafter.labels(*self._whose, self.own_drafts.drafter_here).set(0)
        self.own_drafts.drafter_here = ""

    def drafted_here(self, tokens: int, seconds: float) -> None:
        """Count tokens that the verifier's own drafter has proposed, and the time of its work."""
        self.own_drafts.drafted_here += tokens
        self.own_drafts.drafting_here_s += seconds
        self._drafted_here.inc(tokens)
        self._drafting_here.inc(seconds)

    def lessons(self, what: LessonKind | Lost, positions: int) -> None:
        """Count positions that were kept for the trainer, or did not reach it."""
        counter = self._lost_lessons if isinstance(what, Lost) else self._lessons
        counter.labels(*self._whose, what.name.lower()).inc(positions)

    def show_condition(self, *, sick: bool) -> None:
        """Show whether the engine is sick."""
        self._sick.set(float(sick))

    def refuse(self, error: OutriderError) -> None:
        """Count a stream that was refused before a session was admitted."""
        if isinstance(error, Fenced):
            self.fenced.inc()
        self._refused.labels(*self._whose, type(error).__name__).inc()
        if isinstance(error, ResourceExhausted):
            self._sheds.inc()

    def fail(self, error: OutriderError) -> None:
        """Count a stream that was ended by an error."""
        self._failed.labels(*self._whose, type(error).__name__).inc()

    def _own(
        self, kind: type[Metric], name: str, meaning: str, *, labels: tuple[str, ...] = (), **options: Any
    ) -> Metric:
        """Make a metric with this verifier's labels; one with further `labels` gets all of them from its user."""
        made = kind(f"outrider:{name}", meaning, (*_WHOSE, *labels), registry=self.registry, **options)
        return made if labels else made.labels(*self._whose)

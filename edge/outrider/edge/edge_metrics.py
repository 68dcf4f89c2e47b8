"""An edge's metrics for Prometheus: counted while texts are decoded, or read from their statistics at a scrape.

    metrics = EdgeMetrics()
    async for event in client.generate(prompt, observer=metrics.observer()): ...
    body, content_type = metrics.exposition(accept_header)

A commit costs some ten microseconds. Labels are the target and the drafter, never a session, a request or a text.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from outrider.edge.decoding import Observer, Subject
from outrider.proto.errors import OutriderError, ResourceExhausted
from outrider.proto.plumbing.metrics import SECONDS, TOKENS, exposition
from outrider.proto.policy import Line
from outrider.proto.session import Done, EdgeSession, EdgeStatistics, SentMessages
from outrider.proto.speculation import GENERATED, SpeculationMetrics
from outrider.proto.types import CloudFrame, Commit, Draft, EdgeFrame, FinishReason, Goaway, Open, Opened

PART = "edge"
MAX_SERIES = 64  # (target, drafter) pairs with labels of their own; later ones are counted as `other`
_RECENT = 0.995  # of the running estimate of the speed-up kept at every commit: some 200 commits count

_LABELS = ("model_name", "drafter")
_PHASES = ("draft", "uplink", "queue", "verify", "downlink")

_FROM_STATISTICS = {  # by attribute of the statistics of a text
    "committed": GENERATED[:2],
    "steps": ("outrider:edge_target_steps", "Commits received, each of one target step."),
    "accepted_cloud": ("outrider:edge_accepted_verifier_tokens", "Accepted drafts of verifiers' own drafters."),
    "cloud_drafting_s": ("outrider:edge_verifier_drafting_seconds", "Time that verifiers' own drafters have worked."),
    "drafting_s": ("outrider:edge_drafting_seconds", "Time of the edge's drafting jobs."),
    "drafted": ("outrider:edge_drafted_tokens", "Tokens drafted, verified or not."),
    "compared": (
        "outrider:edge_compared_tokens",
        "Draft tokens that met the target's token of their position, none before them in their chain having missed.",
    ),
    "hits": ("outrider:edge_hit_tokens", "Compared draft tokens that were right."),
    "messages": ("outrider:edge_draft_messages", "Draft messages sent."),
    "uplink_bytes": ("outrider:edge_uplink_bytes", "Bytes of messages sent to verifiers."),
    "downlink_bytes": ("outrider:edge_downlink_bytes", "Bytes of messages received from verifiers."),
    "resumes": ("outrider:edge_resumes", "Streams lost and opened again."),
    "suspected": ("outrider:edge_suspected_streams", "Streams that were silent for longer than their own law allows."),
    "reopened": ("outrider:edge_reopened_streams", "Silent streams that were left, another verifier having answered."),
    "fenced": ("outrider:edge_fenced_frames", "Frames of streams that had been left, ignored."),
    "vectors": ("outrider:edge_steering_vectors", "Steering vectors received in commits."),
    "bad_vectors": ("outrider:edge_steering_bad_vectors", "Steering vectors that could not be read, and were dropped."),
    "vector_bytes": ("outrider:edge_steering_bytes", "Bytes of the steering vectors received."),
    "steered_jobs": ("outrider:edge_steered_jobs", "Drafting jobs steered by a vector of the target's state."),
    "vector_age": (
        "outrider:edge_steering_age_positions",
        "Sum over steered drafting jobs of the vector's age: positions from its own to the one that the job's first "
        "draft follows.",
    ),
}

_GAUGES = {
    "sessions": ("outrider:edge_sessions", "Texts being decoded."),
    "in_flight": ("outrider:edge_in_flight_tokens", "Drafted tokens in flight, of all texts."),
    "credit": ("outrider:edge_credit_tokens", "Tokens that verifiers allow in flight, of all texts."),
    "planned": ("outrider:edge_planned_sessions", "Texts whose verifier plans its patience; others have it fixed."),
    "link": ("outrider:edge_link_seconds", "Round trip of a small message, mean over the texts."),
    "speedup": ("outrider:edge_speedup_ratio", "Estimated speed-up over cloud streaming in the newest commits."),
}


class _Series:
    """Metrics of all texts with one target and one drafter.

    Attributes:
        ended: sums over the statistics of texts that have ended.
        missing: texts that had no drafter from their beginning, though one was requested.
        failed: texts that have ended whose drafter broke.
        speedup: estimated speed-up over cloud streaming in the newest commits; None: not known yet.
    """

    def __init__(self, metrics: EdgeMetrics, model: str, drafter: str) -> None:
        self.labels = (model, drafter)
        self.verified = metrics.verified.labels(PART, *self.labels)
        self.sheds = metrics.sheds.labels(*self.labels)
        self.first_token = metrics.first_token.labels(*self.labels)
        self.round_trip = metrics.round_trip.labels(*self.labels)
        self.draft_token = metrics.draft_token.labels(*self.labels)
        self.window = metrics.window.labels(*self.labels)
        self.draft, self.uplink, self.queue, self.verify, self.downlink = (
            metrics.phase.labels(*self.labels, phase) for phase in _PHASES
        )
        self.ended: dict[str, float] = dict.fromkeys(_FROM_STATISTICS, 0)
        self.missing = 0
        self.failed = 0
        self._metrics = metrics
        self._decoding = metrics.decoding.labels(*self.labels)
        self._cloud_streaming = metrics.cloud_streaming.labels(*self.labels)
        self._recent_decoding_s = 0.0
        self._recent_cloud_s = 0.0

    @property
    def speedup(self) -> float | None:
        return self._recent_cloud_s / self._recent_decoding_s if self._recent_decoding_s else None

    def elapse(self, seconds: float, cloud_s: float) -> None:
        """Count tokens that took `seconds` here, and by estimate `cloud_s` with cloud streaming."""
        self._decoding.inc(seconds)
        self._cloud_streaming.inc(cloud_s)
        self._recent_decoding_s = self._recent_decoding_s * _RECENT + seconds
        self._recent_cloud_s = self._recent_cloud_s * _RECENT + cloud_s

    def lose(self, kind: str) -> None:
        self._metrics.losses.labels(*self.labels, kind).inc()

    def end(self, reason: str, statistics: EdgeStatistics, *, failed: bool) -> None:
        self._metrics.texts.labels(*self.labels, reason).inc()
        self.failed += failed
        for name in _FROM_STATISTICS:
            self.ended[name] += getattr(statistics, name)


class SessionObserver(Observer):
    """Observer that counts one text into its series.

    **Phases.** A commit echoes the newest draft message that had come before it, and says how long the verifier held
    that message; the rest of the time since it was sent is the link's. No clock is compared across machines, so the
    link's time is divided equally between up and down, as NTP does. `queue` is from the commit before to the step,
    which is the verifier's patience and what else it did.

    **Speed-up.** Plain cloud streaming pays the link once and then emits a token every target step, so the n tokens of
    a commit would have taken n·T1, T1 being what its step would have taken without its drafts: what it took, less
    their rows at the slope of the line through (rows, seconds) of this text's steps. A step that also read a prompt
    counts as that line at one row. The estimate leaves out what a verifier does between steps, so it is low by that
    share; where all steps verified equally many drafts the line is flat, so it is high by what those rows cost. In
    simulation, where truth is known, it is within 3 %.
    """

    def __init__(self, metrics: EdgeMetrics) -> None:
        self.machine: EdgeSession | None = None
        self.accepted_of: dict[int, int] = {}  # verified steps by how many drafts they accepted
        self.decoding_s = 0.0
        self.cloud_s = 0.0
        self.credit = 0
        self.planned = False
        self.missing = False  # no drafter from the start, though one was requested
        self._metrics = metrics
        self._series: _Series  # from the beginning of the text on
        self._began = 0.0
        self._first_token_s = 0.0
        self._newest = 0.0  # when the newest commit came; 0: none yet
        self._reads_prompt = True  # the next commit's step has read a prompt
        self._sent_at = SentMessages[float]()
        self._drafting_s = 0.0  # spent since the newest draft message
        self._steps = Line()

    @property
    def speedup(self) -> float:
        """Estimated speed-up over cloud streaming for the text so far; 0: not known yet."""
        return self.cloud_s / self.decoding_s if self.decoding_s else 0.0

    def began(self, subject: Subject, machine: EdgeSession, at: float) -> None:
        """Begin to count, once a turn in a conversation."""
        self.machine = machine
        self._began = at
        self._newest = 0.0
        self._reads_prompt = True
        self._sent_at.clear()
        self._series = self._metrics.join(self, subject)
        self.missing = bool(machine.statistics.drafter_error) and subject.drafter == "none"
        self._series.missing += self.missing

    def drafted(self, began: float, ended: float, tokens: int) -> None:
        self._drafting_s += ended - began
        if tokens:
            self._series.draft_token.observe((ended - began) / tokens)

    def sent(self, frame: EdgeFrame, at: float) -> None:
        if isinstance(frame, Draft):
            self._sent_at.append(at)
            if frame.tokens:
                self._series.draft.observe(self._drafting_s)
                self._drafting_s = 0.0
        elif isinstance(frame, Open):
            self._reads_prompt = True

    def received(self, frame: CloudFrame, at: float) -> None:
        match frame:
            case Commit():
                self._count(frame, at)
            case Opened():
                self.credit = frame.credit
                self.planned = frame.planned
                self._sent_at.clear()
            case Goaway():
                self._series.lose("Goaway")

    def lost(self, error: OutriderError, at: float) -> None:  # noqa: ARG002 - the base's
        self._series.lose(type(error).__name__)
        if isinstance(error, ResourceExhausted):
            self._series.sheds.inc()

    def ended(self, done: Done | None, at: float) -> None:  # noqa: ARG002 - the base's
        if self.machine is None:
            return
        if done is not None and done.error is not None:
            reason = "error"
        else:
            reason = ((done and done.finish) or FinishReason.CANCELLED).name.lower()
        self._series.end(reason, self.machine.statistics, failed=self.failed)
        self._metrics.leave(self)

    @property
    def failed(self) -> bool:
        """Whether its drafter broke while it was decoded."""
        return self.machine is not None and bool(self.machine.statistics.drafter_error) and not self.missing

    def _count(self, commit: Commit, at: float) -> None:
        series, timing, machine = self._series, commit.timing, self.machine
        self.credit = commit.credit
        n = len(commit.tokens)
        if machine is None or not n:
            return
        series.window.observe(machine.in_flight)
        series.queue.observe(timing.queue_s)
        series.verify.observe(timing.verify_s)
        sent_at = self._sent_at.take(timing.echo)
        if sent_at is not None:
            link_s = max(0.0, at - sent_at - timing.hold_s)
            series.round_trip.observe(link_s)
            series.uplink.observe(link_s / 2)
            series.downlink.observe(link_s / 2)
        if commit.verified:
            series.verified.count(commit.verified, commit.accepted)
            self.accepted_of[commit.accepted] = self.accepted_of.get(commit.accepted, 0) + 1
        if not self._newest:
            series.first_token.observe(at - self._began)
        step_s = self._own_step_s(commit)
        if self._newest and step_s:
            self.decoding_s += at - self._newest
            self.cloud_s += n * step_s
            series.elapse(at - self._newest, n * step_s)
        self._newest = at

    def _own_step_s(self, commit: Commit) -> float:
        """Return the seconds that the commit's step would have taken without drafts; 0: not known."""
        steps, verify_s = self._steps, commit.timing.verify_s
        if self._reads_prompt:
            self._reads_prompt = False
            return steps.base + steps.slope
        if not commit.verified:
            steps.add(1, verify_s)
            return verify_s
        steps.add(commit.verified + 1, verify_s)
        return max(0.1 * verify_s, verify_s - steps.slope * commit.verified)


class EdgeMetrics(Collector):
    """Metrics of all texts whose observers it made. For one event loop; any thread may ask for the exposition.

    Attributes:
        registry: registry of all these, where others may add what they count.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.verified = SpeculationMetrics(self.registry)
        self.texts = self._counter("texts", "Texts that have ended, by why.", "finished_reason")
        self.losses = self._counter("stream_losses", "Streams lost or refused, by error.", "error")
        self.sheds = self._counter("sheds", "Refusals because a verifier or coordinator was full.")
        self.decoding = self._counter("decoding_seconds", "From the first to the newest commit, summed over texts.")
        self.cloud_streaming = self._counter(
            "cloud_streaming_seconds",
            "What plain cloud streaming would have taken for the same commits: one target step a token (estimate).",
        )
        self.first_token = self._histogram(
            "outrider:time_to_first_token_seconds", "From the beginning of a text to its first token."
        )
        self.phase = self._histogram(
            "outrider:edge_phase_seconds",
            "Phases of a round trip: draft (making the tokens of one message), uplink and downlink (half each of what "
            "the link took), queue (patience, co-scheduled and other sessions), verify (the target step).",
            "phase",
        )
        self.round_trip = self._histogram(
            "outrider:edge_round_trip_seconds",
            "From sending a draft message to the commit that echoes it, without the time that the verifier held it.",
        )
        self.draft_token = self._histogram("outrider:edge_draft_token_seconds", "Time to draft one token.")
        self.window = self._histogram(
            "outrider:edge_window_tokens", "Drafted tokens in flight when a commit comes in.", buckets=TOKENS
        )
        self._series: dict[tuple[str, str], _Series] = {}
        self._live: dict[SessionObserver, _Series] = {}
        self.registry.register(self)

    def observer(self) -> SessionObserver:
        """Return one for `client.generate(..., observer=...)`."""
        return SessionObserver(self)

    def _counter(self, name: str, meaning: str, *more: str) -> Counter:
        return Counter(f"outrider:edge_{name}", meaning, (*_LABELS, *more), registry=self.registry)

    def _histogram(self, name: str, meaning: str, *more: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        return Histogram(name, meaning, (*_LABELS, *more), registry=self.registry, buckets=buckets)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Return body and content type of `/metrics`: OpenMetrics where the Accept header asks for it."""
        return exposition(self.registry, accept)

    def join(self, observer: SessionObserver, subject: Subject) -> _Series:
        key = (subject.model, subject.drafter)
        if key not in self._series and len(self._series) >= MAX_SERIES:
            key = ("other", "other")
        if key not in self._series:
            self._series[key] = _Series(self, *key)
        self._live[observer] = self._series[key]
        return self._series[key]

    def leave(self, observer: SessionObserver) -> None:
        """Forget a text that has ended; its statistics are in its series."""
        self._live.pop(observer, None)

    def describe(self) -> Iterator[Metric]:
        return iter(_families().values())

    def collect(self) -> Iterator[Metric]:
        families = _families()
        live = list(self._live.items())
        for series in list(self._series.values()):
            _fill(families, series, [observer for observer, own in live if own is series])
        return iter(families.values())


def _families() -> dict[str, CounterMetricFamily | GaugeMetricFamily]:
    counters = {
        name: CounterMetricFamily(*named, labels=GENERATED[2] if name == "committed" else _LABELS)
        for name, named in _FROM_STATISTICS.items()
    }
    meaning = "Texts that went on as plain cloud streaming: no drafter could be had (missing), or it broke (failed)."
    counters["fallbacks"] = CounterMetricFamily("outrider:edge_fallbacks", meaning, labels=(*_LABELS, "reason"))
    return counters | {name: GaugeMetricFamily(*named, labels=_LABELS) for name, named in _GAUGES.items()}


def _fill(
    families: dict[str, CounterMetricFamily | GaugeMetricFamily], series: _Series, live: list[SessionObserver]
) -> None:
    """Add the values of one series, with the texts of it that are being decoded."""
    labels = series.labels
    machines = [observer.machine for observer in live if observer.machine is not None]
    for name in _FROM_STATISTICS:
        total = series.ended[name] + sum(getattr(machine.statistics, name) for machine in machines)
        families[name].add_metric((PART, *labels) if name == "committed" else labels, total)
    families["fallbacks"].add_metric((*labels, "missing"), series.missing)
    families["fallbacks"].add_metric((*labels, "failed"), series.failed + sum(observer.failed for observer in live))
    families["sessions"].add_metric(labels, len(machines))
    families["in_flight"].add_metric(labels, sum(machine.in_flight for machine in machines))
    families["credit"].add_metric(labels, sum(observer.credit for observer in live))
    families["planned"].add_metric(labels, sum(observer.planned for observer in live))
    if series.speedup is not None:
        families["speedup"].add_metric(labels, series.speedup)
    round_trips_s = [machine.statistics.round_trip_s for machine in machines if machine.statistics.round_trip_s]
    if round_trips_s:
        families["link"].add_metric(labels, sum(round_trips_s) / len(round_trips_s))

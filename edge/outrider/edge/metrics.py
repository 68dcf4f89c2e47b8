"""An edge's figures for Prometheus: counted in plain numbers while texts are decoded, put together when asked for.

    metrics = EdgeMetrics()
    async for event in client.generate(prompt, journal=metrics.journal(request_id)): ...
    body, content_type = metrics.exposition(accept_header)

A commit costs a few microseconds. Labels are the target and the drafter, never a session, a request or a text.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from outrider.edge.decoding import Journal, Subject
from outrider.proto import speculation
from outrider.proto.errors import OutriderError, ResourceExhausted
from outrider.proto.figures import Figure, FigureCollector, Page, exposition
from outrider.proto.policy import Line
from outrider.proto.session import Done, EdgeSession, EdgeStatistics
from outrider.proto.speculation import GENERATED, JudgedDrafts
from outrider.proto.tally import SECONDS, TOKENS, Tally
from outrider.proto.types import CloudFrame, Commit, Draft, EdgeFrame, FinishReason, Goaway, Open, Opened

PART = "edge"
MOST_SERIES = 64  # (target, drafter) pairs told apart; what comes after them is counted as `other`
_RECENT = 0.995  # of the running estimate of the speed-up kept at every commit: some 200 commits count

_WHOSE = ("model_name", "drafter")

FIRST_TOKEN = Figure(
    "histogram", "outrider:time_to_first_token_seconds", "From the beginning of a text to its first token.", _WHOSE
)
TEXTS = Figure("counter", "outrider:edge_texts", "Texts that have ended, by why.", (*_WHOSE, "finished_reason"))
SESSIONS = Figure("gauge", "outrider:edge_sessions", "Texts being decoded.", _WHOSE)
STEPS = Figure("counter", "outrider:edge_target_steps", "Commits received, each of one target step.", _WHOSE)
DRAFTED = Figure("counter", "outrider:edge_drafted_tokens", "Tokens drafted, judged or not.", _WHOSE)
COMPARED = Figure(
    "counter",
    "outrider:edge_compared_tokens",
    "Draft tokens that met the target's token of their position, none before them in their chain having missed.",
    _WHOSE,
)
HITS = Figure("counter", "outrider:edge_hit_tokens", "Compared draft tokens that were right.", _WHOSE)
MESSAGES = Figure("counter", "outrider:edge_draft_messages", "Draft messages sent.", _WHOSE)
UPLINK = Figure("counter", "outrider:edge_uplink_bytes", "Bytes of messages sent to verifiers.", _WHOSE)
DOWNLINK = Figure("counter", "outrider:edge_downlink_bytes", "Bytes of messages received from verifiers.", _WHOSE)
CODES = Figure("counter", "outrider:edge_steering_codes", "Steering codes received in commits.", _WHOSE)
BAD_CODES = Figure(
    "counter", "outrider:edge_steering_bad_codes", "Steering codes that could not be read, and were dropped.", _WHOSE
)
CODE_BYTES = Figure("counter", "outrider:edge_steering_bytes", "Bytes of the steering codes received.", _WHOSE)
STEERED_JOBS = Figure(
    "counter", "outrider:edge_steered_jobs", "Drafting jobs that were steered by a code of the target's state.", _WHOSE
)
CODE_AGE = Figure(
    "counter",
    "outrider:edge_steering_age_positions",
    "Sum over steered drafting jobs of the code's age: positions from its own to the one that the job's first draft "
    "follows.",
    _WHOSE,
)
RESUMES = Figure("counter", "outrider:edge_resumes", "Streams lost and opened again.", _WHOSE)
LOSSES = Figure("counter", "outrider:edge_stream_losses", "Streams lost or refused, by error.", (*_WHOSE, "error"))
SHEDS = Figure("counter", "outrider:edge_sheds", "Refusals because a verifier or coordinator was full.", _WHOSE)
FALLBACKS = Figure(
    "counter",
    "outrider:edge_fallbacks",
    "Texts that went on as plain cloud streaming: no drafter could be had (missing), or it broke (failed).",
    (*_WHOSE, "reason"),
)
PHASE = Figure(
    "histogram",
    "outrider:edge_phase_seconds",
    "Phases of a round trip: draft (making the tokens of one message), uplink and downlink (half each of what the "
    "link took), queue (the verifier's patience, company and other sessions), verify (the target step).",
    (*_WHOSE, "phase"),
)
ROUND_TRIP = Figure(
    "histogram",
    "outrider:edge_round_trip_seconds",
    "From sending a draft message to the commit that echoes it, without the time that the verifier held it.",
    _WHOSE,
)
DRAFT_TOKEN = Figure("histogram", "outrider:edge_draft_token_seconds", "Time to draft one token.", _WHOSE)
WINDOW = Figure("histogram", "outrider:edge_window_tokens", "Drafted tokens in flight when a commit comes in.", _WHOSE)
IN_FLIGHT = Figure("gauge", "outrider:edge_in_flight_tokens", "Drafted tokens in flight, of all texts.", _WHOSE)
CREDIT = Figure("gauge", "outrider:edge_credit_tokens", "Tokens that verifiers allow in flight, of all texts.", _WHOSE)
PLANNED = Figure(
    "gauge", "outrider:edge_planned_sessions", "Texts whose verifier plans its patience; others have it fixed.", _WHOSE
)
LINK = Figure("gauge", "outrider:edge_link_seconds", "Round trip of a small message, mean over the texts.", _WHOSE)
DECODING = Figure(
    "counter", "outrider:edge_decoding_seconds", "From the first to the newest commit, summed over texts.", _WHOSE
)
CLOUD = Figure(
    "counter",
    "outrider:edge_cloud_streaming_seconds",
    "What plain cloud streaming would have taken for the same commits: one target step a token (estimate).",
    _WHOSE,
)
SPEEDUP = Figure(
    "gauge", "outrider:edge_speedup_ratio", "Estimated speed-up over cloud streaming in the newest commits.", _WHOSE
)

FIGURES = (
    *speculation.FIGURES,
    *(FIRST_TOKEN, TEXTS, SESSIONS, STEPS, DRAFTED),
    *(COMPARED, HITS, MESSAGES, UPLINK, DOWNLINK, RESUMES, LOSSES, SHEDS, FALLBACKS, PHASE, ROUND_TRIP, DRAFT_TOKEN),
    *(WINDOW, IN_FLIGHT, CREDIT, PLANNED, LINK, DECODING, CLOUD, SPEEDUP),
    *(CODES, BAD_CODES, CODE_BYTES, STEERED_JOBS, CODE_AGE),
)
_FROM_STATISTICS = (
    *((GENERATED, "committed"), (STEPS, "steps"), (DRAFTED, "drafted"), (COMPARED, "compared"), (HITS, "hits")),
    *((MESSAGES, "messages"), (UPLINK, "uplink_bytes"), (DOWNLINK, "downlink_bytes"), (RESUMES, "resumes")),
    *((CODES, "codes"), (BAD_CODES, "bad_codes"), (CODE_BYTES, "code_bytes"), (STEERED_JOBS, "steered_jobs")),
    (CODE_AGE, "code_age"),
)
_MISSING, _FAILED = "missing", "failed"


def _phases() -> dict[str, Tally]:
    return {name: Tally(SECONDS) for name in ("draft", "uplink", "queue", "verify", "downlink")}


@dataclass(slots=True)
class _Series(JudgedDrafts):
    """What all texts with one target and one drafter have come to; `ended` sums the statistics of those that ended."""

    sheds: int = 0
    losses: dict[str, int] = field(default_factory=dict)
    texts: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=lambda: {_MISSING: 0, _FAILED: 0})
    ended: EdgeStatistics = field(default_factory=EdgeStatistics)
    phases: dict[str, Tally] = field(default_factory=_phases)
    first_token: Tally = field(default_factory=lambda: Tally(SECONDS))
    round_trip: Tally = field(default_factory=lambda: Tally(SECONDS))
    draft_token: Tally = field(default_factory=lambda: Tally(SECONDS))
    window: Tally = field(default_factory=lambda: Tally(TOKENS))
    decoding_s: float = 0.0
    cloud_s: float = 0.0
    recent_decoding_s: float = 0.0
    recent_cloud_s: float = 0.0

    def elapse(self, seconds: float, cloud_s: float) -> None:
        """Tokens took `seconds` here, and by estimate `cloud_s` with cloud streaming."""
        self.decoding_s += seconds
        self.cloud_s += cloud_s
        self.recent_decoding_s = self.recent_decoding_s * _RECENT + seconds
        self.recent_cloud_s = self.recent_cloud_s * _RECENT + cloud_s


class SessionJournal(Journal):
    """Counts one text into its series.

    **Phases.** A commit echoes the newest draft message that had come before it, and says how long the verifier held
    that message; the rest of the time since it was sent is the link's. No clock is compared across machines, so the
    link's time is divided equally between up and down, as NTP does. `queue` is from the commit before to the step,
    which is what the verifier's patience comes to.

    **Speed-up.** Plain cloud streaming pays the link once and then emits a token every target step, so the n tokens of
    a commit would have taken n·T1, T1 being what its step would have taken without its drafts: what it took, less
    their rows at the slope of the line through (rows, seconds) of this text's steps. A step that also read a prompt
    counts as that line at one row. The estimate leaves out what a verifier does between steps, so it is low by that
    share; where all steps judged equally many drafts the line is flat, so it is high by what those rows cost. In
    simulation, where truth is known, it is within 3 %.
    """

    def __init__(self, metrics: EdgeMetrics, request_id: str) -> None:
        self.request_id = request_id
        self.machine: EdgeSession | None = None
        self.accepted_of: dict[int, int] = {}  # judged steps by how many drafts they accepted
        self.decoding_s = 0.0
        self.cloud_s = 0.0
        self.credit = 0
        self.planned = False
        self.missing = False  # no drafter from the start, though one was wished for
        self._metrics = metrics
        self._series = _Series()
        self._began = 0.0
        self._first_token_s = 0.0
        self._newest = 0.0  # when the newest commit came; 0: none yet
        self._reads_prompt = True  # the next commit's step has read a prompt
        self._sent_at: list[float] = []  # when each draft message of this stream went
        self._echoed = 0
        self._drafting_s = 0.0  # spent since the newest draft message
        self._steps = Line()

    @property
    def speedup(self) -> float:
        """Estimated over cloud streaming, for the text so far; 0: not known yet."""
        return self.cloud_s / self.decoding_s if self.decoding_s else 0.0

    def began(self, subject: Subject, machine: EdgeSession, at: float) -> None:
        """Begin to count; in a conversation once a turn."""
        self.machine = machine
        self._began = at
        self._newest = 0.0
        self._reads_prompt = True
        self._sent_at.clear()
        self._echoed = 0
        self._series = self._metrics.join(self, subject)
        self.missing = bool(machine.statistics.drafter_error) and subject.drafter == "none"
        self._series.fallbacks[_MISSING] += self.missing

    def drafted(self, began: float, ended: float, tokens: int) -> None:
        """Time a drafting job."""
        self._drafting_s += ended - began
        if tokens:
            self._series.draft_token.add((ended - began) / tokens)

    def sent(self, frame: EdgeFrame, at: float) -> None:
        """Note when drafts go."""
        if isinstance(frame, Draft):
            self._sent_at.append(at)
            if frame.tokens:
                self._series.phases["draft"].add(self._drafting_s)
                self._drafting_s = 0.0
        elif isinstance(frame, Open):
            self._reads_prompt = True

    def received(self, frame: CloudFrame, at: float) -> None:
        """Count a commit."""
        match frame:
            case Commit():
                self._count(frame, at)
            case Opened():
                self.credit = frame.credit
                self.planned = frame.planned
                self._sent_at.clear()
                self._echoed = 0
            case Goaway():
                self._series.losses["Goaway"] = self._series.losses.get("Goaway", 0) + 1

    def lost(self, error: OutriderError, at: float) -> None:  # noqa: ARG002 - the base's
        """Count a lost or refused stream."""
        kind = type(error).__name__
        self._series.losses[kind] = self._series.losses.get(kind, 0) + 1
        self._series.sheds += isinstance(error, ResourceExhausted)

    def ended(self, done: Done | None, at: float) -> None:  # noqa: ARG002 - the base's
        """Settle the text's account."""
        series, machine = self._series, self.machine
        if machine is None:
            return
        if done is not None and done.error is not None:
            reason = "error"
        else:
            reason = ((done and done.finish) or FinishReason.CANCELLED).name.lower()
        series.texts[reason] = series.texts.get(reason, 0) + 1
        series.fallbacks[_FAILED] += self.failed
        for _, name in _FROM_STATISTICS:
            setattr(series.ended, name, getattr(series.ended, name) + getattr(machine.statistics, name))
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
        series.window.add(machine.in_flight)
        phases = series.phases
        phases["queue"].add(timing.queue_s)
        phases["verify"].add(timing.verify_s)
        if self._echoed < timing.echo <= len(self._sent_at):
            self._echoed = timing.echo
            link_s = max(0.0, at - self._sent_at[timing.echo - 1] - timing.hold_s)
            series.round_trip.add(link_s)
            phases["uplink"].add(link_s / 2)
            phases["downlink"].add(link_s / 2)
        if commit.judged:
            series.judge(commit.judged, commit.accepted)
            self.accepted_of[commit.accepted] = self.accepted_of.get(commit.accepted, 0) + 1
        if not self._newest:
            series.first_token.add(at - self._began)
        step_s = self._own_step_s(commit)
        if self._newest and step_s:
            self.decoding_s += at - self._newest
            self.cloud_s += n * step_s
            series.elapse(at - self._newest, n * step_s)
        self._newest = at

    def _own_step_s(self, commit: Commit) -> float:
        """What the commit's step would have taken without drafts, seconds; 0: not known."""
        steps, verify_s = self._steps, commit.timing.verify_s
        if self._reads_prompt:
            self._reads_prompt = False
            return steps.base + steps.slope
        if not commit.judged:
            steps.add(1, verify_s)
            return verify_s
        steps.add(commit.judged + 1, verify_s)
        return max(0.1 * verify_s, verify_s - steps.slope * commit.judged)


class EdgeMetrics:
    """Counts of all texts whose journals it made. For one event loop; any thread may ask for the exposition.

    Args:
        registry: to be part of; None: one of its own, in `registry`, where others may add what they count.

    Raises:
        ValueError: the registry has these names already.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._series: dict[tuple[str, str], _Series] = {}
        self._live: dict[SessionJournal, tuple[str, str]] = {}
        self.registry.register(FigureCollector(FIGURES, self._fill))

    def journal(self, request_id: str = "") -> SessionJournal:
        """For one `client.generate(..., journal=...)`; the request's id is kept for logs, and is never a label."""
        return SessionJournal(self, request_id)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """Body and content type of `/metrics`: OpenMetrics where the Accept header asks for it, else Prometheus."""
        return exposition(self.registry, accept)

    def join(self, journal: SessionJournal, subject: Subject) -> _Series:
        """A text begins: where to count it."""
        key = (subject.model, subject.drafter)
        if key not in self._series and len(self._series) >= MOST_SERIES:
            key = ("other", "other")
        self._live[journal] = key
        return self._series.setdefault(key, _Series())

    def leave(self, journal: SessionJournal) -> None:
        """A text has ended, and its statistics are in its series."""
        self._live.pop(journal, None)

    def _fill(self, page: Page) -> None:
        live = list(self._live.items())
        for whose, series in list(self._series.items()):
            _fill_series(page, whose, series, [journal for journal, key in live if key == whose])


def _fill_series(page: Page, whose: tuple[str, str], series: _Series, live: list[SessionJournal]) -> None:
    machines = [journal.machine for journal in live if journal.machine is not None]
    shared = (PART, *whose)
    series.show(page, shared)
    for figure, name in _FROM_STATISTICS:
        total = getattr(series.ended, name) + sum(getattr(machine.statistics, name) for machine in machines)
        page.put(figure, shared if figure is GENERATED else whose, total)
    for reason, texts in list(series.texts.items()):
        page.put(TEXTS, (*whose, reason), texts)
    for error, losses in list(series.losses.items()):
        page.put(LOSSES, (*whose, error), losses)
    page.put(FALLBACKS, (*whose, _MISSING), series.fallbacks[_MISSING])
    page.put(FALLBACKS, (*whose, _FAILED), series.fallbacks[_FAILED] + sum(journal.failed for journal in live))
    for phase, tally in series.phases.items():
        page.put(PHASE, (*whose, phase), tally)
    page.put(FIRST_TOKEN, whose, series.first_token)
    page.put(ROUND_TRIP, whose, series.round_trip)
    page.put(DRAFT_TOKEN, whose, series.draft_token)
    page.put(WINDOW, whose, series.window)
    page.put(SHEDS, whose, series.sheds)
    page.put(DECODING, whose, series.decoding_s)
    page.put(CLOUD, whose, series.cloud_s)
    page.put(SESSIONS, whose, len(machines))
    page.put(IN_FLIGHT, whose, sum(machine.in_flight for machine in machines))
    page.put(CREDIT, whose, sum(journal.credit for journal in live))
    page.put(PLANNED, whose, sum(journal.planned for journal in live))
    if series.recent_decoding_s:
        page.put(SPEEDUP, whose, series.recent_cloud_s / series.recent_decoding_s)
    timed = [machine.statistics.round_trip_s for machine in machines if machine.statistics.round_trip_s]
    if timed:
        page.put(LINK, whose, sum(timed) / len(timed))

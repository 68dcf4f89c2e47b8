"""The edge's half of a session: the transcript is its own, and drafts run ahead of it.

`EdgeSession.handle(event, now)` is the one entrance: it takes what has happened, on a clock of the caller's, and
returns what to do, in order. A shell that runs the machine

1. hands it `Started`, and a `StreamReady` for every stream that it opens (at once, and after each `Reopen`), with the
   newest answer that this verifier gave to an earlier text, so that drafts can follow the Open at once,
2. hands it every frame that comes, as it is, and `Disconnected` where a stream breaks or cannot be opened,
3. puts the frames of `Send` on the stream, in order, and hands the tokens of `Emit` to the user, until `Done`,
4. gives a `DraftJob` or a `CatchUpJob` to the drafter that it names, and hands its `Drafted` or `CaughtUp`, or else
   `DrafterFailed`, back. One job runs at a time, and the machine issues the next one itself.

Where texts of one edge share what they measure, each event comes with a snapshot of what the others have measured
since this machine's last event, and `measurements` of the machine are the newest then.

One drafter is active and makes the chain. Idle ones catch up with the text, and where steps verify branches they read
the chain, which shows their own proposals in place of the drafts. One that differs is a branch, worth a row by the
share of misses at which this drafter had the token. What it proposes after that is drafted where it is likely enough.
A drafter whose branches bring less than the time that reading takes rests.
"""

from __future__ import annotations

import itertools
import logging
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.proto.drafter_format import published_name
from outrider.proto.errors import InvalidArgument, OutriderError, Unavailable, UnknownToken, bounded_retry_s
from outrider.proto.policy import Measurements, Window
from outrider.proto.policy.likely_branches import BRANCH_BYTES
from outrider.proto.policy.measurements import Acceptance, Smoothed
from outrider.proto.policy.window import TOKEN_BYTES
from outrider.proto.session.events import (
    CaughtUp,
    Disconnected,
    Drafted,
    DrafterFailed,
    EdgeEvent,
    EdgeInstruction,
    Reopen,
    Send,
    StopRequested,
    StreamReady,
    TurnBegun,
)
from outrider.proto.session.jobs import (
    CATCH_UP,
    CatchUpJob,
    DrafterSteering,
    DraftJob,
    Steer,
    TeacherForced,
    VectorKeeper,
)
from outrider.proto.session.measuring import Meter
from outrider.proto.session.selection import DrafterName, Selection
from outrider.proto.session.stream import DrafterCounts, EdgeStatistics, EdgeStream, EdgeText, RetryRules, check_terms
from outrider.proto.session.tree import DraftTree
from outrider.proto.types import (
    Cancel,
    CloudFrame,
    Commit,
    DraftToken,
    FinishReason,
    Goal,
    Goaway,
    Open,
    Opened,
    PromptLogprobs,
    QuietWire,
    Report,
    Sampling,
    ServiceGoal,
    Steering,
    token_ids,
)

log = logging.getLogger(__name__)

JOB_S = 0.004  # drafting time between looks at the verifier's frames
MAX_JOB_TOKENS = 8
RUN = 8  # most tokens that an idle drafter proposes after its own in place of a draft
FIRST_S = 0.0005  # assumed time of an idle drafter's job before the first
MAX_UNREAD = 64  # tokens of the transcript that an idle drafter reads before the chain
REST = 12  # chains that are not read after one did not pay
CHEAP_S = 0.0005  # longest time of a job for branches; whoever takes longer only drafts
_MESSAGE_BYTES = 45  # a small Draft on the wire: HTTP/2 framing, a window update, gRPC's prefix, the message
_MIN_TOKENS = 0.2  # replayed: 40 % fewer bytes at round trips of 30 to 120 ms for 0.2 % of speed
_MIN_TRIALS = 8  # of the verifier's own drafts, before they say anything
_QUIET_COMMITS = 8  # without one, after which the verifier is taken to draft no more
_TOKENS_OF_A_BRANCH = BRANCH_BYTES // TOKEN_BYTES  # whose bytes it has


def job_tokens(drafting_s: float) -> int:
    """Return the most tokens of a drafting job where each takes `drafting_s` seconds; 0: unknown yet."""
    if drafting_s < JOB_S / (MAX_JOB_TOKENS + 1):
        return MAX_JOB_TOKENS
    return max(1, min(MAX_JOB_TOKENS, int(JOB_S / drafting_s)))


@dataclass(slots=True)
class Worth:
    """Worth of an idle drafter's reading of chains: its mean time, in seconds, and the tokens that it adds to a step.

    Attributes:
        rests_until: epoch of the next chain that it reads.
    """

    seconds: Smoothed = field(default_factory=Smoothed)
    gain: Smoothed = field(default_factory=Smoothed)
    rests_until: int = 0


class VerifierArm:
    """Hits of the verifier's own drafter in one text, as commits show them: an arm that costs the edge nothing.

    Chains of both that part compete for the rows of a step, and the verifier's come a round trip sooner. So a drafter
    of the edge that hits less rests; one that hits as much drafts, and price and round trip decide who does
    (`policy.patience`); one that hits more leads. The edge goes by its own counts of both over the same tokens.
    """

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self._trials = 0
        self._quiet_commits = _QUIET_COMMITS

    def take(self, commit: Commit) -> None:
        """Count the verifier's own drafts of a commit, which come after the edge's, up to the first miss."""
        self._quiet_commits = 0 if commit.verified_here else self._quiet_commits + 1
        if not commit.verified_here or commit.accepted < commit.verified - commit.verified_here:
            return
        for _ in range(commit.accepted_here):
            self.acceptance.add(True)
        if commit.accepted_here < commit.verified_here and commit.finish is None:
            self.acceptance.add(False)
        self._trials += commit.accepted_here + 1

    def is_better_than(self, mine: Acceptance) -> bool:
        """Return whether the verifier drafts, and hits surely more than a drafter of the edge."""
        known = self._trials >= _MIN_TRIALS and self._quiet_commits < _QUIET_COMMITS
        return known and self.acceptance.surely_exceeds(mine)


class EdgeSession:
    """One text as the edge sees it: the transcript is its own; drafts run ahead of it."""

    def __init__(
        self,
        frame: Open,
        window: Window | None = None,
        retry: RetryRules | None = None,
        measurements: Measurements | None = None,
        *,
        send_q: bool = False,
        steering: DrafterSteering | None = None,
        selection: Selection | None = None,
        battery: float = 1.0,
        job_tokens: Callable[[float], int] = job_tokens,
    ) -> None:
        """Begin a text.

        Args:
            frame: what to open streams with.
            window: how far ahead to draft; None: as far as it pays.
            retry: how long lost streams are reopened.
            measurements: snapshot of those of earlier texts with the same drafters; the machine's own from now on.
            send_q: whether to send the drafter's probabilities, so that commits carry rewards.
            steering: how the drafter uses the vectors that `frame.steering` requests; None: it is not steered.
            selection: selection among several drafters; None: there is one.
            battery: share of charge that is left; the less, the likelier a branch must be.
            job_tokens: function from the seconds of a drafted token (0: unknown yet) to the most tokens of a job.

        Raises:
            InvalidArgument: one of `frame.steering` and `steering` is there without the other.
        """
        if (frame.steering is None) != (steering is None):
            raise InvalidArgument("must come together with the drafter's steering settings", field="open.steering")
        self._selection = selection or Selection.of_one()
        self._vectors = VectorKeeper(frame.steering, steering) if frame.steering and steering else None
        self._text = EdgeText(frame)
        self._stream = EdgeStream(self._text, retry or RetryRules())
        self._meter = Meter(self._selection.names, measurements or Measurements())
        self._tree = DraftTree(self._text, self._stream, self._meter, battery)
        self._window = window or Window()
        self._job_tokens = job_tokens
        self._send_q = send_q
        self._drafts = frame.drafting  # whether there is a drafter that works
        self._running: DraftJob | CatchUpJob | None = None  # job that no event has answered yet
        self._last_job_s = 0.0
        self._issued_in = self._replaced_in = 0  # turns in which the newest job was issued, and drafters replaced
        self._allowed, self._allowed_to = 0, -1  # tokens since the last review, and their drafter; -1: none
        self._verifier = VerifierArm()
        self._choice_due = True
        self._yields = False  # the verifier's own drafter is the better one
        self._stalled = False  # the drafter had nothing to say; ask again after the next commit
        self._worth: dict[str, Worth] = {}  # of idle drafters, by name
        self._committed = 0  # length of the transcript when the newest job for branches was issued
        self._selection.begin_text(self._text.prompt_length, 0)

    # --- state that a shell may read ---

    @property
    def transcript(self) -> list[int]:
        """Prompt and committed tokens."""
        return self._text.tokens

    @property
    def prompt_length(self) -> int:
        return self._text.prompt_length

    @property
    def in_flight(self) -> int:
        return len(self._tree)

    @property
    def sampling(self) -> Sampling:
        return self._text.frame.sampling

    @property
    def service(self) -> ServiceGoal | None:
        """Service that the text asks for; None: none."""
        return self._text.frame.service

    def take_service(self, service: ServiceGoal | None, *, unkept: bool) -> None:
        """Ask for the service of a lease, before its stream opens; see `EdgeText.take_service`."""
        self._text.take_service(service, unkept=unkept)

    @property
    def quiet(self) -> QuietWire | None:
        """Cells of the text's streams; None: they have frames."""
        return self._text.frame.quiet

    @property
    def done(self) -> bool:
        return self._text.done

    @property
    def finish(self) -> FinishReason | None:
        """Why the turn ended; None: it runs, or failed."""
        return self._text.finish

    @property
    def statistics(self) -> EdgeStatistics:
        return self._text.statistics

    @property
    def verifier(self) -> str:
        """Name of the verifier of the newest stream; empty before the first."""
        return self._stream.terms.verifier

    @property
    def precision(self) -> str:
        """Precision that the next verifier of the text must have; empty: any."""
        return self._stream.precision

    @property
    def needed_context(self) -> int:
        """Positions that the next verifier of the text must have."""
        return self._stream.context_length or len(self.transcript) + 1

    @property
    def connected(self) -> bool:
        return self._stream.connected

    @property
    def next_epoch(self) -> int:
        return self._stream.next_epoch

    @property
    def drafters(self) -> tuple[DrafterName, ...]:
        """Name and version of each drafter, by its index."""
        return tuple(zip(self._selection.names, self._selection.versions, strict=True))

    @property
    def drafter(self) -> int:
        """Index of the active drafter."""
        return self._selection.current

    @property
    def measurements(self) -> Measurements:
        return self._meter.measurements

    @property
    def round_trip_s(self) -> float:
        """Smoothed round-trip time of a small message, in seconds, without the verifier's work."""
        return self._meter.measurements.round_trip_s

    # --- events in, instructions out ---

    def handle(self, event: EdgeEvent, now: float, measurements: Measurements | None = None) -> list[EdgeInstruction]:
        """Take one event in and return what to do.

        Args:
            event: what has happened.
            now: time of the event, in seconds on the clock of all events.
            measurements: snapshot that other texts have added to since the last event; None: none have.

        Raises:
            InvalidArgument: a turn cannot begin with these values; nothing has changed then.
        """
        if measurements is not None:
            self._meter.adopt(measurements)
        if measurements is not None or not isinstance(event, CaughtUp) or event.job.drafter == self.drafter:
            self._review()  # what an idle drafter has read is nothing to the active one
        return [*self._react(event, now), *self._give_work(now)]

    def _react(self, event: EdgeEvent, now: float) -> list[EdgeInstruction]:
        if isinstance(event, CloudFrame) and event.epoch != self._stream.epoch:
            self.statistics.fenced += 1  # a stream that was left still speaks
            return []
        match event:
            case Commit():
                return self._commit(event, now)
            case Drafted():
                return self._drafted(event, now)
            case CaughtUp():
                return self._caught_up(event, now)
            case Opened():
                return self._opened(event, now)
            case StreamReady():
                return self._open(event, now)
            case Disconnected(error):
                return self._lose(error, now)
            case Goaway(reason, retry_after_s):
                return self._lose(Unavailable(reason, retry_after_s=bounded_retry_s(retry_after_s)), now)
            case DrafterFailed(error, drafter):
                return self._drafter_failed(error, drafter)
            case StopRequested(finish):
                return self._cancel(finish)
            case TurnBegun():
                return self._begin_turn(event, now)
            case PromptLogprobs():
                self._text.take_prompt(event)
        return []  # Started and Pong change nothing

    def _give_work(self, now: float) -> list[EdgeInstruction]:
        """Issue the next job; where there is nothing to draft, send what is held and let idle drafters catch up."""
        if self._running is not None:
            return []
        draft = self._draft_job()
        if draft is not None:
            self._issue(draft)
            return [draft]
        held = [] if self.done else self._flush(now)
        job = self._idle_job(self._meter.idle_s(now)) or self._catch_up_job() or self._branch_job(now)
        self._issue(job)
        held += self._send_branches(now, finished=job is None)
        return held if job is None else [*held, job]

    # --- streams ---

    def _open(self, ready: StreamReady, now: float) -> list[EdgeInstruction]:
        """Open a stream; drafts that its verifier has not seen are sent again as a new chain."""
        steering = self._vectors.request(drafting=self._drafts) if self._vectors is not None else None
        frame = self._stream.open(ready.lease, now, drafting=self._drafts, steering=steering, expected=ready.expected)
        self._meter.open_stream(now)
        self._tree.begin_stream()
        return [Send(frame), *self._flush(now)]

    def _opened(self, opened: Opened, now: float) -> list[EdgeInstruction]:
        """Take up a stream, over which drafts may have gone before."""
        if self.done or self.connected:
            return []  # a duplicate
        try:
            reopen = self._stream.accept(opened, now)
        except OutriderError as error:
            return self._lose(error, now)
        if reopen is not None:
            return [reopen]
        self.statistics.steered = opened.steered and self._vectors is not None
        self._meter.time_open(self._stream.opened_at, now)
        self.statistics.round_trip_s = self.round_trip_s
        if len(self._tree) > max(opened.credit, self._tree.sent):
            self._abandon()
        return [*self._flush(now), *self._report()]

    def _lose(self, error: OutriderError, now: float) -> list[EdgeInstruction]:
        """Abandon a stream, and the text with it where no other stream can help."""
        if self.done:
            self._stream.connected = False
            return []
        outcome = self._stream.lose(error, now)
        if error.field.startswith("draft."):
            self._abandon()
        return [outcome if isinstance(outcome, Reopen) else self._end(error=outcome)]

    def _cancel(self, finish: FinishReason) -> list[EdgeInstruction]:
        if self.done:
            return []
        sends: list[EdgeInstruction] = [Send(Cancel(finish.name.lower()))] if self.connected else []
        return [*sends, self._end(finish)]

    def _begin_turn(self, begun: TurnBegun, now: float) -> list[EdgeInstruction]:
        """Send the new tokens to a verifier that kept the session; else open a stream with the whole transcript."""
        text, stream, last = self._text, self._stream, self.sampling
        if stream.connected:
            check_terms(stream.terms, begun.sampling)
        text.begin_turn(begun.start, begun.prompt, begun.sampling)
        sampling = self.sampling
        if self._vectors is not None:
            self._vectors.forget()  # a prompt is read unsteered
        self._meter.forget_round_trip()
        if begun.measurements is not None:
            self._meter.begin_kind(begun.measurements)
        stream.forget_retries()
        stream.max_tokens = min(sampling.max_tokens, stream.terms.context_length - text.prompt_length)
        if begun.selection is not None:
            self._replace_drafters(begun.selection)
        self._stalled = self._yields = False
        self._verifier = VerifierArm()
        self._abandon()
        self._selection.begin_text(text.prompt_length, begun.start)
        if not stream.connected:
            return [Reopen(0.0, Unavailable("no verifier keeps the session"))]
        self._meter.begin_turn(now)
        changed = None if sampling == last else begun.sampling
        frame = stream.begin_turn(begun.start, begun.prompt, changed, self._tree.number)
        return [Send(frame), *self._report()]

    def _replace_drafters(self, selection: Selection) -> None:
        """Go on with the drafters of `selection`; ones that stay keep what they have read."""
        self._drafts = selection.take_over(self._selection)
        self._selection = selection
        self._replaced_in = self._text.turns
        self._meter.take_drafters(selection.names)
        if self._drafts:
            self.statistics.drafter_error = ""

    def _end(self, finish: FinishReason | None = None, error: OutriderError | None = None) -> EdgeInstruction:
        self._stream.end_turn(error)
        return self._text.end(finish, error)

    # --- commits ---

    def _commit(self, commit: Commit, now: float) -> list[EdgeInstruction]:
        """Append the new tokens to the transcript; follow or abandon the chain."""
        text, stream = self._text, self._stream
        if text.done or not stream.serves(commit):
            return []
        try:
            known = stream.follow(commit)
        except OutriderError as error:
            return self._lose(error, now)
        tokens, since_s = commit.tokens[known:], now - self._meter.commit_at
        if tokens or commit.finish is not None:  # else a replay
            self._measure(commit, now)
            stream.credit, stream.covered = commit.credit, commit.covered
        instructions: list[EdgeInstruction] = []
        if tokens:
            instructions.append(text.emit(commit, known))
            self._follow(commit, known, since_s)
            if commit.steering is not None and self._vectors is not None and self.statistics.steered:
                self._take_vector(self._vectors, commit.steering)
        if commit.finish is not None:
            return [*instructions, self._end(commit.finish)]
        self._stalled = False
        stream.forget_retries()
        return [*instructions, *self._report(), *self._flush(now)]

    def _measure(self, commit: Commit, now: float) -> None:
        statistics, vectors = self.statistics, self._vectors
        statistics.steps += 1
        statistics.verified += commit.verified
        statistics.verified_cloud += commit.verified_here
        statistics.verified_beside += commit.verified_beside
        statistics.cloud_drafting_s += commit.timing.drafting_s
        self._tree.said_complete = False
        timed = self._meter.take_commit(commit, now, downlink=vectors is not None)
        if vectors is not None and statistics.steered:
            vectors.policy.after_commit(self._meter.measurements)
        if timed:
            statistics.round_trip_s = self.round_trip_s

    def _follow(self, commit: Commit, known: int, seconds: float) -> None:
        """Append the commit's tokens after the first `known`, which came after `seconds`, to text and chain."""
        text, tree, position = self._text, self._tree, len(self._text.tokens)
        tokens = token_ids(commit.tokens[known:])
        text.tokens += tokens
        met = 0
        while True:
            # Where the chain is shorter, a running job may be proposing the rest, and is compared when it is done.
            drafts = tree.drafts[: len(tokens) - met]
            hits = self._compare(position + met, drafts, tokens[met:])
            if hits == len(drafts):
                break
            met += hits + 1
            self._choice_due = True
            self._selection.agreed = min(self._selection.agreed, position + met - 1)
            tree.miss(position + met - 1, drafts[hits], tokens[met - 1], commit.chain)
        tree.advance(hits)
        self._verifier.take(commit)
        self._yields = self._verifier.is_better_than(self._meter.drafter(self.drafter).calibration.acceptance)
        self._choice_due = self._choice_due or self._rests  # a chain would be another drafter's, perhaps
        self._counts_of(self.drafter).committed += len(tokens)
        self._selection.learn(
            committed=len(tokens),
            # A step verifies drafts after a miss too, but nothing is known of them; the verifier's own come last.
            verified=max(0, min(commit.verified - commit.verified_here, len(commit.tokens)) - known),
            accepted=max(0, commit.accepted - commit.accepted_here - known),
            agreement=math.nan if commit.reward is None else commit.reward,
            seconds=seconds,
        )

    def _take_vector(self, vectors: VectorKeeper, vector: Steering) -> None:
        """Take a vector of the last position but one, the newest that the verifier has processed.

        A bad vector costs drafts alone.
        """
        statistics = self.statistics
        statistics.vectors += 1
        statistics.vector_bytes += len(vector.values)
        try:
            vectors.take(vector, len(self.transcript) - 2)
        except InvalidArgument as error:
            if not statistics.bad_vectors:
                log.warning("a steering vector of %s was dropped: %s", self.verifier, error)
            statistics.bad_vectors += 1

    # --- messages ---

    def _flush(self, now: float) -> list[EdgeInstruction]:
        """Send the drafts when the chain is complete, or when waiting for more would miss a step."""
        tree, stream = self._tree, self._stream
        if not stream.takes_drafts:
            return []
        unsent = tree.drafts[tree.sent : max(tree.sent, stream.credit)]  # the credit may have shrunk
        if not unsent:
            return self._say_complete(now)
        if tree.sent and not self._may_wait_long() and not self._worth_a_message():
            return []  # the verifier has the beginning of the chain; the rest goes after the next commit
        allowance = self._allowance()
        full = len(tree) >= stream.terms.max_drafts > tree.sent
        if allowance and not (full or self._meter.is_due(now, self._last_job_s)):
            return []
        return [self._send(unsent, now, complete=not (allowance or self._job_runs))]

    def _send_branches(self, now: float, *, finished: bool) -> list[EdgeInstruction]:
        message = self._tree.message(now, finished=finished)
        return [] if message is None else [Send(message)]

    def _report(self) -> list[EdgeInstruction]:
        """Report where measurements for the verifier's patience have changed by a quarter."""
        if not self._stream.connected:
            return []
        mine = self._meter.drafter(self.drafter)
        request = None
        if self._vectors is not None and self.statistics.steered:
            request = self._vectors.changed_request(drafting=self._drafts)
        acceptance = mine.calibration.acceptance
        report = Report(self._drafts, mine.drafting_s.value, self.round_trip_s, acceptance.rate, request)
        # The drafter rests, though it hits more than the verifier's own.
        hits_more = self._rests and acceptance.surely_exceeds(self._verifier.acceptance)
        return [Send(report)] if self._stream.changed(report, hits_more=hits_more) else []

    def _say_complete(self, now: float) -> list[EdgeInstruction]:
        """Send an empty end of the chain to a verifier that waits in vain."""
        if not (self._stream.connected and self._drafts) or self._job_runs or self._tree.said_complete:
            return []
        if not self._may_wait_long() or self._allowance():
            return []
        return [self._send([], now, complete=True)]

    def _may_wait_long(self) -> bool:
        """Return whether the verifier may wait for long: not one that plans and has drafts or a long link."""
        stream = self._stream
        if not stream.credit:
            return False  # it wants no drafts
        if not stream.terms.planned or stream.terms.goal is Goal.EFFICIENCY:
            return True
        measured = self._meter.measurements
        return not self._tree.sent and measured.round_trip_s < measured.step.mean

    def _worth_a_message(self) -> bool:
        """Return whether the unsent drafts of a chain already sent are worth a message; each accepted saves a step."""
        measured = self._meter.measurements
        survival = itertools.accumulate(self._tree.chances(self.drafter), operator.mul)
        expected: float = sum(itertools.islice(survival, self._tree.sent, None))  # of the unsent drafts, accepted ones
        saved_s, sent_s = expected * measured.step.mean, _MESSAGE_BYTES * measured.round_trip.slope
        return expected >= _MIN_TOKENS and saved_s >= sent_s

    def _send(self, drafts: list[DraftToken], now: float, *, complete: bool) -> Send:
        confidence = [draft.confidence for draft in drafts]
        with_q = self._send_q and not any(map(math.isnan, confidence))
        ids = token_ids(drafts)
        tokens = tuple(map(DraftToken, ids, confidence) if with_q else map(DraftToken, ids))
        branches = self._tree.leaves(self.drafter, self._tree.sent) if drafts else ()
        self._meter.send_draft(len(drafts) + _TOKENS_OF_A_BRANCH * len(branches), now)
        self.statistics.messages += 1
        self.statistics.sent_beside += len(branches)
        name, version = self._selection.names[self.drafter], self._selection.versions[self.drafter]
        return Send(self._tree.send(tokens, (published_name(name), version), branches, complete=complete))

    # --- how far ahead ---

    def _review(self) -> None:
        """Compute the allowance once more, now that an event may have changed what it depends on."""
        self._allowed_to = -1

    def _allowance(self) -> int:
        """Return how many more tokens may be drafted in the next job."""
        if self._stalled or self._yields or not self._drafts:
            return 0
        if self._allowed_to != self.drafter:
            self._allowed, self._allowed_to = self._tokens(self.drafter), self.drafter
        return self._allowed

    def _tokens(self, drafter: int) -> int:
        """Return how many more tokens a drafter may draft: by credit, length of text and job, and the window."""
        text, stream, meter = self._text, self._stream, self._meter
        in_flight = len(self._tree)
        room = min(stream.credit, stream.max_tokens - text.generated - 1) - in_flight
        if room <= 0 or not stream.takes_drafts or text.done:
            return 0
        mine = meter.drafter(drafter)
        drafting_s = mine.drafting_s.value
        return self._window.more(
            meter.measurements,
            stream.terms.goal,
            min(room, self._job_tokens(drafting_s)),
            in_flight=in_flight,
            survival=self._tree.survival(drafter),
            acceptance=mine.calibration.acceptance.rate,
            drafting_s=drafting_s,
            covered=stream.covered,
        )

    @property
    def _rests(self) -> bool:
        """Whether the verifier drafts alone, since it grants no credit or hits more."""
        return self._yields or (not self._stream.credit and bool(self._stream.terms.drafter_here))

    # --- jobs ---

    @property
    def _job_runs(self) -> bool:
        return isinstance(self._running, DraftJob) and self._running.drafter == self.drafter

    def _issue(self, job: DraftJob | CatchUpJob | None) -> None:
        self._running, self._issued_in = job, self._text.turns

    def _draft_job(self) -> DraftJob | None:
        """Return a job after the drafts in flight; None: enough is drafted, or nothing can be."""
        stream, selection = self._stream, self._selection
        if not stream.connected and selection.reads_prompt(len(self._text.tokens)):
            return None  # what the prompt tells of the drafters decides which of them is first
        if self._choice_due and self._drafts and stream.takes_drafts and not self._tree:
            self._choice_due = False
            self._choose()
        count = self._allowance()
        if not count:
            return None
        drafts, committed, agreed = self._tree.tokens, len(self._text.tokens), selection.agreed
        after = (*self._text.tokens[agreed:], *drafts[max(0, agreed - committed) :])
        forced = max(0, committed - selection.forced_from(committed, self.drafter))
        prefix_length = committed + len(drafts)
        job = DraftJob(
            truncate_to=agreed,
            extend_with=after,
            count=count,
            epoch=self._tree.epoch,
            steer=self._steer(prefix_length - 1) if self.drafter == selection.steered else None,
            drafter=self.drafter,
            skip=committed - forced - agreed if forced else 0,
            teacher_forced=forced,
        )
        selection.agreed = prefix_length
        return job

    def _choose(self) -> None:
        before, patience = self.drafter, self._text.frame.patience
        patience_s = patience.seconds if patience is not None else 0.0
        self._selection.choose(self._meter.round_costs(before), len(self._text.tokens), patience_s)
        self.statistics.switches += self.drafter != before

    def _steer(self, position: int) -> Steer | None:
        """Return the vector for a job whose first token follows `position`; None: unchanged."""
        if self._vectors is None:
            return None
        self._meter.measurements.lookahead.add(position + 2 - len(self._text.tokens))
        age = self._vectors.age(position)
        if age is not None:
            self.statistics.steered_jobs += 1
            self.statistics.vector_age += age
        return self._vectors.steer(self._text.prompt_length)

    def _branch_job(self, now: float) -> DraftJob | None:
        """Return a job of the active drafter for a branch of the chain; None: there is none worth drafting."""
        selection, committed = self._selection, len(self._text.tokens)
        if self.done or not self._drafts or selection.agreed < committed:
            return None
        job = self._tree.job(self.drafter, selection.agreed, self._job_tokens, now)
        if job is not None:
            selection.agreed = job.branch
        return job

    def _idle_job(self, within_s: float) -> DraftJob | None:
        """Return a job of an idle drafter, of at most `within_s` seconds, for branches; None: none pays."""
        within_s = min(within_s, CHEAP_S)
        if within_s <= 0 or self._selection.drafters < 2 or self.done:
            return None
        if not (self._tree and self._tree.takes_others):
            return None
        self._committed = len(self._text.tokens)
        job = self._reading_job(within_s) or self._run_job(within_s)
        if job is not None:
            self._selection.note_read(job.drafter, self._committed)
        return job

    def _reading_job(self, within_s: float) -> DraftJob | None:
        """Return a job in which a drafter reads what it lacks of the text, and the chain."""
        other = next((other for other in self._selection.idle if self._should_read(other, within_s)), None)
        if other is None:
            return None
        agreed, committed, chain = self._selection.read(other), self._committed, self._tree.tokens
        forced_from = max(1, self._selection.forced_from(committed, other))
        return DraftJob(
            truncate_to=agreed,
            extend_with=(*self._text.tokens[agreed:], *chain),
            count=0,
            epoch=self._tree.epoch,
            drafter=other,
            skip=forced_from - agreed,
            teacher_forced=committed + len(chain) - forced_from,
        )

    def _should_read(self, other: int, within_s: float) -> bool:
        if self._tree.read_to.get(other, 0) >= self._committed + len(self._tree):
            return False
        worth = self._worth.setdefault(self._selection.names[other], Worth())
        if self._tree.epoch < worth.rests_until or self._committed - self._selection.read(other) > MAX_UNREAD:
            return False
        return (worth.seconds.value or FIRST_S) <= within_s

    def _run_job(self, within_s: float) -> DraftJob | None:
        """Return a job in which a drafter goes on after its own token in place of a draft."""
        found = self._tree.likeliest_other()
        if found is None:
            return None
        chance, position, token, other = found
        measured = self._meter.drafter(other)
        token_s = measured.drafting_s.value or FIRST_S / RUN
        count = min(RUN, int(within_s / token_s))
        follows, active = measured.calibration.acceptance.rate, self._meter.drafter(self.drafter)
        if follows <= active.calibration.acceptance.rate:
            return None  # the active drafter's own drafts are better than more of these
        gain = chance * follows * (1 - follows**count) / (1 - follows)
        if not count or not self._pays(gain, count * token_s):
            return None
        self._tree.branches[position, token].asked = True
        committed, agreed = self._committed, self._selection.read(other)
        forced = committed - max(1, self._selection.forced_from(committed, other))
        return DraftJob(
            truncate_to=agreed,
            extend_with=(*self._text.tokens[agreed:], *self._tree.tokens[: position - committed], token),
            count=count,
            epoch=self._tree.epoch,
            drafter=other,
            skip=committed - forced - agreed if forced else 0,
            teacher_forced=forced,
            branch=position,
        )

    def _pays(self, gain: float, seconds: float) -> bool:
        """Return whether so many tokens more in a step are worth the work of an idle drafter."""
        return gain * self._meter.measurements.pace.token_s > seconds

    def _catch_up_job(self) -> CatchUpJob | None:
        """Return a job of an idle drafter; None: there is nothing worth reading, or the first Open has not left yet."""
        if self.done or not self._stream.has_opened:
            return None
        job = self._selection.next_catch_up(self._text.tokens)
        if job is None and self._rests and self._drafts:
            job = self._selection.catch_up_active(self._text.tokens)
        return job

    # --- their results ---

    def _drafted(self, done: Drafted, now: float) -> list[EdgeInstruction]:
        """Put the proposals that continue the text on the chain."""
        self._running = None
        self.statistics.drafting_s += done.seconds
        if self.done:
            return []
        if any(not 0 <= draft.id < self._stream.terms.vocab_size for draft in done.drafts):
            error = UnknownToken("the drafter proposes tokens that the target does not have")
            return self._drafter_failed(error, done.job.drafter)
        if done.job.drafter == self.drafter:
            self._take_own(done)
        elif self._issued_in == self._text.turns:
            self._take_idle(done)
        return self._flush(now)

    def _take_own(self, done: Drafted) -> None:
        job, drafts, text, selection = done.job, done.drafts, self._text, self._selection
        if self._issued_in == text.turns:
            self._compare_forced(job.drafter, job.truncate_to + job.skip, done.teacher_forced)
        if job.branch >= 0:
            self._tree.add(done)
            return
        if job.epoch != self._tree.epoch:
            selection.agreed = min(selection.agreed, job.start)
            return
        self.statistics.drafted += len(drafts)
        if not drafts:
            self._stalled = self._choice_due = True
        elif len(job.extend_with) <= CATCH_UP:
            self._meter.drafter(self.drafter).drafting_s.add(done.seconds / len(drafts))
            self._last_job_s = done.seconds
        overtaken = max(0, min(len(drafts), len(text.tokens) - job.start))
        if overtaken:  # by tokens that were committed meanwhile
            hits = self._compare(job.start, drafts[:overtaken], text.tokens[job.start : job.start + overtaken])
            selection.agreed = job.start + hits
            if hits < overtaken:
                self._choice_due = True
                return
        room = max(0, self._stream.credit - len(self._tree))  # the credit may have shrunk meanwhile
        self._tree.drafts += drafts[overtaken : overtaken + room]
        if drafts[overtaken:]:
            selection.agreed = max(selection.agreed, len(text.tokens) + len(self._tree))

    def _take_idle(self, done: Drafted) -> None:
        """Take in what an idle drafter has read of the chain, or the run of its branch."""
        job, other, drafts = done.job, done.job.drafter, done.teacher_forced.drafts
        known = min(len(drafts), self._committed - job.truncate_to - job.skip)
        if known > 0:
            self._compare_forced(other, self._committed - known, TeacherForced(drafts[:known]))
        if job.count:
            self._meter.drafter(other).drafting_s.add(done.seconds / max(1, len(done.drafts)))
            self._tree.add(done)
            return
        self.statistics.read += len(job.extend_with)
        worth = self._worth.setdefault(self._selection.names[other], Worth())
        worth.seconds.add(done.seconds)
        if job.epoch != self._tree.epoch:
            return
        self._tree.read_to[other] = job.start
        worth.gain.add(self._tree.propose(other, self.drafter, self._committed, drafts[max(0, known) :]))
        if not self._pays(worth.gain.value, worth.seconds.value):
            worth.rests_until = self._tree.epoch + REST

    def _caught_up(self, done: CaughtUp, now: float) -> list[EdgeInstruction]:
        self._running = None
        job = done.job
        self.statistics.reading_s += done.seconds
        if self.done or self._issued_in != self._text.turns:
            return []
        self._meter.drafter(job.drafter).reading_s.add(done.seconds / len(job.tokens))
        self.statistics.read += len(job.tokens)
        self._selection.note_prompt(job.drafter, done.teacher_forced.log_q)
        self._compare_forced(job.drafter, job.start, done.teacher_forced)
        return self._flush(now)

    def _drafter_failed(self, error: OutriderError, drafter: int) -> list[EdgeInstruction]:
        """Go on with the other drafters, or without drafts where it was the last, and report that."""
        self._running = None
        if self._issued_in >= self._replaced_in:  # else it was one of the drafters before
            self.statistics.drafter_error = str(error)
            self._drafts = self._selection.fail(drafter) and self._drafts
            if drafter == self.drafter:
                self._abandon()
        return self._report()

    def _abandon(self) -> None:
        self._selection.agreed = min(self._selection.agreed, len(self._text.tokens))
        self._choice_due = True
        self._tree.abandon()

    # --- hits ---

    def _compare(self, start: int, drafts: Sequence[DraftToken], tokens: Sequence[int]) -> int:
        """Count the chain's drafts from `start` on, up to the first that misses; return the hits before it.

        Another drafter's, which come first, say nothing of the active one.
        """
        hits = next((i for i, draft in enumerate(drafts) if draft.id != tokens[i]), len(drafts))
        compared = drafts[: hits + 1]
        if not compared:
            return 0
        others = sum(draft.other for draft in compared)
        if others:
            self._meter.forget_chances()
        if others < len(compared):
            own = [i < hits for i in range(others, len(compared))]
            self._learn(self.drafter, start + others, own, compared[others:])
        self.statistics.compared += len(compared)
        self.statistics.hits += hits
        return hits

    def _compare_forced(self, drafter: int, start: int, forced: TeacherForced) -> None:
        """Compare teacher-forced proposals from position `start` on with the committed tokens there."""
        known = max(0, self._selection.first_undecided(drafter) - start)
        drafts, start = forced.drafts[known:], start + known
        if not drafts:
            return
        committed = self._text.tokens[start : start + len(drafts)]
        hits = [draft.id == token for draft, token in zip(drafts, committed, strict=True)]
        self._learn(drafter, start, hits, drafts)

    def _learn(self, drafter: int, start: int, hits: list[bool], drafts: Sequence[DraftToken]) -> None:
        """Count the hits of a drafter's proposals for positions from `start` on."""
        self._meter.compare(drafter, [draft.score for draft in drafts], hits)
        self._selection.note(drafter, start, hits)
        counts = self._counts_of(drafter)
        counts.compared += len(hits)
        counts.hits += sum(hits)

    def _counts_of(self, drafter: int) -> DrafterCounts:
        return self.statistics.of(self._selection.names[drafter])

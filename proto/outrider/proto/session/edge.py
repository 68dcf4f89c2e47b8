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
"""

from __future__ import annotations

import itertools
import logging
import math
import operator
from collections.abc import Callable

from outrider.proto.errors import InvalidArgument, OutriderError, Unavailable, UnknownToken, bounded_retry_s
from outrider.proto.policy import Measurements, Window
from outrider.proto.policy.likely_branches import BRANCH_BYTES
from outrider.proto.policy.window import TOKEN_BYTES, worth_a_message
from outrider.proto.session.drafting import Drafting, job_tokens
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
from outrider.proto.session.measuring import Meter
from outrider.proto.session.selection import DrafterName, Selection
from outrider.proto.session.session_steering import DrafterSteering, VectorKeeper
from outrider.proto.session.session_text import EdgeStatistics, EdgeText
from outrider.proto.session.stream import EdgeStream, RetryRules, check_terms
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
    Report,
    Sampling,
    Steering,
    token_ids,
)

log = logging.getLogger(__name__)

_TOKENS_OF_A_BRANCH = BRANCH_BYTES // TOKEN_BYTES  # whose bytes it has


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
        selection = selection or Selection.of_one()
        self._vectors = VectorKeeper(frame.steering, steering) if frame.steering and steering else None
        self._text = EdgeText(frame)
        self._stream = EdgeStream(self._text, retry or RetryRules())
        self._meter = Meter(selection.names, measurements or Measurements())
        self._tree = DraftTree(self._text, self._stream, self._meter, battery)
        self._drafting = Drafting(
            self._text,
            self._tree,
            self._stream,
            self._meter,
            selection,
            window or Window(),
            vectors=self._vectors,
            job_tokens=job_tokens,
        )
        self._send_q = send_q

    # --- state that a shell may read ---

    @property
    def transcript(self) -> list[int]:
        """Prompt and committed tokens."""
        return self._text.tokens

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return self._text.prompt_length

    @property
    def in_flight(self) -> int:
        """Number of drafted tokens that no commit has met yet."""
        return len(self._tree)

    @property
    def sampling(self) -> Sampling:
        """Sampling parameters of the present turn."""
        return self._text.frame.sampling

    @property
    def done(self) -> bool:
        """Whether the present turn has ended."""
        return self._text.done

    @property
    def finish(self) -> FinishReason | None:
        """Why the turn ended; None: it runs, or failed."""
        return self._text.finish

    @property
    def statistics(self) -> EdgeStatistics:
        """Counts of the present turn."""
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
        """Whether a verifier has the session, running or kept."""
        return self._stream.connected

    @property
    def next_epoch(self) -> int:
        """Epoch of the next stream, for its lease."""
        return self._stream.next_epoch

    @property
    def drafters(self) -> tuple[DrafterName, ...]:
        """Name and version of each drafter, by its index."""
        return self._drafting.drafters

    @property
    def drafter(self) -> int:
        """Index of the active drafter."""
        return self._drafting.active

    @property
    def measurements(self) -> Measurements:
        """Measurements of this text and the texts before it."""
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
            self._drafting.review()  # what an idle drafter has read is nothing to the active one
        return [*self._react(event, now), *self._give_work(now)]

    def _react(self, event: EdgeEvent, now: float) -> list[EdgeInstruction]:
        if isinstance(event, CloudFrame) and not self._stream.carries(event):
            self.statistics.fenced += 1
            return []
        match event:
            case Commit():
                return self._commit(event, now)
            case Drafted():
                return self._drafted(event, now)
            case CaughtUp():
                return self._flush(now) if self._drafting.take_reading(event) else []
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
        if self._drafting.running is not None:
            return []
        draft = self._drafting.draft()
        if draft is not None:
            return [draft]
        held = [] if self.done else self._flush(now)
        job = self._drafting.merge(self._meter.idle_s(now)) or self._drafting.catch_up() or self._drafting.branch(now)
        held += self._send_branches(now, finished=job is None)
        return held if job is None else [*held, job]

    # --- streams ---

    def _open(self, ready: StreamReady, now: float) -> list[EdgeInstruction]:
        """Open a stream; drafts that its verifier has not seen are sent again as a new chain."""
        drafting = self._drafting.enabled
        steering = self._vectors.request(drafting=drafting) if self._vectors is not None else None
        frame = self._stream.open(ready.lease, now, drafting=drafting, steering=steering, expected=ready.expected)
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
            self._drafting.abandon()
        return [*self._flush(now), *self._report()]

    def _lose(self, error: OutriderError, now: float) -> list[EdgeInstruction]:
        """Abandon a stream, and the text with it where no other stream can help."""
        if self.done:
            self._stream.connected = False
            return []
        outcome = self._stream.lose(error, now)
        if error.field.startswith("draft."):
            self._drafting.abandon()
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
        self._drafting.begin_turn(begun.start, begun.selection)
        if not stream.connected:
            return [Reopen(0.0, Unavailable("no verifier keeps the session"))]
        self._meter.begin_turn(now)
        changed = None if sampling == last else begun.sampling
        frame = stream.begin_turn(begun.start, begun.prompt, changed, self._tree.number)
        return [Send(frame), *self._report()]

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
            if _measure(commit, now, text.statistics, self._tree, self._meter, self._vectors):
                self.statistics.round_trip_s = self.round_trip_s
            stream.credit, stream.covered = commit.credit, commit.covered
        instructions: list[EdgeInstruction] = []
        if tokens:
            instructions.append(text.emit(commit, known))
            self._drafting.commit(commit, known, since_s)
            if commit.steering is not None and self._vectors is not None and self.statistics.steered:
                _take_vector(self._vectors, commit.steering, text, self.verifier)
        if commit.finish is not None:
            return [*instructions, self._end(commit.finish)]
        self._drafting.resume()
        stream.forget_retries()
        return [*instructions, *self._report(), *self._flush(now)]

    # --- messages ---

    def _flush(self, now: float) -> list[EdgeInstruction]:
        """Send the drafts when the chain is complete, or when waiting for more would miss a step."""
        tree, stream, drafting = self._tree, self._stream, self._drafting
        if not stream.takes_drafts:
            return []
        unsent = tree.unsent(stream.credit)  # it may have shrunk
        if not unsent:
            return self._say_complete(now)
        if tree.sent and not self._may_wait_long() and not self._worth_a_message():
            return []  # the verifier has the beginning of the chain; the rest goes after the next commit
        allowance = drafting.allowance()
        full = len(tree) >= stream.terms.max_drafts > tree.sent
        if allowance and not (full or self._meter.is_due(now, drafting.last_job_s)):
            return []
        return [self._send(unsent, now, complete=not (allowance or drafting.job_runs))]

    def _send_branches(self, now: float, *, finished: bool) -> list[EdgeInstruction]:
        """Send the branches made when no more are worth making, or when more would come too late."""
        message = self._tree.message(now, finished=finished)
        return [] if message is None else [Send(message)]

    def _report(self) -> list[EdgeInstruction]:
        """Report where measurements for the verifier's patience have changed by a quarter."""
        if not self._stream.connected:
            return []
        drafting, meter = self._drafting, self._meter
        mine = meter.drafter(drafting.active)
        request = None
        if self._vectors is not None and self._text.statistics.steered:
            request = self._vectors.changed_request(drafting=drafting.enabled)
        acceptance = mine.calibration.acceptance.rate
        report = Report(drafting.enabled, mine.drafting_s.value, meter.measurements.round_trip_s, acceptance, request)
        return [Send(report)] if self._stream.changed(report, wants_to_lead=drafting.should_lead) else []

    def _say_complete(self, now: float) -> list[EdgeInstruction]:
        """Send an empty end of the chain to a verifier that waits in vain."""
        drafting = self._drafting
        if not (self._stream.connected and drafting.enabled) or drafting.job_runs or self._tree.said_complete:
            return []
        if not self._may_wait_long() or drafting.allowance():
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
        measured = self._meter.measurements
        survival = itertools.accumulate(self._tree.chances(self._drafting.active), operator.mul)
        expected = sum(itertools.islice(survival, self._tree.sent, None))  # of the unsent drafts, accepted ones
        return worth_a_message(expected, step_s=measured.step.mean, byte_s=measured.round_trip.slope)

    def _send(self, drafts: list[DraftToken], now: float, *, complete: bool) -> Send:
        confidence = [draft.confidence for draft in drafts]
        with_q = self._send_q and not any(map(math.isnan, confidence))
        ids = token_ids(drafts)
        tokens = tuple(map(DraftToken, ids, confidence) if with_q else map(DraftToken, ids))
        sent = self._tree.sent
        branches = self._tree.leaves(self._drafting.active, sent) if drafts else ()
        self._meter.send_draft(len(drafts) + _TOKENS_OF_A_BRANCH * len(branches), now)
        self._text.statistics.messages += 1
        self._text.statistics.sent_beside += len(branches)
        return Send(self._tree.send(tokens, self._drafting.drafter, branches, complete=complete))

    # --- drafters ---

    def _drafted(self, drafted: Drafted, now: float) -> list[EdgeInstruction]:
        try:
            self._drafting.take(drafted)
        except UnknownToken as error:
            return self._drafter_failed(error, drafted.job.drafter)
        return [] if self.done else self._flush(now)

    def _drafter_failed(self, error: OutriderError, drafter: int) -> list[EdgeInstruction]:
        """Go on with the other drafters, or without drafts where it was the last, and report that."""
        self._drafting.fail(error, drafter)
        return self._report()

    def _end(self, finish: FinishReason | None = None, error: OutriderError | None = None) -> EdgeInstruction:
        self._stream.end_turn(error)
        return self._text.end(finish, error)


def _measure(
    commit: Commit, now: float, statistics: EdgeStatistics, tree: DraftTree, meter: Meter, vectors: VectorKeeper | None
) -> bool:
    """Count and measure a commit; return whether it timed a round trip."""
    statistics.steps += 1
    statistics.verified += commit.verified
    statistics.verified_here += commit.verified_here
    statistics.verified_beside += commit.verified_beside
    statistics.drafting_here_s += commit.timing.drafting_s
    tree.said_complete = False
    timed = meter.take_commit(commit, now, downlink=vectors is not None)
    if vectors is not None and statistics.steered:
        vectors.policy.after_commit(meter.measurements)
    return timed


def _take_vector(vectors: VectorKeeper, vector: Steering, text: EdgeText, verifier: str) -> None:
    """Take a vector of the last position but one, the newest that the verifier has processed.

    A bad vector costs drafts alone.
    """
    text.statistics.vectors += 1
    text.statistics.vector_bytes += len(vector.values)
    try:
        vectors.take(vector, len(text.tokens) - 2)
    except InvalidArgument as error:
        if not text.statistics.bad_vectors:
            log.warning("a steering vector of %s was dropped: %s", verifier, error)
        text.statistics.bad_vectors += 1

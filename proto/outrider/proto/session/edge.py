"""The edge's half of a session: the transcript is its own, and drafts run ahead of it."""

from __future__ import annotations

import itertools
import logging
import math
import operator
from dataclasses import dataclass, field, replace

from outrider.proto.errors import (
    InvalidArgument,
    LeaseExpired,
    OutriderError,
    ResourceExhausted,
    Unavailable,
    UnknownToken,
)
from outrider.proto.policy import (
    TOKEN_BYTES,
    DrafterExperience,
    EdgeView,
    Experience,
    LearningRule,
    SteeringView,
    SurvivalWindow,
    TextCalibration,
    WindowPolicy,
    commit_bytes,
    due_to_flush,
    worth_a_message,
)
from outrider.proto.policy.selection import Arm
from outrider.proto.session.codes import CodeKeeper, Codes, Steer
from outrider.proto.session.selection import Conditions, ReadJob, Selection
from outrider.proto.types import (
    MAX_TOKEN_ID,
    Cancel,
    Commit,
    Continue,
    Draft,
    EdgeFrame,
    FinishReason,
    Goal,
    Goaway,
    Open,
    Opened,
    Report,
    Sampling,
    Steering,
    TopLogprobs,
)

log = logging.getLogger(__name__)

CATCH_UP = 8  # a job that first has to read more tokens than this says nothing about drafting speed
UNMEASURED_S = 0.0005  # to draft a token, of a drafter that has not
UNMEASURED_STEP_S = 0.03  # of a verifier that has not made any
DRAFT_BYTES = 30  # of a Draft message beside its tokens, framing included, for the link's rate


@dataclass(frozen=True, slots=True)
class Send:
    """Put `frame` on the stream."""

    frame: EdgeFrame


@dataclass(frozen=True, slots=True)
class Emit:
    """Hand committed tokens to the user. `drafted[i]` tells whether tokens[i] was an accepted draft."""

    start: int
    tokens: tuple[int, ...]
    drafted: tuple[bool, ...]
    logp: tuple[float, ...]
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Reopen:
    """The stream is gone: get a lease and open again after `after_s` seconds."""

    after_s: float
    reason: OutriderError


@dataclass(frozen=True, slots=True)
class Done:
    """The text is whole (`finish`) or can never be (`error`)."""

    finish: FinishReason | None = None
    error: OutriderError | None = None


EdgeInstruction = Send | Emit | Reopen | Done


@dataclass(frozen=True, slots=True)
class DraftJob:
    """What a drafter should do next: truncate its prefix, extend it, propose up to `count` tokens.

    Attributes:
        truncate_to: tokens of its prefix that it keeps.
        extend_with: tokens after them: committed ones, then drafts of its own.
        count: tokens to propose.
        epoch: of the chain.
        steer: by what, said before it extends; None: as before.
        drafter: whose job it is.
        skip, foresee: behind the first `skip` tokens of `extend_with` it is to foresee so many, all of them committed.
    """

    truncate_to: int
    extend_with: tuple[int, ...]
    count: int
    epoch: int
    steer: Steer | None = None
    drafter: int = 0
    skip: int = 0
    foresee: int = 0

    @property
    def start(self) -> int:
        """Position of the first proposed token."""
        return self.truncate_to + len(self.extend_with)


@dataclass(frozen=True, slots=True)
class Foreseen:
    """What a drafter says of tokens that are there.

    Attributes:
        tokens: [m] that it would have proposed in place of committed ones; -1: nothing.
        q: [m] its probability of each; NaN: not known.
        log_q: [n] natural logs of what it gives to tokens of the prompt.
    """

    tokens: tuple[int, ...] = ()
    q: tuple[float, ...] = ()
    log_q: tuple[float, ...] = ()


NOTHING_FORESEEN = Foreseen()


@dataclass(slots=True)
class DrafterCounts:
    """Of one drafter in one text. Tokens.

    Attributes:
        committed: while it had the turn.
        hits: committed tokens that it proposed, or would have.
        compared: committed tokens of which that is known.
    """

    committed: int = 0
    hits: int = 0
    compared: int = 0


@dataclass(slots=True)
class EdgeStatistics:
    """Counts of one session. Seconds and bytes; bytes are filled in by the link.

    Attributes:
        steered: whether the verifier sends the codes that the drafter takes.
        codes: that came, those that could not be read among them.
        code_bytes: that they took on the downlink, but for their framing.
        bad_codes: that could not be read, and were dropped.
        steered_jobs: drafting jobs that were steered by a code.
        code_age: sum over these of the code's age: positions from its own to the one that the first draft follows.
        of_drafters: by name, of each that had a turn or read along.
        switches: turns that passed on from one drafter to another.
        read: tokens that idle drafters were given to read.
    """

    committed: int = 0
    accepted: int = 0
    drafted: int = 0
    judged: int = 0
    hits: int = 0  # drafts that agreed with the committed token of their position
    compared: int = (
        0  # drafts that met one, none before them in their chain having missed: acceptance is hits / compared
    )
    steps: int = 0
    messages: int = 0  # Draft messages
    resumes: int = 0
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    round_trip_s: float = 0.0
    drafter_error: str = ""
    steered: bool = False
    codes: int = 0
    code_bytes: int = 0
    bad_codes: int = 0
    steered_jobs: int = 0
    code_age: int = 0
    of_drafters: dict[str, DrafterCounts] = field(default_factory=dict)
    switches: int = 0
    read: int = 0

    def of(self, drafter: str) -> DrafterCounts:
        """Counts of the drafter of that name."""
        if drafter not in self.of_drafters:
            self.of_drafters[drafter] = DrafterCounts()
        return self.of_drafters[drafter]

    @property
    def mean_code_age(self) -> float:
        """Positions; 0 where no job was steered."""
        return self.code_age / self.steered_jobs if self.steered_jobs else 0.0


@dataclass(frozen=True, slots=True)
class RetryRules:
    """How long and how often a lost stream is reopened."""

    first_s: float = 0.05
    most_s: float = 2.0
    give_up_s: float = 60.0


@dataclass(slots=True)
class _Retries:
    count: int = 0
    since: float = math.inf


class EdgeSession:
    """One text as the edge sees it: the transcript is its own; drafts run ahead of it."""

    def __init__(
        self,
        frame: Open,
        window: WindowPolicy | None = None,
        retry: RetryRules | None = None,
        experience: Experience | None = None,
        *,
        send_q: bool = False,
        codes: Codes | None = None,
        selection: Selection | None = None,
        battery: float = 1.0,
    ) -> None:
        """Begin a text.

        Args:
            frame: what to open streams with.
            window: how far ahead to draft; None: as `SurvivalWindow` says.
            retry: how long lost streams are reopened.
            experience: measured in earlier texts with the same drafters; this one adds to it.
            send_q: send the drafter's probabilities, which earn rewards in the commits.
            codes: that `frame.steering` wishes for; None: the drafter is not steered.
            selection: among several drafters; None: there is one.
            battery: share that is left, for rules that price energy.

        Raises:
            InvalidArgument: one of `frame.steering` and `codes` is there without the other.
        """
        if (frame.steering is None) != (codes is None):
            raise InvalidArgument("must come with `codes`, and these with it", field="open.steering")
        self._send_q = send_q
        self._codes = CodeKeeper(frame.steering, codes) if frame.steering is not None and codes is not None else None
        self.statistics = EdgeStatistics()
        self.finish: FinishReason | None = None
        self.done = False
        self.transcript: list[int] = [*frame.prompt, *frame.committed]
        self.prompt_length = len(frame.prompt)
        self.verifier = ""
        self._open = frame
        self._policy = window or SurvivalWindow()
        self._learner = window if isinstance(window, LearningRule) else None
        self._retry = retry or RetryRules()
        self._retries = _Retries()
        self._connected = False
        self._kept = False  # whether the verifier keeps the session when a turn is done
        self._turns = 0  # that have begun after the first
        self._opened_for = 0  # as of `_turns`
        self._turn = 0  # so many Continues have gone over this stream
        self._context_length = MAX_TOKEN_ID
        self._max_tokens = frame.sampling.max_tokens
        self._credit = 0
        self._granted = 0  # credit with which a turn begins
        self._vocab_size = MAX_TOKEN_ID + 1
        self._drafting = frame.drafting
        self._drafted: list[int] = []  # unverified, follows the transcript
        self._confidence: list[float] = []  # the drafter's in each of them, NaN: not known
        self._sent = 0  # so many of them are on the wire
        self._chain = 0
        self._said_complete = False  # since the last commit
        self._chain_sent = False  # whether the wire has heard of the chain
        self._entropy: list[float] = []  # likewise
        self._certainty: list[float] = []  # likewise
        self._allowance: int | None = None  # None: something has changed since it was worked out
        self._chances: list[float] = []  # of the first drafts in flight, as the calibration has them now
        self._selection = selection or Selection.of_one()
        self._selection.begin_text(self.prompt_length, 0)
        self._battery = battery
        self._choice_due = True
        self._reading: ReadJob | None = None
        self._given_for = 0  # the turn, as of `_turns`, whose tokens the newest job is of
        self._epoch = 0  # counts contradictions; a job of an older epoch proposes in vain
        self._job_running = False
        self._stalled = False  # the drafter had nothing to say; ask again after the next commit
        self._experience = experience or Experience()
        self._calibrations = self._new_calibrations()
        self._round_trip: tuple[int, float] | None = None  # bytes of the newest commit; seconds, without the uplink's
        self._sent_at: list[tuple[float, int]] = []  # when each Draft message of this stream went, and its bytes
        self._commit_at = 0.0
        self._heard_commit = False  # of this stream
        self._goal = Goal.LATENCY
        self._planned = False
        self._max_drafts = frame.max_drafts
        self._last_job_s = 0.0
        self._opened_at = 0.0
        self._opened_with = 0  # tokens of text that the last Open held
        self._reported = Report(frame.drafting)

    # --- opening and reopening ---

    def open_frame(self, lease: bytes, now: float) -> Open:
        """What to open a stream with, fresh or resumed."""
        self._opened_at = now
        self._opened_with = self.generated
        self._opened_for = self._turns
        self._turn = 0
        self._reported = Report(self._drafting)
        return replace(
            self._open,
            lease=lease,
            committed=tuple(self.transcript[self.prompt_length :]),
            drafting=self._drafting,
            steering=self._codes.ask(self._drafting) if self._codes is not None else None,
        )

    def on_opened(self, opened: Opened, now: float) -> list[EdgeInstruction]:
        """A verifier has taken the session. Drafts that it has not seen go again, as a new chain."""
        self._allowance = None
        if self.done or self._connected:
            return []  # said before
        if self._opened_for != self._turns:
            return [Reopen(0.0, Unavailable("opened for a turn that was left"))]
        if opened.committed != self._opened_with:
            error = InvalidArgument("the verifier took over another text", field="opened.committed")
            return self.on_disconnected(error, now)
        self.verifier = opened.verifier
        self._max_tokens = opened.max_tokens
        self._vocab_size = opened.vocab_size
        self._credit = self._granted = opened.credit
        self._kept = opened.keep_s > 0
        self._context_length = opened.context_length
        self._goal = opened.goal
        self._max_drafts = opened.max_drafts
        self._planned = opened.planned
        self.statistics.steered = opened.steered and self._codes is not None
        self._round_trip = None
        self._connected = True
        self._sent_at.clear()
        self._said_complete = False
        self._commit_at = now
        self._heard_commit = False
        self._experience.time_open(now - self._opened_at)
        self.statistics.round_trip_s = self.round_trip_s
        self._new_chain()
        self._sent = 0
        if len(self._drafted) > self._credit:
            self._forget_drafts()
        return [*self._flush(now), *self._reports()]

    def on_disconnected(self, error: OutriderError, now: float) -> list[EdgeInstruction]:
        """The stream broke, or could not be opened."""
        self._allowance = None
        self._connected = False
        if self.done:
            return []
        if not _may_heal(error):
            return self._end(error=error)
        self._retries.since = min(self._retries.since, now)
        backoff_s = min(self._retry.most_s, self._retry.first_s * 2.0 ** min(self._retries.count, 64))
        wait_s = max(error.retry_after_s, backoff_s)
        given_up = now - self._retries.since > self._retry.give_up_s
        if given_up or error.retry_after_s > self._retry.give_up_s:  # asked to wait for longer than anybody would
            return self._end(error=error)
        self._retries.count += 1
        self.statistics.resumes += 1
        return [Reopen(wait_s, error)]

    def on_goaway(self, goaway: Goaway, now: float) -> list[EdgeInstruction]:
        """The verifier drains."""
        return self.on_disconnected(Unavailable(goaway.reason, retry_after_s=goaway.retry_after_s), now)

    def on_cancel(self, finish: FinishReason = FinishReason.CANCELLED) -> list[EdgeInstruction]:
        """The user wants no more, or has seen a stop string."""
        self._allowance = None
        if self.done:
            return []
        sends: list[EdgeInstruction] = [Send(Cancel(finish.name.lower()))] if self._connected else []
        return [*sends, *self._end(finish=finish)]

    # --- turns ---

    @property
    def connected(self) -> bool:
        """Whether a verifier has the session, running or kept."""
        return self._connected

    def on_turn(
        self,
        start: int,
        prompt: tuple[int, ...],
        sampling: Sampling,
        now: float,
        experience: Experience | None = None,
    ) -> list[EdgeInstruction]:
        """Begin another turn when the last is done: `prompt` [n] follows the first `start` tokens of the transcript.

        A verifier that kept the session is told what is new; else a stream is to be opened with the whole transcript.

        Args:
            start: 0 to the transcript's length; what follows is forgotten.
            prompt: the tokens that are new.
            sampling: of this turn.
            now: on the clock of all events.
            experience: measured in earlier texts of such sampling; None: this session's goes on.

        Raises:
            InvalidArgument: with the field named; nothing has changed then.
        """
        self._allowance = None
        if not self.done:
            raise InvalidArgument("still runs; finish or leave it before the next", field="turn")
        frame = replace(self._open, prompt=(*self.transcript[:start], *prompt), committed=(), sampling=sampling)
        same = sampling == self._open.sampling
        self._open = frame
        self.transcript = list(frame.prompt)
        self.prompt_length = len(frame.prompt)
        self.finish, self.done = None, False
        self.statistics = EdgeStatistics(
            round_trip_s=self.statistics.round_trip_s,
            drafter_error=self.statistics.drafter_error,
            steered=self.statistics.steered,
        )
        if self._codes is not None:
            self._codes.forget()  # a prompt is read unsteered
        self._round_trip = None
        if experience is not None and experience is not self._experience:
            self._experience = experience
            self._calibrations = self._new_calibrations()
        self._retries = _Retries()
        self._turns += 1
        self._stalled = False
        self._max_tokens = min(sampling.max_tokens, self._context_length - self.prompt_length)
        self._forget_drafts()
        self._selection.begin_text(self.prompt_length, start)
        if not self._connected:
            return [Reopen(0.0, Unavailable("no verifier keeps the session"))]
        self._turn += 1
        self._credit = self._granted
        self._sent_at.clear()
        self._commit_at = now
        return [Send(Continue(start, prompt, None if same else sampling, self._chain)), *self._reports()]

    # --- commits ---

    def on_commit(self, commit: Commit, now: float) -> list[EdgeInstruction]:
        """Append to the transcript what is new; follow or abandon the chain."""
        self._allowance = None
        if self.done or commit.turn != self._turn:
            return []
        known = len(self.transcript) - commit.start
        if known < 0:
            return self.on_disconnected(Unavailable("a commit was lost; resuming"), now)
        if commit.start < self.prompt_length or commit.tokens[:known] != tuple(
            self.transcript[commit.start : commit.start + len(commit.tokens)]
        ):
            return self._end(error=InvalidArgument("contradicts the transcript", field="commit.tokens"))
        tokens = commit.tokens[known:]
        if tokens or commit.finish is not None:  # else a replay
            since_s = now - self._commit_at
            self._measure(commit, now)
            self._credit = commit.credit
        instructions: list[EdgeInstruction] = []
        if tokens:
            drafted = tuple(i < commit.accepted for i in range(known, len(commit.tokens)))
            logprobs, top_logprobs = commit.logprobs[known:], commit.top_logprobs[known:]
            instructions.append(
                Emit(len(self.transcript), tokens, drafted, commit.logp[known:], logprobs, top_logprobs)
            )
            self.statistics.committed += len(tokens)
            self.statistics.accepted += sum(drafted)
            self._follow(tokens)
            self.statistics.of(self._selection.names[self.drafter]).committed += len(tokens)
            self._selection.learn(
                committed=len(tokens),
                judged=commit.judged,
                accepted=sum(drafted),
                agreement=math.nan if commit.reward is None else commit.reward,
                seconds=since_s,
            )
            if commit.steering is not None and self._codes is not None and self.statistics.steered:
                self._take_code(self._codes, commit.steering)
        if commit.finish is not None:
            return [*instructions, *self._end(finish=commit.finish)]
        self._stalled = False
        self._retries = _Retries()
        return [*instructions, *self._reports(), *self._flush(now)]

    def _measure(self, commit: Commit, now: float) -> None:
        self.statistics.steps += 1
        self.statistics.judged += commit.judged
        if self._heard_commit:  # before the first of a stream the prompt was read
            self._experience.pace.add(now - self._commit_at, len(commit.tokens))
        self._heard_commit = True
        self._commit_at = now
        self._said_complete = False
        timing = commit.timing
        if timing.verify_s > 0:
            self._experience.step.add(commit.judged + 1, timing.verify_s)
        if 0 < timing.echo <= len(self._sent_at):
            sent_at, size = self._sent_at[timing.echo - 1]
            self._experience.time_draft(size, now - sent_at - timing.hold_s)
            self.statistics.round_trip_s = self.round_trip_s
            if self._codes is not None:
                self._time_commit(commit_bytes(commit), now - sent_at - timing.hold_s, size)
        if self._codes is not None and self.statistics.steered:
            self._codes.policy.after_commit(self._steering_view())

    def _time_commit(self, size: int, seconds: float, draft_bytes: int) -> None:
        """A round trip of `seconds` ended with a commit of `size` bytes."""
        before, self._round_trip = self._round_trip, (size, seconds - self._experience.round_trip.slope * draft_bytes)
        if before is not None:
            self._experience.downlink.add(size - before[0], self._round_trip[1] - before[1])

    def _take_code(self, codes: CodeKeeper, code: Steering) -> None:
        """Of the last position but one: the newest that the verifier has processed. A bad one costs drafts alone."""
        self.statistics.codes += 1
        self.statistics.code_bytes += len(code.values)
        try:
            codes.take(code, len(self.transcript) - 2)
        except InvalidArgument as error:
            if not self.statistics.bad_codes:
                log.warning("a steering code of %s was dropped: %s", self.verifier, error)
            self.statistics.bad_codes += 1

    def _follow(self, tokens: tuple[int, ...]) -> None:
        hits, missed = 0, False
        for token in tokens:
            position = len(self.transcript)
            self.transcript.append(token)
            if not self._drafted:
                continue  # a running job may be proposing this position; on_drafted compares
            hit = self._drafted[0] == token
            self._compare(position, self._confidence[0], hit)
            hits, missed = hits + hit, not hit
            if hit:
                del self._drafted[0], self._confidence[0], self._entropy[0], self._certainty[0]
                self._sent = max(0, self._sent - 1)
            else:
                self._forget_drafts()
                self._selection.agreed = min(self._selection.agreed, position)
        self._settled(hits, missed)

    def _settled(self, hits: int, missed: bool) -> None:
        if self._learner is not None and (hits or missed):
            self._learner.settled(hits, missed)

    def _compare(self, position: int, confidence: float, hit: bool) -> None:
        """The current drafter's draft of that position met the committed token."""
        self._learn_hit(self.drafter, position, confidence, hit)
        self.statistics.compared += 1
        self.statistics.hits += hit

    def _learn_hit(self, drafter: int, position: int, confidence: float, hit: bool) -> None:
        if drafter == self.drafter:
            self._chances.clear()  # they are worth something else from now on
        self._calibrations[drafter].add(confidence, hit)
        self._selection.note(drafter, position, hit, confidence)
        counts = self.statistics.of(self._selection.names[drafter])
        counts.compared += 1
        counts.hits += hit

    def _forget_drafts(self) -> None:
        self._said_complete = False
        self._selection.agreed = min(self._selection.agreed, len(self.transcript))
        for entries in (self._drafted, self._confidence, self._entropy, self._certainty, self._chances):
            entries.clear()
        self._sent = 0
        self._choice_due = True
        self._epoch += 1
        self._new_chain()

    def _new_chain(self) -> None:
        if self._chain_sent:
            self._chain += 1
            self._chain_sent = False

    # --- drafting ---

    @property
    def generated(self) -> int:
        """Tokens of text so far."""
        return len(self.transcript) - self.prompt_length

    @property
    def sampling(self) -> Sampling:
        """Of this turn."""
        return self._open.sampling

    @property
    def drafter(self) -> int:
        """Whose turn it is, where there are several."""
        return self._selection.current

    @property
    def _mine(self) -> DrafterExperience:
        """What was measured of the current drafter."""
        return self._experience.of(self._selection.names[self._selection.current])

    @property
    def _calibration(self) -> TextCalibration:
        return self._calibrations[self._selection.current]

    def _new_calibrations(self) -> list[TextCalibration]:
        """Of this text, for each drafter."""
        return [TextCalibration(self._experience.of(name).calibration) for name in self._selection.names]

    @property
    def in_flight(self) -> int:
        """Drafted tokens that no commit has settled yet."""
        return len(self._drafted)

    @property
    def drafting_s(self) -> float:
        """Smoothed time to draft one token, seconds; 0: not measured yet."""
        return self._mine.drafting_s.value

    @property
    def round_trip_s(self) -> float:
        """Of a small message and its answer, seconds; the verifier's work is not in it."""
        return self._experience.round_trip.base + self._experience.round_trip.slope * DRAFT_BYTES

    @property
    def survival(self) -> float:
        """The chance that all drafts in flight agree with the target."""
        return math.prod(self._chances_in_flight())

    def _chances_in_flight(self) -> list[float]:
        """Of each draft, given those before it; asked for many times between two changes."""
        if len(self._chances) > len(self._confidence):
            self._chances.clear()
        new = self._confidence[len(self._chances) :]
        self._chances += map(self._calibration.chance, new)
        return self._chances

    def allowance(self) -> int:
        """How many more tokens may be drafted now; asked for several times between two events."""
        if self._allowance is None:
            self._allowance = self._work_out_allowance()
        return self._allowance

    def _work_out_allowance(self) -> int:
        if not (self._connected and self._drafting) or self.done or self._stalled:
            return 0
        in_flight = len(self._drafted)
        room = min(self._credit, self._max_tokens - self.generated - 1) - in_flight
        if room <= 0:
            return 0
        view = EdgeView(
            in_flight=in_flight,
            survival=self.survival,
            acceptance=self._mine.calibration.acceptance.rate,
            drafting_s=self._mine.drafting_s.value,
            step_s=self._experience.step.base,
            row_s=self._experience.step.slope,
            round_trip_s=self.round_trip_s,
            byte_s=self._experience.round_trip.slope,
            token_s=self._experience.pace.token_s,
            goal=self._goal,
            chances=tuple(self._chances_in_flight()),
            confidence=tuple(self._confidence),
            entropy=tuple(self._entropy),
            certainty=tuple(self._certainty),
            temperature=self._open.sampling.temperature,
            battery=self._battery,
        )
        return min(room, self._policy.more(view))

    def next_job(self, most: int) -> DraftJob | None:
        """The drafter's next piece of work, at most `most` tokens; None: wait for an event. One job runs at a time."""
        if self._job_running or self._reading is not None or not self._drafting:
            return None
        if self._choice_due and self._connected and not self._drafted:
            self._choose()
        self._allowance = None  # another text of this edge may have changed what is measured
        count = min(most, self.allowance())
        if count == 0:
            return None
        self._job_running = True
        self._given_for = self._turns
        committed = len(self.transcript)
        agreed = self._selection.agreed
        behind = (*self.transcript[agreed:], *self._drafted[max(0, agreed - committed) :])
        foresee = max(0, committed - self._selection.foreseeable(committed))
        prefix_length = committed + len(self._drafted)
        job = DraftJob(
            truncate_to=agreed,
            extend_with=behind,
            count=count,
            epoch=self._epoch,
            steer=self._steer(prefix_length - 1),
            drafter=self.drafter,
            skip=committed - foresee - agreed if foresee else 0,
            foresee=foresee,
        )
        self._selection.agreed = prefix_length
        return job

    def _choose(self) -> None:
        """Whose turn it is, now that a chain begins."""
        self._choice_due = False
        before = self.drafter
        step = self._experience.step
        conditions = Conditions(self.round_trip_s, step.base or UNMEASURED_STEP_S, step.slope)
        self._selection.choose(self._arms(), conditions, len(self.transcript))
        self.statistics.switches += self.drafter != before

    def _arms(self) -> list[Arm]:
        usual_s = self._mine.drafting_s.value or UNMEASURED_S
        measured = [(name, self._experience.of(name)) for name in self._selection.names]
        return [Arm(name, of.drafting_s.value or usual_s, of.reading_s.value) for name, of in measured]

    def next_reading(self) -> ReadJob | None:
        """What an idle drafter should read meanwhile, when there is no job; None: nothing. One runs at a time."""
        if self._job_running or self._reading is not None or self.done:
            return None
        self._reading = self._selection.next_reading(self.transcript)
        self._given_for = self._turns
        return self._reading

    def _steer(self, position: int) -> Steer | None:
        """What a job is to be steered by whose first token follows `position`; None: as before."""
        if self._codes is None or self.drafter != self._selection.steered:
            return None
        self._experience.lead.add(position + 2 - len(self.transcript))
        age = self._codes.age(position)
        if age is not None:
            self.statistics.steered_jobs += 1
            self.statistics.code_age += age
        return self._codes.steer(self.prompt_length)

    def _steering_view(self) -> SteeringView:
        experience = self._experience
        return SteeringView(
            commit_s=experience.pace.commit_s,
            commit_tokens=experience.pace.commit_tokens,
            lead=experience.lead.value,
            byte_s=experience.downlink.byte_s,
            doubt_s=experience.downlink.doubt_s,
            queued_s=experience.downlink.queued_s,
        )

    def on_drafted(
        self,
        job: DraftJob,
        tokens: tuple[int, ...],
        q: tuple[float, ...],
        seconds: float,
        now: float,
        *,
        entropy: tuple[float, ...] = (),
        certainty: tuple[float, ...] = (),
        foreseen: Foreseen = NOTHING_FORESEEN,
    ) -> list[EdgeInstruction]:
        """The drafter did `job` in `seconds`, proposed `tokens` and foresaw what it was asked to.

        Args:
            job: as it was given out.
            tokens: [n], at most `job.count`.
            q: [n] its probability of each; empty: not known.
            seconds: that it took.
            now: on the clock of all events.
            entropy: [n] nats, of its distribution at each; empty: not known.
            certainty: [n] softmax of log probability and shared noise at each; empty: not known.
            foreseen: what it would have proposed in place of the tokens of the job that it was to foresee.
        """
        self._allowance = None
        self._job_running = False
        if self.done:
            return []
        if self._given_for == self._turns:
            self._take_foreseen(job.drafter, job.truncate_to + job.skip, foreseen)
        if tokens and not (min(tokens) >= 0 and max(tokens) < self._vocab_size):
            return self.on_drafter_failed(UnknownToken("the drafter proposes tokens that the target does not have"))
        if job.epoch != self._epoch:
            self._selection.agreed = min(self._selection.agreed, job.start)
            return self._nothing_more(now)
        self.statistics.drafted += len(tokens)
        if not tokens:
            self._stalled = self._choice_due = True
        elif len(job.extend_with) <= CATCH_UP:
            self._mine.drafting_s.add(seconds / len(tokens))
            self._last_job_s = seconds
        unknown = (math.nan,) * len(tokens)
        confidence, entropy, certainty = (
            entries if len(entries) == len(tokens) else unknown for entries in (q, entropy, certainty)
        )
        overtaken = min(len(tokens), len(self.transcript) - job.start)
        if overtaken > 0:
            committed = self.transcript[job.start : job.start + overtaken]
            agreeing = next((i for i in range(overtaken) if tokens[i] != committed[i]), overtaken)
            for i in range(min(agreeing + 1, overtaken)):
                self._compare(job.start + i, confidence[i], i < agreeing)
            self._settled(agreeing, agreeing < overtaken)
            self._selection.agreed = job.start + agreeing
            if agreeing < overtaken:
                self._choice_due = True
                return self._nothing_more(now)
        room = max(0, self._credit - len(self._drafted))  # the credit may have shrunk meanwhile
        fresh = slice(max(0, overtaken), max(0, overtaken) + room)
        self._drafted.extend(tokens[fresh])
        self._confidence.extend(confidence[fresh])
        self._entropy.extend(entropy[fresh])
        self._certainty.extend(certainty[fresh])
        if tokens[fresh.start :]:
            known = len(self.transcript) + len(self._drafted)
            self._selection.agreed = max(self._selection.agreed, known)
        return self._flush(now)

    def on_read(self, job: ReadJob, foreseen: Foreseen, seconds: float, now: float) -> list[EdgeInstruction]:
        """An idle drafter did `job` in `seconds`."""
        self._allowance = None
        self._reading = None
        if self.done or self._given_for != self._turns:
            return []
        self._experience.of(self._selection.names[job.drafter]).reading_s.add(seconds / len(job.tokens))
        self.statistics.read += len(job.tokens)
        self._selection.note_prompt(job.drafter, foreseen.log_q)
        self._take_foreseen(job.drafter, job.start, foreseen)
        return self._flush(now)

    def _take_foreseen(self, drafter: int, start: int, foreseen: Foreseen) -> None:
        """What `drafter` would have proposed from position `start` on, where the text has committed tokens."""
        for i, (token, q) in enumerate(zip(foreseen.tokens, foreseen.q, strict=True)):
            if start + i >= self._selection.first_unheard(drafter):
                self._learn_hit(drafter, start + i, q, token == self.transcript[start + i])

    def on_idle(self, now: float) -> list[EdgeInstruction]:
        """The drafter has no job: send what is held, or say that there is nothing."""
        self._allowance = None  # another text of this edge may have changed what is measured
        return [] if self._job_running or self.done or self.allowance() > 0 else self._flush(now)

    def on_drafter_failed(self, error: OutriderError, drafter: int | None = None) -> list[EdgeInstruction]:
        """A drafter is broken: go on with the others, or as plain cloud streaming where it was the last, and say so.

        `drafter`: which; None: the current one.
        """
        self._allowance = None
        broken = self.drafter if drafter is None else drafter
        self._job_running = False
        self._reading = None
        self.statistics.drafter_error = str(error)
        self._drafting = self._selection.fail(broken) and self._drafting
        if broken == self.drafter:
            self._forget_drafts()
        return self._reports()

    def _flush(self, now: float) -> list[EdgeInstruction]:
        """Send what is drafted when the chain is complete, or when more of it would come too late for a step."""
        self._allowance = None
        unsent = tuple(self._drafted[self._sent : max(self._sent, self._credit)])  # it may have shrunk
        if not self._connected or not unsent:
            return self._nothing_more(now)
        more = self.allowance()
        whole_block = len(self._drafted) >= self._max_drafts > self._sent
        if (
            self._sent
            and not self._must_tell()
            and not worth_a_message(
                self._expected_of_unsent(), step_s=self._experience.step.mean, byte_s=self._experience.round_trip.slope
            )
        ):
            return []  # the verifier has the chain up to here; the rest goes with what the next commit brings
        if (
            more
            and not whole_block
            and not due_to_flush(
                now,
                commit_at=self._commit_at,
                round_trip_s=self.round_trip_s,
                step_s=self._experience.step.mean,
                next_s=self._last_job_s,
            )
        ):
            return []
        confidence = tuple(self._confidence[self._sent : self._sent + len(unsent)])
        frame = Draft(
            chain=self._chain,
            start=len(self.transcript) + self._sent,
            tokens=unsent,
            q=confidence if self._send_q and not any(map(math.isnan, confidence)) else (),
            complete=not more and not self._job_running,
        )
        self._sent += len(unsent)
        return [self._draft(frame, now)]

    def _must_tell(self) -> bool:
        """Whether the verifier may wait for long; one that plans has drafts in flight, or runs ahead on a long link."""
        if not self._credit:
            return False  # it has said that it wants no drafts
        if not self._planned or self._goal is Goal.EFFICIENCY:
            return True
        return not self._sent and self.round_trip_s < self._experience.step.mean

    def _expected_of_unsent(self) -> float:
        """Tokens that the verifier will probably accept of those that it has not been sent."""
        survival = list(itertools.accumulate(self._chances_in_flight(), operator.mul))
        return sum(survival[self._sent :])

    def _nothing_more(self, now: float) -> list[EdgeInstruction]:
        """Tell a waiting verifier that it waits in vain, where that is so."""
        if not (self._connected and self._drafting) or self._job_running or self.allowance() > 0:
            return []
        if not self._must_tell() or self._said_complete:
            return []
        return [self._draft(Draft(self._chain, len(self.transcript) + self._sent, (), complete=True), now)]

    def _draft(self, frame: Draft, now: float) -> Send:
        self._chain_sent = True
        self._said_complete = frame.complete
        self._sent_at.append((now, DRAFT_BYTES + TOKEN_BYTES * len(frame.tokens)))
        self.statistics.messages += 1
        return Send(frame)

    def _reports(self) -> list[EdgeInstruction]:
        """A report when what the verifier's patience rests on has changed by a quarter."""
        if not self._connected:
            return []
        steered = self._codes if self.statistics.steered else None
        report = Report(
            self._drafting,
            self._mine.drafting_s.value,
            self.round_trip_s,
            self._mine.calibration.acceptance.rate,
            steered.ask_anew(self._drafting) if steered is not None else None,
        )
        old = self._reported
        same = (
            report.steering is None
            and report.drafting == old.drafting
            and math.isclose(report.drafting_s, old.drafting_s, rel_tol=0.25)
            and math.isclose(report.round_trip_s, old.round_trip_s, rel_tol=0.25, abs_tol=1e-3)
        )
        if same:
            return []
        self._reported = report
        return [Send(report)]

    def _end(self, finish: FinishReason | None = None, error: OutriderError | None = None) -> list[EdgeInstruction]:
        self.done = True
        self.finish = finish
        self._connected = self._connected and self._kept and error is None
        return [Done(finish, error)]


def _may_heal(error: OutriderError) -> bool:
    """Whether another lease and another stream can help."""
    if isinstance(error, ResourceExhausted):
        return error.retry_after_s > 0
    return isinstance(error, Unavailable | LeaseExpired)

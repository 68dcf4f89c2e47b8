"""The verifier's engine: one thread that gathers, runs the target, samples, commits and emits."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider.cloud.config import ALONE_PREFILL_ROWS, VerifierConfig
from outrider.cloud.kv_cache import SessionCache
from outrider.cloud.sampling import Judged, Sampler
from outrider.cloud.target import Rows, Target
from outrider.proto.errors import Internal, InvalidArgument, OutriderError, ResourceExhausted, Unavailable
from outrider.proto.policy import Smoothed, StepCost, linger_s
from outrider.proto.session import Verified, VerifierRules, VerifierSession
from outrider.proto.types import Cancel, CloudFrame, Draft, EdgeFrame, Goaway, Open, Report

IDLE_S = 0.5
MOST_UNREAD = 64
KEPT_FIGURES = 4096
LEAST_LINGER_S = 0.0003

log = logging.getLogger(__name__)


class Outbox:
    """Where a session's frames go; the server puts one around its stream. Called from the engine's thread."""

    def put(self, item: CloudFrame | OutriderError) -> None:
        """Hand over a frame, or the error that ends the stream."""
        raise NotImplementedError

    def unread(self) -> int:
        """Frames that the client has not taken yet."""
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class _Seat:
    """An admitted session with what the engine keeps for it."""

    session: VerifierSession
    cache: SessionCache
    outbox: Outbox
    ready_since: float = field(default_factory=time.monotonic)

    @property
    def behind(self) -> int:
        """Committed tokens that the KV cache lacks; 1 while decoding: the last one."""
        return len(self.session.transcript) - self.cache.length


@dataclass(frozen=True, slots=True)
class _Turn:
    """One session's part in a step: rows to run, and the drafts among them; block None: more prompt to come."""

    seat: _Seat
    rows: Rows
    judged: Judged | None

    @property
    def only_decodes(self) -> bool:
        """Whether no row of it reads a prompt: such rows cost otherwise."""
        return self.judged is not None and len(self.rows.tokens) == self.judged.rows


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Where the time of one step went, seconds.

    Attributes:
        sessions: that took part.
        rows: of the forward pass.
        forward_s: the model's own.
        sample_s: from logits to tokens.
        overhead_s: all else since the step before it, but for waiting: events, planning, commits, other threads.
    """

    sessions: int
    rows: int
    forward_s: float
    sample_s: float
    overhead_s: float


class Engine:
    """Runs a target for many sessions. `post_*` may be called from any thread; the rest belongs to the engine's."""

    def __init__(self, target: Target, rules: VerifierRules, config: VerifierConfig) -> None:
        self.rules = rules
        self._target = target
        self._config = config
        self._sampler = Sampler(target.device)
        self._seats: dict[int, _Seat] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._bell = threading.Condition()
        self._stopping = False
        self._draining = False
        self._step_s = Smoothed()
        self._cost = StepCost()
        self._line = (0.0, 0.0)  # base of a step and cost of a row, seconds, for as many sessions as there are
        self.figures: deque[StepFigures] = deque(maxlen=KEPT_FIGURES)
        self._accounted_until = time.monotonic()
        self._linger_until = 0.0
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)

    # --- from any thread ---

    def start(self) -> None:
        """Begin to decode."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; sessions still here get Unavailable."""
        self._post(self._stop)
        self._thread.join()

    def post_open(self, key: int, frame: Open, outbox: Outbox) -> None:
        """Admit a session as `key`, or put the reason why not into its outbox."""
        self._post(lambda: self._admit(key, frame, outbox))

    def post_frame(self, key: int, frame: EdgeFrame, taken: Callable[[], None]) -> None:
        """A later frame of session `key`; `taken` is called once it has been dealt with."""
        arrived = time.monotonic()  # not when the engine gets to it: a step may be running
        self._post(lambda: self._take_frame(key, frame, arrived, taken))

    def post_close(self, key: int) -> None:
        """The stream of `key` is gone: free what it held."""
        self._post(lambda: self._release(key))

    def post_drain(self) -> None:
        """Send all sessions elsewhere and admit no more."""
        self._post(self._drain)

    @property
    def session_count(self) -> int:
        """Sessions admitted at present."""
        return len(self._seats)

    @property
    def free_pages(self) -> int:
        """KV pages that no session holds."""
        return self._target.pool.free_pages

    @property
    def step_s(self) -> float:
        """Smoothed time of a decoding step, seconds; 0: none yet."""
        return self._step_s.value

    @property
    def draining(self) -> bool:
        """Whether sessions are being sent away."""
        return self._draining

    def _post(self, event: Callable[[], None]) -> None:
        with self._bell:
            self._inbox.append(event)
            self._bell.notify()

    # --- the engine's thread ---

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._take_events()
                turns = self._plan(time.monotonic())
                if turns:
                    self._step_or_find_culprit(turns)
            except Exception:  # the thread's top loop: it must go on for the others, whatever one event was
                log.exception("the engine met a defect")

    def _step_or_find_culprit(self, turns: list[_Turn]) -> None:
        """One step; where it fails, each session alone, so that only the one at fault ends."""
        try:
            self._step(turns)
            return
        except Exception:  # whatever torch raises, memory that is short among it
            log.exception("a step of %d sessions failed; trying each alone", len(turns))
        for seat in [turn.seat for turn in turns if turn.seat.session.finish is None]:
            seat.cache.truncate(min(seat.cache.length, len(seat.session.transcript) - 1))
            try:
                self._step([self._prefill_turn(seat, self._config.prefill_chunk)])
            except Exception as error:  # as above
                self._fail(seat, Internal(f"the step failed: {type(error).__name__}"))

    def _step(self, turns: list[_Turn]) -> None:
        """Gather, forward, sample, commit, emit."""
        began = time.monotonic()
        logits = self._target.forward([turn.rows for turn in turns])
        forwarded = time.monotonic()
        judging = [(turn.seat, turn.judged) for turn in turns if turn.judged is not None]
        sampled = self._sampler.sample(logits, [judged for _, judged in judging]) if judging else []
        sampled_at = time.monotonic()
        self._keep_pace(began)
        ended = time.monotonic()
        verify_s = ended - began
        rows = sum(len(turn.rows.tokens) for turn in turns)
        self.figures.append(
            StepFigures(len(turns), rows, forwarded - began, sampled_at - forwarded, began - self._accounted_until)
        )
        self._accounted_until = ended
        if all(turn.only_decodes for turn in turns):
            self._cost.add(rows, verify_s)
            self._line = self._cost.line(max(1, len(self._seats)))
        if len(judging) == len(turns):
            self._step_s.add(verify_s)
        for (seat, judged), result in zip(judging, sampled, strict=True):
            queue_s = max(0.0, began - seat.ready_since)
            event = Verified(judged.block, result.tokens, result.logp, queue_s, verify_s, result.reward)
            self._commit(seat, event)

    def _keep_pace(self, began: float) -> None:
        left_s = began + self._config.pace_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)

    def _commit(self, seat: _Seat, event: Verified) -> None:
        now = time.monotonic()
        seat.session.credit = self._credit()
        commit = seat.session.on_verified(event, now)
        seat.cache.truncate(min(seat.cache.length, len(seat.session.transcript) - 1))
        seat.ready_since = now
        seat.outbox.put(commit)

    def _plan(self, now: float) -> list[_Turn]:
        """Who takes part in the next step: who is due, who may as well come along, prompts as far as there is room."""
        decoding = [seat for seat in self._seats.values() if seat.behind == 1 and self._can_step(seat)]
        due: list[_Seat] = []
        waiting: list[_Seat] = []
        for seat in decoding:
            (due if self._due(seat, now) else waiting).append(seat)
        company = [seat for seat in waiting if seat.session.joins_any_step]
        reading = any(seat.behind > 1 and seat.session.finish is None for seat in self._seats.values())
        if due and not reading and self._lingers(due, company, now):
            return []
        if due or reading:
            due += company
        turns = [self._decode_turn(seat) for seat in due]
        room = self._config.prefill_chunk if turns else ALONE_PREFILL_ROWS
        for seat in self._seats.values():
            if seat.behind > 1 and seat.session.finish is None and room > 0:
                turn = self._prefill_turn(seat, room)
                room -= len(turn.rows.tokens)
                turns.append(turn)
        return turns

    def _can_step(self, seat: _Seat) -> bool:
        return seat.session.finish is None and seat.outbox.unread() <= MOST_UNREAD

    def _due(self, seat: _Seat, now: float) -> bool:
        return seat.session.ready_at(*self._line) <= now

    def _lingers(self, due: list[_Seat], waiting: list[_Seat], now: float) -> bool:
        """Whether the step had better begin a little later, since others will have their drafts by then."""
        self._linger_until = now
        if waiting:
            prospects = [seat.session.prospect(*self._line, now) for seat in waiting]
            tokens = sum(seat.session.prospect(*self._line, now).tokens_now for seat in due)
            self._linger_until += linger_s(tokens, prospects, max(self._line[0], 1e-4))
        return self._linger_until > now + LEAST_LINGER_S

    def _decode_turn(self, seat: _Seat) -> _Turn:
        session = seat.session
        base_s, row_s = self._line
        block = session.block(base_s / max(1, len(self._seats)), row_s)  # others judge on the same base
        judged = Judged(session.sampling, session.transcript, session.prompt_length, block, session.q_of(block))
        tokens = (*session.transcript[seat.cache.length :], *block)
        return _Turn(seat, Rows(seat.cache, tokens, len(block) + 1), judged)

    def _prefill_turn(self, seat: _Seat, room: int) -> _Turn:
        """The next chunk of the prompt; the chunk that ends it is followed by the drafts, like any decoding step."""
        if seat.behind <= room:
            return self._decode_turn(seat)
        chunk = tuple(seat.session.transcript[seat.cache.length : seat.cache.length + room])
        return _Turn(seat, Rows(seat.cache, chunk, 0), None)

    # --- events ---

    def _take_events(self) -> None:
        with self._bell:
            if not self._inbox:
                began = time.monotonic()
                self._bell.wait(self._sleep_s(began))
                self._accounted_until += time.monotonic() - began
            events = list(self._inbox)
            self._inbox.clear()
        for event in events:
            try:
                event()
            except Exception:  # the thread's top loop: one bad event must not end every session
                log.exception("an event failed")

    def _sleep_s(self, now: float) -> float:
        """Until the next session is due; at most IDLE_S."""
        wait = IDLE_S
        for seat in self._seats.values():
            if seat.session.finish is not None:
                continue
            if seat.outbox.unread() > MOST_UNREAD:
                wait = min(wait, 0.05)
            elif seat.behind > 1:
                return 0.0
            else:
                due_at = seat.session.ready_at(*self._line)
                wait = min(wait, max(due_at, self._linger_until) - now)
        return max(0.0, wait)

    def _admit(self, key: int, frame: Open, outbox: Outbox) -> None:
        try:
            seat = self._seat(frame, outbox)
        except OutriderError as error:
            outbox.put(error)
            return
        self._seats[key] = seat
        outbox.put(seat.session.opened())

    def _seat(self, frame: Open, outbox: Outbox) -> _Seat:
        if self._draining:
            raise Unavailable("the verifier is draining; ask the coordinator for another", retry_after_s=0.1)
        session = VerifierSession(frame, self.rules, time.monotonic())
        for other in [seat for seat in self._seats.values() if seat.session.id == frame.session]:
            # Its edge has lost the old stream before this end noticed.
            self._fail(other, Unavailable("the session goes on in another stream"))
        if len(self._seats) >= self._config.max_sessions:
            raise ResourceExhausted(
                f"all {self._config.max_sessions} sessions are taken; try again later", retry_after_s=1.0
            )
        cache = self._target.pool.allocate(session.prompt_length + session.sampling.max_tokens)
        session.credit = self._credit()
        return _Seat(session, cache, outbox)

    def _credit(self) -> int:
        """Unverified tokens a session: less the more sessions share the engine, never less than one step's worth."""
        crowd = max(1, len(self._seats) // 8)
        return max(min(self.rules.max_drafts, self.rules.max_credit), self.rules.max_credit // crowd)

    def _take_frame(self, key: int, frame: EdgeFrame, arrived: float, taken: Callable[[], None]) -> None:
        taken()
        seat = self._seats.get(key)
        if seat is None or seat.session.finish is not None:
            return
        try:
            match frame:
                case Draft():
                    seat.session.on_draft(frame, arrived)
                case Report():
                    seat.session.on_report(frame)
                case Cancel():
                    seat.outbox.put(seat.session.on_cancel())
                case Open():
                    raise InvalidArgument("comes twice in one stream; open another stream", field="frame.open")
        except OutriderError as error:
            self._fail(seat, error)

    def _fail(self, seat: _Seat, error: OutriderError) -> None:
        for key, other in list(self._seats.items()):
            if other is seat:
                self._release(key)
        seat.outbox.put(error)

    def _release(self, key: int) -> None:
        seat = self._seats.pop(key, None)
        if seat is not None:
            self._target.pool.release(seat.cache)

    def _drain(self) -> None:
        self._draining = True
        for seat in self._seats.values():
            if seat.session.finish is None:
                seat.outbox.put(Goaway("the verifier is draining", retry_after_s=0.0))

    def _stop(self) -> None:
        self._stopping = True
        for seat in self._seats.values():
            seat.outbox.put(Unavailable("the verifier has stopped; resume elsewhere", retry_after_s=0.1))

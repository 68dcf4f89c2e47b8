"""The verifier's engine: one thread that gathers, runs the target, samples, commits and emits."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from dataclasses import dataclass, field, replace

from outrider.cloud.config import ALONE_PREFILL_ROWS, VerifierConfig
from outrider.cloud.counts import EngineCounts
from outrider.cloud.grammar import GrammarMatcher
from outrider.cloud.kv_cache import SessionCache
from outrider.cloud.sampling import Sampler, VerificationInput
from outrider.cloud.steering import Projection
from outrider.cloud.steering_codes import SteeringCodes
from outrider.cloud.target import Rows, Target
from outrider.proto.errors import Internal, InvalidArgument, OutriderError, ResourceExhausted, Unavailable
from outrider.proto.plumbing.logs import about
from outrider.proto.policy import Smoothed, StepCost, batching_delay_s
from outrider.proto.session import Verified, VerifierRules, VerifierSession
from outrider.proto.types import Cancel, CloudFrame, Continue, Draft, EdgeFrame, Goaway, Open, Report, Sampling

IDLE_S = 0.5
MOST_UNREAD = 64
KEPT_FIGURES = 4096
LEAST_LINGER_S = 0.0003
MASKS_WITHIN_S = 0.005  # a session whose grammar takes longer to say what is allowed misses the step

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
    guide: GrammarMatcher | None = None

    @property
    def busy(self) -> bool:
        """Whether its grammar is being asked what may come next."""
        return self.guide is not None and self.guide.busy

    @property
    def behind(self) -> int:
        """Committed tokens that the KV cache lacks; 1 while decoding: the last one."""
        return len(self.session.transcript) - self.cache.length


@dataclass(frozen=True, slots=True)
class _Turn:
    """One session's part in a step: rows to run, and the drafts among them; block None: more prompt to come."""

    seat: _Seat
    rows: Rows
    judged: VerificationInput | None

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
        sample_s: from logits to tokens and steering codes.
        overhead_s: all else since the step before it, but for waiting: events, planning, commits, other threads.
    """

    sessions: int
    rows: int
    forward_s: float
    sample_s: float
    overhead_s: float


class Engine:
    """Runs a target for many sessions. `post_*` may be called from any thread; the rest belongs to the engine's."""

    def __init__(
        self,
        target: Target,
        rules: VerifierRules,
        config: VerifierConfig,
        projections: Mapping[str, Projection] | None = None,
    ) -> None:
        self.rules = replace(rules, projections=frozenset(projections or ()))
        self._target = target
        self._config = config
        self._sampler = Sampler(target.device)
        self._codes = SteeringCodes(target, projections or {})
        self._seats: dict[int, _Seat] = {}
        self._idle: dict[_Seat, float] = {}  # kept for their next turn, and until when; longest idle first
        self._inbox: deque[Callable[[], None]] = deque()
        self._bell = threading.Condition()
        self._stopping = False
        self._draining = False
        self._step_s = Smoothed()
        self._cost = StepCost()
        self._line = (0.0, 0.0)  # base of a step and cost of a row, seconds, for as many sessions as there are
        self.figures: deque[StepFigures] = deque(maxlen=KEPT_FIGURES)
        self.counts = EngineCounts()
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

    def post_open(self, key: int, frame: Open, outbox: Outbox, guide: GrammarMatcher | None = None) -> None:
        """Admit a session as `key`, or put the reason why not into its outbox. `guide`: of its grammar, if any."""
        self._post(lambda: self._admit(key, frame, outbox, guide))

    def post_frame(
        self, key: int, frame: EdgeFrame, taken: Callable[[], None], guide: GrammarMatcher | None = None
    ) -> None:
        """A later frame of session `key`; `taken` is called once it has been dealt with. `guide`: of a Continue."""
        arrived = time.monotonic()  # not when the engine gets to it: a step may be running
        self._post(lambda: self._take_frame(key, frame, arrived, taken, guide))

    def post_close(self, key: int) -> None:
        """The stream of `key` is gone: free what it held."""
        self._post(lambda: self._release(key))

    def post_half_close(self, key: int) -> None:
        """Nothing more will come on the stream of `key`; a text that runs goes on to its end."""
        self._post(lambda: self._half_close(key))

    def post_drain(self) -> None:
        """Send all sessions elsewhere and admit no more."""
        self._post(self._drain)

    @property
    def session_count(self) -> int:
        """Sessions admitted at present, those left out that are kept for their next turn."""
        return len(self._seats) - len(self._idle)

    @property
    def kept_count(self) -> int:
        """Sessions that are kept for their next turn."""
        return len(self._idle)

    @property
    def free_pages(self) -> int:
        """KV pages that no session holds."""
        return self._target.pool.free_pages

    @property
    def page_count(self) -> int:
        """KV pages in all."""
        return self._target.pool.page_count

    @property
    def credit(self) -> int:
        """Unverified tokens that a session may have in flight."""
        return self._credit()

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
                self._expire(time.monotonic())
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
        """Gather, forward, sample, steer, commit, emit."""
        began = time.monotonic()
        logits = self._target.forward([turn.rows for turn in turns])
        forwarded = time.monotonic()
        judging = [(turn.seat, turn.judged) for turn in turns if turn.judged is not None]
        judged_by_all = [judged for _, judged in judging]
        sampled = self._sampler.sample(logits, judged_by_all) if judging else []
        codes = self._codes.of([seat.session.wanted_code for seat, _ in judging], judged_by_all, sampled)
        sampled_at = time.monotonic()
        self._keep_pace(began)
        ended = time.monotonic()
        verify_s = ended - began
        rows = sum(len(turn.rows.tokens) for turn in turns)
        figures = StepFigures(
            len(turns), rows, forwarded - began, sampled_at - forwarded, began - self._accounted_until
        )
        self.figures.append(figures)
        self.counts.step(len(turns), rows, figures.forward_s, figures.sample_s, figures.overhead_s)
        self._accounted_until = ended
        if all(turn.only_decodes for turn in turns):
            self._cost.add(rows, verify_s)
            self._line = self._cost.line(max(1, self.session_count))
        if len(judging) == len(turns):
            self._step_s.add(verify_s)
        for (seat, judged), result, code in zip(judging, sampled, codes, strict=True):
            queue_s = max(0.0, began - seat.ready_since)
            event = Verified(
                judged.block,
                result.tokens,
                result.logp,
                queue_s,
                verify_s,
                result.reward,
                result.logprobs,
                result.top_logprobs,
                code,
            )
            self._commit(seat, event)

    def _keep_pace(self, began: float) -> None:
        left_s = began + self._config.pace_s - time.monotonic()
        if left_s > 0:
            time.sleep(left_s)

    def _commit(self, seat: _Seat, event: Verified) -> None:
        now = time.monotonic()
        seat.session.credit = self._credit()
        commit = seat.session.on_verified(event, now)
        if seat.guide is not None:
            seat.guide.advance(commit.tokens)
        seat.cache.truncate(min(seat.cache.length, len(seat.session.transcript) - 1))
        seat.ready_since = now
        self.counts.commit(commit)
        seat.outbox.put(commit)
        if commit.finish is not None:
            self._rest(seat)

    def _rest(self, seat: _Seat) -> None:
        """A turn is done: a session that is kept for the next costs its pages, and only those that hold something."""
        if seat.session.keep_s:
            self._target.pool.resize(seat.cache, seat.cache.length)
            self._idle[seat] = time.monotonic() + seat.session.keep_s

    def _plan(self, now: float) -> list[_Turn]:
        """Who takes part in the next step: who is due, who may as well come along, prompts as far as there is room."""
        decoding = [seat for seat in self._seats.values() if seat.behind == 1 and self._can_step(seat)]
        due: list[_Seat] = []
        waiting: list[_Seat] = []
        for seat in decoding:
            (due if self._due(seat, now) else waiting).append(seat)
        company = [seat for seat in waiting if seat.session.joins_any_step]
        reading = any(
            seat.behind > 1 and seat.session.finish is None and not seat.busy for seat in self._seats.values()
        )
        lingered = self._linger_until > now
        if due and not reading and self._lingers(due, company, now):
            self.counts.lingers += not lingered
            return []
        if due or reading:
            due += company
        turns = [self._decode_turn(seat) for seat in self._with_masks(due)]
        room = self._config.prefill_chunk if turns else ALONE_PREFILL_ROWS
        for seat in list(self._seats.values()):
            if seat.behind > 1 and seat.session.finish is None and room > 0 and not seat.busy:
                if seat.behind <= room and not self._with_masks([seat]):
                    continue
                turn = self._prefill_turn(seat, room)
                room -= len(turn.rows.tokens)
                turns.append(turn)
        return turns

    def _can_step(self, seat: _Seat) -> bool:
        return seat.session.finish is None and seat.outbox.unread() <= MOST_UNREAD and not seat.busy

    def _with_masks(self, seats: list[_Seat]) -> list[_Seat]:
        """Those of `seats` whose grammar, if there is one, has said what is allowed; the others come when it has."""
        asked = {seat: seat.guide.ask(self._block(seat), self._wake) for seat in seats if seat.guide is not None}
        if not asked:
            return seats
        wait(asked.values(), MASKS_WITHIN_S)
        for seat, answer in asked.items():
            error = answer.exception() if answer.done() else None
            if error is not None:
                refusal = error if isinstance(error, OutriderError) else Internal(f"the grammar failed: {error!r}")
                self._fail(seat, refusal)
        return [seat for seat in seats if seat not in asked or (asked[seat].done() and not asked[seat].exception())]

    def _wake(self) -> None:
        self._post(lambda: None)

    def _due(self, seat: _Seat, now: float) -> bool:
        return seat.session.ready_at(*self._line) <= now

    def _lingers(self, due: list[_Seat], waiting: list[_Seat], now: float) -> bool:
        """Whether the step had better begin a little later, since others will have their drafts by then."""
        self._linger_until = now
        if waiting:
            prospects = [seat.session.prospect(*self._line, now) for seat in waiting]
            tokens = sum(seat.session.prospect(*self._line, now).tokens_now for seat in due)
            self._linger_until += batching_delay_s(tokens, prospects, max(self._line[0], 1e-4))
        return self._linger_until > now + LEAST_LINGER_S

    def _block(self, seat: _Seat) -> tuple[int, ...]:
        base_s, row_s = self._line
        return seat.session.block(base_s / max(1, self.session_count), row_s)  # others judge on the same base

    def _decode_turn(self, seat: _Seat) -> _Turn:
        session, block, allowed = seat.session, self._block(seat), None
        if seat.guide is not None:
            answer = seat.guide.ask(block, self._wake).result()  # it has answered: `_with_masks`
            block, allowed = answer.block, answer.tokens
        judged = VerificationInput(
            session.sampling,
            session.transcript,
            session.prompt_length,
            block,
            session.q_of(block),
            allowed,
            session.logprobs,
            session.top_logprobs,
        )
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
            if seat.session.finish is not None or seat.busy:
                continue
            if seat.outbox.unread() > MOST_UNREAD:
                wait = min(wait, 0.05)
            elif seat.behind > 1:
                return 0.0
            else:
                due_at = seat.session.ready_at(*self._line)
                wait = min(wait, max(due_at, self._linger_until) - now)
        return max(0.0, wait)

    def _admit(self, key: int, frame: Open, outbox: Outbox, guide: GrammarMatcher | None) -> None:
        try:
            _check_guide(guide, frame.sampling)
            seat = self._seat(frame, outbox)
            seat.guide = guide
        except OutriderError as error:
            outbox.put(error)
            return
        self._seats[key] = seat
        self.counts.admitted += 1
        log.info("a session is admitted", extra=about(frame.session, self.rules.name))
        outbox.put(seat.session.opened())

    def _seat(self, frame: Open, outbox: Outbox) -> _Seat:
        if self._draining:
            raise Unavailable("the verifier is draining; ask the coordinator for another", retry_after_s=0.1)
        session = VerifierSession(frame, self.rules, time.monotonic())
        for other in [seat for seat in self._seats.values() if seat.session.id == frame.session]:
            # Its edge has lost the old stream before this end noticed.
            self._fail(other, Unavailable("the session goes on in another stream"))
        if len(self._seats) >= self._config.max_sessions and self._idle:
            self._give_up(next(iter(self._idle)), "its place is needed")
        if len(self._seats) >= self._config.max_sessions:
            raise ResourceExhausted(
                f"all {self._config.max_sessions} sessions are taken; try again later", retry_after_s=1.0
            )
        tokens = session.prompt_length + session.sampling.max_tokens
        self._make_room(self._target.pool.pages_for(tokens))
        cache = self._target.pool.allocate(tokens)
        session.credit = self._credit()
        return _Seat(session, cache, outbox)

    def _credit(self) -> int:
        """Unverified tokens a session: less the more sessions share the engine, never less than one step's worth."""
        crowd = max(1, self.session_count // 8)
        return max(min(self.rules.max_drafts, self.rules.max_credit), self.rules.max_credit // crowd)

    def _take_frame(
        self, key: int, frame: EdgeFrame, arrived: float, taken: Callable[[], None], guide: GrammarMatcher | None
    ) -> None:
        taken()
        seat = self._seats.get(key)
        if seat is None or (seat.session.finish is not None and not isinstance(frame, Continue | Report)):
            return
        try:
            match frame:
                case Continue():
                    self._continue(seat, frame, arrived)
                    _check_guide(guide, seat.session.sampling)
                    seat.guide = guide
                case Draft():
                    seat.session.on_draft(frame, arrived)
                case Report():
                    seat.session.on_report(frame)
                case Cancel():
                    commit = seat.session.on_cancel()
                    self.counts.commit(commit)
                    seat.outbox.put(commit)
                    self._rest(seat)
                case Open():
                    raise InvalidArgument("comes twice in one stream; open another stream", field="frame.open")
        except OutriderError as error:
            self._fail(seat, error)

    def _continue(self, seat: _Seat, frame: Continue, arrived: float) -> None:
        """Begin the next turn on what is still right of the cache."""
        session, pool = seat.session.continued(frame, arrived), self._target.pool
        del self._idle[seat]
        seat.cache.truncate(min(seat.cache.length, frame.start, session.prompt_length - 1))
        tokens = session.prompt_length + session.sampling.max_tokens
        self._make_room(pool.pages_for(tokens) - len(seat.cache.pages))
        pool.resize(seat.cache, tokens)
        seat.session, seat.ready_since = session, arrived

    def _half_close(self, key: int) -> None:
        seat = self._seats.get(key)
        if seat is None:
            return
        seat.session.on_report(Report(drafting=False))
        if seat in self._idle:
            self._give_up(seat, "its edge has closed the stream")

    def _make_room(self, pages: int) -> None:
        """Give kept sessions up, longest idle first, until `pages` are free; none where that would not do."""
        pool = self._target.pool
        if pool.free_pages + sum(len(seat.cache.pages) for seat in self._idle) >= pages:
            while pool.free_pages < pages:
                self._give_up(next(iter(self._idle)), "its KV pages are needed")

    def _expire(self, now: float) -> None:
        for seat in [seat for seat, until in self._idle.items() if until <= now]:
            self._give_up(seat, f"no turn came within {seat.session.keep_s:g} s")

    def _give_up(self, seat: _Seat, reason: str) -> None:
        """Keep an idle session no longer; its edge begins the next turn with a new stream."""
        log.info("a kept session is given up: %s", reason, extra=about(seat.session.id, self.rules.name))
        self._unseat(seat)
        seat.outbox.put(Goaway(reason))

    def _fail(self, seat: _Seat, error: OutriderError) -> None:
        self._unseat(seat)
        seat.outbox.put(error)

    def _unseat(self, seat: _Seat) -> None:
        for key, other in list(self._seats.items()):
            if other is seat:
                self._release(key)

    def _release(self, key: int) -> None:
        seat = self._seats.pop(key, None)
        if seat is not None:
            self._idle.pop(seat, None)
            self._target.pool.release(seat.cache)

    def _drain(self) -> None:
        self._draining = True
        for seat in list(self._idle):
            self._give_up(seat, "the verifier is draining")
        for seat in self._seats.values():
            if seat.session.finish is None:
                seat.outbox.put(Goaway("the verifier is draining", retry_after_s=0.0))

    def _stop(self) -> None:
        self._stopping = True
        for seat in self._seats.values():
            seat.outbox.put(Unavailable("the verifier has stopped; resume elsewhere", retry_after_s=0.1))


def _check_guide(guide: GrammarMatcher | None, sampling: Sampling) -> None:
    """Refuse a grammar that came without what enforces it: the text would ignore it."""
    if guide is None and sampling.grammar is not None:
        raise Internal("came without its guide", field="sampling.grammar")

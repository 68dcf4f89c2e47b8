"""The collection of lessons: what the target says of each token, kept for whoever trains drafters.

After a step has committed its tokens, the engine's thread chooses rows and copies their logits (`take`). All else
happens in a thread of its own: finding the likeliest tokens, packing records, handing them to a sink. No text waits for
any of it, and where one end is slower than the other the oldest lessons are dropped, and counted. Both threads measure
their own CPU time, and where it exceeds a share of the steps' fewer rows are chosen (`Inclusion`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from outrider.cloud.learning.inclusion import MAX_SHARE, Inclusion, LessonKind
from outrider.cloud.learning.lesson_record import LessonRecord, StepRows
from outrider.proto.salts import key_salt, salted
from outrider.proto.session.verifier import Verified, VerifierSession
from outrider.proto.types import Commit

if TYPE_CHECKING:
    import torch

RECORD_TOKENS = 512  # of text, after which a record is made though the text goes on
RECORD_ROWS = 2048
CONTEXT = 2048  # tokens that a record holds from before its first row, at most
MAX_QUEUED_BYTES = 64 << 20  # of logits that wait for their reading
MAX_QUEUED = 4096  # steps and parts of texts
TICK_S = 0.1
STOP_WITHIN_S = 2.0
MAX_AGE_S = 24 * 3600.0
MAX_WAITING_BYTES = 8 << 20  # of records
MAX_PUSH_BYTES = 4 << 20
ANSWER_WITHIN_S = 30.0
RETRY_S = 2.0

log = logging.getLogger(__name__)


class Lost(Enum):
    """Why a row that was chosen did not reach the trainer."""

    QUEUE = "the collector's thread was too slow"
    NUMBERS = "its logits were no numbers"
    DEFECT = "no record could be made of it"
    TRAINER = "the trainer was too slow"
    PUSH = "a push failed, or was not answered"
    AGE = "it was too old"
    FORGOTTEN = "its key was to be forgotten"


Count = Callable[[LessonKind | Lost, int], None]
"""Called with numbers of rows that were packed, by kind, or lost."""


class LessonSink(Protocol):
    """A trainer, here or in another process. Neither method waits; each may raise anything."""

    def push(self, records: tuple[bytes, ...]) -> Future[object]:
        """Hand over encoded records (`LessonRecord`); the answer says that the next push may come."""
        ...

    def forget(self, key_salt: bytes) -> Future[int]:
        """Drop all lessons of one API key, and answer how many positions these were."""
        ...


@dataclass(frozen=True, slots=True)
class StepLessons:
    """One session's part of a step, in the order of the rows of its logits.

    Attributes:
        key: number of its stream.
        commit: what the step made of it; None: its commit failed.
    """

    key: int
    session: VerifierSession
    verified: Verified
    commit: Commit | None


class NoLessons:
    """Nothing is kept: what the engine drives where nobody learns."""

    def permit(self, key: int, api_key: str) -> None:
        """Keep lessons of the stream `key`, which its edge, and the API key of this name, allow."""

    def take(self, logits: torch.Tensor | None, judged: Sequence[StepLessons], step_s: float) -> None:
        """Choose rows of a step and copy what the target said in them; the last rows of a text make its record.

        Args:
            logits: [rows, vocab] raw ones of all of `judged`; None: they are not at hand.
            judged: the sessions of the step, in order of their rows.
            step_s: time of the step, seconds.
        """

    def end(self, key: int) -> None:
        """Make a record of what a turn has left, which has ended without a step."""

    def close(self, key: int) -> None:
        """Keep nothing more of a stream, which is gone."""

    def forget(self, api_key: str) -> Future[int]:  # noqa: ARG002 - there is nothing of it
        """Drop all lessons of an API key, here and at the trainer; the answer is how many positions that had."""
        answer: Future[int] = Future()
        answer.set_result(0)
        return answer

    def stop(self) -> None:
        """End; what is not handed over is lost."""


class _Row(NamedTuple):
    """A row that is kept: row `step_row` of `step`.

    Attributes:
        position: absolute position of the target's token.
        weight: 1 / probability that it was kept.
    """

    position: int
    kind: int
    weight: float
    step: StepRows
    step_row: int


@dataclass(slots=True, eq=False)
class _TextPart:
    """Part of one text that is being verified, with the rows that are kept of it.

    Attributes:
        facts: what its record says of the whole text, by the names of `LessonRecord`.
        rows: oldest first.
        start: absolute position of tokens[0].
        tokens: [n] text up to the end of the part, once it is whole.
    """

    session: VerifierSession
    facts: dict[str, Any]
    rows: list[_Row] = field(default_factory=list)
    start: int = 0
    tokens: Sequence[int] = ()

    def is_full(self) -> bool:
        """Return whether it is time for a record."""
        if not self.rows:
            return False
        return len(self.session.transcript) - self.rows[0].position >= RECORD_TOKENS or len(self.rows) >= RECORD_ROWS

    def pack(self, count: Count) -> LessonRecord | None:
        """Return the record of the rows that were read, and count what is in it and what is not; None: nothing is."""
        read = [(row, row.step.said) for row in self.rows if row.step.said is not None]
        good = [(row, said) for row, said in read if said.finite[row.step_row]]
        record = None
        if good:
            record = LessonRecord(
                **self.facts,
                start=self.start,
                tokens=np.array(self.tokens, np.uint32),
                positions=np.array([row.position for row, _ in good], np.uint32),
                top_ids=np.stack([said.top_ids[row.step_row] for row, said in good]),
                top_logp=np.stack([said.top_logp[row.step_row] for row, said in good]),
                rest_logp=np.array([said.rest_logp[row.step_row] for row, said in good], np.float32),
                weights=np.array([row.weight for row, _ in good], np.float32),
            )
        for kind in LessonKind:
            count(kind, sum(row.kind == kind for row, _ in good))
        count(Lost.QUEUE, len(self.rows) - len(read))
        count(Lost.NUMBERS, len(read) - len(good))
        return record


class LessonCollector(NoLessons):
    """Collector of one verifier's lessons (rows of logits to learn from), in memory only.

    Args:
        model: id of the target.
        sink: trainer that takes the records.
        positions_s: limit of the rows kept a second, on average.
        tokenizer_sha256: hash of the target's tokenizer, by which a drafter with another refuses them; empty: unknown.
        secret: key of the hashes by which records name API keys, the same at all verifiers of a fleet; empty: none.
        max_share: limit of the CPU time that lessons take, as a share of the steps' time.
        count: takes a number of rows, and their kind or why they are lost; called in the collector's thread.
    """

    def __init__(
        self,
        model: str,
        sink: LessonSink,
        positions_s: float,
        *,
        tokenizer_sha256: str = "",
        secret: bytes = b"",
        max_share: float = MAX_SHARE,
        count: Count = lambda _, __: None,
    ) -> None:
        self._target = {"model": model, "tokenizer_sha256": tokenizer_sha256}
        self._sink, self._secret, self._count = sink, secret, count
        self._permits: dict[int, bytes] = {}  # salts of API keys, by stream
        self._texts: dict[int, _TextPart] = {}
        # Both threads change these, so each holds the lock, for no longer than a choice among rows takes.
        self._lock = threading.Lock()
        self._inclusion = Inclusion(positions_s, max_share, time.monotonic())
        self._queue: deque[StepRows | _TextPart] = deque()
        self._queued_bytes = self._dropped_rows = 0
        self._forgettings: deque[tuple[bytes, Future[int]]] = deque()
        # The collector's thread alone changes these.
        self._delivery = Delivery(sink, count)
        self._forgotten: dict[bytes, float] = {}  # when, Unix seconds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outrider-lessons", daemon=True)
        self._thread.start()

    # --- the engine's thread ---

    def permit(self, key: int, api_key: str) -> None:
        self._permits[key] = key_salt(self._secret, api_key)

    def take(self, logits: torch.Tensor | None, judged: Sequence[StepLessons], step_s: float) -> None:
        if logits is None or not self._permits:
            return
        began_s = time.thread_time()
        kept = 0
        try:
            kept = self._take(logits, judged, step_s)
        except Exception:  # a defect, of which no text knows
            log.exception("the lessons of a step are lost")
        with self._lock:
            self._inclusion.spend(time.thread_time() - began_s, kept)

    def _take(self, logits: torch.Tensor, judged: Sequence[StepLessons], step_s: float) -> int:
        """Return how many rows are kept."""
        texts: dict[int, tuple[_TextPart, Commit]] = {}
        kinds, owners, positions, rows = list[int](), list[_TextPart](), list[int](), list[int]()  # of rows on offer
        first = 0
        for each in judged:
            if (commit := each.commit) is not None and commit.tokens and (text := self._text(each)) is not None:
                of_text = kinds_of(each.verified, commit)
                kinds += of_text
                owners += [text] * len(of_text)
                positions += range(commit.start, commit.start + len(of_text))
                rows += range(first, first + len(of_text))
                texts[each.key] = text, commit
            first += len(each.verified.tokens_by_target)
        with self._lock:
            kept, weights = self._inclusion.draw(kinds, time.monotonic(), step_s)
        if kept:
            step = self._copy(logits, [rows[of_step] for of_step in kept])
            for step_row, (of_step, weight) in enumerate(zip(kept, weights, strict=True)):
                owners[of_step].rows.append(_Row(positions[of_step], kinds[of_step], weight, step, step_row))
        for key, (text, commit) in texts.items():
            if commit.finish is not None or text.is_full():
                self.end(key)
        return len(kept)

    def end(self, key: int) -> None:
        part = self._texts.pop(key, None)
        if part is not None and part.rows:
            part.start = max(0, part.rows[0].position - CONTEXT)
            part.tokens = part.session.transcript[part.start :]
            self._put(part)

    def close(self, key: int) -> None:
        self.end(key)
        self._permits.pop(key, None)

    def _text(self, of: StepLessons) -> _TextPart | None:
        """Return the text that a session's rows belong to; None: nothing is kept of it."""
        salt, session = self._permits.get(of.key), of.session
        if salt is None or session.learning is None or session.sampling.constrains:
            return None
        text = self._texts.get(of.key)
        if text is None or text.session is not session:
            facts = {
                **self._target,
                "session_salt": salted(self._secret, f"session {session.id}"),
                "key_salt": salt,
                "prompt_class": session.learning.prompt_class,
                "sampling": session.sampling,
                "first_generated": session.prompt_length,
                "at_s": time.time(),
            }
            text = self._texts[of.key] = _TextPart(session, facts)
        return text

    def _copy(self, logits: torch.Tensor, rows: Sequence[int]) -> StepRows:
        """Put copies of these rows of a step into the queue."""
        step = StepRows(logits[list(rows)])
        self._put(step)
        return step

    def _put(self, item: StepRows | _TextPart) -> None:
        """Let the other thread read rows, or make a record of a text's part; the oldest give way if it is behind."""
        with self._lock:
            self._queue.append(item)
            self._queued_bytes += item.nbytes if isinstance(item, StepRows) else 0
            while self._queue and (self._queued_bytes > MAX_QUEUED_BYTES or len(self._queue) > MAX_QUEUED):
                oldest = self._queue.popleft()
                if isinstance(oldest, StepRows):
                    self._queued_bytes -= oldest.nbytes
                    oldest.logits = None
                else:
                    self._dropped_rows += len(oldest.rows)

    # --- any thread ---

    def forget(self, api_key: str) -> Future[int]:
        answer: Future[int] = Future()
        self._forgettings.append((key_salt(self._secret, api_key), answer))
        return answer

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(STOP_WITHIN_S)

    # --- the collector's thread ---

    def _run(self) -> None:
        # At the engine's priority: at a lower one it could be put off while it holds the interpreter's lock.
        while not self._stopping.wait(TICK_S):
            began_s, worked = time.thread_time(), True
            try:
                worked = self._turn()
            except Exception:  # the thread's top loop must go on
                log.exception("lessons were lost by a defect")
            if worked:  # an idle night is no debt
                with self._lock:
                    self._inclusion.spend(time.thread_time() - began_s)

    def _turn(self) -> bool:
        """Read what has come, pack it, and push what is packed; return whether there was anything."""
        from outrider.cloud.learning.teaching import read_steps  # imports torch

        with self._lock:
            taken, self._queue = self._queue, deque()
            dropped, self._dropped_rows = self._dropped_rows, 0
            self._queued_bytes = 0
        self._count(Lost.QUEUE, dropped)
        read_steps([item for item in taken if isinstance(item, StepRows)])
        for item in taken:
            if isinstance(item, _TextPart):
                self._pack(item)
        now, wall_s = time.monotonic(), time.time()
        self._delivery.take_answer(now)
        self._forget(wall_s)
        return self._delivery.push(now, wall_s) or bool(taken)

    def _pack(self, part: _TextPart) -> None:
        salt, at_s = part.facts["key_salt"], part.facts["at_s"]
        if self._forgotten.get(salt, 0.0) >= at_s:
            self._count(Lost.FORGOTTEN, len(part.rows))
        elif at_s < time.time() - MAX_AGE_S:
            self._count(Lost.AGE, len(part.rows))
        else:
            try:
                if (record := part.pack(self._count)) is not None:
                    self._delivery.add(Packed(record.encode(), len(record), salt, at_s))
            except Exception:  # this text's alone
                log.exception("a record of lessons could not be made")
                self._count(Lost.DEFECT, len(part.rows))

    def _forget(self, now: float) -> None:
        """Drop the lessons of keys that are to be forgotten; let the sink drop its own once no push is under way."""
        self._forgotten = {salt: at for salt, at in self._forgotten.items() if at >= now - MAX_AGE_S}
        for salt, _ in tuple(self._forgettings):
            self._forgotten[salt] = now
            self._delivery.forget(salt)
        while self._forgettings and not self._delivery.in_flight:
            salt, answer = self._forgettings.popleft()
            try:
                pass_on(self._sink.forget(salt), answer)
            except Exception as error:  # whoever asks must know
                answer.set_exception(error)


def kinds_of(verified: Verified, commit: Commit) -> list[int]:
    """Return the kind of each row whose token was committed, [rows]; those after a miss or the end are left out."""
    kinds = [int(LessonKind.ACCEPTED)] * commit.accepted
    if len(commit.tokens) > commit.accepted:
        kinds.append(int(LessonKind.MISSED if commit.accepted < len(verified.block) else LessonKind.OWN))
    return kinds


def pass_on(source: Future[int], target: Future[int]) -> None:
    """Answer `target` as soon as `source` is answered."""

    def answered(done: Future[int]) -> None:
        error = done.exception() if not done.cancelled() else TimeoutError("it was cancelled")
        if error is not None:
            target.set_exception(error)
        else:
            target.set_result(done.result())

    source.add_done_callback(answered)


@dataclass(frozen=True, slots=True)
class Packed:
    """An encoded record, and what its keeping depends on.

    Attributes:
        rows: number of its rows.
        at_s: time of its first row, Unix seconds.
    """

    data: bytes
    rows: int
    key_salt: bytes
    at_s: float


class Delivery:
    """Records on their way to a sink: one push at a time, what waits meanwhile bounded in size and age.

    One thread uses it, which never waits, and hears of rows that are lost by `count`.
    """

    def __init__(self, sink: LessonSink, count: Count) -> None:
        self._sink, self._count = sink, count
        self._waiting: deque[Packed] = deque()
        self._waiting_bytes = 0
        self._flight: Future[object] | None = None
        self._flight_rows = 0
        self._since = 0.0
        self._not_before = 0.0
        self._failing = False

    @property
    def in_flight(self) -> bool:
        """Whether a push is unanswered."""
        return self._flight is not None

    def add(self, packed: Packed) -> None:
        """Let a record wait for the next push; the oldest give way where too many bytes wait."""
        self._waiting.append(packed)
        self._waiting_bytes += len(packed.data)
        while self._waiting_bytes > MAX_WAITING_BYTES:
            self._count(Lost.TRAINER, self._pop().rows)

    def push(self, now: float, wall_s: float) -> bool:
        """Push what waits, if nothing is unanswered, and return whether that was tried.

        Args:
            now: present time on any clock that never goes back, in seconds.
            wall_s: present time, Unix seconds.
        """
        while self._waiting and self._waiting[0].at_s < wall_s - MAX_AGE_S:
            self._count(Lost.AGE, self._pop().rows)
        if self._flight is not None or not self._waiting or now < self._not_before:
            return False
        batch = [self._pop()]
        while self._waiting and sum(len(each.data) for each in (*batch, self._waiting[0])) <= MAX_PUSH_BYTES:
            batch.append(self._pop())
        self._flight_rows, self._since = sum(each.rows for each in batch), now
        try:
            self._flight = self._sink.push(tuple([each.data for each in batch]))
        except Exception as error:  # a sink may be anything, and a text knows nothing of it
            self._lose(error, now)
        return True

    def forget(self, key_salt: bytes) -> None:
        """Drop what waits of a key."""
        for packed in [self._pop() for _ in range(len(self._waiting))]:
            if packed.key_salt == key_salt:
                self._count(Lost.FORGOTTEN, packed.rows)
            else:
                self.add(packed)

    def take_answer(self, now: float) -> None:
        """Take the answer to the last push, if it is there or has not come in time, at time `now` in seconds."""
        flight = self._flight
        if flight is None:
            return
        if not flight.done():
            if now - self._since > ANSWER_WITHIN_S:
                flight.cancel()
                self._lose(TimeoutError(f"no answer within {ANSWER_WITHIN_S:g} s"), now)
            return
        error = TimeoutError("it was cancelled") if flight.cancelled() else flight.exception()
        if error is not None:
            self._lose(error, now)
            return
        self._flight, self._failing = None, False

    def _lose(self, error: BaseException, now: float) -> None:
        if not self._failing:
            log.warning("lessons are lost, since the trainer does not take them: %r", error)
        self._flight, self._failing, self._not_before = None, True, now + RETRY_S
        self._count(Lost.PUSH, self._flight_rows)

    def _pop(self) -> Packed:
        packed = self._waiting.popleft()
        self._waiting_bytes -= len(packed.data)
        return packed

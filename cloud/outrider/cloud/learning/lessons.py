"""The collection of lessons: what the target says of each token, kept for whoever trains drafters.

After a step has committed its tokens, the engine's thread chooses rows and copies their logits (`take`). All else
happens in a thread of its own: finding the likeliest tokens, packing records, handing them to a sink. No text waits for
any of it, and where one end is slower than the other the oldest lessons are dropped, and counted. Both threads measure
their own CPU time, and where it exceeds a share of the steps' fewer rows are chosen (`LessonBudget`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum

import torch

from outrider.cloud.learning.cpu_share import MAX_SHARE, LessonBudget
from outrider.cloud.learning.inclusion import Inclusion, LessonKind
from outrider.cloud.learning.packing import KeptRows, StepRows, TextPart, pack, read_steps
from outrider.cloud.learning.sink import MAX_AGE_S, Delivery, LessonSink, Packed
from outrider.proto.salts import key_salt, salted
from outrider.proto.session.verifier import Verified, VerifierSession
from outrider.proto.types import Commit

RECORD_TOKENS = 512  # of text, after which a record is made though the text goes on
RECORD_ROWS = 2048
CONTEXT = 2048  # tokens that a record holds from before its first row, at most
MAX_QUEUED_BYTES = 64 << 20  # of logits that wait for their reading
MAX_QUEUED = 4096  # steps and parts of texts
TICK_S = 0.1
STOP_WITHIN_S = 2.0

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


@dataclass(slots=True, eq=False)
class _Text:
    """A text that is being verified: its present part."""

    session: VerifierSession
    part: TextPart
    rows: int = 0

    def is_full(self) -> bool:
        """Return whether it is time for a record."""
        end = len(self.session.transcript)
        first = self.part.kept[0].positions[0] if self.part.kept else end
        return end - first >= RECORD_TOKENS or self.rows >= RECORD_ROWS


@dataclass(slots=True, eq=False)
class _Forgetting:
    """A key that is to be forgotten, and who asks."""

    key_salt: bytes
    answer: Future[int] = field(default_factory=Future)
    passed_on: Future[int] | None = None


class LessonCollector(NoLessons):
    """The lessons of one verifier, in memory only."""

    def __init__(
        self,
        model: str,
        sink: LessonSink,
        positions_s: float,
        *,
        tokenizer_sha256: str = "",
        secret: bytes = b"",
        max_share: float = MAX_SHARE,
        count: Callable[[LessonKind | Lost, int], None] = lambda _, __: None,
    ) -> None:
        """Hand lessons to `sink`.

        Args:
            model: id of the target.
            sink: whoever learns.
            positions_s: rows a second that are kept, on average, at most.
            tokenizer_sha256: hash of the target's tokenizer, by which a drafter with another refuses them; empty:
                unknown.
            secret: shared by all verifiers of a fleet, by which their records name a key alike; empty: anybody's.
            max_share: limit of the CPU time that lessons take, as a share of the steps' time.
            count: called in the collector's thread with rows that were handed over, by kind, or lost.
        """
        self._model = model
        self._tokenizer_sha256 = tokenizer_sha256
        self._secret = secret
        self._count = count
        now = time.monotonic()
        self._budget = LessonBudget(max_share, now)
        self._inclusion = Inclusion(lambda now: min(positions_s, self._budget.rows_s(now)), now)
        self._thread_spent_s = self._thread_billed_s = 0.0  # written by the collector's thread and by the engine's
        self._permits: dict[int, bytes] = {}  # salts of API keys, by stream
        self._texts: dict[int, _Text] = {}
        self._queue: deque[StepRows | TextPart] = deque()
        # Bytes put in and dropped by the engine's thread, and taken out by the other; each is written by one.
        self._put_bytes = self._dropped_bytes = self._taken_bytes = 0
        self._dropped_rows = 0
        self._counted: Counter[Lost] = Counter()
        self._delivery = Delivery(sink)
        self._sink = sink
        self._forgettings: deque[_Forgetting] = deque()
        self._forgotten: dict[bytes, float] = {}  # when, Unix seconds
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outrider-lessons", daemon=True)
        self._thread.start()

    # --- the engine's thread ---

    def permit(self, key: int, api_key: str) -> None:
        """Keep lessons of the stream `key`, which its edge, and the API key of this name, allow."""
        self._permits[key] = key_salt(self._secret, api_key)

    def take(self, logits: torch.Tensor | None, judged: Sequence[StepLessons], step_s: float) -> None:
        """Choose rows of a step and copy what the target said in them; the last rows of a text make its record."""
        if logits is None or not self._permits:
            return
        began_s = time.thread_time()
        kept = 0
        try:
            kept = self._take(logits, judged, step_s)
        except Exception:  # a defect, of which no text knows
            log.exception("the lessons of a step are lost")
        self._budget.spend(time.thread_time() - began_s, kept)

    def _take(self, logits: torch.Tensor, judged: Sequence[StepLessons], step_s: float) -> int:
        """Return how many rows are kept."""
        spent_s = self._thread_spent_s
        self._budget.spend(spent_s - self._thread_billed_s)
        self._thread_billed_s = spent_s
        paid = self._budget.step(step_s)
        kinds: list[int] = []
        taught: list[tuple[int, _Text, Commit, int, int, int]] = []
        row = 0
        for each in judged:
            text = self._text(each) if each.commit is not None else None
            if text is not None and each.commit is not None and each.commit.tokens:
                first = len(kinds)
                kinds += kinds_of(each.verified, each.commit)
                taught.append((each.key, text, each.commit, row, first, len(kinds)))
            row += len(each.verified.tokens_by_target)
        if not taught:
            return 0
        kept, weights = self._inclusion.draw(kinds, time.monotonic(), paid=paid)
        if kept:
            self._copy(logits, taught, kinds, kept, weights)
        for key, text, commit, *_ in taught:
            if commit.finish is not None or text.is_full():
                self._hand_over(key, text)
        return len(kept)

    def end(self, key: int) -> None:
        """Make a record of what a turn has left, which has ended without a step."""
        text = self._texts.get(key)
        if text is not None:
            self._hand_over(key, text)

    def close(self, key: int) -> None:
        """Keep nothing more of a stream, which is gone."""
        self.end(key)
        self._permits.pop(key, None)

    def _text(self, of: StepLessons) -> _Text | None:
        """Return the text that a session's rows belong to; None: nothing is kept of it."""
        salt, session = self._permits.get(of.key), of.session
        if salt is None or session.learning is None or session.sampling.constrains:
            return None
        text = self._texts.get(of.key)
        if text is None or text.session is not session:
            part = TextPart(
                self._model,
                salted(self._secret, f"session {session.id}"),
                salt,
                session.learning.prompt_class,
                session.sampling,
                session.prompt_length,
                time.time(),
                tokenizer_sha256=self._tokenizer_sha256,
            )
            text = self._texts[of.key] = _Text(session, part)
        return text

    def _copy(
        self,
        logits: torch.Tensor,
        taught: Sequence[tuple[int, _Text, Commit, int, int, int]],
        kinds: Sequence[int],
        kept: Sequence[int],
        weights: Sequence[float],
    ) -> None:
        """Copy the rows `kept` of the sessions' `kinds`, and note in each text which these are."""
        step, rows, at = StepRows(None), list[int](), 0
        for _, text, commit, row, first, end in taught:
            began = at
            while at < len(kept) and kept[at] < end:
                rows.append(row + kept[at] - first)
                at += 1
            if at == began:
                continue
            places = kept[began:at]
            text.part.kept.append(
                KeptRows(
                    [commit.start + place - first for place in places],
                    [kinds[place] for place in places],
                    weights[began:at],
                    step,
                    began,
                )
            )
            text.rows += at - began
        step.logits = logits[torch.tensor(rows, device=logits.device)]
        self._put_bytes += step.nbytes
        self._put(step)

    def _hand_over(self, key: int, text: _Text) -> None:
        """Let the other thread make a record of a text's present part, if there is anything in it."""
        self._texts.pop(key, None)
        part, transcript = text.part, text.session.transcript
        if part.kept:
            part.start = max(0, part.kept[0].positions[0] - CONTEXT)
            part.tokens = transcript[part.start :]
            self._put(part)

    def _put(self, item: StepRows | TextPart) -> None:
        self._queue.append(item)
        while (
            self._put_bytes - self._dropped_bytes - self._taken_bytes > MAX_QUEUED_BYTES
            or len(self._queue) > MAX_QUEUED
        ):
            oldest = self._next()
            if oldest is None:
                return
            if isinstance(oldest, StepRows):
                self._dropped_bytes += oldest.nbytes
                oldest.logits = None
            else:
                self._dropped_rows += len(oldest)

    def _next(self) -> StepRows | TextPart | None:
        """Take the oldest item out of the queue; either thread may have taken the last one."""
        try:
            return self._queue.popleft()
        except IndexError:
            return None

    # --- any thread ---

    def forget(self, api_key: str) -> Future[int]:
        """Drop all lessons of an API key, here and at the trainer; the answer is how many positions that had."""
        forgetting = _Forgetting(key_salt(self._secret, api_key))
        self._forgettings.append(forgetting)
        return forgetting.answer

    def stop(self) -> None:
        """End; what is not handed over is lost."""
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
                self._thread_spent_s += time.thread_time() - began_s

    def _turn(self) -> bool:
        """Read what has come, pack it, and push what is packed; return whether there was anything."""
        taken: list[StepRows | TextPart] = []
        while len(taken) < MAX_QUEUED and (item := self._next()) is not None:
            taken.append(item)
        steps = [item for item in taken if isinstance(item, StepRows)]
        self._taken_bytes += sum(step.nbytes for step in steps)
        read_steps(steps)
        for item in taken:
            if isinstance(item, TextPart):
                self._pack(item)
        now, wall_s = time.monotonic(), time.time()
        self._delivery.take_answer(now)
        self._forget(wall_s)
        pushed = self._delivery.push(now, wall_s)
        self._count_losses()
        return pushed or bool(taken)

    def _pack(self, part: TextPart) -> None:
        if self._forgotten.get(part.key_salt, 0.0) >= part.at_s:
            self._count(Lost.FORGOTTEN, len(part))
        elif part.at_s < time.time() - MAX_AGE_S:
            self._count(Lost.AGE, len(part))
        else:
            try:
                packed = pack(part)
                if (record := packed.record) is not None:
                    self._delivery.add(Packed(record.encode(), len(record), part.key_salt, part.at_s))
                    for kind in LessonKind:
                        self._count(kind, packed.kinds[kind])
                self._count(Lost.QUEUE, packed.unread)
                self._count(Lost.NUMBERS, packed.broken)
            except Exception:  # this text's alone
                log.exception("a record of lessons could not be made")
                self._count(Lost.DEFECT, len(part))

    def _forget(self, now: float) -> None:
        """Drop what is here of keys that are to be forgotten, then let the sink do so, after an unanswered push."""
        self._forgotten = {salt: at for salt, at in self._forgotten.items() if at >= now - MAX_AGE_S}
        for forgetting in self._forgettings:
            self._forgotten[forgetting.key_salt] = now
            self._delivery.forget(forgetting.key_salt)
        while self._forgettings and not self._delivery.in_flight:
            forgetting = self._forgettings.popleft()
            try:
                chain(self._sink.forget(forgetting.key_salt), forgetting.answer)
            except Exception as error:  # whoever asks must know
                forgetting.answer.set_exception(error)

    def _count_losses(self) -> None:
        counts = self._delivery.counts
        totals = {
            Lost.QUEUE: self._dropped_rows,
            Lost.TRAINER: counts.crowded_out,
            Lost.PUSH: counts.failed,
            Lost.AGE: counts.expired,
            Lost.FORGOTTEN: counts.forgotten,
        }
        for reason, total in totals.items():
            if total > self._counted[reason]:
                self._count(reason, total - self._counted[reason])
                self._counted[reason] = total


def kinds_of(verified: Verified, commit: Commit) -> list[int]:
    """Return the kind of each row whose token was committed, [rows]; those after a miss or the end are left out."""
    kinds = [int(LessonKind.ACCEPTED)] * commit.accepted
    if len(commit.tokens) > commit.accepted:
        kinds.append(int(LessonKind.MISSED if commit.accepted < len(verified.block) else LessonKind.OWN))
    return kinds


def chain(source: Future[int], target: Future[int]) -> None:
    """Answer `target` as soon as `source` is answered."""

    def answered(done: Future[int]) -> None:
        error = done.exception() if not done.cancelled() else TimeoutError("it was cancelled")
        if error is not None:
            target.set_exception(error)
        else:
            target.set_result(done.result())

    source.add_done_callback(answered)

"""A verifier's own drafter, its texts, and the threads in which it works, on cores that the target leaves.

A thread takes the job with the least to read first. Long texts are read piece by piece, between which others get their
turn, and a job that has waited for `MAX_WAIT_S` goes before shorter ones.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from outrider.cloud.target.backend import TargetFacts
from outrider.drafters import (
    Drafter,
    DraftState,
    NgramDrafter,
    ProposalRule,
    embedded_packages,
    find_package,
)
from outrider.drafters.packages import FAMILY, read_manifest
from outrider.drafters.search import NGRAM
from outrider.proto.drafter_format import MANIFEST
from outrider.proto.errors import InvalidArgument, NotFound, TokenizerMismatch
from outrider.proto.session import Drafted, DraftJob
from outrider.proto.session.both_ends import LocalJob
from outrider.proto.session.jobs import CATCH_UP
from outrider.proto.types import DraftToken

CHUNK = 128  # tokens of a text that are read at a stretch; some 20 ms for the embedded family
MAX_WAIT_S = 0.5
STUCK_S = 5.0  # for one piece of work, after which the drafter counts as failed in a text
STOP_WITHIN_S = 5.0
MODEL_TEXTS = 8  # of full length that a model has room for; others are drafted for as far as it goes


@dataclass(frozen=True, slots=True)
class OwnDrafter:
    """A verifier's own drafter, loaded once and shared by its texts.

    Attributes:
        reach: number of last tokens that an answer depends on; None: all.
        vocab_size: tokens of the target, which alone may be proposed.
        position_bytes: memory that a position of a text takes, at most, in bytes; 0: a few.
    """

    drafter: Drafter
    vocab_size: int
    reach: int | None = None
    position_bytes: int = 0

    @property
    def name(self) -> str:
        return f"{self.drafter.name}@{self.drafter.version}"


def load_own_drafter(name: str, target: TargetFacts) -> OwnDrafter:
    """Return the drafter `name`, `ngram`, or where that is empty the first embedded one of the target, hashes checked.

    Raises:
        NotFound, DataLoss, InvalidArgument, ModelRefused: it cannot be had; ONNX Runtime may be missing (ImportError).
        TokenizerMismatch: it was made for another tokenizer than the target's.
    """
    if name == NGRAM:
        return OwnDrafter(NgramDrafter(vocab_size=target.vocab_size), target.vocab_size)
    if _is_model(name):
        return _load_model(Path(name), target)
    package = find_package(name or _embedded_for(target))
    _check_tokenizer(package.name, package.tokenizer_sha256, target)
    from outrider.drafters.onnx import OnnxDrafter

    drafter = OnnxDrafter(package, threads=1)
    return OwnDrafter(drafter, target.vocab_size, package.reach, package.cache.bytes_of(1))


def _is_model(name: str) -> bool:
    """Return whether `name` is a folder of a transformers model rather than of a drafter."""
    return bool(name) and Path(name, "config.json").is_file() and not Path(name, MANIFEST).is_file()


def _load_model(folder: Path, target: TargetFacts) -> OwnDrafter:
    from outrider.cloud.target.target_drafter import load_target_drafter

    drafter = load_target_drafter(folder, texts=MODEL_TEXTS)
    _check_tokenizer(drafter.name, drafter.tokenizer_sha256, target)
    return OwnDrafter(drafter, target.vocab_size, position_bytes=drafter.position_bytes)


def _check_tokenizer(name: str, sha256: str, target: TargetFacts) -> None:
    if sha256 != target.tokenizer_sha256:
        message = f"{name!r} was made for another tokenizer, and only edges draft by text"
        raise TokenizerMismatch(message, field="draft_with", code="OUT-407")


def _embedded_for(target: TargetFacts) -> str:
    """Return the name of the first embedded drafter that reads the target's tokens, or else of the first of all."""
    names = embedded_packages()
    if not names:
        raise NotFound("no drafter is installed here", field="draft_with")
    fitting = (name for name in names if read_manifest(FAMILY / name).tokenizer_sha256 == target.tokenizer_sha256)
    return next(fitting, names[0])


class DraftedText:
    """One text's prefix in the drafter, used by one thread at a time.

    The prefix is that of the drafter's state and, after it, the unread tokens. So a long text can be read piece by
    piece, and a job that is given up in between leaves a prefix that the next job can go on from.
    """

    def __init__(self, own: OwnDrafter) -> None:
        self._own = own
        self._state: DraftState | None = None
        self._followed: ProposalRule | None = None
        self._unread: list[int] = []

    def begin(self, job: DraftJob, rule: ProposalRule) -> None:
        """Truncate and extend the prefix as `job` says, computing nothing, and propose by `rule` from now on."""
        state = self._opened(rule)
        if job.truncate_to > state.length + len(self._unread):
            raise InvalidArgument(f"keeps {job.truncate_to} tokens of a shorter prefix", field="job.truncate_to")
        del self._unread[max(0, job.truncate_to - state.length) :]
        if job.truncate_to < state.length:
            state.truncate(job.truncate_to)
        self._unread += job.extend_with
        # What no answer depends on is not worth computing.
        self._skip(len(self._unread) - (self._own.reach or len(self._unread)))

    @property
    def num_unread(self) -> int:
        """Number of tokens of the prefix that the drafter has yet to read."""
        return len(self._unread)

    def read(self, count: int) -> None:
        """Let the drafter compute the next `count` unread tokens."""
        self._skip(count)
        state = self._state
        if state is None or not state.length:
            return
        length = state.length
        state.propose(1)  # which computes them
        state.truncate(length)

    def propose(self, job: LocalJob, goes_on: Callable[[LocalJob], bool]) -> tuple[DraftToken, ...]:
        """Return the drafts after the prefix, one by one for as long as the job is worth it and goes on.

        Raises:
            InvalidArgument: the drafter proposes what is no token of the target.
        """
        self._skip(len(self._unread))
        state, drafts = self._state, list[DraftToken]()
        while state is not None and not job.is_enough(drafts) and goes_on(job):
            proposed = state.propose(1)
            if not proposed:
                break
            if not 0 <= proposed[0].id < self._own.vocab_size:
                raise InvalidArgument(f"proposes {proposed[0].id}, which is no token of the target", field="drafter")
            drafts += proposed
        return tuple(drafts)

    def close(self) -> None:
        state, self._state = self._state, None
        self._unread.clear()
        if state is not None:
            state.close()

    def _opened(self, rule: ProposalRule) -> DraftState:
        if self._state is None:
            self._state = self._own.drafter.open(rule)
        elif self._followed is not rule:
            self._state.follow(rule)
        self._followed = rule
        return self._state

    def _skip(self, count: int) -> None:
        """Put the next `count` unread tokens into the state, which computes them when it has to."""
        if self._state is not None and count > 0:
            self._state.extend(self._unread[:count])
            del self._unread[:count]


@dataclass(slots=True, eq=False)
class DraftTask:
    """A job for the drafter, in pieces.

    Attributes:
        goes_on: tells whether further drafts can be of use.
        answer: called from the thread that ends it, with its drafts or with what the drafter raised.
        due_since: time that decides whose turn it is: when it was queued, or the job whose place it takes; seconds.
        queued_at: time from which it has waited for a thread, in seconds.
        began_at: time at which the thread that works for it took it, in seconds; 0: it waits.
        waited_s: time before its newest piece of work in which no thread was free, in seconds.
        worked_s: time that the drafter has worked for it, in seconds.
        read_s: part of that in which more than a few unread tokens were read, in seconds.
        begun: whether a thread has worked for it.
    """

    text: DraftedText
    job: LocalJob
    rule: ProposalRule
    goes_on: Callable[[LocalJob], bool]
    answer: Callable[[DraftTask, Drafted | BaseException], None]
    due_since: float = 0.0
    queued_at: float = 0.0
    began_at: float = 0.0
    waited_s: float = 0.0
    worked_s: float = 0.0
    read_s: float = 0.0
    begun: bool = False
    clock: Callable[[], float] = time.monotonic

    @property
    def num_unread(self) -> int:
        """Number of tokens that it has to read before it can propose."""
        return self.text.num_unread + (0 if self.begun else len(self.job.job.extend_with))

    def is_stuck(self, now: float) -> bool:
        """Return whether a thread has been at one piece of it for more than `STUCK_S` seconds."""
        return 0 < self.began_at < now - STUCK_S

    def work(self) -> Drafted | None:
        """Do the next piece; return the drafts with the last."""
        self.began_at = began = self.clock()
        self.waited_s = began - self.queued_at
        if not self.begun:
            self.begun = True
            self.text.begin(self.job.job, self.rule)
        drafts: tuple[DraftToken, ...] = ()
        useful = self.goes_on(self.job)
        is_last = not useful or self.text.num_unread <= CHUNK
        if useful and self.text.num_unread > CATCH_UP:
            self.text.read(min(CHUNK, self.text.num_unread))
            self.read_s += self.clock() - began
        if useful and is_last:
            drafts = self.text.propose(self.job, self.goes_on)
        self.worked_s += self.clock() - began
        return Drafted(self.job.job, drafts, self.worked_s) if is_last else None


class DraftThreads:
    """A pool of threads in which the verifier's own drafter works, and the tasks that wait for one.

    Attributes:
        num_threads: size of the pool.
    """

    def __init__(self, threads: int) -> None:
        self.num_threads = threads
        self._waiting: list[DraftTask] = []
        self._bell = threading.Condition()
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._run, name=f"outrider-drafts-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, task: DraftTask) -> None:
        with self._bell:
            task.queued_at = time.monotonic()
            task.due_since = task.due_since or task.queued_at
            task.began_at = 0.0
            self._waiting.append(task)
            self._bell.notify()

    def drop(self, task: DraftTask) -> bool:
        """Take back a task that has not begun, and return whether that was in time."""
        with self._bell:
            if task.begun or task not in self._waiting:
                return False
            self._waiting.remove(task)
            return True

    def stop(self) -> bool:
        """End the threads after what they are at, and return whether all have ended; tasks that wait get no answer."""
        with self._bell:
            self._stopping = True
            self._waiting.clear()
            self._bell.notify_all()
        until = time.monotonic() + STOP_WITHIN_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (task := self._next()) is not None:
            try:
                result = task.work()
            except BaseException as error:  # it may be anybody's code, and its SystemExit would end the thread
                task.answer(task, error)
                continue
            if result is not None:
                task.answer(task, result)
            else:
                task.due_since = 0.0
                self.submit(task)

    def _next(self) -> DraftTask | None:
        with self._bell:
            while not (self._waiting or self._stopping):
                self._bell.wait()
            if self._stopping:
                return None
            task = next_task(self._waiting, time.monotonic())
            self._waiting.remove(task)
            return task


def next_task(waiting: list[DraftTask], now: float) -> DraftTask:
    """Return the task whose turn it is: one that has waited too long, or else the first with the least to read."""
    oldest = min(waiting, key=lambda task: task.due_since)
    if now - oldest.due_since > MAX_WAIT_S:
        return oldest
    return min(waiting, key=lambda task: task.num_unread)

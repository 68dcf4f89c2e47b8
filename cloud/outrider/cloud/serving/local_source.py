"""The verifier's own drafter as a source of chains for its sessions, driven from the engine's thread.

Before the engine plans a step, every session is asked what its drafter should do (`drive`), and once more when a step
of it begins (`begin`): the drafter then works while the target does. Results come back as events of the engine. A
session is never held up: one whose drafter fails goes on without, and so do all after `MAX_FAILURES` texts in a row.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.cloud.serving.batching import Batching, Share
from outrider.cloud.serving.own_drafter import (
    STUCK_S,
    DraftedText,
    DraftTask,
    DraftThreads,
    OwnDrafter,
    load_own_drafter,
)
from outrider.cloud.serving.sessions import Sessions
from outrider.cloud.serving.slots import Slot
from outrider.cloud.serving.verifier_metrics import VerifierMetrics
from outrider.cloud.target.backend import TargetFacts
from outrider.cloud.verifier_config import VerifierConfig
from outrider.drafters import ProposalRule
from outrider.proto.errors import ConfigError, OutriderError
from outrider.proto.plumbing.cores import available_cores
from outrider.proto.plumbing.logs import about
from outrider.proto.policy.likely_branches import RUNNERS_UP
from outrider.proto.session import Drafted
from outrider.proto.session.both_ends import DraftingHere
from outrider.proto.session.verifier import VerifierSession
from outrider.proto.types import DraftToken

MAX_FAILURES = 3  # texts in a row in which the drafter fails before it is given up

Post = Callable[[Callable[[], None]], None]

log = logging.getLogger(__name__)


class _Threads(Protocol):
    """`DraftThreads`, or what a harness has in their place."""

    @property
    def num_threads(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    def submit(self, task: DraftTask) -> None: ...

    def drop(self, task: DraftTask) -> bool: ...

    def stop(self) -> bool: ...


@dataclass(slots=True, eq=False)
class _Followed:
    """A session's text in the drafter.

    Attributes:
        session: machine of the turn that `rule` belongs to.
        task: job that no result has answered yet.
        gone: whether it is closed as soon as its task is over.
    """

    slot: Slot
    text: DraftedText
    session: VerifierSession
    rule: ProposalRule
    task: DraftTask | None = None
    gone: bool = False


class NoSource:
    """No drafts beside the target: what the engine drives where there are none."""

    def serve(self, sessions: Sessions, batching: Batching, post: Post, metrics: VerifierMetrics) -> None:
        """Draft for the sessions of one engine; `post` has an event carried out in the engine's thread."""

    def drive(self, now: float) -> None:
        """Let every session's drafter do what is due, before a step is planned, and close the texts that have left."""

    def begin(self, shares: Sequence[Share], now: float) -> None:
        """Let the drafter of each session work while the step of `shares` runs."""

    def stop(self) -> None:
        """End all work."""


class LocalSource(NoSource):
    """The drafter, its threads, and the texts that it follows."""

    _sessions: Sessions
    _batching: Batching
    _post: Post
    _metrics: VerifierMetrics

    def __init__(
        self,
        own: OwnDrafter,
        threads: _Threads,
        price: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Draft with `own` in `threads`; a second of it is worth `price` seconds of waiting (None: derived)."""
        self._here = DraftingHere(own.name, price)
        self._own = own
        self._threads = threads
        self._clock = clock
        self._texts: dict[Slot, _Followed] = {}
        self._failures = 0

    def serve(self, sessions: Sessions, batching: Batching, post: Post, metrics: VerifierMetrics) -> None:
        self._sessions, self._batching, self._post, self._metrics = sessions, batching, post, metrics
        sessions.here = self._here
        metrics.watch_drafting(self._own.name, lambda: self._threads.num_waiting)

    def drive(self, now: float) -> None:
        for followed in [each for slot, each in self._texts.items() if self._sessions.get(slot.key) is not slot]:
            self._leave(followed)
        stuck = sum(each.task is not None and each.task.is_stuck(now) for each in self._texts.values())
        if stuck >= self._threads.num_threads and self._sessions.here is not None:
            self._give_up(f"is stuck in all of its {stuck} threads")
        for slot in self._sessions.running():
            self._ask(slot, now, None)

    def begin(self, shares: Sequence[Share], now: float) -> None:
        for share in shares:
            if share.block is not None:
                self._ask(share.slot, now, share.block)

    def stop(self) -> None:
        if self._threads.stop():
            for followed in self._texts.values():
                followed.text.close()
        self._texts.clear()

    # --- jobs ---

    def _ask(self, slot: Slot, now: float, block: tuple[DraftToken, ...] | None) -> None:
        session, ends = slot.session, slot.session.ends
        if ends is None:
            return
        try:
            followed, due_since = self._texts.get(slot), 0.0
            if followed is not None and (task := followed.task) is not None:
                if ends.goes_on(task.job) or not self._threads.drop(task):
                    if task.is_stuck(now):
                        raise TimeoutError(f"has been at it for more than {STUCK_S:g} s")
                    return
                # No thread has begun it, and it is of no use any more: another takes its place.
                ends.drop(now - task.queued_at)
                followed.task, due_since = None, task.due_since
            job = session.local_job(self._batching.base_s, self._batching.row_s, now, block)
            if job is None:
                return
            followed = self._followed(slot)
            followed.task = DraftTask(
                followed.text,
                job,
                followed.rule,
                ends.goes_on,
                self._answered,
                due_since=due_since,
                clock=self._clock,
            )
            self._threads.submit(followed.task)
        except Exception as error:  # a defect of drafting must end no text
            self._fail(slot, error)

    def _followed(self, slot: Slot) -> _Followed:
        """Return the text of a slot, which proposes by the rule of its present turn."""
        session, followed = slot.session, self._texts.get(slot)
        if followed is None or followed.session is not session:
            eos = session.eos_tokens
            rule = ProposalRule(
                session.sampling, prompt_length=session.prompt_length, runners_up=RUNNERS_UP, eos_tokens=eos
            )
            if followed is None:
                followed = self._texts[slot] = _Followed(slot, DraftedText(self._own), session, rule)
            followed.session, followed.rule = session, rule
        return followed

    def _answered(self, task: DraftTask, result: Drafted | BaseException) -> None:
        """Have the engine's thread take a result; called from another."""
        self._post(lambda: self._take(task, result))

    def _take(self, task: DraftTask, result: Drafted | BaseException) -> None:
        followed = next((each for each in self._texts.values() if each.task is task), None)
        if followed is None:
            return  # all has stopped
        followed.task = None
        if not isinstance(result, BaseException):
            self._metrics.counts.drafted_here += len(result.drafts)
            self._metrics.counts.drafting_here_s += result.seconds
        ends = followed.slot.session.ends
        if followed.gone or ends is None:
            self._leave(followed)
        elif isinstance(result, BaseException):
            self._fail(followed.slot, result)
        else:
            self._failures = 0
            ends.take(result, waited_s=task.waited_s, read_s=task.read_s)

    # --- ends ---

    def _leave(self, followed: _Followed) -> None:
        """Close a text, or have it closed when its task is over."""
        task = followed.task
        if task is not None and not self._threads.drop(task):
            followed.gone = True
            return
        self._texts.pop(followed.slot, None)
        followed.text.close()

    def _fail(self, slot: Slot, error: BaseException) -> None:
        """Go on without the drafter in one text; the message of its error is not logged: it may hold the text."""
        slot.session.draft_here_no_more()
        self._failures += 1
        if followed := self._texts.get(slot):
            self._leave(followed)
        if self._sessions.here is None:
            return
        line = "the drafter %s failed here; a text goes on without"
        log.warning(line, self._own.name, extra=about(slot.session.id, error=error))
        if self._failures >= MAX_FAILURES:
            self._give_up(f"failed in {self._failures} texts in a row")

    def _give_up(self, reason: str) -> None:
        self._sessions.here = None
        self._metrics.stop_drafting()
        log.warning("the drafter %s %s; none is drafted here any more", self._own.name, reason)
        for slot in self._sessions:
            slot.session.draft_here_no_more()
        for followed in list(self._texts.values()):
            self._leave(followed)


def local_source(config: VerifierConfig, target: TargetFacts) -> LocalSource | None:
    """Return the source of drafts beside the target that the settings ask for; None: there is none.

    Raises:
        ConfigError: `--draft-here on` finds no drafter for this target, or no core for it; the remedy is named.
    """
    if config.draft_here == "off":
        return None
    threads = config.draft_threads or spare_cores(config, target)
    if not threads:
        if config.draft_here == "auto":
            return None
        threads = 1  # it was asked for: the two then share a core
    try:
        own = load_own_drafter(config.draft_with, target)
    except (OutriderError, OSError, ImportError) as error:
        reason = error.message if isinstance(error, OutriderError) else error
        if config.draft_here == "on":
            remedy = "name one that reads its tokens by --draft-with, or leave --draft-here at auto"
            raise ConfigError(f"finds no drafter for this target: {reason}; {remedy}", field="draft_here") from error
        level = logging.WARNING if config.draft_with else logging.INFO  # one that was named is missed
        log.log(level, "no drafts are made beside the target: %s", reason, extra=about(verifier=config.name))
        return None
    line = "verifier %s drafts beside its target with %s in %d threads; a position of a text takes up to %d bytes"
    log.info(line, config.name, own.name, threads, own.position_bytes, extra=about(verifier=config.name))
    return LocalSource(own, DraftThreads(threads), config.draft_price)


def spare_cores(config: VerifierConfig, target: TargetFacts) -> int:
    """Return how many cores of this machine the target's threads leave."""
    if target.device is None:
        return available_cores()
    used = config.torch_threads if target.device.type == "cpu" else config.tensor_parallel
    return max(0, available_cores() - used)

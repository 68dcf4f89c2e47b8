"""A verifier's own drafter in the simulator: threads that do the jobs of all sessions, in their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from outrider.cloud.serving.batching import Batching, Share
from outrider.cloud.serving.local_source import Post
from outrider.cloud.serving.sessions import Sessions
from outrider.cloud.serving.verifier_metrics import VerifierMetrics
from outrider.proto.session import Drafted, DrafterFailed, DraftJob
from outrider.proto.session.both_ends import DraftingHere, LocalJob
from outrider.proto.session.verifier import VerifierSession
from outrider.proto.types import DraftToken
from research.simulator.clock import Costs, VirtualClock
from research.simulator.simulated_verifier import SimulatedSource
from research.traces.recordings import HitTrace
from research.traces.traced import DrafterArm, Policy, TracedText

# Proposes tokens for a job of one session, and says how many seconds that takes.
Propose = Callable[[DraftJob], tuple[Drafted | DrafterFailed, float]]


@dataclass(slots=True, eq=False)
class _Work:
    """A job of one session, from when it is asked for."""

    session: VerifierSession
    job: LocalJob
    asked_at: float
    began_at: float = 0.0
    result: Drafted | DrafterFailed | None = None
    seconds: float = 0.0


class LocalThreads(SimulatedSource):
    """The threads of a verifier that draft, as a source of its engine; they have been busy for `busy_s` so far."""

    def __init__(
        self, clock: VirtualClock, here: DraftingHere, drafter_of: Callable[[str], Propose], threads: int = 1
    ) -> None:
        """Draft by the drafter that `drafter_of` gives for the id of a session, in so many threads."""
        self._here = here
        self.busy_s = 0.0
        self._clock = clock
        self._drafter_of = drafter_of
        self._free = threads
        self._waiting: deque[_Work] = deque()
        self._running: list[_Work] = []

    def serve(self, sessions: Sessions, batching: Batching, post: Post, metrics: VerifierMetrics) -> None:  # noqa: ARG002
        self._sessions, self._batching, self._post = sessions, batching, post
        sessions.here = self._here

    def drive(self, now: float) -> None:
        for slot in self._sessions.running():
            self._ask(slot.session, now, None)

    def begin(self, shares: Sequence[Share], now: float) -> None:
        for share in shares:
            if share.block is not None:
                self._ask(share.slot.session, now, share.block)

    def _ask(self, session: VerifierSession, now: float, block: tuple[DraftToken, ...] | None) -> None:
        job = session.local_job(self._batching.base_s, self._batching.row_s, now, block)
        if job is not None:
            self._waiting.append(_Work(session, job, self._clock.now))
            self._begin()

    def recall(self) -> None:
        """End the jobs that should not go on, with the drafts that they have."""
        for work in list(self._running):
            if not _goes_on(work):
                spent_s = self._clock.now - work.began_at
                drafts: tuple[DraftToken, ...] = ()
                if isinstance(work.result, Drafted) and work.seconds:
                    drafts = work.result.drafts[: int(len(work.result.drafts) * spent_s / work.seconds)]
                self._end(work, Drafted(work.job.job, drafts, spent_s))

    def _begin(self) -> None:
        while self._free and self._waiting:
            work = self._waiting.popleft()
            work.began_at = self._clock.now
            self._free -= 1
            self._running.append(work)
            if not _goes_on(work):
                # The drafter follows the text all the same, as later jobs expect of it.
                self._drafter_of(work.session.id)(replace(work.job.job, count=0))
                self._end(work, Drafted(work.job.job, (), 0.0))
                continue
            work.result, work.seconds = self._propose(work)
            self._clock.at(self._clock.now + work.seconds, partial(self._end, work, work.result))

    def _propose(self, work: _Work) -> tuple[Drafted | DrafterFailed, float]:
        """Return the drafts of a job until they are enough, and their seconds."""
        propose, job = self._drafter_of(work.session.id), work.job.job
        result, seconds = propose(job)
        if isinstance(result, DrafterFailed):
            return result, seconds
        drafts = result.drafts
        count = next((n for n in range(1, len(drafts)) if work.job.is_enough(drafts[:n])), len(drafts))
        if count == len(drafts):
            return result, seconds
        shorter, seconds = propose(replace(job, count=count))
        return replace(shorter, job=job) if isinstance(shorter, Drafted) else shorter, seconds

    def _end(self, work: _Work, result: Drafted | DrafterFailed) -> None:
        if work not in self._running:
            return  # it was recalled
        self._running.remove(work)
        self._free += 1
        self.busy_s += self._clock.now - work.began_at
        self._post(partial(_take, work.session, result, work.began_at - work.asked_at))
        self._begin()


class DraftPasses(LocalThreads):
    """A drafter on the target's own device, whose passes are in the time of steps, for all sessions at once."""

    def drive(self, now: float) -> None:
        made = []
        for slot in self._sessions.running():
            job = slot.session.local_job(self._batching.base_s, self._batching.row_s, now, None)
            if job is not None:
                made.append((slot.session, self._drafter_of(slot.session.id)(job.job)[0]))
        if made:
            self._post(partial(_take_all, made))

    def begin(self, shares: Sequence[Share], now: float) -> None:
        pass


def _take_all(made: Sequence[tuple[VerifierSession, Drafted | DrafterFailed]]) -> None:
    for session, result in made:
        _take(session, result, 0.0)


def _take(session: VerifierSession, result: Drafted | DrafterFailed, waited_s: float) -> None:
    if isinstance(result, DrafterFailed):
        session.draft_here_no_more()
    elif session.ends is not None:
        session.ends.take(result, waited_s)


def _goes_on(work: _Work) -> bool:
    ends = work.session.ends
    return ends is not None and work.session.finish is None and ends.goes_on(work.job)


def drafting_beside(drafting_s: float | None = None) -> Callable[[VirtualClock, HitTrace, Costs], LocalThreads]:
    """Give the verifier the first drafter too; a token takes `drafting_s` there, None: as long as at the edge."""
    here = DraftingHere("here")  # of all texts

    def threads(clock: VirtualClock, trace: HitTrace, costs: Costs) -> LocalThreads:
        scale = 1.0 if drafting_s is None else drafting_s / costs.drafting_s
        slower = replace(costs, drafting_s=costs.drafting_s * scale, catch_up_s=costs.catch_up_s * scale)
        text = TracedText((DrafterArm(trace, slower),))
        return LocalThreads(clock, here, lambda _: text.draft)

    return threads


def colocated(length: int) -> Policy:
    """Draft beside the target: so many drafts before every step, none during one, and none at the edge."""
    return Policy(drafting=False, drafts_here=length)

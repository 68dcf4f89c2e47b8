"""A verifier's own drafter in one text: an edge at round trip zero, which needs no messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.proto.policy.branches import MissShares
from outrider.proto.policy.measures import Calibration, Smoothed, TextCalibration
from outrider.proto.session.events import Drafted
from outrider.proto.session.jobs import DraftJob
from outrider.proto.types import DraftToken, common_length, token_ids

FIRST_DRAFTING_S = 0.001  # assumed time of a drafted token, before one is measured


@dataclass(slots=True, eq=False)
class DraftingHere:
    """A verifier's own drafter, with what its sessions have measured of it.

    Attributes:
        name: name@version.
        price: seconds of waiting that a second of its drafting is worth; None: derived (`policy.both_ends`).
        calibration: its hits by lead, over all texts.
        drafting_s: time of a drafted token, in seconds.
        waiting_s: time that a job waits for a free thread, in seconds.
        job_s: time of a job, in seconds.
    """

    name: str
    price: float | None = None
    calibration: Calibration = field(default_factory=Calibration)
    drafting_s: Smoothed = field(default_factory=lambda: Smoothed(FIRST_DRAFTING_S))
    waiting_s: Smoothed = field(default_factory=Smoothed)
    job_s: Smoothed = field(default_factory=Smoothed)

    @property
    def num_sharing(self) -> float:
        """Number of jobs that share a thread, a new one and those that it finds there: it waits for their time."""
        return 1 + self.waiting_s.value / self.job_s.value if self.job_s.value else 1.0


@dataclass(frozen=True, slots=True)
class LocalJob:
    """A drafting job for the verifier's own drafter, which ends early where its chain has become hopeless.

    Whoever does it lets the drafter truncate and extend its prefix in any case, also where nothing is proposed.

    Attributes:
        job: prefix, and most tokens to propose.
        survival: chance that the drafts before its first all agree.
        min_survival: chance below which another draft is not worth its time.
        chance: function from the lead of a draft to the chance that it agrees.
    """

    job: DraftJob
    survival: float
    min_survival: float
    chance: Callable[[float], float]

    def is_enough(self, drafts: Sequence[DraftToken]) -> bool:
        """Return whether no further draft is worth its time after `drafts` [n]."""
        survival = self.survival
        for draft in drafts:
            survival *= self.chance(draft.lead)
        return len(drafts) >= self.job.count or survival < self.min_survival


class LocalDrafts:
    """The chain that a verifier's own drafter makes for one text; it may continue the edge's.

    Attributes:
        tokens: drafts that follow the transcript, the edge's that it continues included.
        running: job that no result has answered yet.
        missed: whether one of its drafts missed in the newest commit.
        stopped: whether the newest job ended early, so that nothing more comes before the next commit.
        seconds: drafting since the last commit, in seconds.
        calibration: hits of the drafter in this text.
        shares: shares of its misses by runner-up, in this text.
    """

    def __init__(self, transcript: list[int], calibration: TextCalibration) -> None:
        self.tokens: list[DraftToken] = []
        self.running: LocalJob | None = None
        self.missed = False
        self.stopped = False
        self.seconds = 0.0
        self.calibration = calibration
        self.shares = MissShares()
        self._own: list[bool] = []  # of the tokens: whether the drafter proposed it
        self._transcript = transcript
        self._epoch = 0  # chains abandoned
        self._recalled: LocalJob | None = None  # a job that hands over what it has
        self._agreed = 0  # tokens of the drafter's prefix that equal transcript and chain

    def survival(self, drafts: int) -> float:
        """Return the chance that the first `drafts` drafts all agree."""
        survival = 1.0
        for draft in self.tokens[:drafts]:
            survival *= self.calibration.chance(draft.lead)
        return survival

    def propose(self, chain: Sequence[DraftToken], count: int, min_survival: float) -> LocalJob:
        """Issue a job of at most `count` drafts after `chain` [n], which follows the transcript.

        Its own drafts that the chain contradicts are dropped.
        """
        same = common_length(token_ids(self.tokens), token_ids(chain))
        if same < len(self.tokens):
            self._abandon(same)
        self.tokens += chain[same:]
        self._own += [False] * (len(chain) - same)
        end = len(self._transcript) + len(self.tokens)
        after = (
            *self._transcript[self._agreed :],
            *token_ids(self.tokens[max(0, self._agreed - len(self._transcript)) :]),
        )
        job = DraftJob(self._agreed, after, count, self._epoch)
        self._agreed = end
        self.stopped = False
        self.running = LocalJob(job, self.survival(len(self.tokens)), min_survival, self.calibration.chance)
        return self.running

    def take(self, done: Drafted) -> None:
        """Put the proposals that continue the text on the chain."""
        recalled = self.running is self._recalled
        self.running = self._recalled = None
        self.seconds += done.seconds
        if done.job.epoch != self._epoch:
            self._agreed = min(self._agreed, done.job.start)
            return
        self.stopped = len(done.drafts) < done.job.count and not recalled
        overtaken = max(0, min(len(done.drafts), len(self._transcript) - done.job.start))
        for position, draft in enumerate(done.drafts[:overtaken], done.job.start):
            if not self._compare(position, draft, self._transcript[position]):
                return
        self.tokens += done.drafts[overtaken:]
        self._own += [True] * (len(done.drafts) - overtaken)
        self._agreed = max(self._agreed, done.job.start + len(done.drafts))

    def goes_on(self, job: LocalJob) -> bool:
        """Return whether a job should propose further drafts; may be asked by any thread.

        It should not where its chain is dead, and where a commit has come: then it hands over what it has.
        """
        return job.job.epoch == self._epoch and job is not self._recalled

    def drop(self) -> None:
        """Forget the running job, which the drafter has not begun and will not."""
        if self.running is not None:
            self._agreed = min(self._agreed, self.running.job.truncate_to)
            self.running = self._recalled = None

    def commit(self, tokens: tuple[int, ...]) -> float:
        """Compare the drafts with `tokens`, which now end the transcript; return drafting since the last commit."""
        seconds, self.seconds = self.seconds, 0.0
        self.missed = self.stopped = False
        self._recalled = self.running
        self._follow(tokens)
        return seconds

    def _follow(self, tokens: tuple[int, ...]) -> None:
        for position, token in enumerate(tokens, len(self._transcript) - len(tokens)):
            if not self.tokens:
                return  # a running job may be proposing this position, and is compared when it is done
            if self._own[0]:
                hit = self._compare(position, self.tokens[0], token)
            elif not (hit := self.tokens[0].id == token):
                self._miss(position)
            if not hit:
                return
            del self.tokens[0], self._own[0]

    def begin_turn(self, transcript: list[int], kept: int) -> None:
        """Go on with another transcript, of which the drafter may know the first `kept` tokens."""
        self._abandon(0)
        self._transcript = transcript
        self._agreed = min(self._agreed, kept)
        self.seconds = 0.0
        self.stopped = False
        self.calibration = TextCalibration(self.calibration.common)
        self.shares = MissShares()

    def _compare(self, position: int, draft: DraftToken, token: int) -> bool:
        """Count a proposal that was compared with the token at `position`; a miss ends the chain."""
        hit = draft.id == token
        self.calibration.add(draft.lead, hit)
        if not hit:
            if draft.runners_up:
                self.shares.add(draft.runners_up, token)
            self._miss(position)
        return hit

    def _miss(self, position: int) -> None:
        self.missed = True
        self._agreed = min(self._agreed, position)
        self._abandon(0)

    def _abandon(self, kept: int) -> None:
        """Drop the drafts after the first `kept`."""
        self._agreed = min(self._agreed, len(self._transcript) + kept)
        del self.tokens[kept:], self._own[kept:]
        self._epoch += 1

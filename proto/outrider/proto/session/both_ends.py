"""Drafts of one text from both ends: the verifier's own drafter, an edge at round trip zero, beside the edge's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from outrider.proto.policy.likely_branches import MissShares
from outrider.proto.policy.measurements import BETTER, Calibration, Smoothed, TextCalibration
from outrider.proto.policy.patience import AT_ONCE, MARGIN_S, Division, Plan, VerifierView, division_of
from outrider.proto.session.events import Drafted
from outrider.proto.session.jobs import CATCH_UP, DraftJob
from outrider.proto.session.received import ReceivedDrafts
from outrider.proto.types import DraftToken, common_length, token_ids

FIRST_DRAFTS, FIRST_SURVIVAL = 4, 0.2  # while no step has been measured
HOPELESS = 0.02  # chance of acceptance below which nothing is drafted, not even for free
MAX_COVERED = 255
KEPT_TOKENS = 16  # for which a division is kept: another takes 3 ms, and measurements of many sessions never rest
PROBE_EVERY, PROBE = 64, 1  # tokens without a job, after which a few drafts show what they cost now
FIRST_DRAFTING_S = 0.001  # assumed time of a drafted token, before one is measured


@dataclass(slots=True, eq=False)
class DraftingHere:
    """A verifier's own drafter, name@version, with what its sessions have measured of it.

    Attributes:
        price: seconds of waiting that a second of its drafting is worth; None: derived (`policy.patience`).
        calibration: its hits by score, over all texts.
        drafting_s, waiting_s, job_s: time of a drafted token, of waiting for a free thread, and of a job, in seconds.
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
        chance: function from the score of a draft to the chance that it agrees.
    """

    job: DraftJob
    survival: float
    min_survival: float
    chance: Callable[[float], float]

    def is_enough(self, drafts: Sequence[DraftToken]) -> bool:
        """Return whether no further draft is worth its time after `drafts` [n]."""
        survival = self.survival
        for draft in drafts:
            survival *= self.chance(draft.score)
        return len(drafts) >= self.job.count or survival < self.min_survival


class BothEnds:
    """The division of drafting in one text, and the chain of the verifier's own drafter.

    Attributes:
        here: the verifier's own drafter.
        tokens: its drafts that follow the transcript, those of the edge that it continues included.
        running: job that no result has answered yet.
        stopped: whether the newest job ended early, so that nothing more comes before the next commit.
        seconds: drafting since the last commit, in seconds.
        calibration, shares: hits of the drafter in this text, and shares of its misses by runner-up.
        edge_drafts, edge_pays: whether more drafts of the edge may come, and whether they are worth their while.
        edge_rests: whether the edge has been told to make none for now.
        awaits_edge: whether the next step waits for the edge's drafts.
        covered: tokens after the newest commit that the verifier has by its own drafts before the edge's answer.
    """

    def __init__(self, here: DraftingHere, received: ReceivedDrafts, transcript: list[int], fixed: int | None) -> None:
        """Divide the drafting of one text, whose `transcript` grows with every commit.

        Args:
            here: the verifier's own drafter.
            received: drafts of the edge.
            transcript: tokens so far.
            fixed: drafts made here before every step, none during one; None: as the policy divides them.
        """
        self.here = here
        self.tokens: list[DraftToken] = []
        self.running: LocalJob | None = None
        self.stopped = False
        self.seconds = 0.0
        self.calibration = TextCalibration(here.calibration)
        self.shares = MissShares()
        self.edge_drafts = self.edge_pays = True
        self.awaits_edge = self.edge_rests = False
        self.covered = 0
        self._transcript = transcript
        self._epoch = 0  # chains abandoned
        self._recalled: LocalJob | None = None  # a job that hands over what it has
        self._agreed = 0  # tokens of the drafter's prefix that equal transcript and chain
        self._missed = False  # whether one of its drafts missed in the newest commit
        self._idle = 0  # tokens committed since the newest job
        self._kept = 0  # and since the newest division
        self._received = received
        self._fixed = fixed
        self._view: VerifierView | None = None
        self._division: Division | None = None

    def begin_turn(self, received: ReceivedDrafts, transcript: list[int], kept: int) -> None:
        """Go on with another turn, whose transcript begins with the first `kept` tokens of the last."""
        self._abandon(0)
        self._transcript = transcript
        self._agreed = min(self._agreed, kept)
        self.seconds = 0.0
        self.stopped = False
        self.calibration = TextCalibration(self.here.calibration)
        self.shares = MissShares()
        self._received = received
        self.edge_pays, self.covered = True, 0

    # --- the chain ---

    def chain(self) -> list[DraftToken]:
        """Return the drafts that follow the transcript, the edge's first.

        The edge's chain leads, and the verifier's continues it. Where they part, the edge's leads unless its drafts
        have missed more often.
        """
        edge, own = self._received.tokens, self.tokens
        same = common_length(token_ids(edge), token_ids(own))
        if same < len(edge) and (same == len(own) or not self._is_better_here()):
            return edge
        return [*edge[:same], *[draft._replace(other=True) for draft in own[same:]]]

    def worth_their_rows(self, row_s: float) -> int:
        """Return how many of the chain's first drafts are worth a row of the step, which takes `row_s` seconds.

        Those made while the target stepped cost nothing then, and were not weighed against it.
        """
        chain = self.chain()
        if self._fixed is not None or self._division is None:
            return len(chain)
        edge, own = self._received.acceptance, self.calibration
        survival, token_s = 1.0, self._division.token_s
        for index, draft in enumerate(chain):
            survival *= own.chance(draft.score) if draft.other else edge.rate
            if survival * token_s < row_s:
                return index
        return len(chain)

    @property
    def drafts_here(self) -> bool:
        return self.running is not None

    @property
    def acceptance(self) -> float:
        """Chance that a draft agrees, given that all before it in its chain did."""
        own, edge = self.calibration.common.acceptance.rate, self._received.acceptance.rate
        return max(own, edge) if self.edge_drafts and not self._is_better_here() else own

    def take(self, done: Drafted, waited_s: float = 0.0, read_s: float = 0.0) -> None:
        """Take the result of a job in, which waited `waited_s` seconds for a thread.

        In `read_s` seconds of its time many unread tokens were read; 0: not told apart.
        """
        if read_s or len(done.job.extend_with) <= CATCH_UP:
            self.here.waiting_s.add(waited_s)
            if done.drafts:
                self.here.drafting_s.add((done.seconds - read_s) / len(done.drafts))
                self.here.job_s.add(done.seconds - read_s)
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
        self.tokens += [draft._replace(other=True) for draft in done.drafts[overtaken:]]
        self._agreed = max(self._agreed, done.job.start + len(done.drafts))

    def drop(self, waited_s: float) -> None:
        """Forget the running job, for which no thread was free in `waited_s` seconds."""
        self.here.waiting_s.add(max(waited_s, self.here.waiting_s.value))
        if self.running is not None:
            self._agreed = min(self._agreed, self.running.job.truncate_to)
            self.running = self._recalled = None

    def commit(self, tokens: tuple[int, ...], now: float) -> float:
        """Compare its drafts with `tokens`, which end the transcript; return the seconds that its drafter worked."""
        drafting_s, self.seconds = self.seconds, 0.0
        self._missed = self.stopped = False
        self._recalled = self.running
        self._follow(tokens)
        self._idle += len(tokens)
        self._kept += len(tokens)
        if self._missed:
            self._received.note_miss(now)
        self.covered = self._covered()
        return drafting_s

    # --- the own drafter's chain ---

    def survival(self, drafts: int) -> float:
        survival = 1.0
        for draft in self.tokens[:drafts]:
            survival *= self.calibration.chance(draft.score)
        return survival

    def propose(self, chain: Sequence[DraftToken], count: int, min_survival: float) -> LocalJob:
        """Issue a job of at most `count` drafts after `chain` [n], which follows the transcript.

        Its own drafts that the chain contradicts are dropped.
        """
        same = common_length(token_ids(self.tokens), token_ids(chain))
        if same < len(self.tokens):
            self._abandon(same)
        self.tokens += chain[same:]
        end = len(self._transcript) + len(self.tokens)
        after = (
            *self._transcript[self._agreed :],
            *token_ids(self.tokens[max(0, self._agreed - len(self._transcript)) :]),
        )
        job = DraftJob(self._agreed, after, count, self._epoch)
        self._agreed = end
        self._idle = 0
        self.stopped = False
        self.running = LocalJob(job, self.survival(len(self.tokens)), min_survival, self.calibration.chance)
        return self.running

    def goes_on(self, job: LocalJob) -> bool:
        """Return whether a job should propose further drafts; may be asked by any thread.

        It should not where its chain is dead, and where a commit has come: then it hands over what it has.
        """
        return job.job.epoch == self._epoch and job is not self._recalled

    def _follow(self, tokens: tuple[int, ...]) -> None:
        for position, token in enumerate(tokens, len(self._transcript) - len(tokens)):
            if not self.tokens:
                return  # a running job may be proposing this position, and is compared when it is done
            draft = self.tokens.pop(0)
            if draft.other:
                self._compare(position, draft, token)
            elif draft.id != token:
                self._miss(position)

    def _compare(self, position: int, draft: DraftToken, token: int) -> bool:
        """Count a proposal that was compared with the token at `position`; a miss ends the chain."""
        hit = draft.id == token
        self.calibration.add(draft.score, hit)
        if not hit:
            if draft.runners_up:
                self.shares.add(draft.runners_up, token)
            self._miss(position)
        return hit

    def _miss(self, position: int) -> None:
        self._missed = True
        self._agreed = min(self._agreed, position)
        self._abandon(0)

    def _abandon(self, kept: int) -> None:
        self._agreed = min(self._agreed, len(self._transcript) + kept)
        del self.tokens[kept:]
        self._epoch += 1

    # --- who drafts ---

    def plan(self, view: VerifierView) -> Plan:
        """Return how long the next step waits, and for how many drafts."""
        lacking = self._needed(view) - len(self.chain())
        self.awaits_edge = lacking > 0 and self._waits_for_edge(lacking, view)
        if lacking <= 0:
            return AT_ONCE
        needed, most = lacking + len(self.chain()), view.max_drafts
        if self.awaits_edge:
            wait_s, whole_s = (max(0.0, view.edge_wait_s(drafts)) for drafts in (needed, most))
        else:
            here_s = self.here.drafting_s.value
            wait_s, whole_s = (self.here.waiting_s.value + drafts * here_s for drafts in (lacking, most))
        return Plan.waiting(needed, wait_s, most, whole_s)

    def job(self, view: VerifierView, block: int | None) -> LocalJob | None:
        """Return the next job for the verifier's own drafter, which may draft; None: by the newest plan, nothing.

        A draft is worth its time while its chance to be accepted, times the time of a token, exceeds its price. The
        step that begins now verifies `block` drafts; None: none begins.
        """
        chain = self.chain()
        lacking = self._needed(view) - len(chain)
        division, here_s = self._division, self.here.drafting_s.value
        if block is None:
            hopeless = self._received.complete and len(self._received) > 0  # so its edge says
            if lacking <= 0 or hopeless or self.awaits_edge:
                return None
            if self._fixed is not None:
                return self.propose(chain, lacking, 0.0)
            if division is None:
                return self.propose(chain, lacking, FIRST_SURVIVAL)
            price_s = (self.here.num_sharing + division.price) * here_s + view.row_s
            return self.propose(chain, view.max_drafts - len(chain), price_s / division.token_s)
        if division is None or self._fixed is not None:
            return None
        if not division.ahead or lacking + block + 1 <= 0:
            return self.propose(chain, PROBE, 0.0) if self._idle >= PROBE_EVERY else None
        count = view.max_drafts + block + 1 - len(chain)
        return self.propose(chain, count, max(HOPELESS, division.price * here_s / division.token_s))

    def may_draft(self, block: int | None) -> bool:
        """Return whether `job` could have a job now; its `block` says whether a step begins."""
        return self.running is None and not (self.stopped and block is None)

    def _needed(self, view: VerifierView) -> int:
        if self._fixed is not None:
            return min(view.max_drafts, self._fixed)
        if not view.step_s:
            return min(view.max_drafts, FIRST_DRAFTS)
        return self._divide(view).drafts

    def _divide(self, view: VerifierView) -> Division:
        """Return the division for the present measurements, and keep it while these stay alike.

        It is kept for `KEPT_TOKENS` in any case, unless the edge begins or ceases to draft.
        """
        drafts = self.edge_drafts and not self._is_better_here()
        edge_s = view.drafting_s if drafts and view.drafting_s else math.inf
        before, kept = self._view, self._division
        same_ends = before is not None and math.isinf(before.drafting_s) == math.isinf(edge_s)
        if same_ends and kept is not None and self._kept < KEPT_TOKENS:
            return kept
        own = self.calibration.common.acceptance.rate
        acceptance = self.acceptance if edge_s < math.inf else own
        now = replace(
            view,
            acceptance=acceptance,
            drafting_s=edge_s,
            here_s=max(1e-6, self.here.drafting_s.value * acceptance / own),
            sharing=self.here.num_sharing,
            branched=self._received.branched.rate,
            branch_drafts=round(self._received.branch_drafts.value),
            price=self.here.price,
        )
        if kept is None or before is None or not now.is_like(before):
            self._view, kept, self._kept = now, division_of(now), 0
            self._division, self.edge_pays = kept, kept.edge_pays or not view.drafting_s
        return kept

    def _waits_for_edge(self, lacking: int, view: VerifierView) -> bool:
        overdue = view.edge_wait_s(len(self.chain()) + lacking) <= -MARGIN_S
        nothing_comes = self.edge_rests or self._received.complete or overdue
        if self._fixed is not None or self._division is None or self._view is None or nothing_comes:
            return False
        return self._division.waits_for_edge(lacking, view.since_miss, view.since_miss_s, self._view)

    def _is_better_here(self) -> bool:
        own, edge = self.calibration.common.acceptance, self._received.acceptance
        return own.rate > edge.rate + BETTER

    def _covered(self) -> int:
        """Return how far the text is before the edge's answer to the newest commit can come."""
        view, division = self._view, self._division
        if self._fixed is not None or view is None or division is None or not division.here_s:
            return 0
        return min(MAX_COVERED, int(view.round_trip_s / division.token_s))

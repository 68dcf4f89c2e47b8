"""The edge's branches: continuations of likely misses of its chain, made while the target runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.proto.policy.branches import (
    BRANCH_BYTES,
    LEAST_GAIN,
    MAX_BRANCHES,
    MAX_LEAVES,
    MIN_CHANCE,
    LikelyBranch,
    MissShares,
    likely_branches,
    likely_leaves,
)
from outrider.proto.policy.window import due_to_flush
from outrider.proto.session.chain import Chain
from outrider.proto.session.events import Drafted
from outrider.proto.session.jobs import DraftJob
from outrider.proto.session.measuring import Meter
from outrider.proto.session.stream import EdgeStream
from outrider.proto.session.text import EdgeText
from outrider.proto.types import Branch, Branches, DraftToken, Goal, token_ids

LEAST_MESSAGE = 0.05  # tokens that branches without a run must add to a step to be worth a message of their own

_Key = tuple[int, int]  # position of the miss, and the token in place of the draft


@dataclass(slots=True, eq=False)
class Branching:
    """Branches of the present chain.

    Attributes:
        shares: shares of misses by runner-up, in this text.
        borrowed: whether the drafts of the branch taken last are an idle drafter's.
    """

    _text: EdgeText
    _chain: Chain
    _stream: EdgeStream
    _meter: Meter
    _battery: float
    shares: MissShares = field(default_factory=MissShares)
    borrowed: bool = False
    _made: dict[_Key, tuple[DraftToken, ...]] = field(default_factory=dict)
    _sent: set[_Key] = field(default_factory=set)  # with their runs, which are final
    _chances: dict[_Key, float] = field(default_factory=dict)  # of those made, given that the chain agrees before them
    _job_s: float = 0.0  # duration of the newest job
    _proposed: dict[int, list[tuple[int, DraftToken]]] = field(default_factory=dict)  # others and theirs, by position
    _others: dict[_Key, tuple[float, int]] = field(default_factory=dict)  # chance to be taken, and whose run may follow
    _begun: set[_Key] = field(default_factory=set)  # whose runs have been asked for
    _leaves: set[_Key] = field(default_factory=set)  # runners-up that went without a run
    _ended: set[_Key] = field(default_factory=set)  # after whose runs the drafter had nothing to say

    def job(self, drafter: int, agreed: int, job_tokens: Callable[[float], int], now: float) -> DraftJob | None:
        """Return the next job for a branch; None: none is worth drafting, or would come in time.

        Args:
            drafter: index of the chain's drafter.
            agreed: tokens of its prefix that agree with transcript and chain, the transcript's at least.
            job_tokens: function from the seconds of a drafted token to the most tokens of a job.
            now: present time, in seconds.
        """
        branch = self._wanted(drafter, now)
        if branch is None:
            return None
        made, committed = self._made.get(self._key(branch), ()), len(self._text.tokens)
        position = committed + branch.index
        kept = min(agreed, position)
        return DraftJob(
            truncate_to=kept,
            extend_with=(*self._chain.tokens[kept - committed : branch.index], branch.token, *token_ids(made)),
            count=min(branch.drafts - len(made), job_tokens(self._meter.drafter(drafter).drafting_s.value)),
            epoch=self._chain.epoch,
            drafter=drafter,
            branch=position,
        )

    def _wanted(self, drafter: int, now: float) -> LikelyBranch | None:
        stream, chain = self._stream, self._chain
        if not (stream.connected and stream.terms.branches and stream.credit and chain.sent):
            return None
        if stream.terms.goal is Goal.EFFICIENCY:
            return None  # its verifier waits for a whole chain, which comes later where branches are made
        if not self._meter.measurements.step.mean or len(self._made) >= MAX_BRANCHES:
            return None
        likely = likely_branches(
            self._meter.chances(chain, drafter),
            [draft.runners_up for draft in chain.drafts],
            self.shares,
            self._meter.drafter(drafter).calibration.acceptance.rate,
            MIN_CHANCE / max(0.1, self._battery),
        )
        lacking = [branch for branch in likely if self._lacks(branch) and self._is_in_time(branch, drafter, now)]
        if not lacking:
            return None
        return max(lacking, key=lambda branch: (self._key(branch) in self._made, branch.chance))

    def _key(self, branch: LikelyBranch) -> _Key:
        return len(self._text.tokens) + branch.index, branch.token

    def _lacks(self, branch: LikelyBranch) -> bool:
        key = self._key(branch)
        if key in self._begun or key in self._sent or key in self._ended:
            return False
        return len(self._made.get(key, ())) < branch.drafts

    def _is_in_time(self, branch: LikelyBranch, drafter: int, now: float) -> bool:
        """Return whether the branch can be at the verifier before the step that judges its draft is over.

        The drafter must be free again when the next commit comes, for the chain that follows a miss.
        """
        measured, trip_s, commit_at = self._meter.measurements, self._meter.round_trip_s, self._meter.commit_at
        judged_s = max(measured.step.mean, (branch.index + 1) * measured.pace.token_s)
        ready_at = now + branch.drafts * self._meter.drafter(drafter).drafting_s.value
        return ready_at + trip_s < commit_at + judged_s and ready_at < commit_at + measured.step.mean

    def add(self, done: Drafted) -> None:
        """Take the result of a job in, unless its chain is gone."""
        job = done.job
        self._text.statistics.branched += len(done.drafts)
        self._job_s = done.seconds
        if job.epoch != self._chain.epoch or job.branch < len(self._text.tokens):
            return
        token = job.extend_with[job.branch - job.truncate_to]
        key = job.branch, token
        if not done.drafts:
            self._ended.add(key)
            return
        if key in self._sent:
            return  # the verifier may go on with the run as it has it, and the edge with no other
        if key in self._begun:
            # Confidence means something else with another drafter.
            self._made[key] = tuple([DraftToken(draft.id) for draft in done.drafts])
            return
        self._made[key] = self._made.get(key, ()) + done.drafts
        if self.verified_beside and key not in self._others:
            index = job.branch - len(self._text.tokens)
            rank = self._chain.drafts[index].runners_up.index(token)
            chance = self._meter.chances(self._chain, job.drafter)[index]
            self._chances[key] = (1 - chance) * self.shares.of(rank)

    @property
    def verified_beside(self) -> bool:
        """Whether steps verify branches beside the chain."""
        return self._text.frame.trees and self._stream.terms.trees

    # --- other drafters' ---

    @property
    def takes_others(self) -> bool:
        """Whether there is room for branches of idle drafters."""
        return self.verified_beside and self._stream.terms.branches and len(self._made) < MAX_BRANCHES

    def propose(self, other: int, active: int, start: int, drafts: Sequence[DraftToken]) -> float:
        """Take an idle drafter's proposals [n] in place of the chain's drafts from position `start` on.

        Returns:
            the tokens that its branches add to a step on average.
        """
        gain, survival, committed = 0.0, 1.0, len(self._text.tokens)
        chances, shares = self._meter.chances(self._chain, active), self._meter.drafter(other).beside
        proposed = dict(enumerate(drafts, start))
        for position, own, agrees in zip(itertools.count(committed), self._chain.drafts, chances, strict=False):
            draft = proposed.get(position, own)
            if draft.id != own.id and 0 <= draft.id < self._stream.terms.vocab_size:
                self._proposed.setdefault(position, []).append((other, draft))
                chance = (1 - agrees) * shares.of(draft.lead)
                if self._take_other((position, draft.id), other, own, chance, agrees, survival):
                    gain += survival * chance
            survival *= agrees
        return gain

    def _take_other(
        self, key: _Key, other: int, own: DraftToken, chance: float, agrees: float, survival: float
    ) -> bool:
        """Make a branch of the token of `key`, perhaps a runner-up of `own`; return whether it is worth its row."""
        before = self._chances.get(key, 0.0)
        if not before and key[1] in own.runners_up:
            before = (1 - agrees) * self.shares.of(own.runners_up.index(key[1]))
        both = min(1 - agrees, before + chance - before * chance)
        if survival * both < self._least or len(self._made) >= MAX_BRANCHES:
            return False
        self._made.setdefault(key, ())
        self._chances[key] = both
        if key not in self._others or chance > before:
            self._others[key] = survival * both, other
        return True

    def likeliest_other(self) -> tuple[float, int, int, int] | None:
        """Return chance, position, token and drafter of the likeliest branch that has no run yet; None: none."""
        lacking = [
            (taken, *key, other)
            for key, (taken, other) in self._others.items()
            if key not in self._begun and not self._made[key]
        ]
        return max(lacking, default=None)

    def begin_run(self, position: int, token: int) -> None:
        """Note that the run of a branch is being drafted."""
        self._begun.add((position, token))

    def message(self, now: float, *, finished: bool) -> Branches | None:
        """Return the branches to send now; None: there are none, or more can go with them in time.

        `finished`: whether no more will be made for now.
        """
        stream, meter = self._stream, self._meter
        end = len(self._text.tokens) + self._chain.sent
        unsent = [key for key in self._made if key[0] < end and self._is_unsent(key)]
        worth = sum(1.0 if self._made[key] else self._others[key][0] for key in unsent)
        if worth < LEAST_MESSAGE or not stream.connected:
            return None
        step_s = meter.measurements.step.mean
        due = due_to_flush(
            now, commit_at=meter.commit_at, round_trip_s=meter.round_trip_s, step_s=step_s, next_s=self._job_s
        )
        if not (finished or due):
            return None
        return Branches(self._chain.number, self._send(unsent))

    def _is_unsent(self, key: _Key) -> bool:
        return key not in self._sent and (bool(self._made[key]) or key not in self._leaves)

    def _send(self, keys: Sequence[_Key]) -> tuple[Branch, ...]:
        if not keys:
            return ()
        for key in keys:
            (self._sent if self._made[key] else self._leaves).add(key)
        self._chain.branched = True  # a verifier may make one of them the next chain
        return tuple(
            Branch(key[0], (key[1], *token_ids(self._made[key])), self._chances.get(key, math.nan)) for key in keys
        )

    @property
    def _least(self) -> float:
        """Chance of a branch below which it is not worth its row and bytes."""
        measured = self._meter.measurements
        row_s, byte_s, token_s = measured.step.fit()[1], measured.round_trip.fit()[1], measured.pace.token_s
        return max(LEAST_GAIN, (row_s + BRANCH_BYTES * byte_s) / token_s if token_s else 0.0)

    def leaves(self, drafter: int, first: int) -> tuple[Branch, ...]:
        """Return branches that are worth a row of the step, for drafts of `drafter` from `first` on that are sent now.

        They are runners-up, which cost no drafting; what has been drafted after one goes with it.
        """
        if not self.verified_beside:
            return ()
        chain = self._chain
        leaves = likely_leaves(
            self._meter.chances(chain, drafter),
            [draft.runners_up for draft in chain.drafts],
            self.shares,
            first,
            self._least,
        )
        committed, branches = len(self._text.tokens), list[Branch]()
        for index, token, chance in leaves:
            key = committed + index, token
            if key in self._made and self._is_unsent(key):
                branches += self._send([key])
            elif key not in self._made:
                branches.append(Branch(key[0], (token,), chance))
                self._leaves.add(key)
        end = committed + len(chain)
        others = [key for key in self._others if self._is_unsent(key) and committed + first <= key[0] < end]
        others.sort(key=lambda key: -self._others[key][0])
        return (*branches, *self._send(others[: MAX_LEAVES - len(branches)]))

    def take(self, position: int, draft: DraftToken, token: int) -> tuple[DraftToken, ...]:
        """Return the drafts that follow `token`, which the target put in place of `draft`; forget all branches."""
        if draft.runners_up:
            self.shares.add(draft.runners_up, token)
        for other, proposal in self._proposed.get(position, ()):
            self._meter.drafter(other).beside.add(proposal.lead, proposal.id == token)
        drafts = self._made.get((position, token), ())
        self.borrowed = (position, token) in self._begun
        self.forget()
        return drafts

    def forget(self) -> None:
        """Forget all branches."""
        for known in (self._made, self._sent, self._chances, self._leaves, self._proposed, self._others):
            known.clear()
        self._begun.clear()
        self._ended.clear()

    def advance(self) -> None:
        """Forget the branches of drafts that have become text."""
        end = len(self._text.tokens)
        for key in [key for key in self._made if key[0] < end]:
            del self._made[key]
            self._sent.discard(key)
            self._chances.pop(key, None)
            self._others.pop(key, None)
        for position in [position for position in self._proposed if position < end]:
            del self._proposed[position]

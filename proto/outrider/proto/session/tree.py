"""The edge's drafts after the transcript: a tree of a chain, and of branches where it is likely to miss.

The active drafter makes the chain, and branches of it while the target runs. Idle drafters make others, where they
disagree with the chain. With a miss the branch that has the target's token, if there is one, becomes the chain.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from outrider.proto.policy.likely_branches import (
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
from outrider.proto.session.events import Drafted
from outrider.proto.session.jobs import DraftJob
from outrider.proto.session.measuring import Meter
from outrider.proto.session.selection import NO_DRAFTER, DrafterName
from outrider.proto.session.stream import EdgeStream, EdgeText
from outrider.proto.types import Branch, Branches, Draft, DraftToken, Goal, token_ids

LEAST_MESSAGE = 0.05  # tokens that branches without a run must add to a step to be worth a message of their own

Key = tuple[int, int]  # position of a miss, and the token in place of the draft


@dataclass(slots=True)
class Beside:
    """The drafts made and sent beside the chain at one likely miss.

    Attributes:
        run: drafts after its token; None: it is no branch yet.
        chance: chance that it is taken, given that the chain agrees before it; NaN: not known.
        other: idle drafter that proposed its token, and may propose its run; -1: none did.
        worth: tokens that it adds to a step on average, as that drafter's.
        asked: whether the run was asked of that drafter.
        ended: whether the active drafter had nothing more to say.
        leaf, sent: whether the token went without a run, and whether it went with its run, which is final then.
    """

    run: tuple[DraftToken, ...] | None = None
    chance: float = math.nan
    other: int = -1
    worth: float = 0.0
    asked: bool = False
    ended: bool = False
    leaf: bool = False
    sent: bool = False

    @property
    def is_unsent(self) -> bool:
        return self.run is not None and not self.sent and (bool(self.run) or not self.leaf)


class DraftTree:
    """Drafts that no commit has met yet; they live while the target's tokens agree with them.

    Attributes:
        drafts: drafts of the chain, oldest first; the position of the first is the transcript's length.
        sent: number of drafts at its front that have been sent.
        epoch: number of chains abandoned so far; what a job of an older epoch proposes is dropped.
        number: number of the chain in messages.
        said_complete: whether the verifier knows, since the last commit, that no more drafts come.
        branched: whether branches of it have been sent, one of which the verifier may have made the next chain.
        read_to: end of the chain as idle drafters have read it, by drafter.
        branches: what is beside the chain, by position and token, in the order in which it was made.
    """

    def __init__(self, text: EdgeText, stream: EdgeStream, meter: Meter, battery: float) -> None:
        self.drafts: list[DraftToken] = []
        self.sent = 0
        self.epoch = 0
        self.number = 0
        self.said_complete = False
        self.branched = False
        self.read_to: dict[int, int] = {}
        self.shares = MissShares()
        self.branches: dict[Key, Beside] = {}
        self._number_used = False
        self._named = NO_DRAFTER  # drafter that the stream's verifier knows of
        self._job_s = 0.0  # duration of the newest job of a branch
        self._proposed: dict[int, list[tuple[int, DraftToken]]] = {}  # idle drafters and theirs, by position
        self._text = text
        self._stream = stream
        self._meter = meter
        self._battery = battery

    def __len__(self) -> int:
        return len(self.drafts)

    @property
    def tokens(self) -> tuple[int, ...]:
        return token_ids(self.drafts)

    def chances(self, drafter: int) -> list[float]:
        """Return the chance of each draft of the chain, made by `drafter`, to agree, given that all before it do."""
        return self._meter.chances(self.drafts, self.epoch, drafter)

    def survival(self, drafter: int) -> float:
        return self._meter.survival(self.drafts, self.epoch, drafter)

    # --- the text goes on ---

    def advance(self, drafts: int) -> None:
        """Drop the first `drafts` drafts of the chain, which are text now, and all that is beside them."""
        del self.drafts[:drafts]
        self.sent = max(0, self.sent - drafts)
        end = len(self._text.tokens)
        for key in [key for key in self.branches if key[0] < end]:
            del self.branches[key]
        for position in [position for position in self._proposed if position < end]:
            del self._proposed[position]

    def miss(self, position: int, draft: DraftToken, token: int, newest: int) -> None:
        """Go on with the branch of `token`, which the target put in place of `draft`, if there is one.

        The verifier's `newest` chain is that branch if it is newer than this chain.
        """
        taken, run = newest > self.number, self.take(position, draft, token)
        self.abandon()
        if run:
            self.follow(run, newest if taken else 0)
            self._text.statistics.branches_taken += taken

    def take(self, position: int, draft: DraftToken, token: int) -> tuple[DraftToken, ...]:
        """Return the drafts that follow `token`, which the target put in place of `draft`, and learn from the miss."""
        if draft.runners_up:
            self.shares.add(draft.runners_up, token)
        for other, proposal in self._proposed.get(position, ()):
            self._meter.drafter(other).beside.add(proposal.score, proposal.id == token)
        return self._run((position, token))

    def abandon(self) -> None:
        """Forget all drafts and begin another chain."""
        self.drafts.clear()
        self.epoch += 1
        self.read_to.clear()
        self.forget_branches()
        self.resend()

    def forget_branches(self) -> None:
        self.branches.clear()
        self._proposed.clear()

    def resend(self) -> None:
        """Send the drafts again, as a chain of another number."""
        self.sent = 0
        self.said_complete = False
        if self._number_used:
            self.number += 2 if self.branched else 1
            self._number_used = self.branched = False

    def follow(self, run: tuple[DraftToken, ...], number: int) -> None:
        """Go on with a branch of the chain just abandoned, which the verifier has as chain `number`; 0: it has not."""
        self.drafts = list(run)
        if number:
            self.number, self.sent, self._number_used = number, len(run), True

    def begin_stream(self) -> None:
        """Send the drafts again to a verifier that has seen nothing."""
        self._named = NO_DRAFTER
        self.forget_branches()
        self.resend()

    # --- the chain's messages ---

    def send(
        self, tokens: tuple[DraftToken, ...], drafter: DrafterName, branches: tuple[Branch, ...] = (), *, complete: bool
    ) -> Draft:
        """Return the message that sends the next `tokens` of the chain, which are `drafter`'s, and branches."""
        start = len(self._text.tokens) + self.sent
        name, version = NO_DRAFTER if drafter == self._named else drafter
        self._named = drafter
        self.sent += len(tokens)
        self.said_complete = complete
        self._number_used = True
        return Draft(self.number, start, tokens, name, version, complete, branches)

    # --- the active drafter's branches ---

    def job(self, drafter: int, agreed: int, job_tokens: Callable[[float], int], now: float) -> DraftJob | None:
        """Return the active drafter's next job for a branch; None: none is worth drafting, or would come in time.

        `agreed` tokens of its prefix agree with transcript and chain, the transcript's at least.
        """
        branch = self._wanted(drafter, now)
        if branch is None:
            return None
        committed = len(self._text.tokens)
        position = committed + branch.index
        made = self._run((position, branch.token))
        kept = min(agreed, position)
        return DraftJob(
            truncate_to=kept,
            extend_with=(*self.tokens[kept - committed : branch.index], branch.token, *token_ids(made)),
            count=min(branch.drafts - len(made), job_tokens(self._meter.drafter(drafter).drafting_s.value)),
            epoch=self.epoch,
            drafter=drafter,
            branch=position,
        )

    def _wanted(self, drafter: int, now: float) -> LikelyBranch | None:
        stream = self._stream
        if not (stream.connected and stream.terms.branches and stream.credit and self.sent):
            return None
        if stream.terms.goal is Goal.EFFICIENCY:
            return None  # its verifier waits for a whole chain, which comes later where branches are made
        if not self._meter.measurements.step.mean or self._is_full:
            return None
        likely = likely_branches(
            self.chances(drafter),
            [draft.runners_up for draft in self.drafts],
            self.shares,
            self._meter.drafter(drafter).calibration.acceptance.rate,
            MIN_CHANCE / max(0.1, self._battery),
        )
        begins = len(self._text.tokens)
        lacking = [
            ((beside is not None and beside.run is not None, branch.chance), branch)
            for branch in likely
            if _lacks(branch, beside := self.branches.get((begins + branch.index, branch.token)))
            and self._is_in_time(branch, drafter, now)
        ]
        return max(lacking, key=lambda each: each[0])[1] if lacking else None

    @property
    def _is_full(self) -> bool:
        return sum(beside.run is not None for beside in self.branches.values()) >= MAX_BRANCHES

    def _run(self, key: Key) -> tuple[DraftToken, ...]:
        beside = self.branches.get(key)
        return beside.run or () if beside is not None else ()

    def _make(self, key: Key) -> Beside:
        """Return the branch at `key`, which is begun where there is none, and is the newest then."""
        beside = self.branches.get(key, Beside())
        if beside.run is None:
            self.branches.pop(key, None)  # it is now the newest
            self.branches[key], beside.run = beside, ()
        return beside

    def _is_in_time(self, branch: LikelyBranch, drafter: int, now: float) -> bool:
        """Return whether the branch can be at the verifier before the step that judges its draft is over.

        The drafter must be free again when the next commit comes, for the chain that follows a miss.
        """
        measured, commit_at = self._meter.measurements, self._meter.commit_at
        judged_s = max(measured.step.mean, (branch.index + 1) * measured.pace.token_s)
        ready_at = now + branch.drafts * self._meter.drafter(drafter).drafting_s.value
        return ready_at + measured.round_trip_s < commit_at + judged_s and ready_at < commit_at + measured.step.mean

    def add(self, done: Drafted) -> None:
        """Take the result of a branch's job in, unless its chain is gone."""
        job = done.job
        self._text.statistics.branched += len(done.drafts)
        self._job_s = done.seconds
        if job.epoch != self.epoch or job.branch < len(self._text.tokens):
            return
        token = job.extend_with[job.branch - job.truncate_to]
        key = job.branch, token
        if not done.drafts:
            self.branches.setdefault(key, Beside()).ended = True
            return
        if key in self.branches and self.branches[key].sent:
            return  # the verifier may go on with the run as it has it, and the edge with no other
        beside = self._make(key)
        if beside.asked:
            # Confidence means something else with another drafter.
            beside.run = tuple([DraftToken(draft.id, other=True) for draft in done.drafts])
            return
        beside.run = (*self._run(key), *done.drafts)
        index = job.branch - len(self._text.tokens)
        if self.verified_beside and beside.other < 0 and token in (runners_up := self.drafts[index].runners_up):
            beside.chance = (1 - self.chances(job.drafter)[index]) * self.shares.of(runners_up.index(token))

    @property
    def verified_beside(self) -> bool:
        return self._text.frame.trees and self._stream.terms.trees

    # --- idle drafters' branches ---

    @property
    def takes_others(self) -> bool:
        """Whether there is room for branches of idle drafters."""
        return self.verified_beside and self._stream.terms.branches and not self._is_full

    def propose(self, other: int, active: int, start: int, drafts: Sequence[DraftToken]) -> float:
        """Take an idle drafter's proposals from position `start` on; return the tokens that they add to a step."""
        gain, survival, committed = 0.0, 1.0, len(self._text.tokens)
        chances, shares = self.chances(active), self._meter.drafter(other).beside
        proposed = dict(enumerate(drafts, start))
        for position, own, agrees in zip(itertools.count(committed), self.drafts, chances, strict=False):
            draft = proposed.get(position, own)
            if draft.id != own.id and 0 <= draft.id < self._stream.terms.vocab_size:
                self._proposed.setdefault(position, []).append((other, draft))
                chance = (1 - agrees) * shares.of(draft.score)
                if self._take_other((position, draft.id), other, own, chance, agrees, survival):
                    gain += survival * chance
            survival *= agrees
        return gain

    def _take_other(self, key: Key, other: int, own: DraftToken, chance: float, agrees: float, survival: float) -> bool:
        """Make a branch of the token of `key`, perhaps a runner-up of `own`; return whether it is worth its row."""
        beside = self.branches.get(key, Beside())
        before = 0.0 if math.isnan(beside.chance) else beside.chance
        if not before and key[1] in own.runners_up:
            before = (1 - agrees) * self.shares.of(own.runners_up.index(key[1]))
        both = min(1 - agrees, before + chance - before * chance)
        if survival * both < self._least or self._is_full:
            return False
        beside = self._make(key)
        beside.chance = both
        if beside.other < 0 or chance > before:
            beside.worth, beside.other = survival * both, other
        return True

    def likeliest_other(self) -> tuple[float, int, int, int] | None:
        """Return chance, position, token and drafter of the likeliest branch that has no run yet; None: none."""
        lacking = [
            (beside.worth, *key, beside.other)
            for key, beside in self.branches.items()
            if beside.other >= 0 and not beside.asked and not beside.run
        ]
        return max(lacking, default=None)

    # --- branches' messages ---

    def message(self, now: float, *, finished: bool) -> Branches | None:
        """Return the branches to send now; None: there are none, or not `finished` and more can go in time."""
        end = len(self._text.tokens) + self.sent
        unsent = {key: beside for key, beside in self.branches.items() if key[0] < end and beside.is_unsent}
        worth = sum(1.0 if beside.run else beside.worth for beside in unsent.values())
        if worth < LEAST_MESSAGE or not self._stream.connected:
            return None
        due = finished or self._meter.is_due(now, self._job_s)
        return Branches(self.number, self._send(unsent)) if due else None

    def _send(self, keys: Iterable[Key]) -> tuple[Branch, ...]:
        messages = []
        for key in keys:
            beside = self.branches[key]
            if beside.run:
                beside.sent = True
            else:
                beside.leaf = True
            messages.append(Branch(key[0], (key[1], *token_ids(beside.run or ())), beside.chance))
            self.branched = True  # a verifier may make one of them the next chain
        return tuple(messages)

    @property
    def _least(self) -> float:
        """Chance of a branch below which it is not worth its row and bytes."""
        measured = self._meter.measurements
        row_s, byte_s, token_s = measured.step.fit()[1], measured.round_trip.fit()[1], measured.pace.token_s
        return max(LEAST_GAIN, (row_s + BRANCH_BYTES * byte_s) / token_s if token_s else 0.0)

    def leaves(self, drafter: int, first: int) -> tuple[Branch, ...]:
        """Return branches worth a row of the step, for drafts of `drafter` from `first` on that are sent now.

        They are runners-up, which cost no drafting; what has been drafted after one goes with it.
        """
        if not self.verified_beside:
            return ()
        leaves = likely_leaves(
            self.chances(drafter), [draft.runners_up for draft in self.drafts], self.shares, first, self._least
        )
        committed, branches = len(self._text.tokens), list[Branch]()
        for index, token, chance in leaves:
            key = committed + index, token
            beside = self.branches.setdefault(key, Beside())
            if beside.is_unsent:
                branches += self._send([key])
            elif beside.run is None:
                branches.append(Branch(key[0], (token,), chance))
                beside.leaf = True
        end = committed + len(self.drafts)
        others = [
            key
            for key, beside in self.branches.items()
            if beside.other >= 0 and beside.is_unsent and committed + first <= key[0] < end
        ]
        others.sort(key=lambda key: -self.branches[key].worth)
        return (*branches, *self._send(others[: MAX_LEAVES - len(branches)]))


def _lacks(branch: LikelyBranch, beside: Beside | None) -> bool:
    """Return whether the active drafter may still draft for a branch, which `beside` holds."""
    if beside is None:
        return True
    if beside.asked or beside.sent or beside.ended:
        return False
    return len(beside.run or ()) < branch.drafts

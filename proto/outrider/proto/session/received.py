"""Drafts that a verifier has received for one text, compared with its tokens."""

from __future__ import annotations

from collections import deque

from outrider.proto.errors import ResourceExhausted
from outrider.proto.policy.likely_branches import MAX_BRANCHES
from outrider.proto.policy.measurements import Acceptance, Smoothed
from outrider.proto.session.selection import NO_DRAFTER
from outrider.proto.types import Branch, Branches, Draft, DraftToken

MAX_COMMITS = 64  # commits whose times are kept
FIRST_BRANCHED, FIRST_TRIALS, FIRST_DRAFTS = 0.4, 4.0, 5.0  # of branches, before any miss


class ReceivedDrafts:
    """The newest chain of drafts, as far as it agrees with the transcript.

    Attributes:
        chain: number of the chain; before the first, one less than the lowest that may come.
        tokens: drafts that follow the transcript.
        complete: whether the edge sends no more of them before the next commit.
        drafter: name and version of the drafter of what is received now, as the edge says; empty: it says none.
        since_miss: number of tokens committed since a draft last missed.
        missed_at: time from which the edge could know of that miss, in seconds.
        branched: share of misses whose branch was there, which had `branch_drafts` drafts.
    """

    def __init__(
        self,
        transcript: list[int],
        max_credit: int,
        now: float,
        *,
        chain: int,
        acceptance: Acceptance,
    ) -> None:
        self.chain = chain
        self.tokens: list[DraftToken] = []
        self.complete = False
        self.drafter = NO_DRAFTER
        self.acceptance = acceptance
        self.since_miss = 0
        self.missed_at = now
        self._transcript = transcript
        self._max_credit = max_credit
        self.branched = Acceptance(FIRST_BRANCHED * FIRST_TRIALS, FIRST_TRIALS)
        self.branch_drafts = Smoothed(FIRST_DRAFTS)
        self._branches: dict[tuple[int, int], Branch] = {}  # by position and token of the miss
        self._alive = True  # no draft of the chain has missed
        self._commits: deque[tuple[int, float]] = deque(maxlen=MAX_COMMITS)  # length of the transcript, and time

    def continued(self, transcript: list[int], chain: int, now: float) -> ReceivedDrafts:
        """Return what follows in the next turn, whose chains are numbered from `chain` on."""
        following = ReceivedDrafts(transcript, self._max_credit, now, chain=chain - 1, acceptance=self.acceptance)
        following.drafter = self.drafter
        following.branched, following.branch_drafts = self.branched, self.branch_drafts
        return following

    def __len__(self) -> int:
        return len(self.tokens)

    def receive(self, draft: Draft) -> bool:
        """Take in drafts of the newest chain, and ignore stale ones; return whether one has missed.

        A chain ends where a draft contradicts an earlier one of the same position, and goes on with the newer.

        Raises:
            ResourceExhausted: there are more unverified drafts than any credit allows.
        """
        if draft.drafter:
            self.drafter = draft.drafter, draft.drafter_version
        if draft.chain < self.chain or (draft.chain == self.chain and not self._alive):
            return False
        if draft.chain > self.chain:
            self.chain = draft.chain
            self._alive = True
            self.complete = False
            self.tokens.clear()
            self._branches.clear()
        if draft.start > len(self._transcript) + len(self.tokens):
            self.complete = True  # drafts are missing, and they will not come in order: do not wait for them
            return False
        for i, token in enumerate(draft.tokens):
            if not self._take(draft.start + i, token):
                return True
        self._keep(draft.branches)
        overtaken = draft.start + len(draft.tokens) < len(self._transcript) + bool(draft.tokens)
        if draft.complete and not overtaken:  # otherwise the edge has yet to answer a newer commit
            self.complete = True
        return False

    def receive_branches(self, frame: Branches) -> None:
        """Keep the branches of the chain that lives, at drafts that no commit has met.

        Raises:
            ResourceExhausted: there are more than a chain may have.
        """
        if frame.chain == self.chain and self._alive:
            self._keep(frame.branches)

    def _keep(self, branches: tuple[Branch, ...]) -> None:
        if not branches:
            return
        end = len(self._transcript)
        self._branches = {key: branch for key, branch in self._branches.items() if key[0] >= end}
        self._branches |= {(branch.start, branch.tokens[0]): branch for branch in branches if branch.start >= end}
        if len(self._branches) > MAX_BRANCHES:
            raise ResourceExhausted(
                f"hold more than {MAX_BRANCHES} branches beside one chain; send fewer", field="branches.starts"
            )

    @property
    def end(self) -> int:
        return len(self._transcript)

    def branches(self) -> list[Branch]:
        """Return the branches at drafts that no commit has met; their chain lives."""
        end = len(self._transcript)
        return [branch for branch in self._branches.values() if branch.start >= end] if self._alive else []

    def _take(self, position: int, token: DraftToken) -> bool:
        """Take one draft in; return whether the chain still lives."""
        ahead = position - len(self._transcript)
        if ahead < 0:
            return self._compare(position, self._transcript[position] == token.id)
        if ahead >= self._max_credit:
            raise ResourceExhausted(
                f"more than {self._max_credit} unverified tokens; respect the credit", field="draft.tokens"
            )
        if ahead < len(self.tokens) and self.tokens[ahead].id != token.id:
            del self.tokens[ahead:]
        if ahead == len(self.tokens):
            self.tokens.append(token)
        return True

    def commit(self, tokens: tuple[int, ...], now: float) -> None:
        """Compare the drafts with `tokens`, which now end the transcript."""
        end = len(self._transcript)
        self._commits.append((end, now))
        self.since_miss += len(tokens)
        for position, token in enumerate(tokens, end - len(tokens)):
            if not self.tokens:
                break  # drafts for these positions may still come, and will be compared then
            if self._compare(position, self.tokens[0].id == token):
                del self.tokens[0]
            elif not self._follow_branch(position, token, now):
                break
        if self.complete and self._alive:  # the edge goes on drafting when this commit reaches it
            self.since_miss, self.missed_at = -len(self.tokens), now
        self.complete = False

    def _follow_branch(self, position: int, token: int, now: float) -> bool:
        """Begin the next chain with the branch of `token` at the draft that just missed; return whether it is here."""
        branch = self._branches.get((position, token))
        self._branches.clear()
        drafts = branch.tokens[1:] if branch is not None else ()
        self.branched.add(bool(drafts))
        if not drafts:
            return False
        self.branch_drafts.add(len(drafts))
        self.chain += 1
        self._alive = True
        self.complete = False
        self.tokens.extend(map(DraftToken, drafts))
        self.since_miss -= len(drafts)  # which the edge has already
        self.missed_at = now
        return True

    def note_miss(self, now: float) -> None:
        """Note that the edge's drafter must have missed in the commit of `now`, as another of its kind did."""
        if not self.tokens:
            self.since_miss, self.missed_at = 0, now

    def _compare(self, position: int, hit: bool) -> bool:
        """Count a draft that was compared with the token at `position`; a miss ends the chain."""
        self.acceptance.add(hit)
        if not hit:
            self._alive = False
            self.tokens.clear()
            self.since_miss = len(self._transcript) - position - 1
            # The edge learns of the miss from the commit that held the position.
            self.missed_at = next((at for end, at in self._commits if end > position), self.missed_at)
        return hit

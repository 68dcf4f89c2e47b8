"""Drafts that a verifier has received for one text, compared with its tokens."""

from __future__ import annotations

from collections import deque

from outrider.proto.errors import InvalidArgument, ResourceExhausted
from outrider.proto.policy.measures import Acceptance
from outrider.proto.session.chain import NO_DRAFTER, DrafterName
from outrider.proto.types import Draft, DraftToken

MAX_COMMITS = 64  # commits whose times are kept


class ReceivedDrafts:
    """The newest chain of drafts, as far as it agrees with the transcript.

    Attributes:
        chain: number of the chain; before the first, one less than the lowest that may come.
        tokens: drafts that follow the transcript.
        complete: whether the edge sends no more of them before the next commit.
        drafter: name and version of the drafter of what is received now, as the edge says; empty: it says none.
        acceptance: chance that a draft agrees.
        since_miss: number of tokens committed since a draft last missed.
        missed_at: time from which the edge could know of that miss, in seconds.
    """

    def __init__(
        self,
        transcript: list[int],
        max_credit: int,
        now: float,
        *,
        chain: int,
        acceptance: Acceptance,
        drafter: DrafterName = NO_DRAFTER,
    ) -> None:
        self.chain = chain
        self.tokens: list[DraftToken] = []
        self.complete = False
        self.drafter = drafter
        self.acceptance = acceptance
        self.since_miss = 0
        self.missed_at = now
        self._transcript = transcript
        self._max_credit = max_credit
        self._alive = True  # no draft of the chain has missed
        self._commits: deque[tuple[int, float]] = deque(maxlen=MAX_COMMITS)  # length of the transcript, and time

    def __len__(self) -> int:
        return len(self.tokens)

    def receive(self, draft: Draft) -> bool:
        """Take in drafts of the newest chain, and ignore stale ones; return whether one has missed.

        Raises:
            InvalidArgument: a draft contradicts an earlier one of the same chain.
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
        path = draft.first_path()
        if draft.start > len(self._transcript) + len(self.tokens):
            self.complete = True  # drafts are missing, and they will not come in order: do not wait for them
            return False
        for i, token in enumerate(path):
            if not self._take(draft.start + i, token):
                return True
        overtaken = draft.start + len(path) < len(self._transcript) + bool(path)
        if draft.complete and not overtaken:  # otherwise the edge has yet to answer a newer commit
            self.complete = True
        return False

    def _take(self, position: int, token: DraftToken) -> bool:
        """Take one draft in; return whether the chain still lives."""
        ahead = position - len(self._transcript)
        if ahead < 0:
            return self._compare(position, self._transcript[position] == token.id)
        if ahead < len(self.tokens):
            if self.tokens[ahead].id != token.id:
                raise InvalidArgument(f"contradicts what chain {self.chain} said at {position}", field="draft.tokens")
        elif ahead >= self._max_credit:
            raise ResourceExhausted(
                f"more than {self._max_credit} unverified tokens; respect the credit", field="draft.tokens"
            )
        else:
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
            if not self._compare(position, self.tokens[0].id == token):
                break
            del self.tokens[0]
        if self.complete and self._alive:  # the edge goes on drafting when this commit reaches it
            self.since_miss, self.missed_at = -len(self.tokens), now
        self.complete = False

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

"""The chain of unverified drafts that follows the transcript, and how much of it has been sent."""

from __future__ import annotations

from outrider.proto.types import Branch, Draft, DraftToken, token_ids

DrafterName = tuple[str, str]  # name and version
NO_DRAFTER: DrafterName = ("", "")


class Chain:
    """Drafts that no commit has met yet; they live while the target's tokens agree with them.

    Attributes:
        drafts: the drafts, oldest first; the position of the first is the transcript's length.
        sent: number of drafts at the front that have been sent.
        epoch: number of chains abandoned so far; what a job of an older epoch proposes is dropped.
        said_complete: whether the verifier knows, since the last commit, that no more drafts come.
        branched: whether branches of it have been sent, one of which the verifier may have made the next chain.
        borrowed: number of drafts at the front that are not the active drafter's.
    """

    def __init__(self) -> None:
        self.drafts: list[DraftToken] = []
        self.sent = 0
        self.epoch = 0
        self.number = 0  # in messages
        self.said_complete = False
        self.branched = False
        self.borrowed = 0
        self._number_used = False
        self._named = NO_DRAFTER  # drafter that the stream's verifier knows of

    def __len__(self) -> int:
        return len(self.drafts)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Ids of the drafts."""
        return token_ids(self.drafts)

    def advance(self, drafts: int) -> None:
        """Drop the first `drafts` drafts, which the target has agreed with."""
        del self.drafts[:drafts]
        self.sent = max(0, self.sent - drafts)
        self.borrowed = max(0, self.borrowed - drafts)

    def abandon(self) -> None:
        """Forget all drafts and begin another chain."""
        self.drafts.clear()
        self.borrowed = 0
        self.epoch += 1
        self.resend()

    def resend(self) -> None:
        """Send the drafts again, as a chain of another number."""
        self.sent = 0
        self.said_complete = False
        if self._number_used:
            self.number += 2 if self.branched else 1
            self._number_used = self.branched = False

    def follow_branch(self, drafts: tuple[DraftToken, ...], number: int, borrowed: int) -> None:
        """Go on with the drafts of a branch of the chain just abandoned.

        Args:
            drafts: [n] the drafts.
            number: that under which the verifier has them already; 0: it has not.
            borrowed: number of them that are not the active drafter's, which come first.
        """
        self.drafts, self.borrowed = list(drafts), borrowed
        if number:
            self.number, self.sent, self._number_used = number, len(drafts), True

    def begin_stream(self) -> None:
        """Send the drafts again to a verifier that has seen nothing."""
        self._named = NO_DRAFTER
        self.resend()

    def unsent(self, credit: int) -> list[DraftToken]:
        """Return the drafts that may be sent where `credit` of those in flight are allowed."""
        return self.drafts[self.sent : max(self.sent, credit)]

    def send(
        self,
        start: int,
        tokens: tuple[DraftToken, ...],
        drafter: DrafterName,
        branches: tuple[Branch, ...] = (),
        *,
        complete: bool,
    ) -> Draft:
        """Return the message that sends the next `tokens` of `drafter`, the first at position `start`, and branches."""
        name, version = NO_DRAFTER if drafter == self._named else drafter
        self._named = drafter
        self.sent += len(tokens)
        self.said_complete = complete
        self._number_used = True
        return Draft(self.number, start, tokens, name, version, complete, branches)

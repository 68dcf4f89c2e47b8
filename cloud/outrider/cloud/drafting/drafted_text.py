"""One text in the verifier's own drafter: its prefix, and the part of it that the drafter has yet to read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from outrider.drafters import Drafter, DraftState, ProposalRule
from outrider.proto.errors import InvalidArgument
from outrider.proto.session import DraftJob
from outrider.proto.session.both_ends import LocalJob
from outrider.proto.types import DraftToken


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
        """Return name@version."""
        return f"{self.drafter.name}@{self.drafter.version}"


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
        """Give the memory back."""
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

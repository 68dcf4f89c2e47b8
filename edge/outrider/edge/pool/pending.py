"""Drafter that loads while a text begins, and takes part once it is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from outrider.drafters.pool import DrafterPool, Member
from outrider.drafters.proposals import ProposalRule
from outrider.drafters.protocol import Drafter, DraftState, TokenPrefix
from outrider.proto.errors import Unavailable
from outrider.proto.types import DraftToken

if TYPE_CHECKING:
    from outrider.drafters.packages import DrafterPackage, SteeringShape


@dataclass(frozen=True, slots=True)
class FoundDrafters:
    """Result of a search for drafters.

    Attributes:
        drafters: pool whose first drafter is loaded; None: there are none, or none yet.
        package: package of the first that has one.
        error: reason why there are none where they were requested.
        pending: first drafter while it loads; None: nothing loads.
    """

    drafters: DrafterPool | None
    package: DrafterPackage | None = None
    error: str = ""
    pending: PendingDrafter | None = None


class PendingDrafter:
    """First drafter of a pool, which loads in a thread of its own; unsteered.

    Its states propose nothing until it is there, and fail once it is known that it cannot be loaded.

    Args:
        member: the drafter by its manifest.
        load: makes the pool.
    """

    def __init__(self, member: Member, load: Callable[[], FoundDrafters]) -> None:
        self.name = member.name
        self.version = member.version
        self.steering: SteeringShape | None = None
        thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-drafter-loader")
        self.loading: Future[FoundDrafters] = thread.submit(load)
        thread.shutdown(wait=False)

    def close(self) -> None:
        """Close the pool, or let it be closed when what loads now is there."""

        def close(loading: Future[FoundDrafters]) -> None:
            if not loading.cancelled() and loading.exception() is None and (pool := loading.result().drafters):
                pool.close()

        self.loading.add_done_callback(close)

    def loaded(self) -> Drafter | None:
        """Return the drafter, or None while it loads.

        Raises:
            OutriderError, OSError: it cannot be loaded.
        """
        if not self.loading.done():
            return None
        drafting = self.loading.result()
        drafter = drafting.drafters.first if drafting.drafters is not None else None
        if drafter is None or drafter.name != self.name:
            raise Unavailable(drafting.error or f"the drafter {self.name} cannot be loaded")
        return drafter

    def open(self, rule: ProposalRule) -> DraftState:
        """Begin an empty prefix that is read when the drafter is there."""
        return _PendingState(self, rule)


class _PendingState:
    """Prefix of a drafter that may still load."""

    def __init__(self, drafter: PendingDrafter, rule: ProposalRule) -> None:
        self._drafter = drafter
        self._rule = rule
        self._state: DraftState | None = None
        self._prefix = TokenPrefix()  # while there is no state

    @property
    def length(self) -> int:
        return self._prefix.length if self._state is None else self._state.length

    def extend(self, tokens: Sequence[int]) -> None:
        if self._state is None:
            self._prefix.extend(tokens)
        else:
            self._state.extend(tokens)

    def propose(self, n: int) -> tuple[DraftToken, ...]:
        """Propose nothing while it loads, and once more when it reads the prefix: that is no time of a draft's."""
        if self._state is not None:
            return self._state.propose(n)
        drafter = self._drafter.loaded()
        if drafter is not None:
            state = self._begin(drafter)
            length = state.length
            state.propose(1)
            state.truncate(length)
        return ()

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """Wait for the drafter, since nothing else can tell."""
        return self._waited_for().score(tokens)

    def propose_forced(self, tokens: Sequence[int]) -> tuple[DraftToken, ...]:
        """Wait for the drafter, since an answer is due for each token."""
        return self._waited_for().propose_forced(tokens)

    def truncate(self, length: int) -> None:
        if self._state is None:
            self._prefix.truncate(length)
        else:
            self._state.truncate(length)

    def follow(self, rule: ProposalRule) -> None:
        self._rule = rule
        if self._state is not None:
            self._state.follow(rule)

    def steer(self, vector: np.ndarray | None, since: int) -> None:
        """Do nothing: nobody asks for vectors before the drafter is there."""

    def close(self) -> None:
        self._prefix.close()
        if self._state is not None:
            self._state.close()

    def _begin(self, drafter: Drafter) -> DraftState:
        self._state = state = drafter.open(self._rule)
        state.extend(self._prefix.tokens)
        self._prefix.close()
        return state

    def _waited_for(self) -> DraftState:
        if self._state is not None:
            return self._state
        self._drafter.loading.exception()
        drafter = self._drafter.loaded()
        assert drafter is not None  # noqa: S101 - it is not loading any more
        return self._begin(drafter)

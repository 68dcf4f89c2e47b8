"""The steps of a simulated engine: the toy target's tokens, or what a schedule lets go wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.cloud.serving.batching import Batch, Share
from outrider.cloud.serving.runner import StepResult
from outrider.cloud.serving.slots import Slot
from outrider.proto.session import VerifierSession
from outrider.proto.types import CommittedToken, DraftToken
from research.chaos.world import LocalClock, World
from research.simulator.pages import CountedPages
from research.simulator.virtual_engine import TimedRunner

SLOW_STEP_S = 1.6  # above the least time of a slow step, and far above ten times the usual one


class StepFault(Exception):
    """A step that fails, as a target's may."""


class StepTrouble:
    """The faults of one process's steps.

    Attributes:
        failures: next steps that fail; infinite: all do, from now on.
        max_rows: most rows for which there is memory.
        slow: whether steps take `SLOW_STEP_S`.
    """

    def __init__(self) -> None:
        self.failures = 0.0
        self.max_rows = math.inf
        self.slow = False

    def meet(self, shares: Sequence[Share[Slot]], poisoned: set[str]) -> None:
        """Raise where the step of `shares` fails: for itself, for its size, or for a text of `poisoned` sessions."""
        if self.failures:
            self.failures -= 1
            raise StepFault("a step fails")
        if sum(share.num_rows for share in shares) > self.max_rows:
            raise MemoryError
        if any(share.slot.session.id in poisoned for share in shares):
            raise FloatingPointError("the logits of a text are no numbers")


class ToyRunner(TimedRunner):
    """Runs batches on the toy target, or lets them fail."""

    def __init__(self, world: World, clock: LocalClock, pages: CountedPages, trouble: StepTrouble) -> None:
        super().__init__(pages, clock.monotonic)
        self._world = world
        self._trouble = trouble

    def seconds(self, batch: Batch[Slot]) -> float:
        """Return the time that a batch takes."""
        return SLOW_STEP_S if self._trouble.slow else 0.004 + 0.001 * batch.num_rows

    def after(self, session: VerifierSession, block: tuple[DraftToken, ...]) -> tuple[CommittedToken, ...]:
        """Return the toy target's tokens."""
        return self._world.targets.of(session.sampling).after(session.transcript, block)

    def run(self, shares: Sequence[Share[Slot]]) -> StepResult:
        """Verify the drafts of a step whose time is over, unless it is to fail."""
        self._trouble.meet(shares, self._world.poisoned)
        return super().run(shares)

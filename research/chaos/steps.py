"""The steps of a simulated engine: the toy target's tokens, or what a schedule lets go wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.cloud.serving.batching import Batch, Share
from outrider.cloud.serving.runner import StepResult
from outrider.cloud.serving.slots import Slot
from outrider.cloud.serving.step_timing import StepTimes
from outrider.proto.session import Verified
from outrider.proto.session.acceptance import branch_taken
from outrider.proto.types import token_ids
from research.chaos.pages import CountedPages
from research.chaos.world import LocalClock, World

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


class ToyRunner:
    """Runs batches on the toy target."""

    def __init__(self, world: World, clock: LocalClock, pages: CountedPages, trouble: StepTrouble) -> None:
        self._world = world
        self._clock = clock
        self._pages = pages
        self._trouble = trouble

    def seconds(self, batch: Batch[Slot]) -> float:
        """Return the time that a batch takes."""
        return SLOW_STEP_S if self._trouble.slow else 0.004 + 0.001 * batch.num_rows

    def run(self, shares: Sequence[Share[Slot]]) -> StepResult:
        """Compute every share's rows and verify its drafts at once; the engine has waited for their time."""
        self._trouble.meet(shares, self._world.poisoned)
        now, verified = self._clock.monotonic(), []
        verify_s = self.seconds(Batch(shares))
        for share in shares:
            path = share.block or ()
            if share.block is not None:
                session = share.slot.session
                target = self._world.targets.of(session.sampling)
                tokens = target.after(session.transcript, share.block)
                if (branch := branch_taken(share.block, share.branches, token_ids(tokens))) is not None:
                    path = (*share.block[: branch.index], *branch.drafts)
                    tokens = target.after(session.transcript, path)
                beside = share.num_drafts - len(path)
                verified.append((share.slot, Verified(path, tokens, verify_s=verify_s, beside=beside)))
            self._pages.compute(share.slot.handle, share.num_tokens + len(path))
        return StepResult(verified, StepTimes(now - verify_s, now, now, now), None)

"""The masks of a step: what each session's grammar allows, asked before the step and waited for only shortly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from outrider.cloud.grammar.grammar import Allowed
from outrider.cloud.serving.batching import Share
from outrider.cloud.serving.slots import Slot, Slots
from outrider.proto.errors import Internal, OutriderError
from outrider.proto.types import BlockBranch, DraftToken, token_ids

MASKS_WITHIN_S = 0.005  # a session whose grammar takes longer to say what is allowed misses the step


class Masks:
    """Asks the grammars of the sessions that take part in a step."""

    def __init__(self, slots: Slots, wake: Callable[[], None]) -> None:
        """Ask for sessions of `slots`; `wake` is called, from another thread, whenever a grammar has answered."""
        self._slots = slots
        self._wake = wake

    def applied(self, shares: Sequence[Share[Slot]], now: float) -> list[Share[Slot]]:
        """Return the shares whose grammar, if any, has its masks ready; ask the others, which wake the engine."""
        masked = []
        for share in shares:
            slot, block = share.slot, share.block
            if slot.matcher is None or block is None:
                masked.append(share)
                continue
            try:
                if not slot.matcher.asked:
                    slot.masks_by = now + MASKS_WITHIN_S
                    slot.matcher.ask(token_ids(block), self._wake, share.tokens_beside)
                allowed = slot.matcher.allowed(token_ids(block), share.tokens_beside)
            except Exception as error:  # a parser may raise anything for a stranger's grammar
                known = error if isinstance(error, OutriderError) else Internal(f"the grammar failed: {error!r}")
                self._slots.fail(slot, known)
                continue
            if allowed is not None:
                masked.append(_within(share, block, allowed))
        return masked


def _within(share: Share[Slot], block: tuple[DraftToken, ...], allowed: Allowed) -> Share[Slot]:
    """Return a share with the drafts of `block` and its branches that the grammar allows."""
    beside = (
        BlockBranch(branch.index, branch.drafts[: len(allowed.branches[asked])])
        for branch, asked in zip(share.branches, share.tokens_beside, strict=True)
        if asked in allowed.branches
    )
    return replace(share, block=block[: len(allowed.block)], branches=tuple(beside))


def masks_by_of(slots: Sequence[Slot]) -> float:
    """Return until when a step waits for the masks of grammars, seconds; 0: it waits for none."""
    return max((slot.masks_by for slot in slots if slot.busy), default=0.0)

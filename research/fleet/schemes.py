"""Ways to divide the work between edges and verifiers, as the simulator plays them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

from outrider.cloud.serving.batching import Batch, Batching, Share
from outrider.cloud.serving.slots import Slot
from outrider.proto.session.both_ends import DraftingHere
from research.fleet.prices import VerifierPrices
from research.simulator.clock import Costs, VirtualClock
from research.traces.local_threads import DraftPasses, LocalThreads, Propose, colocated
from research.traces.traced import Policy, synchronous

CORE_DRAFT_S = 0.002  # a token of the drafter beside the target, on a core of its own
LENGTHS = (1, 2, 4, 8)  # of rounds and of co-located drafting


class DeadlineBatching(Batching):
    """Steps by deadline: the batches of WISP (arXiv 2601.11652) as its abstract and summaries describe them.

    A session's tokens are due `gap_s` after its last step began. Of those that a step would take, sessions join in the
    order of their deadlines, while the time that is estimated for it keeps the earliest that can be kept; the others
    wait for the next one. When a step begins is the shipped rule's.
    """

    def __init__(self, gap_s: float) -> None:
        super().__init__()
        self._gap_s = gap_s
        self._last: dict[int, float] = {}  # by stream, when its last step began

    def plan(self, candidates: Iterable[Slot], now: float) -> Batch:
        """Return the step that should begin now, or when to look again."""
        batch = super().plan(candidates, now)
        by_deadline = sorted(batch.shares, key=lambda share: self._last.get(share.slot.key, 0.0))
        deadlines = (self._last.get(share.slot.key, now) + self._gap_s for share in by_deadline)
        alone_s = self.cost.seconds(1) if self.base_s else 0.0
        earliest_s = min((at for at in deadlines if at >= now + alone_s), default=math.inf)  # that can be kept
        shares, rows = list[Share](), 0
        for share in by_deadline:
            rows += share.num_rows
            if shares and self.base_s and now + self.cost.seconds(rows) > earliest_s:
                break
            shares.append(share)
            self._last[share.slot.key] = now
        return replace(batch, shares=shares)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """One way to decode.

    Attributes:
        name: name in tables.
        policy: policy of the edges, and of the verifier for them.
        length: drafts of a round, or before every step; None: as many as pay.
        threads: cores beside the target that draft; 0: the verifier drafts nothing there.
        core_draft_s: seconds of a token that one of them drafts.
        passes: tokens that a drafter on the target's own device drafts before every step, for all sessions at once.
        new_batching: makes the rules of a verifier's batches.
    """

    name: str
    policy: Policy
    length: int | None = None
    threads: int = 0
    core_draft_s: float = CORE_DRAFT_S
    passes: int = 0
    new_batching: Callable[[], Batching] = Batching

    def costs(self, prices: VerifierPrices, drafting_s: float) -> Costs:
        """Return the costs of the machines, with an edge that drafts a token in `drafting_s`."""
        return Costs(
            step_s=prices.step_s + self.passes * prices.pass_s,
            row_s=prices.row_s,
            min_step_s=prices.min_step_s,
            drafting_s=drafting_s,
            catch_up_s=drafting_s / 10,
        )

    def beside(self, clock: VirtualClock, drafter_of: Callable[[str], Propose]) -> LocalThreads | None:
        """Return the verifier's own drafter; None: it has none."""
        if not (self.threads or self.passes):
            return None
        source = DraftPasses if self.passes else LocalThreads
        return source(clock, DraftingHere("here"), drafter_of, self.threads)

    def costs_here(self, prices: VerifierPrices) -> Costs:
        """Return the costs of the verifier's own drafter, which takes no time where its passes are in the step."""
        costs = self.costs(prices, self.core_draft_s)
        return replace(costs, job_s=0.0, drafting_s=0.0, catch_up_s=0.0) if self.passes else costs


def cloud_streaming() -> Scheme:
    """Return decoding without drafts."""
    return Scheme(name="cloud streaming", policy=Policy(drafting=False))


def centralised(prices: VerifierPrices, length: int) -> Scheme:
    """Return drafting beside the target, `length` tokens before every step: on its device, or on a core of its own."""
    on_device = prices.pass_s > 0
    return Scheme(
        name="centralised drafting",
        policy=colocated(length),
        length=length,
        threads=0 if on_device else prices.threads,
        passes=length if on_device else 0,
    )


def in_rounds(length: int) -> Scheme:
    """Return edges that draft `length` tokens and wait for the verdict, the scheme of SLED (arXiv 2506.09397)."""
    return Scheme(name="edges in rounds", policy=synchronous(length), length=length)


def by_deadline(length: int, gap_s: float) -> Scheme:
    """Return rounds whose verifications are batched by their deadlines, as in WISP."""
    return replace(in_rounds(length), name="rounds, by deadline", new_batching=partial(DeadlineBatching, gap_s))


def edges_alone() -> Scheme:
    """Return edges that draft ahead, as many tokens as pay, for verifiers that draft nothing."""
    return Scheme(name="Outrider, edges alone", policy=Policy())


def both_ends(prices: VerifierPrices) -> Scheme:
    """Return edges that draft ahead, and verifiers that draft on cores of their own as they price it."""
    return Scheme(name="Outrider, both ends", policy=Policy(), threads=prices.threads)

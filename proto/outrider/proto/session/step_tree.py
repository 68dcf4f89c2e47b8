"""Branches that a step verifies beside the chain of both ends: those that pay for their rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from outrider.proto.policy.trees import Run, best_tree
from outrider.proto.session.both_ends import BothEnds
from outrider.proto.session.received import ReceivedDrafts
from outrider.proto.types import BlockBranch, DraftToken, token_ids

_UNKNOWN_SHARE = 0.4  # of misses whose token is the first of a branch, where its edge does not say

_Candidate = tuple[Run, tuple[DraftToken, ...]]


def branches_beside(
    chain: Sequence[DraftToken],
    received: ReceivedDrafts,
    own: BothEnds | None,
    *,
    depth: int,
    room: int,
    row_share: float,
) -> tuple[BlockBranch, ...]:
    """Return the branches that a step verifies beside the chain.

    Args:
        chain: [n] drafts that follow the transcript, the edge's first.
        received: what the edge has sent.
        own: chain of the verifier's own drafter; None: it has none.
        depth: most drafts along a path that the text has room for.
        room: most drafts of the step.
        row_share: time of a row over that of a step beside its rows; 0: unknown.
    """
    follows = received.acceptance.rate
    chances = [follows] * min(depth, len(chain))
    candidates = _of_edge(received, chain, depth)
    if own is not None:
        own_chance = own.calibration.chance
        chances = [own_chance(draft.lead) if draft.other else follows for draft in chain[:depth]]
        candidates = _without_twins([*candidates, *_of_own(own, chain[:depth], chances)])
    tree = best_tree(chances, [run for run, _ in candidates], follows=follows, room=room, row_share=row_share)
    kept = zip(candidates, tree.runs, strict=True)
    return tuple(BlockBranch(run.index, drafts[:length]) for (run, drafts), length in kept if length)


def _of_edge(received: ReceivedDrafts, chain: Sequence[DraftToken], depth: int) -> list[_Candidate]:
    """Return the branches of the edge that leave its part of the chain, or its end."""
    end, unknown = received.end, (1 - received.acceptance.rate) * _UNKNOWN_SHARE
    ids, of_edge = token_ids(chain), sum(not draft.other for draft in chain)
    found = []
    for branch in received.branches():
        index = branch.start - end
        length = min(len(branch.tokens), depth - index)
        if index > of_edge or length < 1 or ids[index : index + 1] == branch.tokens[:1]:
            continue
        chance = unknown if math.isnan(branch.chance) else branch.chance
        found.append((Run(index, chance, length), tuple(map(DraftToken, branch.tokens))))
    return found


def _of_own(own: BothEnds, chain: Sequence[DraftToken], chances: Sequence[float]) -> list[_Candidate]:
    """Return the runners-up of the verifier's own drafts."""
    return [
        (Run(index, (1 - chance) * own.shares.of(rank), 1), (DraftToken(token, other=True),))
        for index, (draft, chance) in enumerate(zip(chain, chances, strict=True))
        if draft.other
        for rank, token in enumerate(draft.runners_up)
    ]


def _without_twins(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """Return the branches, each place and token once, with the larger chance; the first has no shorter run."""
    found: dict[tuple[int, int], _Candidate] = {}
    for run, drafts in candidates:
        place = run.index, drafts[0].id
        kept, first = found.get(place, (run, drafts))
        found[place] = replace(kept, chance=max(kept.chance, run.chance)), first
    return list(found.values())

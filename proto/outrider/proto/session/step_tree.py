"""The tree of one step: the chain of both ends, and the branches beside it that pay for their rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from outrider.proto.policy.trees import Run, best_tree
from outrider.proto.session.both_ends import BothEnds
from outrider.proto.session.received import ReceivedDrafts
from outrider.proto.types import BlockBranch, DraftToken, token_ids

_UNKNOWN_SHARE = 0.4  # of misses whose token is the first of a branch, where its edge does not say


class StepTree(NamedTuple):
    """The drafts of a step.

    Attributes:
        chain: drafts of the chain that it verifies.
        branches: branches beside them.
        of_edge: how many of the branches the edge made, which come first.
    """

    chain: int
    branches: tuple[BlockBranch, ...] = ()
    of_edge: int = 0

    def pruned(self) -> StepTree:
        """Return the tree without branches that leave the chain after its end here."""
        kept = [branch.index <= self.chain for branch in self.branches]
        branches = tuple(branch for branch, stays in zip(self.branches, kept, strict=True) if stays)
        return StepTree(self.chain, branches, sum(kept[: self.of_edge]))

    @property
    def num_drafts(self) -> int:
        """Drafts in all."""
        return self.chain + sum(len(branch.drafts) for branch in self.branches)

    def made_here(self, path: Sequence[int], block: Sequence[DraftToken], of_edge: int) -> int:
        """Return how many drafts of a path [n] the verifier made itself, which come last.

        Args:
            path: ids of the block's drafts, or of those along a branch.
            block: [k] the block, whose first `of_edge` drafts are the edge's.
            of_edge: drafts of the edge in the block.
        """
        if tuple(path) == token_ids(block[: len(path)]):
            return max(0, len(path) - of_edge)
        for place, branch in enumerate(self.branches):
            own = token_ids(branch.drafts)
            if tuple(path[branch.index :]) == own[: len(path) - branch.index] and branch.index < len(path):
                return max(0, len(path) - min(of_edge, branch.index)) if place >= self.of_edge else 0
        return 0


def step_tree(
    chain: Sequence[DraftToken],
    of_edge: int,
    received: ReceivedDrafts,
    own: BothEnds | None,
    *,
    depth: int,
    room: int,
    row_share: float,
) -> StepTree:
    """Return the tree that a step verifies.

    Args:
        chain: [n] drafts that follow the transcript, the edge's `of_edge` first.
        of_edge: drafts of the edge among them.
        received: what the edge has sent.
        own: chain of the verifier's own drafter; None: it has none.
        depth: most drafts along a path that the text has room for.
        room: most drafts of the step.
        row_share: time of a row over that of a step beside its rows; 0: unknown.
    """
    follows = received.acceptance.rate
    chances = [follows] * of_edge
    if own is not None:
        chances += [own.calibration.chance(draft.lead) for draft in chain[of_edge:]]
    candidates = _of_edge(received, chain, of_edge, depth)
    if own is not None:
        candidates = _without_twins([*candidates, *_of_own(own, chain, of_edge, chances, depth)])
    tree = best_tree(
        chances[:depth], [run for run, _, _ in candidates], follows=follows, room=room, row_share=row_share
    )
    taken = [
        (BlockBranch(run.index, tuple(map(DraftToken, tokens[:kept]))), is_of_edge)
        for (run, tokens, is_of_edge), kept in zip(candidates, tree.runs, strict=True)
        if kept
    ]
    return StepTree(tree.chain, tuple(branch for branch, _ in taken), sum(of_edge for _, of_edge in taken))


_Candidate = tuple[Run, tuple[int, ...], bool]  # its tokens, and whether it is the edge's


def _of_edge(received: ReceivedDrafts, chain: Sequence[DraftToken], of_edge: int, depth: int) -> list[_Candidate]:
    """Return the branches of the edge that leave its part of the chain, or its end."""
    end, unknown = received.end, (1 - received.acceptance.rate) * _UNKNOWN_SHARE
    found = []
    for branch in received.branches():
        index = branch.start - end
        length = min(len(branch.tokens), depth - index)
        if index > of_edge or length < 1 or (index < len(chain) and chain[index].id == branch.tokens[0]):
            continue
        chance = unknown if math.isnan(branch.chance) else branch.chance
        found.append((Run(index, chance, length), branch.tokens, True))
    return found


def _of_own(
    own: BothEnds, chain: Sequence[DraftToken], of_edge: int, chances: Sequence[float], depth: int
) -> list[_Candidate]:
    """Return the runners-up of the verifier's own drafts."""
    return [
        (Run(index, (1 - chances[index]) * own.shares.of(rank), 1), (token,), False)
        for index in range(of_edge, min(len(chain), depth))
        for rank, token in enumerate(chain[index].runners_up)
    ]


def _without_twins(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """Return the branches, each place and token once, with the larger chance; the first has no shorter run."""
    found: dict[tuple[int, int], _Candidate] = {}
    for run, tokens, is_of_edge in candidates:
        place = run.index, tokens[0]
        kept, *_ = twin = found.get(place, (run, tokens, is_of_edge))
        found[place] = (replace(kept, chance=max(kept.chance, run.chance)), twin[1], twin[2])
    return list(found.values())

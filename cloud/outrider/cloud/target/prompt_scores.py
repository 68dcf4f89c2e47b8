"""Log probabilities of a prompt's tokens, from the rows of a step that read it.

The logits of all positions of a prompt are many: [prompt, vocab]. So they are never there together: a step reads no
more positions that are scored than batches allow, and keeps of each what was wanted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.cloud.target.backend import StepRow
from outrider.cloud.target.sampler import token_facts
from outrider.proto.types import TokenFacts


def split_scored(
    rows: Sequence[StepRow], logits: torch.Tensor
) -> tuple[list[tuple[TokenFacts, ...]], torch.Tensor, list[int]]:
    """Return what the rows' scored tokens get, and the rest of the logits: those that verify.

    Args:
        rows: rows of a step, of which one or more score.
        logits: [sum of wanted rows, vocab] float32: of a row that scores all that it reads and verifies, and of others
            what they verify; then those of the rows' branches.

    Returns:
        The scores, the logits [verified rows, vocab] and those of the branches, and the places that these had before.
    """
    scores: list[tuple[TokenFacts, ...]] = []
    verified: list[int] = []
    first = 0
    for row in rows:
        verifies = 0 if row.verification is None else row.verification.rows
        if row.scored:
            scores.append(token_facts(logits[first : first + len(row.scored)], row.scored, row.top_logprobs))
        end = first + wanted_rows(row)
        verified += range(end - verifies, end)
        first = end
    verified += range(first, len(logits))
    return scores, logits[torch.tensor(verified, dtype=torch.int64, device=logits.device)], verified


def wanted_rows(row: StepRow) -> int:
    """Return how many of a row's last positions need logits: all where it scores, else those that verify."""
    verifies = 0 if row.verification is None else row.verification.rows
    return len(row.tokens) + max(0, verifies - 1) if row.scored else verifies

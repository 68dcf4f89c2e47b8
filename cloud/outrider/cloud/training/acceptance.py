"""How often the target would accept the drafter's token, measured on given text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

ROWS_PER_PASS = 4
POSITIONS_PER_CHUNK = 256


@dataclass(frozen=True)
class Row:
    """Text to measure on: tokens (uint32 [length]) and the first position whose token is predicted."""

    tokens: np.ndarray
    first: int = 1


@dataclass(frozen=True)
class Acceptance:
    """Means over the predicted positions.

    Attributes:
        greedy: share of positions where both argmaxes agree: acceptance at T = 0.
        sampled: the same at T = 1 with the same Gumbel noise added to both log-probabilities.
        overlap: 1 - total variation distance at T = 1.
        kl: KL(target || drafter), nats.
        positions: how many there were.
    """

    greedy: float
    sampled: float
    overlap: float
    kl: float
    positions: int


@torch.inference_mode()
def measure_acceptance(
    target: PreTrainedModel, drafter: PreTrainedModel, rows: Sequence[Row], *, seed: int
) -> Acceptance:
    """Run both models over `rows` and compare their next-token distributions, each given the true prefix."""
    generator = torch.Generator().manual_seed(seed)
    sums = torch.zeros(4, dtype=torch.float64)
    positions = 0
    for first in range(0, len(rows), ROWS_PER_PASS):
        batch = rows[first : first + ROWS_PER_PASS]
        longest = max(len(row.tokens) for row in batch)
        tokens = torch.zeros(len(batch), longest, dtype=torch.int64)  # zeros to the right: causal models never look
        counted = torch.zeros(len(batch), longest, dtype=torch.bool)
        for index, row in enumerate(batch):
            tokens[index, : len(row.tokens)] = torch.from_numpy(row.tokens.astype(np.int64))
            counted[index, row.first - 1 : len(row.tokens) - 1] = True
        logits_by_target = target(input_ids=tokens.to(target.device), use_cache=False).logits[counted]
        logits_by_drafter = drafter(input_ids=tokens.to(drafter.device), use_cache=False).logits[counted]
        positions += len(logits_by_target)
        chunks = zip(
            logits_by_target.split(POSITIONS_PER_CHUNK), logits_by_drafter.split(POSITIONS_PER_CHUNK), strict=True
        )
        for target_chunk, drafter_chunk in chunks:
            sums += _sums(target_chunk.float().cpu(), drafter_chunk.float().cpu(), generator)
    greedy, sampled, overlap, kl = (sums / max(1, positions)).tolist()
    return Acceptance(greedy, sampled, overlap, kl, positions)


def _sums(logits_by_target: torch.Tensor, logits_by_drafter: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Sums over positions of (greedy, sampled, overlap, kl); both arguments are float32 [positions, vocab]."""
    log_p = logits_by_target.log_softmax(-1)
    log_q = logits_by_drafter.log_softmax(-1)
    noise = torch.empty_like(log_p).exponential_(generator=generator).log_().neg_()
    p = log_p.exp()
    return torch.stack(
        [
            (log_p.argmax(-1) == log_q.argmax(-1)).double().sum(),
            ((log_p + noise).argmax(-1) == (log_q + noise).argmax(-1)).double().sum(),
            torch.minimum(p, log_q.exp()).double().sum(),
            (p * (log_p - log_q)).double().sum(),
        ]
    )

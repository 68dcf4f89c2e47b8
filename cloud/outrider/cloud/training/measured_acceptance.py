"""Share of a drafter's tokens that the target would accept, measured on given text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

ROWS_PER_PASS = 4
POSITIONS_PER_CHUNK = 256


@dataclass(frozen=True)
class HeldOutText:
    """Text to measure on: tokens (uint32 [length]) and the first position whose token is predicted."""

    tokens: np.ndarray
    first: int = 1


@dataclass(frozen=True)
class MeanAcceptance:
    """Means over the predicted positions.

    Attributes:
        greedy: share of positions where both argmaxes agree: acceptance at T = 0.
        sampled: the same share at T = 1, with the same Gumbel noise on both log-probabilities.
        overlap: 1 - total variation distance at T = 1.
        kl: KL(target || drafter), nats.
        positions: number of predicted positions.
    """

    greedy: float
    sampled: float
    overlap: float
    kl: float
    positions: int


Student = Callable[[torch.Tensor], torch.Tensor]
"""Returns logits [rows, positions, vocab] of tokens int64 [rows, positions]; called after the target ran on them."""


def logits_of(model: PreTrainedModel) -> Student:
    """Return `model` as a student."""
    return lambda tokens: model(input_ids=tokens, use_cache=False).logits


@torch.inference_mode()
def compare_students(
    target: PreTrainedModel, students: Mapping[str, Student], rows: Sequence[HeldOutText], *, seed: int
) -> dict[str, MeanAcceptance]:
    """Measure several students on the same text with the same noise, and return their acceptance by name."""
    generator = torch.Generator(target.device).manual_seed(seed)
    sums = {name: torch.zeros(4, dtype=torch.float64, device=target.device) for name in students}
    positions = 0
    for first in range(0, len(rows), ROWS_PER_PASS):
        batch = rows[first : first + ROWS_PER_PASS]
        longest = max(len(row.tokens) for row in batch)
        tokens = torch.zeros(len(batch), longest, dtype=torch.int64)  # zeros to the right: causal models never look
        counted = torch.zeros(len(batch), longest, dtype=torch.bool)
        for index, row in enumerate(batch):
            tokens[index, : len(row.tokens)] = torch.from_numpy(row.tokens.astype(np.int64))
            counted[index, row.first - 1 : len(row.tokens) - 1] = True
        log_p = _log_softmax(target(input_ids=tokens.to(target.device), use_cache=False).logits[counted])
        noise = torch.empty_like(log_p).exponential_(generator=generator).log_().neg_()
        positions += len(log_p)
        for name, student in students.items():
            logits = student(tokens.to(target.device))[counted]
            chunks = zip(*(part.split(POSITIONS_PER_CHUNK) for part in (log_p, logits, noise)), strict=True)
            for log_p_chunk, logits_chunk, noise_chunk in chunks:
                sums[name] += _sums(log_p_chunk, _log_softmax(logits_chunk), noise_chunk)
    measured: dict[str, MeanAcceptance] = {}
    for name, total in sums.items():
        greedy, sampled, overlap, kl = (total / max(1, positions)).tolist()
        measured[name] = MeanAcceptance(greedy, sampled, overlap, kl, positions)
    return measured


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().log_softmax(-1)


def _sums(log_p: torch.Tensor, log_q: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Sum (greedy, sampled, overlap, kl) over positions; all arguments are float32 [positions, vocab]."""
    p = log_p.exp()
    return torch.stack(
        [
            (log_p.argmax(-1) == log_q.argmax(-1)).double().sum(),
            ((log_p + noise).argmax(-1) == (log_q + noise).argmax(-1)).double().sum(),
            torch.minimum(p, log_q.exp()).double().sum(),
            (p * (log_p - log_q)).double().sum(),
        ]
    )

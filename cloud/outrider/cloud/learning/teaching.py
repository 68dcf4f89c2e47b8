"""The target's likeliest tokens in the rows that are kept, from their logits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from outrider.cloud.learning.lesson_record import TOP, StepRows, Teaching

MIN_LOGP = -60000.0  # the least that a float16 can say
_SLICE = 1 << 17  # logits that are read at once, so that they stay in a core's cache


@torch.inference_mode()
def teaching(logits: torch.Tensor) -> Teaching:
    """Return the likeliest tokens of each row of logits [m, vocab] with log p, and the log of what the rest has."""
    if logits.is_cuda:
        return _teaching(logits)
    parts = [_teaching(part) for part in logits.split(max(1, _SLICE // logits.shape[1]))]
    return parts[0] if len(parts) == 1 else Teaching(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def _teaching(logits: torch.Tensor) -> Teaching:
    top, top_ids = _likeliest(logits, min(TOP, logits.shape[1]))
    best = top[:, :1]
    mass = (logits - best).exp_().sum(dim=-1)
    of_top = (top - best).exp().sum(dim=-1)
    log_sums = best + mass.log()[:, None]
    whole = logits.shape[1] <= TOP
    rest = torch.full_like(mass, -math.inf) if whole else ((mass - of_top).clamp(min=0.0) / mass).log()
    # Rounding may make them a little more than 0.
    top_logp = (top - log_sums).clamp(MIN_LOGP, 0.0).half()
    finite = log_sums[:, 0].isfinite() & top_logp.isfinite().all(dim=-1)
    return Teaching(
        top_ids.cpu().numpy().astype(np.uint32),
        top_logp.cpu().numpy(),
        rest.clamp(max=0.0).float().cpu().numpy(),
        finite.cpu().numpy(),
    )


def _likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest `count` of each row of logits [m, vocab], in order, and their indices.

    They are among the `count` columns with the largest maxima, if a row is cut into columns; on a CPU, to look for
    these and then in them takes a third of the time of a search through all.
    """
    vocab = logits.shape[1]
    height = round(math.sqrt(vocab / count))
    width = vocab // height
    if height < 4:
        top = logits.topk(count, dim=-1)
        return top.values, top.indices
    columns = logits[:, : height * width].unflatten(1, (height, width)).amax(dim=1).topk(count, sorted=False).indices
    rows = torch.arange(0, height * width, width, device=logits.device)
    indices = (columns[:, None, :] + rows[:, None]).flatten(1)
    left_over = torch.arange(height * width, vocab, device=logits.device)
    indices = torch.cat([indices, left_over.expand(len(logits), -1)], dim=1)
    top = logits.gather(1, indices).topk(count, dim=-1)
    return top.values, indices.gather(1, top.indices)


def read_steps(steps: Sequence[StepRows]) -> None:
    """Read the rows of several steps with one call."""
    waiting = [(step, step.logits) for step in steps if step.logits is not None]
    if not waiting:
        return
    said = teaching(torch.cat([logits for _, logits in waiting]))
    first = 0
    for step, logits in waiting:
        end = first + len(logits)
        step.said, step.logits = Teaching(*(array[first:end] for array in said)), None
        first = end

"""The forward KL divergence from target to drafter over the whole vocabulary, in little memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

LEAST = 1e-6  # probability of all tokens beyond the best that the loss tells from none


class _ForwardKL(torch.autograd.Function):
    """The loss and its gradients, made together so that no [positions, vocab] tensor outlives its chunk."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_by_drafter: torch.Tensor,
        head: torch.Tensor,
        logits_by_target: torch.Tensor,
        positions_per_chunk: int,
    ) -> torch.Tensor:
        positions = hidden_by_drafter.shape[0]
        total = hidden_by_drafter.new_zeros(())
        grad_hidden = torch.empty_like(hidden_by_drafter)
        grad_head = torch.zeros_like(head)
        for first in range(0, positions, positions_per_chunk):
            chunk = slice(first, first + positions_per_chunk)
            log_p = logits_by_target[chunk].float().log_softmax(-1)
            log_q = (hidden_by_drafter[chunk] @ head.T).log_softmax(-1)
            difference = log_p - log_q
            p = log_p.exp_()
            total += difference.mul_(p).sum()
            grad_logits = log_q.exp_().sub_(p).div_(positions)
            grad_hidden[chunk] = grad_logits @ head
            grad_head.addmm_(grad_logits.T, hidden_by_drafter[chunk])
        ctx.save_for_backward(grad_hidden, grad_head)
        return total / positions

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad_loss, grad_head * grad_loss, None, None


def forward_kl(
    hidden_by_drafter: torch.Tensor,
    head: torch.Tensor,
    logits_by_target: torch.Tensor,
    *,
    positions_per_chunk: int,
) -> torch.Tensor:
    """Return the mean over positions of KL(target || drafter), in nats a token.

    Args:
        hidden_by_drafter: float32 [positions, hidden], after the last norm.
        head: float32 [vocab, hidden]; the drafter's logits are `hidden_by_drafter @ head.T`.
        logits_by_target: [positions, vocab]; no gradient flows to it.
        positions_per_chunk: how many positions are expanded to the vocabulary at once.

    Returns:
        A float32 scalar.
    """
    apply: Callable[..., torch.Tensor] = _ForwardKL.apply  # torch gives it no types
    return apply(hidden_by_drafter, head, logits_by_target, positions_per_chunk)


def kl_of_best(
    hidden_by_drafter: torch.Tensor,
    head: torch.Tensor,
    best_tokens: torch.Tensor,
    best_logprobs: torch.Tensor,
    *,
    positions_per_chunk: int,
) -> torch.Tensor:
    """Return the mean KL(target || drafter) of the target's best tokens and one class of all others, nats a token.

    It is at most the whole divergence (data processing), and less only by what tokens beyond the best would add.

    Args:
        hidden_by_drafter: [positions, hidden], after the last norm.
        head: [tokens, hidden], the drafter's, over the tokens that it knows.
        best_tokens: int64 [positions, best], rows of `head`; -1: the drafter does not know it, and the target's
            distribution is taken without it.
        best_logprobs: [positions, best], the target's.
        positions_per_chunk: how many positions are expanded to the vocabulary at once.

    Returns:
        A scalar, through which gradients flow to `hidden_by_drafter` and `head`.
    """
    chunks = zip(
        *(each.split(positions_per_chunk) for each in (hidden_by_drafter, best_tokens, best_logprobs)), strict=True
    )
    sums = [checkpoint(_kl_of_best, hidden, head, *best, use_reentrant=False) for hidden, *best in chunks]
    return torch.stack(sums).sum() / max(1, len(hidden_by_drafter))


def _kl_of_best(
    hidden: torch.Tensor, head: torch.Tensor, best_tokens: torch.Tensor, best_logprobs: torch.Tensor
) -> torch.Tensor:
    known = best_tokens >= 0
    p = best_logprobs.float().exp()
    others_p = (1 - p.sum(-1)).clamp(min=0)
    p = p * known
    total = (p.sum(-1) + others_p).clamp(min=LEAST)  # where the drafter knows none of it, there is nothing to learn
    p, others_p = p / total[:, None], others_p / total
    logits = (hidden @ head.T).float()
    log_q = logits.gather(1, best_tokens.clamp(min=0)) - logits.logsumexp(-1, keepdim=True)
    others_q = (1 - (log_q.exp() * known).sum(-1)).clamp(min=LEAST)
    of_best = torch.xlogy(p, p) - p * log_q.masked_fill(~known, 0.0)
    return of_best.sum() + (torch.xlogy(others_p, others_p) - others_p * others_q.log()).sum()

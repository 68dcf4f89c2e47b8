"""The start of a head of low rank: fitted to the whole head on text, before anything else is trained."""

from __future__ import annotations

import torch

from outrider.cloud.models.heads import SmallHead
from outrider.cloud.training.loss import forward_kl
from outrider.cloud.training.optimizers import Budget, adam, linear_fall

FIT_STEPS, FIT_ROWS, WARM_UP_STEPS = 250, 512, 10
FIT_RATE = 2e-3
FALL = 0.7  # last share of the steps, over which the rate falls


def fit_head(head: SmallHead, whole: torch.Tensor, states: torch.Tensor, *, seed: int) -> None:
    """Train a head of low rank to say of `states` what the whole head says; nothing else learns.

    The whole head is a better teacher here than the target: what the states do not tell cannot be learned from them,
    and on few states is learned by heart.

    Args:
        head: head that `reduce_head` made.
        whole: float32 [vocab, hidden], the head before.
        states: float32 [n, hidden], which the head sees on text.
        seed: seed of the order of the states.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizer = adam(list(head.parameters()), FIT_RATE)
    budget = Budget(FIT_STEPS, None, WARM_UP_STEPS, linear_fall(FALL))
    for step in range(FIT_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = FIT_RATE * budget.rate(step, 0.0)
        chosen = states[torch.randint(len(states), (FIT_ROWS,), generator=generator).to(states.device)]
        loss = forward_kl(head.down(chosen), head.up.weight, chosen @ whole.T, positions_per_chunk=FIT_ROWS // 2)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

"""The losses that a drafter can learn from, each with its source and its equation.

p is the target's distribution at T = 1, q the drafter's, y the committed token, a the one that the drafter proposes. Of
p a record keeps the most likely tokens S and the mass rho outside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

MIN_MASS = 1e-7  # of a rest: float32 sums of probabilities are not exact below


@dataclass(frozen=True, slots=True, eq=False)
class JudgedRows:
    """Positions of one batch, as the verifier judged them and the drafter sees them now.

    Attributes:
        log_q: float32 [n, vocab], the drafter's log-probabilities at T = 1; gradients flow to them.
        top: int64 [n, k], the target's most likely tokens, S.
        log_p: float32 [n, k], the target's log-probabilities of these.
        log_rest: float32 [n], log of the target's mass outside S; -inf: none.
        committed: int64 [n], y.
        weights: float32 [n], inverse of the probability that the position was logged.
        drafted: int64 [n], a, which the drafter of today would propose with the shared noise; None: not given.
        noise: float32 [n, vocab], the shared Gumbel noise of each position, times the temperature; None: not given.
        log_parent: float32 [n, vocab], the parent's log-probabilities, which do not learn; None: not given.
    """

    log_q: torch.Tensor
    top: torch.Tensor
    log_p: torch.Tensor
    log_rest: torch.Tensor
    committed: torch.Tensor
    weights: torch.Tensor
    drafted: torch.Tensor | None = None
    noise: torch.Tensor | None = None
    log_parent: torch.Tensor | None = None

    def mean(self, values: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return the weighted mean of `values` [n] where `mask` [n] holds; 0 where it holds nowhere."""
        weights = self.weights if mask is None else torch.where(mask, self.weights, 0.0)
        total = weights.sum()
        return (values * weights).sum() / total.clamp(min=torch.finfo(total.dtype).tiny)


def reverse_kl(rows: JudgedRows) -> torch.Tensor:
    """Return KL_S(q|p) of each position [n], in nats: over S and a last entry for the rest.

    KL_S(q|p) = sum_S q ln(q/p) + rho_q ln(rho_q/rho_p),  rho_q = 1 - sum_S q.
    """
    log_q = rows.log_q.gather(1, rows.top)
    rest = (1 - log_q.exp().sum(-1)).clamp(min=MIN_MASS).log()
    log_q = torch.cat([log_q, rest[:, None]], dim=1)
    p = torch.cat([rows.log_p.exp(), rows.log_rest.exp()[:, None]], dim=1)
    return (log_q.exp() * (log_q - p.clamp(min=MIN_MASS).log())).sum(-1)


@dataclass(eq=False)
class Loss(ABC):
    """A loss of judged rows.

    Attributes:
        needs_noise: whether `JudgedRows.noise` must be given.
        needs_parent: whether `JudgedRows.log_parent` must be given.
        on_policy: whether `JudgedRows.drafted` must be given.
        reads_target: whether it needs the target's probabilities; else tokens are enough.
        means: running means that it keeps, which a checkpoint saves.
    """

    needs_noise: ClassVar[bool] = False
    needs_parent: ClassVar[bool] = False
    on_policy: ClassVar[bool] = False
    reads_target: ClassVar[bool] = True
    means: dict[str, float] = field(default_factory=dict, kw_only=True)

    def __call__(self, rows: JudgedRows, step: int) -> torch.Tensor:
        """Return the loss of a batch, a scalar; `step` counts optimizer steps from 0."""
        return self._value(rows, step)

    @abstractmethod
    def _value(self, rows: JudgedRows, step: int) -> torch.Tensor: ...


class TailedKL(Loss):
    """`kl-tail`: the mean of KL(t|q), t the target where it is known, else the parent.

    t is p in S; outside it is rho times the parent's probabilities there, scaled to 1. A divergence with one entry for
    the rest leaves the shape of q outside S to chance, and at T = 1 a fifth of the tokens can be from there.
    """

    needs_parent = True

    def _value(self, rows: JudgedRows, step: int) -> torch.Tensor:  # noqa: ARG002 - the interface's
        if rows.log_parent is None:
            raise ValueError("the loss kl-tail needs the parent's log-probabilities")
        outside = rows.log_parent.exp().scatter(1, rows.top, 0.0)
        outside = outside / outside.sum(1, keepdim=True).clamp(min=MIN_MASS)
        taught = (rows.log_rest.exp()[:, None] * outside).scatter(1, rows.top, rows.log_p.exp())
        return rows.mean((torch.xlogy(taught, taught) - taught * rows.log_q).sum(-1))


class CoupledCrossEntropy(Loss):
    """`cce`: the mean of -ln softmax(ln q + G)[y]; tokens and the seed of the noise suffice, no target is needed.

    y is the argmax of ln p + G, so the perturbed drafter is trained as a classifier of it; at T = 0 it is plain
    cross-entropy.
    """

    needs_noise = True
    reads_target = False

    def _value(self, rows: JudgedRows, step: int) -> torch.Tensor:  # noqa: ARG002
        if rows.noise is None:
            raise ValueError("the loss cce needs the noise of its positions")
        perturbed = (rows.log_q + rows.noise).log_softmax(-1)
        return -rows.mean(perturbed.gather(1, rows.committed[:, None])[:, 0])


@dataclass(eq=False)
class ReverseThenReward(Loss):
    """`dvi`: imitation first, then reward ("DVI", equations 4 to 9).

    L = l_pg L_pg + l_kl KL_S(q|p) + w_rl L_rl,  L_pg = -mean of ln q(a) where a = y,
    L_rl = mean of -(r - b) ln q(a), which is REINFORCE (Williams 1992): r is 1 where a = y, else 0, and b the running
    mean of r, which keeps `memory` of itself a step and begins at `baseline`. (l_pg, l_kl, w_rl) is (0, `kl`, 0) for
    `warm_up` steps, then moves on a line for `ramp` steps to (`pg_max`, `kl_min`, `rl_max`). The paper gives no numbers
    for these; its terms of cross-entropy and entropy are left out, and its p^tau is p here.
    """

    on_policy = True
    warm_up: int = 22
    ramp: int = 22
    kl: float = 1.0
    kl_min: float = 0.2
    pg_max: float = 0.3
    rl_max: float = 0.3
    baseline: float = 0.5
    memory: float = 0.9

    def _value(self, rows: JudgedRows, step: int) -> torch.Tensor:
        if rows.drafted is None:
            raise ValueError("the loss dvi needs the drafter's proposals")
        ramped = min(1.0, max(0.0, (step - self.warm_up) / self.ramp))
        loss = (self.kl + ramped * (self.kl_min - self.kl)) * rows.mean(reverse_kl(rows))
        hits = rows.drafted == rows.committed
        reward, baseline = hits.to(rows.log_q.dtype), self.means.get("reward", self.baseline)
        self.means["reward"] = self.memory * baseline + (1 - self.memory) * float(rows.mean(reward))
        if ramped:
            log_q = rows.log_q.gather(1, rows.drafted[:, None])[:, 0]
            imitated, rewarded = -rows.mean(log_q, hits), -rows.mean((reward - baseline) * log_q)
            loss = loss + ramped * (self.pg_max * imitated + self.rl_max * rewarded)
        return loss


LOSSES: Mapping[str, Callable[[], Loss]] = {
    "kl-tail": TailedKL,
    "cce": CoupledCrossEntropy,
    "dvi": ReverseThenReward,
}

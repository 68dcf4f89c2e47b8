"""The losses that a drafter can learn from judged drafts, each with its source and its equation.

p is the target's distribution at T = 1, q the drafter's, y the committed token, a the drafted one. Of p a record keeps
the most likely tokens S and the mass rho outside, so every divergence is one over S and a last entry for the rest:

    KL_S(p|q) = sum_S p ln(p/q) + rho_p ln(rho_p/rho_q),        rho_q = 1 - sum_S q
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from outrider.cloud.learning.record import LessonKind

MIN_MASS = 1e-7  # of a rest: float32 sums of probabilities are not exact below


@dataclass(frozen=True, slots=True, eq=False)
class JudgedRows:
    """Positions of one batch, as the verifier judged them and the drafter sees them now.

    Attributes:
        log_q: float32 [n, vocab], the drafter's log-probabilities at T = 1; gradients flow to them.
        top: int64 [n, k], the target's most likely tokens, S.
        log_p: float32 [n, k], the target's log-probabilities of these.
        log_rest: float32 [n], log of the target's mass outside S; -inf: none.
        committed: int64 [n], y; any token at a SUFFIX position.
        drafted: int64 [n], a; any token at an OWN position.
        kinds: int64 [n], values of `LessonKind`.
        depths: int64 [n], index of the position in its block of drafts, from 0.
        greedy: bool [n], whether the text is decoded at T = 0.
        weights: float32 [n], inverse of the probability that the position was logged.
        noise: float32 [n, vocab], the shared Gumbel noise of each position, times the temperature; None: not given.
        log_parent: float32 [n, vocab], the parent's log-probabilities, which do not learn; None: not given.
    """

    log_q: torch.Tensor
    top: torch.Tensor
    log_p: torch.Tensor
    log_rest: torch.Tensor
    committed: torch.Tensor
    drafted: torch.Tensor
    kinds: torch.Tensor
    depths: torch.Tensor
    greedy: torch.Tensor
    weights: torch.Tensor
    noise: torch.Tensor | None = None
    log_parent: torch.Tensor | None = None

    def of_kind(self, *kinds: LessonKind) -> torch.Tensor:
        """Return a mask [n] of the positions of these kinds."""
        return torch.isin(self.kinds, torch.tensor([int(kind) for kind in kinds]))

    def log_q_of(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the drafter's log-probabilities [n] of `tokens` int64 [n]."""
        return self.log_q.gather(1, tokens[:, None])[:, 0]

    def mean(self, values: torch.Tensor, mask: torch.Tensor, factors: torch.Tensor | None = None) -> torch.Tensor:
        """Return the weighted mean of `values` [n] where `mask` [n] holds; 0 where it holds nowhere.

        `factors` [n] multiply the weights.
        """
        weights = self.weights if factors is None else self.weights * factors
        total = torch.where(mask, weights, 0.0).sum()
        return torch.where(mask, values * weights, 0.0).sum() / total.clamp(min=torch.finfo(total.dtype).tiny)

    def split(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return p and log q over S and the rest, [n, k + 1] each."""
        log_q = self.log_q.gather(1, self.top)
        rest = (1 - log_q.exp().sum(-1)).clamp(min=MIN_MASS).log()
        p = torch.cat([self.log_p.exp(), self.log_rest.exp()[:, None]], dim=1)
        return p, torch.cat([log_q, rest[:, None]], dim=1)


def forward_kl(rows: JudgedRows) -> torch.Tensor:
    """Return KL_S(p|q) of each position [n], in nats."""
    p, log_q = rows.split()
    return (torch.xlogy(p, p) - p * log_q).sum(-1)


def reverse_kl(rows: JudgedRows) -> torch.Tensor:
    """Return KL_S(q|p) of each position [n], in nats."""
    p, log_q = rows.split()
    return (log_q.exp() * (log_q - p.clamp(min=MIN_MASS).log())).sum(-1)


def coupled_acceptance(p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """Return the probability that `argmax log p + G` is `argmax log q + G` for Gumbel noise G that both share.

    A token x wins both races iff E_y >= E_x max(p_y/p_x, q_y/q_x) for every other y, where E = exp(-G) are independent
    exponentials (Daliri, Musco, Suresh 2024), so

        A = sum_x 1 / sum_y max(p_y/p_x, q_y/q_x)

    In descending order of p/q the first ratio is the larger for x and all before it, and the second for all after:

        A = sum_x p_x q_x / (P_x q_x + Q_x p_x),    P_x = sum of p up to x,  Q_x = sum of q after x

    which takes one sort and two running sums. A entry for several tokens, such as the rest of a record, counts them
    exactly where q divides it as p does. For a p of one token y it is q_y, the expected hits of a draft drawn from q.

    Args:
        p: [..., n]; rows sum to 1.
        log_q: [..., n]; gradients flow to it.

    Returns:
        [...], between (1 - TV) / (1 + TV) and 1 - TV.
    """
    q = log_q.exp()
    order = (p.clamp(min=torch.finfo(p.dtype).tiny).log() - log_q).argsort(dim=-1, descending=True)
    p, q = p.gather(-1, order), q.gather(-1, order)
    before = p.cumsum(-1)
    after = q.flip(-1).cumsum(-1).flip(-1) - q
    wins = p * q / (before * q + after.clamp(min=0) * p).clamp(min=torch.finfo(p.dtype).tiny)
    return wins.sum(-1)


def expected_hits(rows: JudgedRows) -> torch.Tensor:
    """Return the probability [n] that a draft is accepted: `coupled_acceptance`, and q(y) at T = 0.

    At T = 0 that of a draft drawn from q stands in for the argmax's, which is 0 or 1 and has no gradient.
    """
    return torch.where(rows.greedy, rows.log_q_of(rows.committed).exp(), coupled_acceptance(*rows.split()))


@dataclass(eq=False)
class Loss(ABC):
    """A loss of judged rows.

    Attributes:
        needs_noise: whether `JudgedRows.noise` must be given.
        needs_parent: whether `JudgedRows.log_parent` must be given.
        on_policy: whether it wants drafts judged as the drafter of today would make them.
        reads_suffixes: whether it learns from SUFFIX positions.
        reads_target: whether it needs the target's probabilities; else tokens are enough.
        means: running means that it keeps, which a checkpoint saves.
    """

    needs_noise: ClassVar[bool] = False
    needs_parent: ClassVar[bool] = False
    on_policy: ClassVar[bool] = False
    reads_suffixes: ClassVar[bool] = False
    reads_target: ClassVar[bool] = True
    means: dict[str, float] = field(default_factory=dict, kw_only=True)

    def __call__(self, rows: JudgedRows, step: int) -> torch.Tensor:
        """Return the loss of a batch, a scalar; `step` counts optimizer steps from 0. Without positions it is 0."""
        return self._value(rows, step)

    @abstractmethod
    def _value(self, rows: JudgedRows, step: int) -> torch.Tensor: ...


class ForwardKL(Loss):
    """`kl`: the mean of KL_S(p|q) over ACCEPTED, MISSED and OWN (distillation, Hinton et al. 2015)."""

    def _value(self, rows: JudgedRows, step: int) -> torch.Tensor:  # noqa: ARG002 - the interface's
        return rows.mean(forward_kl(rows), rows.kinds != LessonKind.SUFFIX)


class TailedKL(Loss):
    """`kl-tail`: the mean of KL(t|q) over ACCEPTED, MISSED and OWN, t the target where it is known, else the parent.

    t is p in S; outside it is rho times the parent's probabilities there, scaled to 1. KL_S leaves the shape of q
    outside S to chance, and at T = 1 a fifth of the tokens can be from there.
    """

    needs_parent = True

    def _value(self, rows: JudgedRows, step: int) -> torch.Tensor:  # noqa: ARG002
        if rows.log_parent is None:
            raise ValueError("the loss kl-tail needs the parent's log-probabilities")
        outside = rows.log_parent.exp().scatter(1, rows.top, 0.0)
        outside = outside / outside.sum(1, keepdim=True).clamp(min=MIN_MASS)
        taught = (rows.log_rest.exp()[:, None] * outside).scatter(1, rows.top, rows.log_p.exp())
        lost = (torch.xlogy(taught, taught) - taught * rows.log_q).sum(-1)
        return rows.mean(lost, rows.kinds != LessonKind.SUFFIX)


class OnlineSpeculative(Loss):
    """`osd`: the mean of KL_S(p|q) over MISSED alone (Liu et al. 2024, "Online Speculative Decoding", section 4).

    The authors' released code masks the logits at the wrong token's own index, which are those of the position after
    it; the paper, and this, train the position where the wrong token was drafted.
    """

    on_policy = True

    def _value(self, rows: JudgedRows, step: int) -> torch.Tensor:  # noqa: ARG002
        return rows.mean(forward_kl(rows), rows.of_kind(LessonKind.MISSED))


@dataclass(eq=False)
class DraftOnPolicy(Loss):
    """`opd`: what was accepted is kept, what was rejected is corrected under the drafter's own distribution.

    L = (w_a L_a + w_r L_r) / (w_a + w_r),  L_a = mean KL_S(p|q) over ACCEPTED,
    L_r = sum g^k KL_S(q|p) / sum g^k over MISSED and SUFFIX, k the index of the draft. From the implementation of
    Draft-OPD in vLLM's speculators.
    """

    on_policy = True
    reads_suffixes = True
    accepted: float = 1.0
    rejected: float = 1.0
    decay: float = 0.8

    def _value(self, rows: JudgedRows, step: int) -> torch.Tensor:  # noqa: ARG002
        kept = rows.mean(forward_kl(rows), rows.of_kind(LessonKind.ACCEPTED))
        fade = self.decay ** rows.depths.to(rows.weights.dtype)
        corrected = rows.mean(reverse_kl(rows), rows.of_kind(LessonKind.MISSED, LessonKind.SUFFIX), fade)
        return (self.accepted * kept + self.rejected * corrected) / (self.accepted + self.rejected)


@dataclass(eq=False)
class PolicyGradient(Loss):
    """`pg`: REINFORCE, the mean of -(r - b) ln q(a) over ACCEPTED (r = 1) and MISSED (r = 0) (Williams 1992).

    b is the running mean of r, which keeps `memory` of itself a step; it begins at `baseline`.
    """

    on_policy = True
    baseline: float = 0.5
    memory: float = 0.9

    def _value(self, rows: JudgedRows, step: int) -> torch.Tensor:  # noqa: ARG002
        judged = rows.of_kind(LessonKind.ACCEPTED, LessonKind.MISSED)
        if not judged.any():
            return rows.log_q.sum() * 0
        reward = rows.of_kind(LessonKind.ACCEPTED).to(rows.log_q.dtype)
        baseline = self.means.get("reward", self.baseline)
        mean = float(rows.mean(reward, judged))
        self.means["reward"] = self.memory * baseline + (1 - self.memory) * mean
        return rows.mean(-(reward - baseline) * rows.log_q_of(rows.drafted), judged)


class ExactPolicyGradient(Loss):
    """The expectation that `pg` estimates: the mean of -(expected hits) over ACCEPTED and MISSED."""

    def _value(self, rows: JudgedRows, step: int) -> torch.Tensor:  # noqa: ARG002
        return -rows.mean(expected_hits(rows), rows.of_kind(LessonKind.ACCEPTED, LessonKind.MISSED))


@dataclass(eq=False)
class ReverseThenReward(Loss):
    """`dvi`, and `dvi-exact` with another `reward`: imitation first, then reward ("DVI", equations 4 to 9).

    L = l_pg L_pg + l_kl KL_S(q|p) + w_ce CE - w_ent H[q] + w_rl L_rl,  L_pg = -mean over ACCEPTED of ln q(a),
    CE = -mean ln q(y). (l_pg, l_kl, w_rl) is (0, `kl`, 0) for `warm_up` steps, then moves on a line for `ramp` steps
    to (`pg_max`, `kl_min`, `rl_max`). Positions behind a miss are left out. The paper gives no numbers but w_ce and
    w_ent, which these defaults leave at 0; its p^tau is p here.

    Attributes:
        reward: L_rl; REINFORCE in the paper.
    """

    on_policy = True
    reward: Loss
    warm_up: int = 22
    ramp: int = 22
    kl: float = 1.0
    kl_min: float = 0.2
    pg_max: float = 0.3
    rl_max: float = 0.3
    ce: float = 0.0
    entropy: float = 0.0

    def __post_init__(self) -> None:
        self.means = self.reward.means

    def _value(self, rows: JudgedRows, step: int) -> torch.Tensor:
        ramped = min(1.0, max(0.0, (step - self.warm_up) / self.ramp))
        read = rows.kinds != LessonKind.SUFFIX
        loss = (self.kl + ramped * (self.kl_min - self.kl)) * rows.mean(reverse_kl(rows), read)
        if self.ce:
            loss = loss - self.ce * rows.mean(rows.log_q_of(rows.committed), read)
        if self.entropy:
            loss = loss + self.entropy * rows.mean((rows.log_q.exp() * rows.log_q).sum(-1), read)
        reward = self.reward(rows, step)  # also during warm-up, for its running mean
        if ramped:
            imitated = -rows.mean(rows.log_q_of(rows.drafted), rows.of_kind(LessonKind.ACCEPTED))
            loss = loss + ramped * (self.pg_max * imitated + self.rl_max * reward)
        return loss


class CrossEntropy(Loss):
    """`ce`: the mean of -ln q(y) over positions that follow text; it needs no target but its tokens."""

    reads_target = False

    def _value(self, rows: JudgedRows, step: int) -> torch.Tensor:  # noqa: ARG002
        return -rows.mean(rows.log_q_of(rows.committed), rows.kinds != LessonKind.SUFFIX)


class CoupledCrossEntropy(Loss):
    """`cce`: the mean of -ln softmax(ln q + G)[y]; tokens and the seed of the noise suffice, no target is needed.

    y is the argmax of ln p + G, so the perturbed drafter is trained as a classifier of it; at T = 0 it is `ce`.
    """

    needs_noise = True
    reads_target = False

    def _value(self, rows: JudgedRows, step: int) -> torch.Tensor:  # noqa: ARG002
        if rows.noise is None:
            raise ValueError("the loss cce needs the noise of its positions")
        perturbed = (rows.log_q + rows.noise).log_softmax(-1)
        chosen = perturbed.gather(1, rows.committed[:, None])[:, 0]
        return -rows.mean(chosen, rows.kinds != LessonKind.SUFFIX)


class CoupledAcceptance(Loss):
    """`coupled`: minus the acceptance itself, over ACCEPTED, MISSED and OWN; see `coupled_acceptance`."""

    def _value(self, rows: JudgedRows, step: int) -> torch.Tensor:  # noqa: ARG002
        return -rows.mean(expected_hits(rows), rows.kinds != LessonKind.SUFFIX)


LOSSES: Mapping[str, Callable[[], Loss]] = {
    "kl": ForwardKL,
    "kl-tail": TailedKL,
    "osd": OnlineSpeculative,
    "opd": DraftOnPolicy,
    "dvi": lambda: ReverseThenReward(PolicyGradient()),
    "dvi-exact": lambda: ReverseThenReward(ExactPolicyGradient()),
    "pg": PolicyGradient,
    "ce": CrossEntropy,
    "cce": CoupledCrossEntropy,
    "coupled": CoupledAcceptance,
}

"""The losses of online learning, against values by hand, brute force, Monte Carlo and finite differences."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.cloud.learning.losses import (
    LOSSES,
    DraftOnPolicy,
    ExactPolicyGradient,
    JudgedRows,
    Loss,
    PolicyGradient,
    ReverseThenReward,
    coupled_acceptance,
    forward_kl,
)
from outrider.cloud.learning.record import LessonKind
from outrider.cloud.learning.settings import LOSS_NAMES

P, Q = (0.75, 0.25), (0.4, 0.6)


def judged(
    q: list[tuple[float, ...]],
    p: list[tuple[float, ...]],
    kinds: list[LessonKind],
    *,
    committed: list[int] | None = None,
    drafted: list[int] | None = None,
    greedy: bool = False,
) -> JudgedRows:
    """Rows in float64 whose p is known whole; `committed` and `drafted` default to token 0."""
    n, vocab = len(q), len(q[0])
    log_p = torch.tensor(p, dtype=torch.float64).log()
    return JudgedRows(
        log_q=torch.tensor(q, dtype=torch.float64).log().requires_grad_(),
        top=torch.arange(vocab).repeat(n, 1),
        log_p=log_p,
        log_rest=torch.full((n,), -math.inf, dtype=torch.float64),
        committed=torch.tensor(committed or [0] * n),
        drafted=torch.tensor(drafted or [0] * n),
        kinds=torch.tensor([int(kind) for kind in kinds]),
        depths=torch.arange(n),
        greedy=torch.full((n,), greedy),
        weights=torch.ones(n, dtype=torch.float64),
        noise=torch.zeros(n, vocab, dtype=torch.float64),
        log_parent=torch.full((n, vocab), 1 / vocab, dtype=torch.float64).log(),
    )


def kl(p: tuple[float, ...], q: tuple[float, ...]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)


def value(loss: Loss, rows: JudgedRows, step: int = 0) -> float:
    return float(loss(rows, step).detach())


def gradients(name: str, rows: JudgedRows, step: int = 0) -> torch.Tensor:
    """Norm of the gradient at each position, [n]."""
    (gradient,) = torch.autograd.grad(LOSSES[name]()(rows, step), rows.log_q)
    return gradient.norm(dim=1)


BLOCK = [LessonKind.ACCEPTED, LessonKind.MISSED, LessonKind.SUFFIX]


def a_block() -> JudgedRows:
    """Token 0 accepted, then 1 drafted where 0 was the target's, then a position behind that."""
    return judged([Q, Q, Q], [P, P, P], BLOCK, committed=[0, 0, 0], drafted=[0, 1, 1])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kl", kl(P, Q)),
        ("kl-tail", kl(P, Q)),  # there is no rest
        ("osd", kl(P, Q)),
        # g^1 and g^2 weigh two equal divergences, so their mean is one of them.
        ("opd", (kl(P, Q) + kl(Q, P)) / 2),
        ("dvi", kl(Q, P)),  # in warm-up
        ("dvi-exact", kl(Q, P)),
        ("pg", (-0.5 * math.log(0.4) + 0.5 * math.log(0.6)) / 2),
        ("ce", -math.log(0.4)),
        ("cce", -math.log(0.4)),  # without noise
        ("coupled", -(1 / (1 + 1.5) + 1 / (1 + 3))),
    ],
)
def test_a_loss_of_two_tokens_is_what_its_equation_gives_by_hand(name: str, expected: float) -> None:
    assert value(LOSSES[name](), a_block()) == pytest.approx(expected, abs=1e-6)


def test_every_loss_of_no_position_is_zero_and_has_a_gradient() -> None:
    rows = judged([Q], [P], [LessonKind.OWN])
    nothing = replace(rows, weights=torch.zeros(1, dtype=torch.float64))
    for name, make in LOSSES.items():
        (gradient,) = torch.autograd.grad(make()(nothing, 100), nothing.log_q)
        assert torch.isfinite(gradient).all(), name
        assert not gradient.any(), name


@pytest.mark.parametrize(
    ("name", "learns"),
    [
        ("kl", [True, True, False]),
        ("kl-tail", [True, True, False]),
        ("osd", [False, True, False]),
        ("opd", [True, True, True]),
        ("dvi", [True, True, False]),
        ("dvi-exact", [True, True, False]),
        ("pg", [True, True, False]),
        ("ce", [True, True, False]),
        ("cce", [True, True, False]),
        ("coupled", [True, True, False]),
    ],
)
def test_a_loss_learns_from_its_positions_alone(name: str, learns: list[bool]) -> None:
    # osd's released code trains the position after the wrong token, here the last: this fails for it.
    for step in (0, 100):
        assert (gradients(name, a_block(), step) > 0).tolist() == learns


def test_the_positions_that_a_mask_leaves_out_may_hold_anything() -> None:
    rows = a_block()
    broken = replace(rows, log_p=torch.where(rows.kinds[:, None] == LessonKind.SUFFIX, -math.inf, rows.log_p))
    for name in ("kl", "kl-tail", "osd", "dvi", "pg", "coupled"):
        assert value(LOSSES[name](), broken, 100) == pytest.approx(value(LOSSES[name](), rows, 100)), name


def test_a_weight_counts_a_position_as_often() -> None:
    twice = judged([Q, (0.5, 0.5), (0.5, 0.5)], [P] * 3, [LessonKind.MISSED] * 3)
    weighted = judged([Q, (0.5, 0.5)], [P] * 2, [LessonKind.MISSED] * 2)
    weighted = replace(weighted, weights=torch.tensor([1.0, 2.0], dtype=torch.float64))
    for name in ("kl", "kl-tail", "osd", "dvi", "pg", "ce", "coupled"):
        assert value(LOSSES[name](), weighted, 0) == pytest.approx(value(LOSSES[name](), twice, 0)), name


def test_the_rest_counts_as_one_token_and_without_it_the_divergence_is_another() -> None:
    p, q = (0.5, 0.3, 0.2), (0.2, 0.3, 0.5)
    whole = judged([q], [p], [LessonKind.MISSED])
    top = replace(whole, top=torch.tensor([[0]]), log_p=torch.tensor([[0.5]]).log(), log_rest=torch.tensor([0.5]).log())
    top = replace(top, log_p=top.log_p.double(), log_rest=top.log_rest.double())
    assert float(forward_kl(top).detach()) == pytest.approx(kl((0.5, 0.5), (0.2, 0.8)))
    unrested = replace(top, log_rest=torch.tensor([-math.inf], dtype=torch.float64))
    assert float(forward_kl(unrested).detach()) == pytest.approx(0.5 * math.log(0.5 / 0.2))
    (gradient,) = torch.autograd.grad(forward_kl(top).sum(), top.log_q)
    moved = replace(top, log_q=top.log_q.detach() + torch.tensor([[1e-6, 0, 0]]))
    slope = float(forward_kl(moved) - forward_kl(top).detach()) / 1e-6
    assert float(gradient[0, 0]) == pytest.approx(slope, abs=1e-4)
    assert slope == pytest.approx(-0.5 + 0.5 * 0.2 / 0.8, abs=1e-4)


def test_the_rest_keeps_the_shape_that_the_parent_has_there() -> None:
    q = (0.4, 0.3, 0.1, 0.2)
    rows = judged([q], [(0.5, 0.3)], [LessonKind.OWN])
    parent = torch.tensor([[0.1, 0.1, 0.6, 0.2]], dtype=torch.float64)
    rest = torch.tensor([0.2], dtype=torch.float64).log()
    rows = replace(rows, top=torch.tensor([[0, 1]]), log_rest=rest, log_parent=parent.log())
    taught = (0.5, 0.3, 0.15, 0.05)
    assert value(LOSSES["kl-tail"](), rows) == pytest.approx(kl(taught, q))
    assert value(LOSSES["kl"](), rows) == pytest.approx(kl((0.5, 0.3, 0.2), (0.4, 0.3, 0.3)))

    def slope(name: str, q: tuple[float, ...]) -> float:
        logits = torch.tensor([q], dtype=torch.float64).log().requires_grad_()
        (gradient,) = torch.autograd.grad(LOSSES[name]()(replace(rows, log_q=logits.log_softmax(-1)), 0), logits)
        return float(gradient.abs().max())

    assert slope("kl-tail", taught) == pytest.approx(0, abs=1e-9)
    elsewhere = (0.5, 0.3, 0.05, 0.15)
    assert slope("kl", elsewhere) == pytest.approx(0, abs=1e-9)  # it does not see the shape of the rest
    assert slope("kl-tail", elsewhere) == pytest.approx(0.1, abs=1e-9)
    with pytest.raises(ValueError, match="parent"):
        LOSSES["kl-tail"]()(replace(rows, log_parent=None), 0)
    assert {name for name, make in LOSSES.items() if make().needs_parent} == {"kl-tail"}


def test_draft_opd_fades_by_the_depth_of_the_draft() -> None:
    near, far = (0.4, 0.6), (0.1, 0.9)
    rows = judged([near, far], [P, P], [LessonKind.MISSED, LessonKind.SUFFIX])
    expected = (kl(near, P) + 0.8 * kl(far, P)) / 1.8 / 2
    assert value(DraftOnPolicy(), rows) == pytest.approx(expected)


def test_dvi_moves_from_imitation_to_reward_on_a_line() -> None:
    rows = a_block()
    imitation = kl(Q, P)
    reward = value(PolicyGradient(), rows)
    masked = -math.log(0.4)  # ln q(a) over what was accepted
    for step, ramped in [(0, 0.0), (22, 0.0), (33, 0.5), (44, 1.0), (1000, 1.0)]:
        expected = (1 - 0.8 * ramped) * imitation + ramped * 0.3 * (masked + reward)
        assert value(LOSSES["dvi"](), rows, step) == pytest.approx(expected), step


def test_dvi_takes_cross_entropy_and_entropy_where_they_have_weights() -> None:
    entropy = -sum(x * math.log(x) for x in Q)
    loss = ReverseThenReward(PolicyGradient(), ce=0.5, entropy=0.25)
    assert value(loss, a_block()) == pytest.approx(kl(Q, P) - 0.5 * math.log(0.4) - 0.25 * entropy)


def test_the_policy_gradient_estimates_the_exact_one() -> None:
    """At T = 0 the mean of REINFORCE's gradient over drafts drawn from q is that of -q(y), whatever the baseline."""
    q, y = (0.5, 0.3, 0.2), 1
    exact = judged([q], [(0.0, 1.0, 0.0)], [LessonKind.MISSED], committed=[y], greedy=True)
    (wanted,) = torch.autograd.grad(ExactPolicyGradient()(exact, 0), exact.log_q)
    mean = torch.zeros(1, 3, dtype=torch.float64)
    for a, chance in enumerate(q):
        kind = LessonKind.ACCEPTED if a == y else LessonKind.MISSED
        rows = judged([q], [(0.0, 1.0, 0.0)], [kind], committed=[y], drafted=[a], greedy=True)
        (gradient,) = torch.autograd.grad(PolicyGradient(baseline=0.0)(rows, 0), rows.log_q)
        mean += chance * gradient
    assert torch.allclose(mean, wanted)


def test_the_baseline_follows_the_rewards_and_a_checkpoint_keeps_it() -> None:
    loss = LOSSES["dvi"]()
    for _ in range(50):
        loss(judged([Q], [P], [LessonKind.ACCEPTED]), 0)
    assert loss.means["reward"] > 0.99
    resumed, fresh = LOSSES["dvi"](), LOSSES["dvi"]()
    resumed.means.update(loss.means)
    missed = judged([Q], [P], [LessonKind.MISSED])
    assert value(resumed, missed, 100) == pytest.approx(value(loss, missed, 100))
    assert value(fresh, missed, 100) != pytest.approx(value(loss, missed, 100))


def brute_force(p: np.ndarray, q: np.ndarray) -> float:
    """A = sum_x 1 / sum_y max(p_y/p_x, q_y/q_x), as it stands."""
    return sum(
        1 / sum(max(p[y] / p[x], q[y] / q[x]) for y in range(len(p))) for x in range(len(p)) if p[x] > 0 and q[x] > 0
    )


def a_pair(generator: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    return generator.dirichlet(np.full(n, 0.5)), generator.dirichlet(np.full(n, 0.5))


def acceptance(p: np.ndarray, q: np.ndarray) -> float:
    return float(coupled_acceptance(torch.from_numpy(p), torch.from_numpy(q).log()))


def test_the_coupled_acceptance_of_two_tokens_by_hand() -> None:
    # x = 0: y = 1 has ratios 1/3 and 3/2; x = 1: y = 0 has 3 and 2/3.
    assert acceptance(np.array(P), np.array(Q)) == pytest.approx(1 / (1 + 1.5) + 1 / (1 + 3))


@pytest.mark.parametrize("n", [2, 3, 7, 65])
def test_the_sorted_form_is_the_double_sum(n: int) -> None:
    generator = np.random.default_rng(n)
    for _ in range(20):
        p, q = a_pair(generator, n)
        tv = np.abs(p - q).sum() / 2
        found = acceptance(p, q)
        assert found == pytest.approx(brute_force(p, q), rel=1e-9)
        assert (1 - tv) / (1 + tv) - 1e-12 <= found <= 1 - tv + 1e-12
        assert acceptance(p, p) == pytest.approx(1)


def test_the_sorted_form_takes_zeros_and_ties() -> None:
    p, q = np.array([0.5, 0.5, 0.0, 0.0]), np.array([0.25, 0.25, 0.5, 0.0])
    assert acceptance(p, q) == pytest.approx(brute_force(p, q))
    one = np.array([0.0, 1.0, 0.0, 0.0])
    assert acceptance(one, q) == pytest.approx(0.25)
    assert acceptance(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 0


def test_the_double_sum_is_how_often_two_argmaxes_with_shared_noise_agree() -> None:
    generator = np.random.default_rng(0)
    draws = 200_000
    for _ in range(3):
        p, q = a_pair(generator, 6)
        noise = generator.gumbel(size=(draws, 6))
        shared = np.mean((np.log(p) + noise).argmax(1) == (np.log(q) + noise).argmax(1))
        error = 5 * math.sqrt(0.25 / draws)
        assert acceptance(p, q) == pytest.approx(shared, abs=error)
        # Noise of their own makes another number: the test can fail.
        own = np.mean((np.log(p) + noise).argmax(1) == (np.log(q) + generator.gumbel(size=(draws, 6))).argmax(1))
        assert abs(acceptance(p, q) - own) > error


def test_the_rest_is_exact_where_the_drafter_divides_it_alike() -> None:
    p, q = np.array([0.4, 0.3, 0.1, 0.2]), np.array([0.6, 0.1, 0.1, 0.2])  # the last two: 1 to 2 in both
    together = acceptance(np.array([0.4, 0.3, 0.3]), np.array([0.6, 0.1, 0.3]))
    assert together == pytest.approx(acceptance(p, q))
    assert together != pytest.approx(acceptance(p, np.array([0.6, 0.1, 0.25, 0.05])), abs=1e-3)


def test_the_gradient_of_the_coupled_acceptance_is_its_finite_differences() -> None:
    generator = np.random.default_rng(4)
    for n in (2, 3, 9):
        p, q = a_pair(generator, n)
        logits = torch.from_numpy(np.log(q)).requires_grad_()
        (gradient,) = torch.autograd.grad(coupled_acceptance(torch.from_numpy(p), logits.log_softmax(-1)), logits)
        for token in range(n):
            moved = [float(np.log(q)[token]) + sign * 1e-6 for sign in (1, -1)]
            values = []
            for value in moved:
                shifted = np.log(q).copy()
                shifted[token] = value
                values.append(brute_force(p, np.exp(shifted) / np.exp(shifted).sum()))
            assert float(gradient[token]) == pytest.approx((values[0] - values[1]) / 2e-6, abs=1e-6)


def test_coupled_cross_entropy_needs_the_noise_and_is_lower_for_a_likely_winner() -> None:
    rows = judged([Q], [P], [LessonKind.ACCEPTED], committed=[0])
    favoured = replace(rows, noise=torch.tensor([[3.0, 0.0]], dtype=torch.float64))
    expected = -math.log(0.4 * math.exp(3) / (0.4 * math.exp(3) + 0.6))
    assert value(LOSSES["cce"](), favoured, 0) == pytest.approx(expected)
    with pytest.raises(ValueError, match="noise"):
        LOSSES["cce"]()(replace(rows, noise=None), 0)
    assert {name for name, make in LOSSES.items() if make().needs_noise} == {"cce"}
    assert tuple(LOSSES) == LOSS_NAMES


def test_descending_the_loss_raises_acceptance_and_ascending_lowers_it() -> None:
    generator = np.random.default_rng(1)
    p, q = a_pair(generator, 5)
    for name in ("kl", "dvi", "dvi-exact", "coupled", "opd"):
        results = []
        for sign in (-1, 1):
            logits = torch.from_numpy(np.log(q)).requires_grad_()
            first = LessonKind.ACCEPTED if name == "opd" else LessonKind.MISSED
            for step in range(30):
                kinds = [first, LessonKind.MISSED]
                rows = judged([tuple(q)] * 2, [tuple(p)] * 2, kinds, committed=[int(p.argmax())] * 2)
                rows = replace(rows, log_q=logits.log_softmax(-1).repeat(2, 1))
                (gradient,) = torch.autograd.grad(LOSSES[name]()(rows, min(step, 4)), logits)
                logits = (logits + sign * 0.1 * gradient).detach().requires_grad_()
            results.append(acceptance(p, logits.softmax(-1).detach().numpy()))
        assert results[0] > acceptance(p, q) > results[1], name

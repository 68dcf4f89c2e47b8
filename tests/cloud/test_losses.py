"""The losses of online learning, against values by hand and brute force."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.cloud.learning.losses import LOSSES, JudgedRows, Loss, ReverseThenReward, reverse_kl
from outrider.cloud.learning.trainer_settings import LOSS_NAMES

P, Q = (0.75, 0.25), (0.4, 0.6)


def judged(q: list[tuple[float, ...]], p: list[tuple[float, ...]], drafted: list[int] | None = None) -> JudgedRows:
    """Rows in float64 whose p is known whole and whose committed token is 0; `drafted` defaults to it."""
    n, vocab = len(q), len(q[0])
    return JudgedRows(
        log_q=torch.tensor(q, dtype=torch.float64).log().requires_grad_(),
        top=torch.arange(vocab).repeat(n, 1),
        log_p=torch.tensor(p, dtype=torch.float64).log(),
        log_rest=torch.full((n,), -math.inf, dtype=torch.float64),
        committed=torch.zeros(n, dtype=torch.int64),
        weights=torch.ones(n, dtype=torch.float64),
        drafted=torch.tensor(drafted or [0] * n),
        noise=torch.zeros(n, vocab, dtype=torch.float64),
        log_parent=torch.full((n, vocab), 1 / vocab, dtype=torch.float64).log(),
    )


def kl(p: tuple[float, ...], q: tuple[float, ...]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)


def value(loss: Loss, rows: JudgedRows, step: int = 0) -> float:
    return float(loss(rows, step).detach())


def a_hit_and_a_miss() -> JudgedRows:
    return judged([Q, Q], [P, P], drafted=[0, 1])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kl-tail", kl(P, Q)),  # there is no rest
        ("cce", -math.log(0.4)),  # without noise
        ("dvi", kl(Q, P)),  # in warm-up
    ],
)
def test_a_loss_of_two_tokens_is_what_its_equation_gives_by_hand(name: str, expected: float) -> None:
    assert value(LOSSES[name](), a_hit_and_a_miss()) == pytest.approx(expected, abs=1e-6)


def test_every_loss_of_no_position_is_zero_and_has_a_gradient() -> None:
    rows = judged([Q], [P])
    nothing = replace(rows, weights=torch.zeros(1, dtype=torch.float64))
    for name, make in LOSSES.items():
        (gradient,) = torch.autograd.grad(make()(nothing, 100), nothing.log_q)
        assert torch.isfinite(gradient).all(), name
        assert not gradient.any(), name


def test_a_weight_counts_a_position_as_often() -> None:
    twice = judged([Q, (0.5, 0.5), (0.5, 0.5)], [P] * 3, drafted=[0, 1, 1])
    weighted = judged([Q, (0.5, 0.5)], [P] * 2, drafted=[0, 1])
    weighted = replace(weighted, weights=torch.tensor([1.0, 2.0], dtype=torch.float64))
    for name, make in LOSSES.items():
        for step in (0, 100):
            assert value(make(), weighted, step) == pytest.approx(value(make(), twice, step)), name


def test_the_rest_counts_as_one_token_and_without_it_the_divergence_is_another() -> None:
    whole = judged([(0.2, 0.3, 0.5)], [(0.5, 0.3, 0.2)])
    half = torch.tensor([0.5], dtype=torch.float64).log()
    top = replace(whole, top=torch.tensor([[0]]), log_p=half[:, None], log_rest=half)
    assert float(reverse_kl(top).detach()) == pytest.approx(kl((0.2, 0.8), (0.5, 0.5)))
    (gradient,) = torch.autograd.grad(reverse_kl(top).sum(), top.log_q)
    moved = replace(top, log_q=top.log_q.detach() + torch.tensor([[1e-6, 0, 0]]))
    slope = float(reverse_kl(moved) - reverse_kl(top).detach()) / 1e-6
    assert float(gradient[0, 0]) == pytest.approx(slope, abs=1e-4)
    assert slope == pytest.approx(0.2 * math.log(0.2 / 0.8), abs=1e-4)


def test_the_rest_keeps_the_shape_that_the_parent_has_there() -> None:
    q = (0.4, 0.3, 0.1, 0.2)
    rows = judged([q], [(0.5, 0.3)])
    parent = torch.tensor([[0.1, 0.1, 0.6, 0.2]], dtype=torch.float64)
    rest = torch.tensor([0.2], dtype=torch.float64).log()
    rows = replace(rows, top=torch.tensor([[0, 1]]), log_rest=rest, log_parent=parent.log())
    taught = (0.5, 0.3, 0.15, 0.05)
    assert value(LOSSES["kl-tail"](), rows) == pytest.approx(kl(taught, q))

    def slope(q: tuple[float, ...]) -> float:
        logits = torch.tensor([q], dtype=torch.float64).log().requires_grad_()
        (gradient,) = torch.autograd.grad(LOSSES["kl-tail"]()(replace(rows, log_q=logits.log_softmax(-1)), 0), logits)
        return float(gradient.abs().max())

    assert slope(taught) == pytest.approx(0, abs=1e-9)
    assert slope((0.5, 0.3, 0.05, 0.15)) == pytest.approx(0.1, abs=1e-9), "the same rest in another shape"


def test_a_loss_says_what_its_rows_lack() -> None:
    lacks = {"kl-tail": "log_parent", "cce": "noise", "dvi": "drafted"}
    for name, lacking in lacks.items():
        with pytest.raises(ValueError, match=f"the loss {name} needs"):
            LOSSES[name]()(replace(judged([Q], [P]), **{lacking: None}), 0)
    for fact, name in (("needs_parent", "kl-tail"), ("needs_noise", "cce"), ("on_policy", "dvi")):
        assert {each for each, make in LOSSES.items() if getattr(make(), fact)} == {name}
    assert tuple(LOSSES) == LOSS_NAMES


def test_dvi_moves_from_imitation_to_reward_on_a_line() -> None:
    rows = a_hit_and_a_miss()
    imitation = kl(Q, P)
    reward = (-0.5 * math.log(0.4) + 0.5 * math.log(0.6)) / 2
    masked = -math.log(0.4)  # ln q(a) over what was accepted
    for step, ramped in [(0, 0.0), (22, 0.0), (33, 0.5), (44, 1.0), (1000, 1.0)]:
        expected = (1 - 0.8 * ramped) * imitation + ramped * 0.3 * (masked + reward)
        assert value(LOSSES["dvi"](), rows, step) == pytest.approx(expected), step


def test_the_reward_estimates_the_gradient_of_expected_hits() -> None:
    """At T = 0 the mean of REINFORCE's gradient over drafts drawn from q is that of -q(y)."""
    q, p = (0.3, 0.5, 0.2), (1.0, 0.0, 0.0)
    mean = torch.zeros(1, 3, dtype=torch.float64)
    for drafted, chance in enumerate(q):
        rows = judged([q], [p], drafted=[drafted])
        loss = ReverseThenReward(kl=0.0, kl_min=0.0, pg_max=0.0, rl_max=1.0, baseline=0.0)
        (gradient,) = torch.autograd.grad(loss(rows, 100), rows.log_q)
        mean += chance * gradient
    assert torch.allclose(mean, torch.tensor([[-q[0], 0.0, 0.0]], dtype=torch.float64))


def test_the_baseline_follows_the_rewards_and_a_checkpoint_keeps_it() -> None:
    loss = LOSSES["dvi"]()
    for _ in range(50):
        loss(judged([Q], [P]), 0)
    assert loss.means["reward"] > 0.99
    resumed, fresh = LOSSES["dvi"](), LOSSES["dvi"]()
    resumed.means.update(loss.means)
    missed = judged([Q], [P], drafted=[1])
    assert value(resumed, missed, 100) == pytest.approx(value(loss, missed, 100))
    assert value(fresh, missed, 100) != pytest.approx(value(loss, missed, 100))


def test_coupled_cross_entropy_is_lower_for_a_likely_winner() -> None:
    favoured = replace(judged([Q], [P]), noise=torch.tensor([[3.0, 0.0]], dtype=torch.float64))
    expected = -math.log(0.4 * math.exp(3) / (0.4 * math.exp(3) + 0.6))
    assert value(LOSSES["cce"](), favoured, 0) == pytest.approx(expected)


def acceptance(p: np.ndarray, q: np.ndarray) -> float:
    """Chance that `argmax ln p + G` is `argmax ln q + G` (Daliri, Musco, Suresh 2024)."""
    return sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(len(p)))


@pytest.mark.parametrize("name", LOSS_NAMES)
def test_descending_the_loss_raises_acceptance_and_ascending_lowers_it(name: str) -> None:
    generator = np.random.default_rng(1)
    p, q = generator.dirichlet(np.full(5, 0.5)), generator.dirichlet(np.full(5, 0.5))
    results = []
    for sign in (-1, 1):
        logits = torch.from_numpy(np.log(q)).requires_grad_()
        for step in range(30):
            noise = torch.from_numpy(generator.gumbel(size=(200, 5)))
            rows = judged([tuple(q)] * 200, [tuple(p)] * 200)
            committed = (torch.from_numpy(np.log(p)) + noise).argmax(1)
            log_q = logits.log_softmax(-1).repeat(200, 1)
            rows = replace(rows, log_q=log_q, committed=committed, noise=noise)
            (gradient,) = torch.autograd.grad(LOSSES[name]()(rows, min(step, 4)), logits)
            logits = (logits + sign * 0.1 * gradient).detach().requires_grad_()
        results.append(acceptance(p, logits.detach().softmax(-1).numpy()))
    assert results[0] > acceptance(p, q) > results[1]

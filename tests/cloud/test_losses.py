"""The losses of online learning, against values by hand and brute force."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider.cloud.learning.losses import LOSSES, JudgedRows

P, Q = (0.75, 0.25), (0.4, 0.6)


def judged(q: list[tuple[float, ...]], p: list[tuple[float, ...]]) -> JudgedRows:
    """Rows in float64 whose p is known whole and whose committed token is 0."""
    n, vocab = len(q), len(q[0])
    return JudgedRows(
        log_q=torch.tensor(q, dtype=torch.float64).log().requires_grad_(),
        top=torch.arange(vocab).repeat(n, 1),
        log_p=torch.tensor(p, dtype=torch.float64).log(),
        log_rest=torch.full((n,), -math.inf, dtype=torch.float64),
        committed=torch.zeros(n, dtype=torch.int64),
        weights=torch.ones(n, dtype=torch.float64),
        noise=torch.zeros(n, vocab, dtype=torch.float64),
        log_parent=torch.full((n, vocab), 1 / vocab, dtype=torch.float64).log(),
    )


def kl(p: tuple[float, ...], q: tuple[float, ...]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)


def value(name: str, rows: JudgedRows) -> float:
    return float(LOSSES[name].value(rows).detach())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kl-tail", kl(P, Q)),  # there is no rest
        ("cce", -math.log(0.4)),  # without noise
    ],
)
def test_a_loss_of_two_tokens_is_what_its_equation_gives_by_hand(name: str, expected: float) -> None:
    assert value(name, judged([Q, Q], [P, P])) == pytest.approx(expected, abs=1e-6)


def test_every_loss_of_no_position_is_zero_and_has_a_gradient() -> None:
    rows = judged([Q], [P])
    nothing = replace(rows, weights=torch.zeros(1, dtype=torch.float64))
    for name, loss in LOSSES.items():
        (gradient,) = torch.autograd.grad(loss.value(nothing), nothing.log_q)
        assert torch.isfinite(gradient).all(), name
        assert not gradient.any(), name


def test_a_weight_counts_a_position_as_often() -> None:
    twice = judged([Q, (0.5, 0.5), (0.5, 0.5)], [P] * 3)
    weighted = replace(judged([Q, (0.5, 0.5)], [P] * 2), weights=torch.tensor([1.0, 2.0], dtype=torch.float64))
    for name in LOSSES:
        assert value(name, weighted) == pytest.approx(value(name, twice)), name


def test_the_rest_keeps_the_shape_that_the_parent_has_there() -> None:
    q = (0.4, 0.3, 0.1, 0.2)
    rows = judged([q], [(0.5, 0.3)])
    parent = torch.tensor([[0.1, 0.1, 0.6, 0.2]], dtype=torch.float64)
    rest = torch.tensor([0.2], dtype=torch.float64).log()
    rows = replace(rows, top=torch.tensor([[0, 1]]), log_rest=rest, log_parent=parent.log())
    taught = (0.5, 0.3, 0.15, 0.05)
    assert value("kl-tail", rows) == pytest.approx(kl(taught, q))

    def slope(q: tuple[float, ...]) -> float:
        logits = torch.tensor([q], dtype=torch.float64).log().requires_grad_()
        (gradient,) = torch.autograd.grad(LOSSES["kl-tail"].value(replace(rows, log_q=logits.log_softmax(-1))), logits)
        return float(gradient.abs().max())

    assert slope(taught) == pytest.approx(0, abs=1e-9)
    assert slope((0.5, 0.3, 0.05, 0.15)) == pytest.approx(0.1, abs=1e-9), "the same rest in another shape"


def test_a_loss_says_what_its_rows_lack() -> None:
    for name, lacking in (("kl-tail", "log_parent"), ("cce", "noise")):
        with pytest.raises(ValueError, match=f"the loss {name} needs"):
            LOSSES[name].value(replace(judged([Q], [P]), **{lacking: None}))


def test_coupled_cross_entropy_is_lower_for_a_likely_winner() -> None:
    favoured = replace(judged([Q], [P]), noise=torch.tensor([[3.0, 0.0]], dtype=torch.float64))
    expected = -math.log(0.4 * math.exp(3) / (0.4 * math.exp(3) + 0.6))
    assert value("cce", favoured) == pytest.approx(expected)


def acceptance(p: np.ndarray, q: np.ndarray) -> float:
    """Chance that `argmax ln p + G` is `argmax ln q + G` (Daliri, Musco, Suresh 2024)."""
    return sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(len(p)))


@pytest.mark.parametrize("name", LOSSES)
def test_descending_the_loss_raises_acceptance_and_ascending_lowers_it(name: str) -> None:
    generator = np.random.default_rng(1)
    p, q = generator.dirichlet(np.full(5, 0.5)), generator.dirichlet(np.full(5, 0.5))
    results = []
    for sign in (-1, 1):
        logits = torch.from_numpy(np.log(q)).requires_grad_()
        for _ in range(30):
            noise = torch.from_numpy(generator.gumbel(size=(200, 5)))
            rows = judged([tuple(q)] * 200, [tuple(p)] * 200)
            committed = (torch.from_numpy(np.log(p)) + noise).argmax(1)
            log_q = logits.log_softmax(-1).repeat(200, 1)
            rows = replace(rows, log_q=log_q, committed=committed, noise=noise)
            (gradient,) = torch.autograd.grad(LOSSES[name].value(rows), logits)
            logits = (logits + sign * 0.1 * gradient).detach().requires_grad_()
        results.append(acceptance(p, logits.detach().softmax(-1).numpy()))
    assert results[0] > acceptance(p, q) > results[1]

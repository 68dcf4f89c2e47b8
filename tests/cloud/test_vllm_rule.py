"""The coupled rule with vLLM's noise takes vLLM's own tokens; any of its ways to settle a row takes the same ones."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.cloud.distribution import VerificationInput
from outrider.cloud.sampling import Sampler
from outrider.cloud.vllm_rule import VllmRule, cut_by_sorting, kept_by_list, vllm_scores
from outrider.proto.types import DraftToken, Noise, Sampling, token_ids
from outrider.proto.vllm_noise import VllmNoiseSieve, gumbel32, row_state

torch.set_num_threads(1)

GOLDEN = json.loads((Path(__file__).parents[1] / "proto" / "vllm_noise.json").read_text())
VOCAB, DRAFTS = GOLDEN["vocab"], tuple(map(DraftToken, GOLDEN["drafts"]))
TRANSCRIPT = GOLDEN["prompt"] + GOLDEN["text"]
CPU = torch.device("cpu")
EVERY = np.arange(VOCAB)


def golden_logits(rows):
    """[rows, VOCAB] float32, as the recorder made them."""
    numbers = np.arange(1, VOCAB + 1, dtype=np.uint64) * np.arange(1, rows + 1, dtype=np.uint64)[:, None]
    mixed = (numbers * np.uint64(2654435761)) % np.uint64(1 << 32)
    return torch.from_numpy(((mixed >> np.uint64(12)).astype(np.float64) / 65536 - 8).astype(np.float32))


def sampling_of(draw):
    """Outrider's settings for vLLM's."""
    names = {"allowed_token_ids": "allowed_tokens"}
    settings = {names.get(name, name): value for name, value in draw["settings"].items()}
    bias = tuple((int(token), value) for token, value in settings.pop("logit_bias", {}).items())
    allowed = tuple(settings.pop("allowed_tokens", ()))
    seed = draw["seed"] % (1 << 64)
    return Sampling(seed=seed, logit_bias=bias, allowed_tokens=allowed, noise=Noise.VLLM, **settings)


def drawn(sampling, transcript=TRANSCRIPT):
    session = VerificationInput(sampling, transcript, len(GOLDEN["prompt"]), DRAFTS)
    (sampled,) = Sampler(CPU).sample(golden_logits(len(DRAFTS) + 1), [session])
    return list(token_ids(sampled.tokens))


@pytest.mark.parametrize("draw", GOLDEN["draws"], ids=lambda draw: f"{draw['settings']} {draw['seed']}")
def test_tokens_are_those_of_vllms_own_sampler(draw):
    assert drawn(sampling_of(draw)) == draw["tokens"]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda sampling: drawn(replace(sampling, noise=Noise.OUTRIDER)),
        lambda sampling: drawn(sampling, [*TRANSCRIPT, 3]),
        lambda sampling: drawn(replace(sampling, seed=sampling.seed % (1 << 32))),
    ],
    ids=["our noise", "a position on", "half the seed"],
)
def test_another_noise_position_or_seed_does_not_take_vllms_tokens(wrong):
    hot = [draw for draw in GOLDEN["draws"] if draw["settings"] == {"temperature": 1.0} and draw["seed"] != 5]
    assert len(hot) == 2
    assert all(wrong(sampling_of(draw)) != draw["tokens"] for draw in hot)


def test_min_p_comes_before_top_p_as_in_vllm():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    session = VerificationInput(Sampling(temperature=1.0, top_p=0.84, min_p=0.5), [1, 2], 1, ())
    # Of the two that min-p leaves, 0.625 and 0.375, top-p keeps both; top-p alone would have kept the third too.
    assert torch.isfinite(vllm_scores(logits, session)).tolist() == [[True, True, False, False]]
    alone = VerificationInput(Sampling(temperature=1.0, top_p=0.84), [1, 2], 1, ())
    assert torch.isfinite(vllm_scores(logits, alone)).tolist() == [[True, True, True, False]]


def rows_of(kind, seed, rows):
    """[rows, VOCAB] float32 logits."""
    noise = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))
    match kind:
        case "flat":
            return 0.01 * noise
        case "normal":
            return 2 * noise
        case "peaked":
            return noise + 15 * (torch.arange(VOCAB) == 77)
        case "ties":
            return torch.round(noise)
        case "three tokens":
            return torch.where(torch.arange(VOCAB) % 500 == 9, noise, torch.tensor(-math.inf))
    raise AssertionError(kind)


SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.2),
    Sampling(temperature=3.0, top_k=40),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=1.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=-0.2),
]
KINDS = ["flat", "normal", "peaked", "ties", "three tokens"]


def session_of(sampling, seed, rows):
    drafts = tuple(map(DraftToken, range(70, 70 + rows - 1)))
    return VerificationInput(replace(sampling, seed=seed, noise=Noise.VLLM), [3, 77, 5, 17 + seed % 90], 2, drafts)


def plainly(logits, session):
    """[(token, log p)] of each row, with the noise of every token; the lower token wins among equals."""
    scores = vllm_scores(logits, session)
    logp = torch.log_softmax(scores.double(), -1)
    seed, position = session.sampling.seed, len(session.transcript)
    sums = [row + gumbel32(seed, position + j, EVERY) for j, row in enumerate(scores.numpy())]
    return [(int(row.argmax()), float(logp[j, row.argmax()])) for j, row in enumerate(sums)]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_log_probabilities_are_those_of_a_plain_computation(kind):
    sessions = [session_of(sampling, 10 * n + i, 5) for n, sampling in enumerate(SETTINGS) for i in range(6)]
    logits = rows_of(kind, 3, 5 * len(sessions))
    for n, (session, got) in enumerate(zip(sessions, Sampler(CPU).sample(logits, sessions), strict=True)):
        for token, (wanted, logp) in zip(got.tokens, plainly(logits[5 * n : 5 * n + 5], session), strict=True):
            assert token.id == wanted
            assert token.logp == pytest.approx(logp, abs=1e-5)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 0.9), (0, 0.3), (0, 0.999), (1, 0.5), (20, 0.8), (300, 0.95)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_short_list_keeps_the_tokens_that_sorting_keeps(kind, top_k, top_p):
    settled = 0
    for row in rows_of(kind, 5, 160).reshape(10, 16 * VOCAB):
        by_sorting = torch.isfinite(cut_by_sorting(row[None], top_k, top_p)[0]).nonzero()[:, 0].tolist()
        kept = kept_by_list(row.numpy(), top_k, top_p)
        settled += kept is not None
        assert kept is None or sorted(kept.tolist()) == by_sorting
    if kind == "normal" and top_p < 0.9:
        assert settled == 10


@pytest.mark.parametrize("far", [0.0, 1e-3])
def test_a_sum_that_ends_at_top_p_is_left_to_sorting(far):
    row = np.full(16 * VOCAB, -40.0, np.float32)
    row[[5, 900]] = 0.0  # each has half
    assert (kept_by_list(row, 0, 0.5 + far) is None) is (far == 0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_row_takes_the_tokens_of_the_plain_computation_too(kind):
    rule, session = VllmRule(CPU), session_of(SETTINGS[0], 8, 60)
    logits = rows_of(kind, 4, 60)
    scores = vllm_scores(logits, session)
    states = torch.tensor([row_state(8, len(session.transcript) + row) for row in range(60)])
    assert rule.argmax(scores, states).tolist() == [token for token, _ in plainly(logits, session)]


class Deaf(VllmNoiseSieve):
    """Wrong: only the likely tokens count."""

    def most_bits(self, bound):
        return 0


def test_a_wrong_sieve_is_noticed(monkeypatch):
    session, logits = session_of(SETTINGS[0], 8, 60), rows_of("normal", 4, 60)

    def right():
        (got,) = Sampler(CPU).sample(logits, [session])
        return list(token_ids(got.tokens)) == [token for token, _ in plainly(logits, session)]

    assert right()
    monkeypatch.setattr("outrider.cloud.vllm_rule.VllmNoiseSieve", Deaf)
    assert not right()


def test_most_rows_are_settled_by_few_tokens(monkeypatch):
    rule, session = VllmRule(CPU), session_of(SETTINGS[0], 8, 60)
    whole = []
    right = rule.argmax
    monkeypatch.setattr(rule, "argmax", lambda scores, states: whole.append(len(scores)) or right(scores, states))
    rule.choose(rows_of("normal", 4, 60), [session], np.zeros(60, np.int64))
    assert sum(whole) < 10


def test_sums_that_are_equal_in_float32_go_to_the_lower_token():
    session = session_of(SETTINGS[0], 8, 1)
    noise = gumbel32(8, 4, EVERY)
    for tied in ([10, 1200], [5, 6]):
        scores = torch.full((1, VOCAB), -math.inf)
        scores[0, tied] = torch.from_numpy(np.float32(1e6) - noise[tied])  # a unit in the last place is 1/16
        assert len(set((scores[0, tied].numpy() + noise[tied]).tolist())) == 1
        (got,) = Sampler(CPU).sample(scores, [session])
        assert got.tokens[0].id == tied[0]
        assert VllmRule(CPU).argmax(scores, torch.tensor([row_state(8, 4)])).tolist() == [tied[0]]


def test_a_session_keeps_its_tokens_beside_sessions_of_the_other_noise():
    of_vllm, ours = session_of(SETTINGS[0], 1, 3), replace(session_of(SETTINGS[0], 1, 3), sampling=SETTINGS[3])
    logits = rows_of("normal", 9, 9)
    together = Sampler(CPU).sample(logits, [of_vllm, ours, of_vllm])
    alone = [Sampler(CPU).sample(logits[3 * i : 3 * i + 3], [s])[0] for i, s in enumerate((of_vllm, ours, of_vllm))]
    assert together == alone

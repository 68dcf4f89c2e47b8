"""Log probabilities that a client sees are those of the model itself, however the tokens came about."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from collecting_outbox import CollectingOutbox

from outrider.cloud.models.family_index import resolve_target
from outrider.cloud.serving.engine import Engine
from outrider.cloud.serving.slots import Owner
from outrider.cloud.target import sampler as sampling_module
from outrider.cloud.target.distribution import VerificationInput
from outrider.cloud.target.sampler import Sampler, token_facts
from outrider.cloud.target.target import load_model
from outrider.cloud.target.transformers_backend import TransformersBackend
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto import codec
from outrider.proto.errors import InvalidArgument
from outrider.proto.session.verifier import VerifierRules
from outrider.proto.types import MAX_TOP_LOGPROBS, Commit, Draft, DraftToken, Open, Patience, Sampling, token_ids
from outrider.proto.v1 import decoding_pb2 as pb

CPU = torch.device("cpu")
FOREVER = Patience(math.inf, 1000)
TOP = 5
GREEDY = Sampling(max_tokens=12, ignore_eos=True)
DRAWN = Sampling(
    max_tokens=12, ignore_eos=True, temperature=0.8, seed=5, top_k=40, top_p=0.9, repetition_penalty=1.3, min_p=0.01
)


# === the sampler ================================================================================================


def rows_of(vocab: int, rows: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def top_of(logits: torch.Tensor, count: int) -> list[list[tuple[int, float]]]:
    """The likeliest by a sort of the whole vocabulary, the lower token first among equals."""
    logp = torch.log_softmax(logits.double(), dim=-1).tolist()
    return [sorted(enumerate(row), key=lambda pair: (-pair[1], pair[0]))[:count] for row in logp]


@pytest.mark.parametrize("vocab", [40, 5000])
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, replace(GREEDY, allowed_tokens=(3, 9))])
def test_they_are_of_the_models_own_distribution_however_the_token_is_drawn(vocab, sampling):
    logits = rows_of(vocab, 1)
    (got,) = Sampler(CPU).sample(logits, [VerificationInput(sampling, [1, 2], 1, (), logprobs=True, top_logprobs=TOP)])
    expected = top_of(logits, TOP)[0]
    assert [token for token, _ in got.tokens[0].top] == [token for token, _ in expected]
    assert [logp for _, logp in got.tokens[0].top] == pytest.approx([logp for _, logp in expected], abs=1e-5)
    own = float(torch.log_softmax(logits.double(), dim=-1)[0, got.tokens[0].id])
    assert got.tokens[0].logprob == pytest.approx(own, abs=1e-5)
    if sampling.allowed_tokens:
        assert got.tokens[0].logp > own, "the processed one is another"


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, replace(GREEDY, allowed_tokens=(3, 9))])
def test_rank_and_entropy_are_of_the_models_own_distribution_at_each_position(sampling):
    logits = rows_of(5000, 3)
    logits[2, 1000:] = -math.inf
    best = tuple(map(DraftToken, logits[:2].argmax(dim=-1).tolist()))
    (got,) = Sampler(CPU).sample(logits, [VerificationInput(sampling, [1, 2], 1, best, logprobs=True)])
    logp = torch.log_softmax(logits.double(), dim=-1)
    known = [token for token in got.tokens if token.facts is not None]
    assert known
    assert len(known) == 3 or sampling != GREEDY
    for row, token in zip(logp, known, strict=False):
        likely = row[row.isfinite()]
        assert token.facts.entropy == pytest.approx(-float((likely.exp() * likely).sum()), abs=1e-4)
        assert token.facts.rank == 1 + int((row > row[token.id]).sum())


def test_entropy_is_0_where_the_target_is_sure_and_largest_where_it_is_even():
    sure, even = torch.full((1, 64), -math.inf), torch.zeros(1, 64)
    sure[0, 5] = 1.0
    facts = [token_facts(logits, (5,), 0)[0] for logits in (sure, even)]
    assert [each.entropy for each in facts] == pytest.approx([0.0, math.log(64)], abs=1e-5)
    assert [each.rank for each in facts] == [1, 1]


def test_among_equals_the_lower_token_comes_first_and_no_more_than_asked_come():
    logits = torch.zeros(1, 3000)
    logits[0, [7, 2900]] = 1.0
    (got,) = Sampler(CPU).sample(logits, [VerificationInput(GREEDY, [1], 1, (), logprobs=True, top_logprobs=4)])
    assert [token for token, _ in got.tokens[0].top] == [7, 2900, 0, 1]


def test_there_is_one_list_for_each_draft_that_agrees_and_for_the_token_after_them():
    logits = rows_of(5000, 5)
    best = logits.argmax(dim=-1).tolist()
    for agreed in range(5):
        block = (*best[:agreed], *[(token + 1) % 5000 for token in best[agreed:4]])
        (got,) = Sampler(CPU).sample(
            logits, [VerificationInput(GREEDY, [1], 1, tuple(map(DraftToken, block)), logprobs=True, top_logprobs=2)]
        )
        known, unknown = got.tokens[: agreed + 1], got.tokens[agreed + 1 :]
        assert all(token.logprob is not None for token in known)
        assert all((token.logprob, token.top) == (None, ()) for token in unknown)
        assert [[t for t, _ in token.top] for token in known] == [
            [t for t, _ in row] for row in top_of(logits[: agreed + 1], 2)
        ]


def test_a_session_that_did_not_ask_costs_nothing(monkeypatch):
    def must_not_run(*_: Any) -> None:
        raise AssertionError("computed for nobody")

    monkeypatch.setattr(sampling_module, "with_logprobs", must_not_run)
    (got,) = Sampler(CPU).sample(rows_of(5000, 1), [VerificationInput(GREEDY, [1], 1, ())])
    assert [(token.logprob, token.top) for token in got.tokens] == [(None, ())]


# === the engine, on the reference target ========================================================================


ISOLATIONS = map(str, itertools.count())  # each session reads its own prompt


@pytest.fixture(scope="module")
def engine(shared_target) -> Any:
    target = shared_target()
    rules = VerifierRules("v", "reference", target.tokenizer_sha256, target.vocab_size, 512, target.eos_tokens)
    engine = Engine(TransformersBackend(target), rules, VerifierConfig(threads=1, max_sessions=8, prefill_chunk=5))
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def plain_model() -> Any:
    return load_model(str(resolve_target("reference")), "reference", device="cpu", dtype="float32")


def opening(engine: Engine, prompt: tuple[int, ...], sampling: Sampling, session: str, **more: Any) -> Open:
    asked = {"logprobs": True, "top_logprobs": TOP, "drafting": False} | more
    return Open("reference", engine.rules.tokenizer_sha256, prompt, sampling, session, **asked)


def decode(engine: Engine, key: int, frame: Open) -> list[Commit]:
    box = CollectingOutbox()
    engine.post_open(key, frame, box, owner=Owner(isolation=next(ISOLATIONS)))
    commits = box.rest()
    engine.post_close(key)
    return commits


def assert_those_of_the_plain_model(model: Any, prompt: tuple[int, ...], commits: list[Commit]) -> None:
    tokens = [token for commit in commits for token in commit.tokens]
    text, logprobs, top = token_ids(tokens), [token.logprob for token in tokens], [token.top for token in tokens]
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *text]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    logp = torch.log_softmax(logits.float(), dim=-1)
    values, _ = logp.topk(TOP, dim=-1)
    for i, token in enumerate(text):
        assert logprobs[i] == pytest.approx(float(logp[i, token]), abs=2e-4)
        assert [value for _, value in top[i]] == pytest.approx(values[i].tolist(), abs=2e-4)
        assert [value for _, value in top[i]] == pytest.approx([float(logp[i, t]) for t, _ in top[i]], abs=2e-4)
        assert len({t for t, _ in top[i]}) == TOP


@pytest.mark.usefixtures("all_drafts_pay")
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_they_equal_a_plain_forward_with_drafts_accepted_and_rejected_in_one_step(engine, plain_model, sampling):
    prompt = tuple(random.Random(3).randrange(5, 8000) for _ in range(23))  # read in chunks of 5
    expected = [
        token.id for commit in decode(engine, 1, opening(engine, prompt, sampling, "plain")) for token in commit.tokens
    ]
    box = CollectingOutbox()
    engine.post_open(
        2,
        opening(engine, prompt, sampling, "drafted", drafting=True, patience=FOREVER),
        box,
        owner=Owner(isolation=next(ISOLATIONS)),
    )
    commits = [box.commit()]  # the prompt's own step waits for nobody
    for chain, right in enumerate((3, 0, 4)):
        done = sum(len(commit.tokens) for commit in commits)
        ahead = [*expected[done : done + right], (expected[done + right] + 1) % 8000, 9]
        engine.post_frame(
            2, Draft(chain, len(prompt) + done, tuple(map(DraftToken, tuple(ahead))), complete=True), lambda: None
        )
        commits.append(box.commit())
    engine.post_close(2)
    assert any(0 < commit.accepted < commit.verified for commit in commits), "accepted and rejected in one step"
    text = [token.id for commit in commits for token in commit.tokens]
    assert text == expected[: len(text)]
    assert_those_of_the_plain_model(plain_model, prompt, commits)


def test_they_equal_a_plain_forward_after_a_resume(engine, plain_model):
    prompt = (5, 6, 7, 300)
    whole = decode(engine, 1, opening(engine, prompt, DRAWN, "whole"))
    text = tuple(token.id for commit in whole for token in commit.tokens)
    resumed = decode(engine, 2, opening(engine, prompt, DRAWN, "resumed", committed=text[:7]))
    assert tuple(token.id for commit in resumed for token in commit.tokens) == text[7:]
    assert_those_of_the_plain_model(plain_model, (*prompt, *text[:7]), resumed)


def test_a_commit_says_nothing_of_it_to_a_session_that_did_not_ask(engine):
    commits = decode(engine, 1, opening(engine, (5, 6), GREEDY, "silent", logprobs=False, top_logprobs=0))
    said = [token for commit in commits for token in commit.tokens]
    assert all(token.logp is not None and (token.logprob, token.top) == (None, ()) for token in said)
    only = decode(engine, 2, opening(engine, (5, 6), GREEDY, "no-list", top_logprobs=0, logp=False))
    said = [token for commit in only for token in commit.tokens]
    assert all(token.logprob is not None and (token.logp, token.top) == (None, ()) for token in said)


# === on the wire ================================================================================================


@pytest.mark.parametrize(
    "wire",
    [
        pb.Commit(tokens=[1, 2], top_tokens=[1, 2, 3], top_logp=[0, 0, 0]),
        pb.Commit(tokens=[1, 2], top_tokens=[1, 2], top_logp=[0]),
        pb.Commit(tokens=[1], top_logp=[0]),
        pb.Commit(tokens=[1, 2], top_tokens=[1], top_logp=[0]),
    ],
)
def test_lists_that_do_not_fit_the_tokens_are_refused_by_name(wire):
    with pytest.raises(InvalidArgument) as refused:
        codec.decode_cloud_frame(pb.CloudFrame(commit=wire).SerializeToString())
    assert refused.value.field == "commit.top_logprobs"


@pytest.mark.parametrize(
    "asked", [{"top_logprobs": MAX_TOP_LOGPROBS + 1, "logprobs": True}, {"top_logprobs": 1}, {"top_logprobs": -1}]
)
def test_what_cannot_be_asked_is_refused_by_name(asked):
    with pytest.raises(InvalidArgument) as refused:
        Open("m", "0" * 64, (1,), GREEDY, "s", **asked)
    assert refused.value.field == "open.top_logprobs"


def test_the_order_of_the_likeliest_is_the_same_in_any_batch():
    logits = torch.round(rows_of(3000, 6, seed=4))  # ties everywhere
    session = VerificationInput(GREEDY, [1], 1, (), logprobs=True, top_logprobs=20)
    together = Sampler(CPU).sample(logits, [session] * 6)
    alone = [Sampler(CPU).sample(logits[i : i + 1], [session])[0] for i in range(6)]
    assert [got.tokens for got in together] == [got.tokens for got in alone]
    assert np.all(np.diff([[value for _, value in got.tokens[0].top] for got in together]) <= 0)

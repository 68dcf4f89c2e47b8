"""Log probabilities, of a prompt and of a text, are those of the model itself, however the tokens came about."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from collecting_outbox import CollectingOutbox

from outrider.cloud.models.family_index import resolve_target
from outrider.cloud.serving import batching
from outrider.cloud.serving.engine import Engine
from outrider.cloud.serving.slots import ANYBODY, Owner
from outrider.cloud.target import sampler as sampling_module
from outrider.cloud.target.sampler import Sampler, token_facts
from outrider.cloud.target.target import Target
from outrider.cloud.target.target_loading import load_model
from outrider.cloud.target.transformers_backend import TransformersBackend
from outrider.cloud.target.verification import VerificationInput
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto import codec
from outrider.proto.errors import InvalidArgument
from outrider.proto.session.verifier import VerifierRules
from outrider.proto.types import (
    MAX_TOP_LOGPROBS,
    Commit,
    Continue,
    Draft,
    DraftToken,
    Open,
    Opened,
    Patience,
    PromptLogprobs,
    Sampling,
    TokenFacts,
    token_ids,
)
from outrider.proto.v1 import decoding_pb2 as pb

TOP = 3
SAMPLING = Sampling(max_tokens=4, ignore_eos=True)
KEYS = itertools.count()
CLOSE = 2e-4
ISOLATIONS = map(str, itertools.count())  # each reads its own prompt
CPU = torch.device("cpu")
FOREVER = Patience(math.inf, 1000)
MOST = 5
GREEDY = Sampling(max_tokens=12, ignore_eos=True)
DRAWN = Sampling(
    max_tokens=12, ignore_eos=True, temperature=0.8, seed=5, top_k=40, top_p=0.9, repetition_penalty=1.3, min_p=0.01
)


class Bench:
    """An engine on the reference target, and the same model as transformers runs it."""

    def __init__(self, target: Target, **config: Any) -> None:
        self.target = target
        rules = VerifierRules("v", "reference", target.tokenizer_sha256, target.vocab_size, 512, target.eos_tokens)
        settings = VerifierConfig(**{"threads": 1, "max_sessions": 8, "prefill_chunk": 5, **config})
        self.engine = Engine(TransformersBackend(target), rules, settings)

    def frame(self, prompt: tuple[int, ...], session: str = "s", sampling: Sampling = SAMPLING, **more: Any) -> Open:
        asked = {"drafting": False, "prompt_logprobs": TOP, **more}
        return Open("reference", self.target.tokenizer_sha256, prompt, sampling, session, **asked)

    def begin(self, frame: Open, isolation: str = "") -> Stream:
        return Stream(self.engine, frame, isolation)


class Stream:
    """A session, and what has come of it."""

    def __init__(self, engine: Engine, frame: Open, isolation: str = "") -> None:
        self.key = next(KEYS)
        self.scores: list[TokenFacts] = []
        self.frames: list[PromptLogprobs] = []
        self.commits: list[Commit] = []
        self._engine, self._kept = engine, frame.keep_s > 0
        self._box = CollectingOutbox()
        engine.post_open(self.key, frame, self._box, owner=Owner(isolation=isolation))

    def read(self, *, commits: int = 0) -> Stream:
        """Take frames to the end of the turn, or so many of its commits."""
        while not self.commits or (len(self.commits) != commits and self.commits[-1].finish is None):
            item = self._box.items.get(timeout=60)
            assert not isinstance(item, Exception), item
            if isinstance(item, PromptLogprobs):
                assert not self.commits, "they come before the first token"
                assert item.start == len(self.scores) + 1
                self.frames.append(item)
                self.scores += item.tokens
            elif isinstance(item, Commit):
                self.commits.append(item)
        if self.commits[-1].finish is not None and not self._kept:
            self._engine.post_close(self.key)
        return self

    @property
    def text(self) -> tuple[int, ...]:
        return tuple(token.id for commit in self.commits for token in commit.tokens)

    def goes_on(self, frame: Continue) -> Stream:
        self.commits = []
        self._engine.post_frame(self.key, frame, lambda: None)
        return self.read()


@pytest.fixture(scope="module")
def bench(shared_target: Any) -> Iterator[Bench]:
    made = Bench(shared_target())
    made.engine.start()
    yield made
    made.engine.stop()


@pytest.fixture(scope="module")
def plain() -> Any:
    """Return [p - 1, vocab] log probabilities after each token of a prompt but the last, by a plain forward."""

    model = load_model(str(resolve_target("reference")), "reference", device="cpu", dtype="float32")

    def logp(prompt: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, :-1]
        return torch.log_softmax(logits.float(), dim=-1)

    return logp


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(5, 8000) for _ in range(length))


def assert_equal(scores: list[TokenFacts], logp: torch.Tensor, prompt: tuple[int, ...], top: int = TOP) -> None:
    assert len(scores) == len(prompt) - 1
    for row, token, said in zip(logp, prompt[1:], scores, strict=True):
        assert said.logprob == pytest.approx(float(row[token]), abs=CLOSE)
        values, ids = row.topk(top)
        assert [value for _, value in said.top] == pytest.approx(values.tolist(), abs=CLOSE)
        assert {t for t, _ in said.top} == set(ids.tolist())
        assert dict(said.top).get(token, said.logprob) == said.logprob, "one value in both places"
        assert (said.rank == 1) == (token == int(row.argmax()))
        assert (said.rank <= top) == (token in ids)


def test_they_equal_a_plain_forward_of_a_prompt_in_one_piece_and_in_many(bench, plain) -> None:
    prompt = prompt_of(300)
    alone = bench.begin(bench.frame(prompt)).read()
    assert_equal(alone.scores, plain(prompt), prompt)
    assert len(alone.frames) >= 300 / batching.MAX_SCORED_ROWS, "never the logits of all positions at once"
    assert max(len(frame.tokens) for frame in alone.frames) <= batching.MAX_SCORED_ROWS
    long = replace(SAMPLING, max_tokens=90)
    running = bench.begin(bench.frame(prompt_of(9, 1), "beside", long, prompt_logprobs=None))
    running.read(commits=1)
    chunked = bench.begin(bench.frame(prompt[:100], "chunked")).read()
    running.read()
    assert len(chunked.frames) >= 15, "read in pieces of 5 while another decodes"
    assert_equal(chunked.scores, plain(prompt[:100]), prompt[:100])


def test_log_probabilities_of_the_next_position_are_not_taken_for_them(bench, plain) -> None:
    prompt = prompt_of(40)
    scores = bench.begin(bench.frame(prompt)).read().scores
    with pytest.raises(AssertionError):
        assert_equal(scores[1:], plain(prompt)[:-1], prompt[:-1])
    with pytest.raises(AssertionError):
        assert_equal(scores[:-1], plain(prompt)[1:], prompt[1:])


def test_a_cached_prompt_is_computed_whole_and_says_the_same(bench, plain) -> None:
    prompt = prompt_of(80, 2)
    cold = bench.begin(bench.frame(prompt, "cold"), "k").read()
    known = bench.begin(bench.frame(prompt, "known", prompt_logprobs=None), "k").read()
    assert known.commits[0].cached_tokens > 60, "the cache is warm"
    warm = bench.begin(bench.frame(prompt, "warm"), "k").read()
    assert warm.commits[0].cached_tokens == 0
    assert warm.scores == cold.scores
    assert warm.text == known.text == cold.text
    again = bench.begin(bench.frame(prompt, "again", prompt_logprobs=None), "k").read()
    assert again.commits[0].cached_tokens > 60, "it is still"
    assert_equal(warm.scores, plain(prompt), prompt)


def test_sessions_side_by_side_get_each_their_own(bench, plain) -> None:
    prompts = [prompt_of(length, length) for length in (70, 33, 2, 1)]
    tops = (TOP, 0, 1, 5)
    streams = [
        bench.begin(bench.frame(prompt, f"s{i}", prompt_logprobs=top), "same")
        for i, (prompt, top) in enumerate(zip(prompts, tops, strict=True))
    ]
    for prompt, top, stream in zip(prompts, tops, streams, strict=True):
        stream.read()
        if top:
            assert_equal(stream.scores, plain(prompt) if len(prompt) > 1 else torch.empty(0, 1), prompt, top)
        assert [len(said.top) for said in stream.scores] == [top] * (len(prompt) - 1)


def test_a_text_that_asks_for_them_is_the_same_and_its_neighbours_too(bench) -> None:
    prompt, other = prompt_of(60, 3), prompt_of(20, 4)
    expected = [
        bench.begin(bench.frame(each, prompt_logprobs=None), str(i)).read() for i, each in enumerate((prompt, other))
    ]
    assert not any(stream.scores for stream in expected), "they come where they are asked for, and nowhere else"
    asked = bench.begin(bench.frame(prompt, "asked"), "a")
    beside = bench.begin(bench.frame(other, "beside", prompt_logprobs=None), "b")
    assert (asked.read().text, beside.read().text) == (expected[0].text, expected[1].text)


def test_a_prompt_is_scored_over_streams_that_break_after_a_frame_each(bench, plain) -> None:
    prompt, scores, streams = prompt_of(300, 9), list[TokenFacts](), 0
    while len(scores) < len(prompt) - 1:
        streams += 1
        assert streams <= 2 * len(prompt) / batching.MAX_SCORED_ROWS, "it makes no progress"
        asked = bench.frame(prompt, epoch=streams, prompt_logprobs_from=len(scores) + 1)
        stream = bench.begin(asked, "k")
        while not isinstance(item := stream._box.items.get(timeout=60), PromptLogprobs):
            assert isinstance(item, Opened)
        bench.engine.post_close(stream.key)
        assert item.start == len(scores) + 1
        scores += item.tokens
    assert_equal(scores, plain(prompt), prompt)


@pytest.mark.parametrize("isolation", ["cold", "warm"])
def test_scores_begin_where_they_are_wanted_whatever_is_cached(bench, plain, isolation) -> None:
    prompt = prompt_of(200, 10)
    whole = bench.begin(bench.frame(prompt, prompt_logprobs=None), "warm").read()
    stream = bench.begin(bench.frame(prompt, "again", prompt_logprobs_from=151), isolation)
    stream.scores += [None] * 150
    assert stream.read().text == whole.text
    assert_equal(stream.scores[150:], plain(prompt)[150:], prompt[150:])
    assert (stream.commits[0].cached_tokens > 0) == (isolation == "warm")


def test_a_step_that_fails_in_sampling_loses_none_of_them(bench, plain, monkeypatch) -> None:
    sampler, prompt, failed = bench.engine.backend._sampler, prompt_of(90, 8), []
    sample, step, scoring = sampler.sample, bench.engine.backend.step, []

    def seen(rows: Any) -> Any:
        scoring[:] = [row for row in rows if row.scored and len(rows) > 1]
        return step(rows)

    def failing(*arguments: Any) -> Any:
        if scoring and not failed:
            failed.append(True)
            raise RuntimeError("no memory, once")
        return sample(*arguments)

    monkeypatch.setattr(bench.engine.backend, "step", seen)
    monkeypatch.setattr(sampler, "sample", failing)
    long = replace(SAMPLING, max_tokens=90)
    other = bench.begin(bench.frame(prompt_of(9, 1), "other", long, prompt_logprobs=None))
    other.read(commits=1)
    scored = bench.begin(bench.frame(prompt, "scored")).read()
    assert failed, "the step of both has failed"
    assert_equal(scored.scores, plain(prompt), prompt)
    other.read()


def test_a_text_taken_over_brings_those_of_the_prompt_alone(bench, plain) -> None:
    prompt = prompt_of(50, 5)
    text = bench.begin(bench.frame(prompt, "first")).read().text
    resumed = bench.begin(bench.frame(prompt, "second", committed=text[:2])).read()
    assert resumed.text == text[2:]
    assert_equal(resumed.scores, plain(prompt), prompt)


def test_the_next_turn_of_a_kept_session_brings_none(bench) -> None:
    stream = bench.begin(bench.frame(prompt_of(30, 6), keep_s=30.0)).read()
    known = len(stream.scores)
    stream.goes_on(Continue(34, (7, 8, 9)))
    assert len(stream.text) == SAMPLING.max_tokens
    assert len(stream.scores) == known
    bench.engine.post_close(stream.key)


def test_tokens_of_no_probability_and_ties_have_their_rank() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -torch.inf]] * 3)
    likeliest, tied, never = token_facts(logits, (1, 2, 3), 2)
    assert (likeliest.rank, tied.rank, never.rank) == (1, 1, 4)
    assert [token for token, _ in tied.top] == [1, 2], "the lower token comes first among equals"
    assert never.logprob == -torch.inf


def test_a_verifier_that_cannot_tell_them_refuses_the_session_by_name(bench) -> None:
    rules = replace(bench.engine.rules, scores_prompts=False)
    engine = Engine(TransformersBackend(bench.target), rules, VerifierConfig(threads=1))
    box = CollectingOutbox()
    engine._admit(0, bench.frame((5, 6)), box, None, ANYBODY)
    refused = box.items.get_nowait()
    assert isinstance(refused, InvalidArgument)
    assert refused.field == "open.prompt_logprobs"
    engine._admit(1, bench.frame((5, 6), prompt_logprobs=None), box, None, ANYBODY)
    assert not isinstance(box.items.get_nowait(), Exception)


# === of a text: the sampler ======================================================================================


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
    (got,) = Sampler(CPU).sample(logits, [VerificationInput(sampling, [1, 2], 1, (), logprobs=True, top_logprobs=MOST)])
    expected = top_of(logits, MOST)[0]
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


def test_the_order_of_the_likeliest_is_the_same_in_any_batch():
    logits = torch.round(rows_of(3000, 6, seed=4))  # ties everywhere
    session = VerificationInput(GREEDY, [1], 1, (), logprobs=True, top_logprobs=20)
    together = Sampler(CPU).sample(logits, [session] * 6)
    alone = [Sampler(CPU).sample(logits[i : i + 1], [session])[0] for i in range(6)]
    assert [got.tokens for got in together] == [got.tokens for got in alone]
    assert np.all(np.diff([[value for _, value in got.tokens[0].top] for got in together]) <= 0)


# === of a text: the engine ======================================================================================


def asking(bench: Bench, prompt: tuple[int, ...], sampling: Sampling, session: str, **more: Any) -> Stream:
    asked = {"prompt_logprobs": None, "logprobs": True, "top_logprobs": MOST} | more
    return bench.begin(bench.frame(prompt, session, sampling, **asked), next(ISOLATIONS))


def assert_those_of_the_plain_model(plain: Any, prompt: tuple[int, ...], commits: list[Commit]) -> None:
    tokens = [token for commit in commits for token in commit.tokens]
    for row, token in zip(plain((*prompt, *token_ids(tokens)))[len(prompt) - 1 :], tokens, strict=True):
        assert token.logprob == pytest.approx(float(row[token.id]), abs=CLOSE)
        assert [value for _, value in token.top] == pytest.approx(row.topk(MOST).values.tolist(), abs=CLOSE)
        assert [value for _, value in token.top] == pytest.approx([float(row[t]) for t, _ in token.top], abs=CLOSE)
        assert len({t for t, _ in token.top}) == MOST


@pytest.mark.usefixtures("all_drafts_pay")
@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_they_equal_a_plain_forward_with_drafts_accepted_and_rejected_in_one_step(bench, plain, sampling) -> None:
    prompt = prompt_of(23, 3)  # read in chunks of 5
    expected = asking(bench, prompt, sampling, "plain").read().text
    stream = asking(bench, prompt, sampling, "drafted", drafting=True, patience=FOREVER)
    stream.read(commits=1)  # the prompt's own step waits for nobody
    for chain, right in enumerate((3, 0, 4)):
        done = len(stream.text)
        ahead = (*expected[done : done + right], (expected[done + right] + 1) % 8000, 9)
        draft = Draft(chain, len(prompt) + done, tuple(map(DraftToken, ahead)), complete=True)
        bench.engine.post_frame(stream.key, draft, lambda: None)
        stream.read(commits=chain + 2)
    bench.engine.post_close(stream.key)
    assert any(0 < commit.accepted < commit.verified for commit in stream.commits), "both in one step"
    assert stream.text == expected[: len(stream.text)]
    assert_those_of_the_plain_model(plain, prompt, stream.commits)


def test_they_equal_a_plain_forward_after_a_resume(bench, plain) -> None:
    prompt = (5, 6, 7, 300)
    text = asking(bench, prompt, DRAWN, "whole").read().text
    resumed = asking(bench, prompt, DRAWN, "resumed", committed=text[:7]).read()
    assert resumed.text == text[7:]
    assert_those_of_the_plain_model(plain, (*prompt, *text[:7]), resumed.commits)


def test_a_commit_says_nothing_of_it_to_a_session_that_did_not_ask(bench) -> None:
    silent = asking(bench, (5, 6), GREEDY, "silent", logprobs=False, top_logprobs=0).read()
    for token in itertools.chain(*(commit.tokens for commit in silent.commits)):
        assert token.logp is not None
        assert (token.logprob, token.top) == (None, ())
    only = asking(bench, (5, 6), GREEDY, "no-list", top_logprobs=0, logp=False).read()
    for token in itertools.chain(*(commit.tokens for commit in only.commits)):
        assert token.logprob is not None
        assert (token.logp, token.top) == (None, ())


# === on the wire ================================================================================================


@pytest.mark.parametrize(
    ("wire", "field"),
    [
        (pb.PromptLogprobs(start=1, logprobs=[0.0, 0.0], ranks=[1]), "prompt_logprobs.ranks"),
        (
            pb.PromptLogprobs(start=1, logprobs=[0.0], ranks=[1], top_tokens=[1, 2], top_logp=[0]),
            "prompt_logprobs.top_tokens",
        ),
        (pb.PromptLogprobs(start=0, logprobs=[0.0], ranks=[1]), "prompt_logprobs.start"),
        (pb.PromptLogprobs(start=1), "prompt_logprobs.logprobs"),
    ],
)
def test_a_frame_that_cannot_be_is_refused_by_name(wire: Any, field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        codec.decode_cloud_frame(pb.CloudFrame(prompt_logprobs=wire).SerializeToString())
    assert refused.value.field == field


@pytest.mark.parametrize(
    "wire",
    [
        pb.Commit(tokens=[1, 2], top_tokens=[1, 2, 3], top_logp=[0, 0, 0]),
        pb.Commit(tokens=[1, 2], top_tokens=[1, 2], top_logp=[0]),
        pb.Commit(tokens=[1], top_logp=[0]),
        pb.Commit(tokens=[1, 2], top_tokens=[1], top_logp=[0]),
    ],
)
def test_lists_that_do_not_fit_the_tokens_are_refused_by_name(wire) -> None:
    with pytest.raises(InvalidArgument) as refused:
        codec.decode_cloud_frame(pb.CloudFrame(commit=wire).SerializeToString())
    assert refused.value.field == "commit.top_logprobs"


@pytest.mark.parametrize(
    ("field", "asked"),
    [
        *(("prompt_logprobs", {"prompt_logprobs": top}) for top in (-1, MAX_TOP_LOGPROBS + 1)),
        *(("top_logprobs", {"top_logprobs": top, "logprobs": True}) for top in (-1, MAX_TOP_LOGPROBS + 1)),
        ("top_logprobs", {"top_logprobs": 1}),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(field: str, asked: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        Open("m", "0" * 64, (1,), GREEDY, "s", **asked)
    assert refused.value.field == f"open.{field}"

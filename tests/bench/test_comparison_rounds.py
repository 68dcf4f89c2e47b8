"""Rounds of `outrider compare` against known drafters, the session machines, and real targets."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from outrider.bench.comparison.rounds import Rounds, synchronous_rounds
from outrider.bench.replay.optimum import synchronous
from outrider.bench.replay.traced import replay
from outrider.bench.replay.traces import HitTrace
from outrider.bench.simulator.clock import Costs
from outrider.bench.vectors import SentVectors
from outrider.cloud.backend import StepRow
from outrider.cloud.distribution import VerificationInput
from outrider.cloud.steering import Projection
from outrider.cloud.steering_vectors import SteeringVectors, load_projections
from outrider.cloud.target import Target, load_target
from outrider.cloud.text_writer import TextRequest, TextVectors, TextWriter, WrittenText
from outrider.cloud.transformers_backend import TransformersBackend
from outrider.deploy.link.shape import LinkShape
from outrider.drafters import find_package
from outrider.drafters.onnx import OnnxDrafter
from outrider.drafters.proposals import ProposalRule
from outrider.drafters.protocol import DraftState, TokenPrefix
from outrider.edge.testing import ScriptedDrafter, tiny_drafter
from outrider.proto.errors import ConfigError
from outrider.proto.policy import FixedSteering, FixedWindow
from outrider.proto.session import (
    Drafted,
    DrafterSteering,
    DraftJob,
    EdgeEvent,
    EdgeSession,
    EdgeStatistics,
    Send,
    StreamReady,
    Verified,
    VerifierRules,
    VerifierSession,
)
from outrider.proto.types import (
    CommittedToken,
    Draft,
    DraftToken,
    Open,
    Patience,
    Sampling,
    SteeringPrecision,
    SteeringRequest,
)

GREEDY = Sampling(temperature=0.0, max_tokens=40)
PROMPT = tuple(range(10, 15))
WRONG = 99
HASH = "ab" * 32

# --- rounds of drafters whose every draft is known ---


def text_of(tokens: int, *, limit: int | None = None, vectors: TextVectors | None = None) -> WrittenText:
    transcript = (*PROMPT, *range(200, 200 + tokens))
    made = {"p": vectors} if vectors is not None else {}
    return WrittenText(TextRequest(PROMPT, GREEDY, "t", "code"), transcript, limit or tokens, made)


class VectorDrafter:
    """A drafter of as many right tokens as the first number of its vector says, none without; it records its calls."""

    name, version, steering = "by-vector", "1", None

    def __init__(self, text: WrittenText) -> None:
        self.text = text
        self.steered: list[tuple[int, float | None]] = []  # length at which a round began, and its vector
        self.drafted: list[int] = []  # drafts of each round

    def open(self, rule: ProposalRule) -> _VectorState:
        return _VectorState(self)


class _VectorState(TokenPrefix):
    def __init__(self, drafter: VectorDrafter) -> None:
        super().__init__()
        self._drafter = drafter
        self._vector: float | None = None
        self._began = 0

    def steer(self, vector: np.ndarray | None, since: int) -> None:
        assert since == len(PROMPT)
        self._vector = None if vector is None else float(vector[0])

    def extend(self, tokens: Sequence[int]) -> None:
        super().extend(tokens)
        assert tuple(self.tokens) == self._drafter.text.transcript[: self.length], "the prefix is not the text"
        self._began = self.length
        self._drafter.drafted.append(0)
        if self.length > len(PROMPT):
            self._drafter.steered.append((self.length, self._vector))

    def propose(self, n: int) -> tuple[DraftToken, ...]:
        assert n == 1
        right = self.length < self._began + round(self._vector or 0)
        token = self._drafter.text.transcript[self.length] if right else WRONG
        self.tokens.append(token)
        self._drafter.drafted[-1] += 1
        return (DraftToken(token, 0.5),)


def sent(numbers: np.ndarray, *, first: int = 0, age: int = 0) -> SentVectors:
    """Return vectors as float16, which holds small whole numbers exactly."""
    rows = np.asarray(numbers, dtype=np.float32)[:, None]
    return SentVectors(TextVectors(first, rows), SteeringPrecision.FLOAT16, age)


def test_a_drafter_with_three_right_drafts_commits_four_tokens_a_step() -> None:
    text = text_of(41)
    rounds = synchronous_rounds(VectorDrafter(text), text, GREEDY, sent(np.full(60, 3.0)), drafts=8)
    assert rounds.tokens == 41
    assert rounds.steps == 1 + 10  # the first has no vector: its one token is the target's own
    # In every round but the last, one more was verified, and missed.
    assert (rounds.accepted, rounds.compared) == (30, 40)
    assert (len(rounds.first_s), len(rounds.next_s)) == (10, 29)  # the text's first round, which reads, left out


@pytest.mark.parametrize("age", [0, 1, 5])
def test_a_round_is_steered_by_the_vector_of_the_given_age(age) -> None:
    text = text_of(30)
    drafter = VectorDrafter(text)
    numbers = np.arange(60) % 3
    synchronous_rounds(drafter, text, GREEDY, sent(numbers, age=age), drafts=8)
    assert len(drafter.steered) > 10
    for length, vector in drafter.steered:
        position = length - 2 - age
        assert vector == (numbers[position] if position >= 0 else None)


def test_without_a_vector_of_that_age_the_drafter_is_steered_by_none() -> None:
    text = text_of(6)
    drafter = VectorDrafter(text)
    synchronous_rounds(drafter, text, GREEDY, sent(np.ones(20), first=6, age=2), drafts=2)
    assert drafter.steered == [(6, None), (7, None), (8, None), (9, None), (10, 1.0)]


def test_a_drafter_without_vectors_is_never_steered() -> None:
    text = text_of(10)
    drafter = VectorDrafter(text)
    assert synchronous_rounds(drafter, text, GREEDY, None, drafts=4).steps == 10
    assert {vector for _, vector in drafter.steered} == {None}


def test_no_more_is_drafted_than_the_text_may_have_after_the_next_token() -> None:
    always = sent(np.full(60, 8.0))
    drafter = VectorDrafter(text := text_of(12))
    assert synchronous_rounds(drafter, text, GREEDY, always, drafts=4).steps == 4
    assert drafter.drafted == [1, 4, 4, 0]  # its first draft is wrong; one token is left, and the target's own
    drafter = VectorDrafter(ended := replace(text, limit=40))  # it ended by itself, before its limit
    rounds = synchronous_rounds(drafter, ended, GREEDY, always, drafts=8)
    assert drafter.drafted == [1, 8, 2]
    assert (rounds.steps, rounds.tokens, rounds.accepted, rounds.compared) == (3, 12, 10, 11)


def test_nothing_is_drafted_after_a_wrong_draft() -> None:
    drafter = VectorDrafter(text := text_of(20))
    synchronous_rounds(drafter, text, GREEDY, sent(np.full(60, 2.0)), drafts=8)
    assert drafter.drafted == [1, 3, 3, 3, 3, 3, 3, 0]


def test_vectors_are_rounded_to_their_precision() -> None:
    vector = np.array([1.0, -0.4037, 0.0011, 0.25], dtype=np.float32)
    vectors = TextVectors(3, vector[None])
    got = {precision: SentVectors(vectors, precision, 0).after(5) for precision in SteeringPrecision}
    assert all(row is not None for row in got.values())
    np.testing.assert_allclose(got[SteeringPrecision.INT8], vector, atol=0.5 / 127)
    assert not np.array_equal(got[SteeringPrecision.INT8], vector)
    np.testing.assert_allclose(got[SteeringPrecision.FLOAT16], vector, rtol=2**-11)
    assert SentVectors(vectors, SteeringPrecision.INT8, 0).after(4) is None
    assert SentVectors(vectors, SteeringPrecision.INT8, 0).after(6) is None


# --- against both halves of real sessions ---

Step = Callable[[VerifierSession, tuple[int, ...]], Verified]


def by_session_machine(
    frame: Open, rules: VerifierRules, state: DraftState, step: Step, steering: DrafterSteering | None = None
) -> EdgeSession:
    """Decode a text by an edge and a verifier that wait for each other, and return the edge."""
    verifier = VerifierSession(frame, rules, 0.0)
    edge = EdgeSession(frame, FixedWindow(frame.window), steering=steering, job_tokens=lambda _: 3)

    def handle(event: EdgeEvent) -> None:
        for instruction in edge.handle(event, 0.0):
            match instruction:
                case Send(Draft() as frame):
                    verifier.on_draft(frame, 0.0)
                case DraftJob() as job:
                    state.truncate(job.truncate_to)
                    if job.steer is not None:
                        state.steer(job.steer.vector, job.steer.since)
                    state.extend(job.extend_with)
                    handle(Drafted(job, state.propose(job.count), 0.001))

    handle(StreamReady(b""))
    handle(verifier.opened())
    while verifier.finish is None:
        handle(verifier.on_verified(step(verifier, verifier.block()), 0.0))
    state.close()
    return edge


def assert_same(rounds: Rounds, found: EdgeStatistics) -> None:
    assert (rounds.tokens, rounds.steps) == (found.committed, found.steps)
    assert (rounds.accepted, rounds.compared) == (found.hits, found.compared)


@pytest.mark.parametrize("seed", range(12))
def test_rounds_agree_with_a_session_and_an_engine_that_reads_first_takes_one_more(seed) -> None:
    rng = random.Random(seed)
    tokens, share, drafts = rng.randint(1, 70), rng.random(), rng.choice((1, 3, 8))
    text = text_of(tokens, limit=tokens + rng.choice((0, 30)))
    hits = tuple(rng.random() < share for _ in range(tokens))
    ended = text.limit > tokens
    truth = (*text.transcript, *(0,) * 9)

    def script(prefix: list[int]) -> int:
        at = len(prefix) - len(PROMPT)
        right = at < tokens and hits[at] and tuple(prefix) == text.transcript[: len(prefix)]
        return text.transcript[len(prefix)] if right else WRONG

    def step(verifier: VerifierSession, block: tuple[DraftToken, ...]) -> Verified:
        at = len(verifier.transcript)
        return Verified(block, tuple(map(CommittedToken, truth[at : at + len(block) + 1], (-1.0,) * (len(block) + 1))))

    drafter = ScriptedDrafter(script)
    rounds = synchronous_rounds(drafter, text, GREEDY, None, drafts=drafts)
    sampling = replace(GREEDY, max_tokens=text.limit, ignore_eos=not ended)
    frame = Open("m", HASH, PROMPT, sampling, "s", patience=Patience(math.inf, drafts), window=drafts)
    rules = VerifierRules("v", "m", HASH, 400, 500, frozenset(text.transcript[-1:]))
    assert_same(rounds, by_session_machine(frame, rules, drafter.open(ProposalRule(sampling)), step).statistics)

    trace = HitTrace("t", "", "d", "1", 0.0, 5, text.transcript[5:], hits, (math.nan,) * tokens, ended=ended)
    link, free = LinkShape.of(rtt_ms=40), Costs(row_s=0.0)  # a row that costs nothing is always verified
    (outcome,) = replay([trace], lambda _: link, free, synchronous(drafts))
    assert 0 <= outcome.statistics.steps - rounds.steps <= 1  # in the first step, drafts are still on their way


# --- a real target, and drafters with small graphs ---


@pytest.fixture(scope="module")
def target(family) -> Target:
    return load_target(str(family.target), kv_tokens=1024)


def requests(count: int, sampling: Sampling) -> list[TextRequest]:
    rng = random.Random(4)
    prompts = [tuple(rng.randrange(2, tiny_drafter.VOCAB) for _ in range(rng.randint(1, 24))) for _ in range(count)]
    return [TextRequest(prompt, sampling, str(i), f"d{i % 2}") for i, prompt in enumerate(prompts)]


def real_session(
    target: Target,
    drafter: OnnxDrafter,
    prompt: tuple[int, ...],
    sampling: Sampling,
    projections: dict[str, Projection],
) -> EdgeSession:
    """Decode with eight drafts a round, steered where there are projections."""
    steering = SteeringRequest(next(iter(projections))) if projections else None
    frame = Open(
        "m", target.tokenizer_sha256, prompt, sampling, "s", patience=Patience(math.inf, 8), window=8, steering=steering
    )
    rules = VerifierRules(
        "v",
        "m",
        target.tokenizer_sha256,
        target.vocab_size,
        target.context_length,
        target.eos_tokens,
        projections=frozenset(projections),
    )
    backend = TransformersBackend(target)
    vectors, handle = SteeringVectors(backend, projections), backend.open()
    backend.reserve(handle, len(prompt) + sampling.max_tokens)

    def step(verifier: VerifierSession, block: tuple[DraftToken, ...]) -> Verified:
        backend.truncate(handle, min(handle.length, len(verifier.transcript) - 1))
        verified = VerificationInput(verifier.sampling, verifier.transcript, len(prompt), block)
        tokens, tapped = tuple(verifier.transcript[handle.length :]), verifier.wanted_vector is not None
        output = backend.step([StepRow(handle, tokens, verified, tapped)])
        (sampled,) = output.sampled
        (vector,) = vectors.of([verifier.wanted_vector], output.taps)
        return Verified(block, sampled.tokens, steering=vector)

    state = drafter.open(ProposalRule(sampling, prompt_length=len(prompt)))
    steered = DrafterSteering(tiny_drafter.RANK, FixedSteering()) if projections else None
    edge = by_session_machine(frame, rules, state, step, steered)
    backend.release(handle)
    return edge


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["plain", "steered"])
def test_texts_and_rounds_agree_with_real_sessions(family, target, kind, temperature) -> None:
    drafter = OnnxDrafter(find_package(getattr(family, kind)))
    projections = {}
    if kind == "steered":
        projections = load_projections(
            [str(family.projection)], TransformersBackend(target).facts, name="big", model="big"
        )
    likely = ((1, 4.0), *((token, 9.0) for token in range(2, 6)))  # otherwise target and drafter hardly ever agree
    sampling = Sampling(temperature=temperature, seed=5, max_tokens=30, logit_bias=likely)
    texts = TextWriter(target, projections).write(requests(5, sampling))
    hits = 0
    for text in texts:
        edge = real_session(target, drafter, text.request.prompt, sampling, projections)
        assert text.transcript == tuple(edge.transcript)
        vectors = None
        if projections:
            vectors = SentVectors(text.vectors[drafter.package.steering.projection], SteeringPrecision.INT8, 0)
            assert edge.statistics.vectors == edge.statistics.steps - 1  # none with the last
        rounds = synchronous_rounds(drafter, text, sampling, vectors, drafts=8)
        assert_same(rounds, edge.statistics)
        hits += rounds.accepted
    assert hits > 10
    assert target.pool.free_pages == target.pool.page_count


def test_vectors_are_projections_of_the_hidden_states(family, target) -> None:
    ((name, projection),) = load_projections(
        [str(family.projection)], TransformersBackend(target).facts, name="big", model="big"
    ).items()
    sampled = Sampling(temperature=1.0, max_tokens=12)
    texts = TextWriter(target, {name: projection}, max_age=3).write(requests(5, sampled))
    model = LlamaForCausalLM.from_pretrained(family.target)
    for text in texts:
        with torch.inference_mode():
            states = model(torch.tensor([text.transcript]), output_hidden_states=True).hidden_states
            wanted = projection(torch.cat([states[layer][0] for layer in (0, 1)], dim=-1)).numpy()
        vectors, end = text.vectors[name], len(text.transcript) - 1
        assert vectors.first == max(0, text.prompt_length - 4)  # no older one can be asked for
        assert vectors.at(end) is None  # the last token is never processed
        np.testing.assert_allclose(vectors.rows, wanted[vectors.first : end], atol=1e-4)


def test_prompts_wait_for_kv_pages_and_texts_stay_the_same(family, target) -> None:
    sampling = Sampling(temperature=1.0, seed=3, max_tokens=30)
    texts = TextWriter(target).write(requests(12, sampling))
    narrow = load_target(str(family.target), kv_tokens=192)
    again = TextWriter(narrow).write(requests(12, sampling))
    assert [text.request.id for text in again] == [str(i) for i in range(12)]
    assert [text.transcript for text in again] == [text.transcript for text in texts]
    assert {len(text) for text in texts} != {30}  # some end by themselves
    assert narrow.pool.free_pages == narrow.pool.page_count


def test_a_prompt_that_the_target_cannot_read_is_named(target) -> None:
    with pytest.raises(ConfigError, match=r"'far' of 'docs' has 300 tokens; the target holds 192") as refused:
        TextWriter(target).write([TextRequest((3,) * 300, GREEDY, "far", "docs")])
    assert refused.value.field == "prompts"

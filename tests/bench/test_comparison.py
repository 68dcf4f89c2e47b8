"""`outrider compare`: its rounds are those of real sessions, its results those of its rounds, its numbers add up."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from outrider.bench.comparison.record import Variant, in_front
from outrider.bench.comparison.rounds import Rounds, SentVectors, synchronous_rounds
from outrider.bench.comparison.summary import Summary, Trial
from outrider.bench.replay.optimum import synchronous
from outrider.bench.replay.traced import replay
from outrider.bench.replay.traces import HitTrace
from outrider.bench.simulator.clock import Costs
from outrider.cloud.distribution import VerificationInput
from outrider.cloud.sampling import Sampler
from outrider.cloud.steering import Projection
from outrider.cloud.steering_vectors import SteeringVectors, load_projections
from outrider.cloud.target import Rows, Target, load_target
from outrider.cloud.testing import save_tiny_target
from outrider.cloud.text_writer import TextRequest, TextVectors, TextWriter, WrittenText
from outrider.deploy.cli import main
from outrider.deploy.link.shape import LinkShape
from outrider.deploy.prompts import choose_prompts
from outrider.edge.drafters import find_package
from outrider.edge.drafters.onnx import OnnxDrafter
from outrider.edge.drafters.proposals import ProposalRule
from outrider.edge.drafters.protocol import DraftState, TokenPrefix
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
from outrider.proto.testing import word_tokenizer
from outrider.proto.tokenizer import tokenizer_hash
from outrider.proto.types import (
    CommittedToken,
    Draft,
    DraftToken,
    Open,
    Patience,
    Sampling,
    SteeringPrecision,
    SteeringRequest,
    token_ids,
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


class Obedient:
    """Drafts as many tokens right as the first number of its vector says, none without, and records what comes."""

    name, version, steering = "obedient", "1", None

    def __init__(self, text: WrittenText) -> None:
        self.text = text
        self.steered: list[tuple[int, float | None]] = []  # after so many tokens a round began with this vector
        self.drafted: list[int] = []  # in each round

    def open(self, rule: ProposalRule) -> _ObedientState:
        return _ObedientState(self)


class _ObedientState(TokenPrefix):
    def __init__(self, drafter: Obedient) -> None:
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
    """float16, which holds small whole numbers exactly."""
    rows = np.asarray(numbers, dtype=np.float32)[:, None]
    return SentVectors(TextVectors(first, rows), SteeringPrecision.FLOAT16, age)


def test_a_drafter_that_a_code_makes_right_three_times_commits_four_tokens_a_step() -> None:
    text = text_of(41)
    rounds = synchronous_rounds(Obedient(text), text, GREEDY, sent(np.full(60, 3.0)), drafts=8)
    assert rounds.tokens == 41
    assert rounds.steps == 1 + 10  # the first has no vector: its one token is the target's own
    assert (rounds.accepted, rounds.compared) == (
        30,
        40,
    )  # in every round but the last one more was verified, and missed
    assert (len(rounds.first_s), len(rounds.next_s)) == (10, 29)  # the text's first round, which reads, left out


@pytest.mark.parametrize("age", [0, 1, 5])
def test_a_round_is_steered_by_the_code_of_the_given_age(age) -> None:
    text = text_of(30)
    drafter = Obedient(text)
    numbers = np.arange(60) % 3
    synchronous_rounds(drafter, text, GREEDY, sent(numbers, age=age), drafts=8)
    assert len(drafter.steered) > 10
    for length, vector in drafter.steered:
        position = length - 2 - age
        assert vector == (numbers[position] if position >= 0 else None)


def test_where_no_code_is_so_old_the_drafter_is_steered_by_none() -> None:
    text = text_of(6)
    drafter = Obedient(text)
    synchronous_rounds(drafter, text, GREEDY, sent(np.ones(20), first=6, age=2), drafts=2)
    assert drafter.steered == [(6, None), (7, None), (8, None), (9, None), (10, 1.0)]


def test_a_drafter_that_gets_no_codes_is_never_steered() -> None:
    text = text_of(10)
    drafter = Obedient(text)
    assert synchronous_rounds(drafter, text, GREEDY, None, drafts=4).steps == 10
    assert {vector for _, vector in drafter.steered} == {None}


def test_no_more_is_drafted_than_the_text_may_have_after_the_next_token() -> None:
    always = sent(np.full(60, 8.0))
    drafter = Obedient(text := text_of(12))
    assert synchronous_rounds(drafter, text, GREEDY, always, drafts=4).steps == 4
    assert drafter.drafted == [1, 4, 4, 0]  # its first draft is wrong; one token is left, and the target's own
    drafter = Obedient(ended := replace(text, limit=40))  # it ended by itself, which nobody could know beforehand
    rounds = synchronous_rounds(drafter, ended, GREEDY, always, drafts=8)
    assert drafter.drafted == [1, 8, 2]
    assert (rounds.steps, rounds.tokens, rounds.accepted, rounds.compared) == (3, 12, 10, 11)


def test_what_follows_a_wrong_draft_is_not_drafted_at_all() -> None:
    drafter = Obedient(text := text_of(20))
    synchronous_rounds(drafter, text, GREEDY, sent(np.full(60, 2.0)), drafts=8)
    assert drafter.drafted == [1, 3, 3, 3, 3, 3, 3, 0]


def test_codes_are_rounded_as_they_travel() -> None:
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
    """A whole text between an edge and a verifier that wait for each other; the edge when it is done."""
    verifier = VerifierSession(frame, rules, 0.0)
    edge = EdgeSession(frame, FixedWindow(frame.window), steering=steering, job_tokens=lambda _: 3)

    def tell(event: EdgeEvent) -> None:
        for instruction in edge.handle(event, 0.0):
            match instruction:
                case Send(Draft() as frame):
                    verifier.on_draft(frame, 0.0)
                case DraftJob() as job:
                    state.truncate(job.truncate_to)
                    if job.steer is not None:
                        state.steer(job.steer.vector, job.steer.since)
                    state.extend(job.extend_with)
                    tell(Drafted(job, state.propose(job.count), 0.001))

    tell(StreamReady(b""))
    tell(verifier.opened())
    while verifier.finish is None:
        tell(verifier.on_verified(step(verifier, verifier.block()), 0.0))
    state.close()
    return edge


def assert_same(rounds: Rounds, found: EdgeStatistics) -> None:
    assert (rounds.tokens, rounds.steps) == (found.committed, found.steps)
    assert (rounds.accepted, rounds.compared) == (found.hits, found.compared)


@pytest.mark.parametrize("seed", range(12))
def test_rounds_are_a_sessions_and_an_engine_that_reads_first_takes_one_more(seed) -> None:
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
    assert 0 <= outcome.statistics.steps - rounds.steps <= 1  # the first, whose drafts are still on their way


# --- a real target, and drafters whose graphs are small ---

SIZES = {
    "vocab_size": tiny_drafter.VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "max_position_embeddings": 192,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
WORDS = word_tokenizer(tiny_drafter.VOCAB)


@dataclass(frozen=True)
class Family:
    """Where they lie: a target, a drafter, the same drafter with steering, and the projection of its vectors."""

    target: Path
    plain: Path
    steered: Path
    projection: Path


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp("family")
    found = Family(*(folder / name for name in ("target", "plain", "steered", "projection.safetensors")))
    save_tiny_target(found.target, seed=0, sharpness=1, **SIZES)
    projection = Projection((0, 1), hidden=32, rank=tiny_drafter.RANK, target="big").save(found.projection)
    tiny_package(found.plain, tiny_drafter.tiny_graph())
    manifest = tiny_drafter.STEERING_MANIFEST | {"projection": projection}
    graphs = tiny_drafter.tiny_graph(steered=True), tiny_drafter.steering_graph()
    tiny_package(found.steered, *graphs, steering=manifest)
    return found


def tiny_package(folder: Path, *graphs: object, **manifest: object) -> None:
    """With the target's tokenizer instead of its own."""
    folder.mkdir()
    tiny_drafter.write_package(folder, *graphs, name=folder.name, **manifest)
    (folder / "tokenizer.json").write_text(WORDS)
    promised = json.loads((folder / "manifest.json").read_text())
    promised["tokenizer_sha256"] = tokenizer_hash(WORDS)
    file = {"sha256": hashlib.sha256(WORDS.encode()).hexdigest(), "bytes": len(WORDS)}
    promised["files"]["tokenizer.json"] = file
    (folder / "manifest.json").write_text(json.dumps(promised))


@pytest.fixture(scope="module")
def target(family: Family) -> Target:
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
    """Of eight drafts a round; steered where there are projections."""
    wish = SteeringRequest(next(iter(projections))) if projections else None
    frame = Open(
        "m", target.tokenizer_sha256, prompt, sampling, "s", patience=Patience(math.inf, 8), window=8, steering=wish
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
    sampler, vectors = Sampler(target.device), SteeringVectors(target, projections)
    cache = target.pool.allocate(len(prompt) + sampling.max_tokens)

    def step(verifier: VerifierSession, block: tuple[DraftToken, ...]) -> Verified:
        cache.truncate(min(cache.length, len(verifier.transcript) - 1))
        verified = VerificationInput(verifier.sampling, verifier.transcript, len(prompt), block)
        rows = Rows(cache, (*verifier.transcript[cache.length :], *token_ids(block)), len(block) + 1)
        (sampled,) = sampler.sample(target.forward([rows]), [verified])
        (vector,) = vectors.of([verifier.wanted_vector], [verified], [sampled])
        return Verified(block, sampled.tokens, steering=vector)

    state = drafter.open(ProposalRule(sampling, prompt_length=len(prompt)))
    edge_codes = DrafterSteering(tiny_drafter.RANK, FixedSteering()) if projections else None
    edge = by_session_machine(frame, rules, state, step, edge_codes)
    target.pool.release(cache)
    return edge


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["plain", "steered"])
def test_texts_and_rounds_are_those_of_real_sessions_of_the_same_target_and_drafter(
    family, target, kind, temperature
) -> None:
    drafter = OnnxDrafter(find_package(getattr(family, kind)))
    projections = {}
    if kind == "steered":
        projections = load_projections([str(family.projection)], target, name="big", model="big")
    likely = ((1, 4.0), *((token, 9.0) for token in range(2, 6)))  # or two that know nothing of each other hardly agree
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


def test_codes_are_the_projections_of_the_hidden_states_of_the_models_own_forward(family, target) -> None:
    ((name, projection),) = load_projections([str(family.projection)], target, name="big", model="big").items()
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


def test_prompts_wait_for_kv_pages_and_the_texts_are_the_same(family, target) -> None:
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


# --- results ---


def trial_of(by_variant: dict[Variant, list[tuple[int, int]]], domains: str) -> Trial:
    """Of (tokens, steps) of each text."""
    texts = [
        WrittenText(TextRequest((1,), GREEDY, str(i), domain), (1, *range(tokens)), tokens)
        for i, (domain, (tokens, _)) in enumerate(zip(domains, next(iter(by_variant.values())), strict=True))
    ]
    rounds = {
        variant: [Rounds(tokens, steps, tokens - steps, tokens, (0.001, 0.003), (0.004,)) for tokens, steps in counts]
        for variant, counts in by_variant.items()
    }
    return Trial(1.0, texts, rounds)


SLOW, FAST = Variant("slow"), Variant("fast", "int8", 0)


def test_block_efficiency_is_all_tokens_over_all_steps() -> None:
    trial = trial_of({SLOW: [(10, 10), (30, 10), (20, 4)], FAST: [(10, 5), (30, 5), (20, 4)]}, "aab")
    found = {(f.domain, f.variant): f for f in Summary(trial, seed=0).results()}
    assert set(found) == {(domain, variant) for domain in ("a", "b", None) for variant in (SLOW, FAST)}
    assert found["a", SLOW].block_efficiency == 40 / 20
    assert found["b", SLOW].block_efficiency == 20 / 4
    assert found[None, SLOW].block_efficiency == 60 / 24
    assert (found[None, FAST].texts, found[None, FAST].tokens, found[None, FAST].steps) == (3, 60, 14)
    assert found[None, SLOW].acceptance == (60 - 24) / 60
    assert (found[None, SLOW].first_ms, found[None, SLOW].next_ms) == (pytest.approx(2.0), pytest.approx(4.0))
    assert found["b", SLOW].interval is None  # one prompt says nothing of others
    assert found[None, SLOW].interval is None


def test_ratios_are_paired_so_a_constant_one_has_no_width() -> None:
    rng = random.Random(1)
    counts = [(2 * rng.randint(20, 90), 2 * rng.randint(5, 20)) for _ in range(40)]
    trial = trial_of({SLOW: counts, FAST: [(tokens, steps // 2) for tokens, steps in counts]}, "ab" * 20)
    summary = Summary(trial, seed=0)
    for ratio in [*summary.ratios(FAST, [SLOW]), *summary.mean_ratios(FAST, [SLOW])]:
        assert ratio.ratio == pytest.approx(2.0)
        assert (ratio.interval.low, ratio.interval.high) == pytest.approx((2.0, 2.0))
    for result in summary.results():
        assert result.interval.low < result.block_efficiency < result.interval.high


def test_the_mean_of_the_domains_ratios_counts_each_domain_once() -> None:
    slow = [(60, 60)] * 30 + [(60, 30)] * 2
    fast = [(60, 30)] * 30 + [(60, 30)] * 2
    summary = Summary(trial_of({SLOW: slow, FAST: fast}, "a" * 30 + "b" * 2), seed=0)
    by_domain = {ratio.domain: ratio.ratio for ratio in summary.ratios(FAST, [SLOW])}
    assert by_domain == {"a": 2.0, "b": 1.0, None: pytest.approx((60 * 30 + 30 * 2) / (32 * 30))}
    (mean,) = summary.mean_ratios(FAST, [SLOW])
    assert mean.ratio == 1.5
    alone = Summary(trial_of({SLOW: slow, FAST: fast}, "a" * 32), seed=0)
    assert alone.mean_ratios(FAST, [SLOW]) == []
    assert [result.domain for result in alone.results()] == [None, None]


def test_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(2)
    inside = 0
    for trial in range(60):
        steps = rng.geometric(0.1, 40) + 4
        found = Summary(trial_of({SLOW: [(60, int(count)) for count in steps]}, "a" * 40), seed=trial).results()[0]
        inside += found.interval.low < 60 / (1 / 0.1 + 4) < found.interval.high
    assert 51 <= inside <= 60  # 95 % of them, less a little for so few prompts


def test_what_stands_in_front_has_the_first_age_or_none() -> None:
    variants = [Variant("a"), *(Variant("b", p, age) for p in ("int8", "float16") for age in (2, 0)), Variant("b")]
    assert in_front(variants) == [variants[0], variants[1], variants[3], variants[5]]


# --- prompts ---


def test_prompts_come_from_a_file_or_a_folder_so_many_of_each_domain(tmp_path) -> None:
    def lines(*domains: str) -> str:
        return "".join(json.dumps({"id": i, "prompt": "x", "domain": d}) + "\n" for i, d in enumerate(domains))

    (tmp_path / "b.jsonl").write_text(lines("", "", ""))
    (tmp_path / "a.jsonl").write_text(lines("c", "c", "c"))
    (tmp_path / "other.txt").write_text("not read")
    found = [(prompt.domain, prompt.id) for prompt in choose_prompts(tmp_path, 2)]
    assert found == [("c", "0"), ("c", "1"), ("b", "0"), ("b", "1")]
    mixed = tmp_path / "mixed.jsonl"
    mixed.write_text(lines("x", "y", "x", "x", "y"))
    assert [(p.domain, p.id) for p in choose_prompts(mixed, 2)] == [("x", "0"), ("x", "2"), ("y", "1"), ("y", "4")]
    assert {prompt.domain for prompt in choose_prompts(None, 1)} == {"code", "docs", "prose", "math"}
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty holds no DOMAIN\.jsonl"):
        choose_prompts(tmp_path / "empty", 1)


# --- the command ---


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(9)
    path = tmp_path_factory.mktemp("prompts") / "words.jsonl"
    records = [
        {
            "id": str(i),
            "domain": f"d{i % 2}",
            "prompt": " ".join(f"w{rng.randrange(2, tiny_drafter.VOCAB)}" for _ in range(6)),
        }
        for i in range(6)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_the_command_compares_every_variant_and_writes_all_of_it(family, prompt_file, tmp_path, capsys) -> None:
    arguments = [
        "compare", f"plain={family.plain}", f"steered={family.steered}", "--steering", str(family.projection),
        "--target", str(family.target), "--prompts", str(prompt_file), "--max-tokens", "20", "--drafts", "4",
        "--age", "0,3", "--precision", "int8,float16,none", "--json", str(tmp_path / "c.json"),
        "--plot", str(tmp_path / "c.png"), "--threads", "1",
    ]  # fmt: skip
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    record = json.loads((tmp_path / "c.json").read_text())
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    names = [(v["drafter"], v["vectors"], v["age"]) for v in record["variants"]]
    steered = [("steered", vectors, age) for vectors in ("int8", "float16") for age in (0, 3)]
    assert names == [("plain", "none", None), *steered, ("steered", "none", None)]
    assert len(record["results"]) == 2 * 3 * 6  # temperatures, domains and all, variants
    assert len(record["texts"]) == 2 * 6
    for result in record["results"]:
        own = [t for t in record["texts"] if t["temperature"] == result["temperature"]]
        own = [t for t in own if result["domain"] in (t["domain"], None)]
        at = record["variants"].index(result["variant"])
        assert result["tokens"] == sum(t["tokens"] for t in own)
        assert result["steps"] == sum(t["steps"][at] for t in own)
        assert result["block_efficiency"] == result["tokens"] / result["steps"]
        assert result["first_ms"] > 0
        without = {(f["temperature"], f["domain"]): f for f in record["results"] if f["variant"]["drafter"] == "plain"}
        if result["variant"]["vectors"] == "none":  # here both drafters are one, but for vectors
            assert result["steps"] == without[result["temperature"], result["domain"]]["steps"]
    front = [("plain", "none"), ("steered", "float16"), ("steered", "none")]
    for ratio in record["ratios"]:
        assert ratio["variant"] == {"drafter": "steered", "vectors": "int8", "age": 0}
        assert (ratio["against"]["drafter"], ratio["against"]["vectors"]) in front
    assert len(record["ratios"]) == 2 * 3 * 3
    assert len(record["mean_ratios"]) == 2 * 3
    assert [d["rank"] for d in record["drafters"]] == [None, tiny_drafter.RANK]
    assert record["environment"]["target"] == str(family.target)
    assert record["drafts"] == 4
    assert [step["rows"] for step in record["steps"]] == [1, 5, 9]
    for step in record["steps"]:
        assert step["projection"] == record["drafters"][1]["projection"]
        assert step["plain_ms"] > 0
        assert 0 < step["low"] <= step["ratio"] <= step["high"]
    for said in (
        "A verifier's step",
        "T = 0, 4 drafts a round",
        "/ plain",
        "mean of domains",
        "By age of the vectors",
        "float16",
    ):
        assert said in out
    assert max(map(len, out.splitlines())) <= 100
    assert "12 texts" not in err
    assert "6 texts of" in err


def test_without_codes_no_projection_is_needed(family, prompt_file, capsys) -> None:
    arguments = ["compare", str(family.steered), "--target", str(family.target), "--prompts", str(prompt_file)]
    small = ["--max-tokens", "4", "--temperature", "0", "--per-domain", "1", "--threads", "1"]
    assert main([*arguments, *small, "--precision", "none"]) == 0
    out, _ = capsys.readouterr()
    assert "over that of others" not in out  # there is no other
    assert "A verifier's step" not in out
    assert main([*arguments, *small]) == 1
    _, err = capsys.readouterr()
    said = err.splitlines()[-1]
    assert said.startswith("outrider compare: steering: none is projection ")
    assert said.endswith(
        "whose vectors 'steered' takes; name its projection.safetensors, or compare it with --precision none"
    )


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["general", "general"], 1, "package: two drafters are called 'general'; name them by NAME=FOLDER"),
        (["=general"], 1, "package: '=general' has no name before the =; write NAME=FOLDER"),
        (["nowhere"], 1, "no drafter 'nowhere': give a folder with a manifest.json"),
        (["general", "--temperature", "0,0"], 1, "temperature: names something twice; once is enough"),
        (["general", "--age", ""], 1, "age: must name something"),
        (["general", "--precision", "int4"], 2, "--precision: 'int4' is none of int8, float16, none"),
        (["general", "--plot", "figure.doc"], 1, "plot: figure.doc does not end in .png, .pdf, .svg"),
        (["general", "--prompts", "nowhere"], 1, "prompts: cannot read nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_clear_line(arguments, status, says, capfd) -> None:
    try:
        got = main(["compare", *arguments])
    except SystemExit as ended:
        got = int(ended.code or 0)
    out, err = capfd.readouterr()
    assert got == status
    mistakes = [line for line in err.splitlines() if line.startswith("outrider compare: ")]
    assert len(mistakes) == 1
    assert says in mistakes[0]
    assert out == ""


def test_a_drafter_with_another_tokenizer_is_refused(family, capfd) -> None:
    assert main(["compare", f"tiny={family.plain}", "g=general", "--target", str(family.target), "--threads", "1"]) == 1
    assert "outrider compare: package: 'g' has another tokenizer than the target" in capfd.readouterr().err

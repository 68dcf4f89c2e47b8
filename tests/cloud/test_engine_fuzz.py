"""Texts of many edges on two engines that fail in every known way: each text is the target's, and no page leaks.

The edges are real session machines on a bad link, with drafters that are right now and then; they cancel, and go on
with further turns. The engines are real but for their thread, on a target whose logits hash what its KV cache holds,
in plain passes, filled up ones and tiles; most have a drafter beside the target, which is wrong now and then, slow,
raises or hangs. What else fails: steps of one text, the device once or for good, too large steps, plans of one text,
once or for good. Only texts that are at fault themselves may end with an error.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from bad_link import Faults, FaultyLink
from fuzzed_fleet import BROKEN_PLAN, NOTICED_S, PROJECTION, RANK, EngineStream, Fleet, HashedGrammar, allowed_after
from hashing_model import EOS, LAYERS, NO_NUMBER, PLAIN, POISON
from oracle_drafters import ScriptedDrafters, drafter_of

from outrider.cloud.grammar.grammar import Allowed
from outrider.cloud.serving import batching, recovery
from outrider.cloud.serving.batching import Share
from outrider.cloud.serving.own_drafter import DraftedText
from outrider.cloud.serving.recovery import Recovery
from outrider.cloud.serving.service_goals import StepGoals
from outrider.cloud.serving.slots import Slot
from outrider.cloud.target.kv_cache import PagedKVCache, SessionCache
from outrider.cloud.target.prefix_tree import CachedPage, PrefixTree
from outrider.cloud.target.projection import FoldedProjection
from outrider.cloud.target.sampler import Sampler
from outrider.cloud.target.target import ROUNDED, TILES, Target
from outrider.cloud.target.verification import VerificationInput
from outrider.drafters import ProposalRule
from outrider.proto.errors import Internal, Unavailable
from outrider.proto.policy.steering_rate import FixedSteering, SteeringRate
from outrider.proto.session import DrafterSteering, DraftJob, EdgeSession, StopRequested, StreamReady, TurnBegun
from outrider.proto.steering_vector import encode
from outrider.proto.types import (
    CloudFrame,
    Commit,
    FinishReason,
    Grammar,
    GrammarKind,
    Open,
    Patience,
    Sampling,
    ServiceGoal,
    SteeringPrecision,
    SteeringRequest,
)
from research.simulator.clock import VirtualClock
from research.simulator.simulated_verifier import SimulatedStream
from research.simulator.simulation import Simulation

TEXTS = 7
ENOUGH_S = 400.0
QUICK, LONG = 10, 60
SERVICES = (
    *(None, ServiceGoal(batch=True), ServiceGoal(batch=True)),
    *(ServiceGoal(gap_s=0.01), ServiceGoal(gap_s=0.02, first_token_s=0.05)),
)
# A seed, on average.
LEAST = {
    "texts": 5, "texts with a grammar": 1, "tokens": 60, "accepted drafts": 8, "vectors": 8, "further turns": 3,
    "resumes": 4, "ended by a fault of its own": 1, "before": 1, "written": 1, "sampled": 1, "rows": 0.4, "plan": 0.4,
    "pages": 0.4, "verifiers replaced": 0.4, "drain": 0.05, "preempted": 0.05, "filled up": 0.1, "tiles": 0.1,
    "cached tokens": 100, "verified here": 10, "accepted here": 5, "texts drafted here": 1, "verified beside": 5,
    "verified beside with a grammar": 1, "whole source": 0.5, "slow source": 0.1, "failures here": 0.1,
    "hung here": 0.1, "gaps": 20, "sat out": 0.02, "drafts given up": 1,
}  # fmt: skip


class Text(Simulation):
    """The turns of one edge, and what is wrong with them.

    Attributes:
        guilty: whether a step or plan of the present turn fails for what the text itself is.
        over: whether there will be no further turn.
    """

    def __init__(self, fleet: Fleet, number: int, rng: random.Random, counts: Counter[str]) -> None:
        self._fleet = fleet
        self._rng = rng
        self._counts = counts
        self._sampler = Sampler(torch.device("cpu"))
        self._turns_left = rng.choice((0, 0, 1, 3))
        self._turn = 0
        kind = rng.choice(("", "", "", "", "", "poison", "no number", BROKEN_PLAN))
        self._bad_token = {"poison": POISON, "no number": NO_NUMBER}.get(kind, 0)
        self._broken_plan = kind == BROKEN_PLAN
        self.guilty = False
        self.over = self._checked = False
        prompt = self._prompt(self._bad_token if not self._turns_left else 0)
        steered = rng.random() < 0.4
        frame = Open(
            "hashing",
            fleet.verifiers[0].rules.tokenizer_sha256,
            prompt,
            self._sampling(),
            f"{kind.replace(' ', '-') or 'text'}-{number}",
            keep_s=rng.choice((0.0, 60.0)),
            patience=rng.choice((None, None, Patience(0.0), Patience(0.02, 2), Patience(math.inf, 3))),
            drafts_here=rng.choice((None, None, None, 0, 1, 4)),
            steering=SteeringRequest(PROJECTION) if steered else None,
            trees=rng.random() < 0.7,
            service=random.Random(f"service {number} {prompt}").choice(SERVICES),
        )
        rate = SteeringRate(rng.choice(list(SteeringPrecision)), rng.choice((1, 3)))
        edge = EdgeSession(
            frame,
            send_q=rng.random() < 0.3,
            steering=DrafterSteering(RANK, FixedSteering(rate)) if steered else None,
            job_tokens=lambda _: rng.choice((1, 3, 6)),
        )
        vocab = fleet.language.vocab_size
        confidence = rng.choice(("none", "telling", "false"))
        proposer = drafter_of(
            self.token_after, number, rng.choice((1.0, 0.9, 0.6, 0.0)), 0.1, 1 << 30, confidence, vocab, 2
        )
        faults = Faults(
            delay_s=rng.choice((0.0, 0.002, 0.03)),
            jitter_s=rng.choice((0.0, 0.02)),
            duplicated=rng.choice((0.0, 0.2)),
            reordered=rng.choice((0.0, 0.2)),
        )
        self._breaks_every_s = rng.choice((math.inf, 0.5, 0.1))
        drafters = ScriptedDrafters([proposer], rng.choice((0.0003, 0.004)), rng)
        new_link = functools.partial(FaultyLink, faults, rng)
        super().__init__(fleet.clock, edge, fleet.verifiers[0], drafters, new_link)  # type: ignore[arg-type]
        self._note_guilt(prompt)
        self._may_cancel()

    # --- what is asked for ---

    def _prompt(self, bad_token: int) -> tuple[int, ...]:
        rng, vocab = self._rng, self._fleet.language.vocab_size
        tokens = [rng.randrange(PLAIN, vocab) for _ in range(rng.randrange(1, rng.choice((10, 30, 100))))]
        if len(tokens) < 30 and rng.random() < 0.7:
            tokens = [*itertools.chain(*rng.choices(self._fleet.segments, k=rng.randrange(1, 4))), *tokens]
        if bad_token:
            tokens.insert(rng.randrange(len(tokens) + 1), bad_token)
        return tuple(tokens)

    def _sampling(self) -> Sampling:
        rng, vocab = self._rng, self._fleet.language.vocab_size
        grammar = Grammar(GrammarKind.REGEX, f"half-{rng.randrange(9)}") if rng.random() < 0.3 else None
        return Sampling(
            temperature=rng.choice((0.0, 0.7, 1.0, 1.3)),
            seed=rng.randrange(1 << 64),
            top_k=rng.choice((0, 0, 5, 30)),
            top_p=rng.choice((1.0, 1.0, 0.9, 0.5)),
            min_p=rng.choice((0.0, 0.0, 0.05)),
            repetition_penalty=rng.choice((1.0, 1.2)),
            presence_penalty=rng.choice((0.0, 0.5)),
            frequency_penalty=rng.choice((0.0, 0.4)),
            logit_bias=rng.choice(((), ((PLAIN, 3.0), (PLAIN + 2, -100.0)))),
            max_tokens=rng.randrange(1, rng.choice((12, 25, 60))),
            stop_tokens=rng.choice(((), (), (vocab - 2, vocab - 3))),
            ignore_eos=grammar is None and rng.random() < 0.5,
            grammar=grammar,
        )

    def _note_guilt(self, prompt: Sequence[int]) -> None:
        self.guilty = self._broken_plan or bool({POISON, NO_NUMBER} & {*prompt})

    def _may_cancel(self) -> None:
        if self._rng.random() < 0.15:
            turn = self._turn
            self.clock.at(self.clock.now + self._rng.random(), lambda: self._cancel(turn))

    def _cancel(self, turn: int) -> None:
        if self._turn == turn and self.done is None:
            self.handle(StopRequested())
            self._after_event()

    # --- what must come ---

    def token_after(self, text: tuple[int, ...]) -> int:
        """The target's token, from the logits of one row."""
        return self._token_after(text, self.edge.sampling, self.edge.prompt_length)

    @functools.lru_cache(maxsize=1 << 10)  # noqa: B019 - no longer than its test
    def _token_after(self, text: tuple[int, ...], sampling: Sampling, start: int) -> int:
        language = self._fleet.language
        grammar = sampling.grammar
        allowed = None if grammar is None else allowed_after(grammar, text[start:], language.vocab_size)[None]
        logits = torch.from_numpy(language.logits(text))[None]
        inputs = [VerificationInput(sampling, list(text), start, (), allowed)]
        [sampled], _ = self._sampler.sample_numbers(logits, inputs)  # a drafter may be asked about a spoiled text
        return sampled.tokens[0].id

    def whole(self) -> tuple[list[int], FinishReason]:
        """The text of the present turn, decoded token by token, and why it ends."""
        sampling, text = self.edge.sampling, tuple(self.edge.transcript[: self.edge.prompt_length])
        said: list[int] = []
        while True:
            said.append(self.token_after((*text, *said)))
            if said[-1] == EOS and not sampling.ignore_eos:
                return said, FinishReason.EOS
            if said[-1] in sampling.stop_tokens:
                return said, FinishReason.STOP_TOKEN
            if len(said) == sampling.max_tokens:
                return said, FinishReason.LENGTH

    def _check(self) -> None:
        done = self.done
        assert self.emitted == self.edge.transcript[self.edge.prompt_length :]
        if done.error is not None:
            assert self.guilty, f"an innocent text ends with {done.error!r}"
            assert isinstance(done.error, Internal), repr(done.error)
            self._counts["ended by a fault of its own"] += 1
            return
        if NO_NUMBER in self.edge.transcript or POISON in self.edge.transcript:
            assert done.finish is FinishReason.CANCELLED
            assert self.emitted == []
            return
        said, finish = self.whole()
        if done.finish is FinishReason.CANCELLED:
            assert self.emitted == said[: len(self.emitted)]
        else:
            assert (self.emitted, done.finish) == (said, finish)
        statistics = self.edge.statistics
        self._counts["texts"] += 1
        self._counts["texts with a grammar"] += self.edge.sampling.grammar is not None
        self._counts["tokens"] += len(self.emitted)
        self._counts["accepted drafts"] += statistics.accepted
        self._counts["resumes"] += statistics.resumes
        self._counts["vectors"] += statistics.vectors
        assert statistics.accepted_cloud <= min(statistics.accepted, statistics.verified_cloud)
        assert statistics.verified_cloud <= statistics.verified
        self._counts["texts drafted here"] += statistics.accepted_cloud > 0
        self._counts["verified beside"] += statistics.verified_beside
        self._counts["gaps"] += statistics.service.gaps if statistics.service is not None else 0
        self._counts["verified beside with a grammar"] += (
            statistics.verified_beside if self.edge.sampling.grammar is not None else 0
        )

    def _check_vector(self, commit: Commit) -> None:
        if commit.steering is None:
            return
        text = tuple(self.edge.transcript[: commit.start + len(commit.tokens) - 1])
        taps = np.concatenate([self._fleet.language.hidden(text, layer) for layer in range(LAYERS)])
        [vector] = FoldedProjection(self._fleet.projection, torch.device("cpu"))(torch.from_numpy(taps)[None])
        expected = encode(vector, commit.steering.precision)
        stored = "<f2" if commit.steering.precision is SteeringPrecision.FLOAT16 else np.int8
        got, wanted = (np.frombuffer(each.values, stored).astype(float) for each in (commit.steering, expected))
        assert np.allclose(got, wanted, rtol=1e-2, atol=1.001), "of another position"

    # --- what happens ---

    def open_stream(self) -> None:
        self.num_streams += 1
        self.verifier = self._rng.choices(self._fleet.verifiers, (5, 1))[0]  # type: ignore[assignment]
        stream = self.stream = EngineStream(
            self.clock,
            self._new_link(self.clock.now),
            self.verifier,  # type: ignore[arg-type]
            self.receive,
            self.lose_stream,
        )
        self.handle(StreamReady(b""))
        if self._breaks_every_s < math.inf and self._fleet.failing:
            lasts_s = self._rng.expovariate(1 / self._breaks_every_s)
            self.clock.at(self.clock.now + lasts_s, lambda: self.lose_stream(stream, Unavailable("the link broke")))

    def receive(self, stream: SimulatedStream, frame: CloudFrame) -> None:
        before = len(self.edge.transcript)
        super().receive(stream, frame)
        if isinstance(frame, Commit) and len(self.edge.transcript) > before:
            self._check_vector(frame)
            self._counts["cached tokens"] += frame.cached_tokens

    def handle(self, event: object) -> None:
        super().handle(event)  # type: ignore[arg-type]
        self._after_event()

    def _after_event(self) -> None:
        """Check a turn that has ended, and begin the next a little later."""
        if self.done is None or self._checked:
            return
        self._checked = True
        self._check()
        if self.done.error is not None or not self._turns_left:
            self.over = True
            self._leave_stream()
            return
        self._turns_left -= 1
        self._turn += 1
        self.clock.at(self.clock.now + self._rng.choice((0.0, 0.01, 0.4)), self._begin_turn)

    def _begin_turn(self) -> None:
        self._counts["further turns"] += 1
        start = self._rng.choice((len(self.edge.transcript), self._rng.randrange(len(self.edge.transcript) + 1)))
        prompt = self._prompt(self._bad_token if not self._turns_left else 0)
        if start + len(prompt) > 100:
            start = 0
        self.emitted.clear()
        self.done, self._checked = None, False
        self._note_guilt(prompt)
        self.handle(TurnBegun(start, prompt, self._sampling()))
        self._may_cancel()


def run(seed: int, counts: Counter[str]) -> None:
    """A few texts, most at the same time, until all are over; then nothing may be left of them."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        clock = VirtualClock()
        fleet = Fleet(seed, clock, monkeypatch)
        count_what_is_held(monkeypatch, counts)
        rng = random.Random(f"texts {seed}")
        texts: list[Text] = []

        def begin(number: int) -> None:
            texts.append(Text(fleet, number, random.Random(f"text {seed} {number}"), counts))
            texts[-1].begin()

        for number in range(TEXTS):
            clock.at(rng.choice((0.0, 0.0, rng.random())), functools.partial(begin, number))
        clock.at(20.0, fleet.heal)
        while len(texts) < TEXTS or not all(text.over for text in texts):
            clock.advance()
            assert clock.now < ENOUGH_S, "no end in sight"
        until = clock.now + 2 * NOTICED_S
        clock.at(until, lambda: None)
        while clock.now < until:
            clock.advance()
        for verifier in fleet.verifiers:
            verifier.check_is_empty()
        counts.update(fleet.counts)
        counts["filled up"] += fleet.passes is ROUNDED[2]
        counts["tiles"] += fleet.passes is TILES


def count_what_is_held(monkeypatch: pytest.MonkeyPatch, counts: Counter[str]) -> None:
    """Count sessions that sit a step out for goals of service, and drafts that are given up."""
    taking_part, rows_to_cut = StepGoals.taking_part, StepGoals.rows_to_cut

    def counted_part(goals: StepGoals, decoding: Sequence[Slot], now: float) -> Sequence[Slot]:
        part = taking_part(goals, decoding, now)
        counts["sat out"] += len(decoding) - len(part)
        return part

    def counted_rows(goals: StepGoals, *drafts: Any) -> Counter[Slot]:
        given_up = rows_to_cut(goals, *drafts)
        counts["drafts given up"] += given_up.total()
        return given_up

    monkeypatch.setattr(StepGoals, "taking_part", counted_part)
    monkeypatch.setattr(StepGoals, "rows_to_cut", counted_rows)


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def run_all(seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        try:
            run(seed, counts)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    return counts


def check_counts(counts: Counter[str], seeds: int) -> None:
    """Everything must have happened often, or the property would say little."""
    for what, least in LEAST.items():
        assert counts[what] >= int(least * seeds), (what, counts)


def test_engines_that_fail_in_every_way_lose_and_change_no_text() -> None:
    check_counts(run_all(range(QUICK)), QUICK)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_engines_that_fail_in_every_way_for_long_lose_and_change_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    counts = run_all(range(QUICK, LONG))
    with capsys.disabled():
        print("\nengine fuzz:", ", ".join(f"{what}: {count}" for what, count in sorted(counts.items())))
    check_counts(counts, LONG - QUICK)


# === what it would find ===========================================================================================


def no_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Slot, "forget_drafts", lambda _: None)


def lost_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    resize = PagedKVCache.resize

    def resized(pool: PagedKVCache, cache: SessionCache, tokens: int) -> None:
        before = set(cache.pages)
        resize(pool, cache, tokens)
        lost = sorted(before - set(cache.pages))
        pool._holders[lost] += 1
        pool.free_pages -= len(lost)

    monkeypatch.setattr(PagedKVCache, "resize", resized)


def pages_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedKVCache, "_pages_with", lambda _, cache, more: list(range(len(cache.pages) + more)))


def pages_without_parents(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(tree: PrefixTree, isolation: str, tokens: Sequence[int], page_size: int) -> list[CachedPage]:
        pages = {each.tokens: each for each in tree._by_page.values()}
        starts = range(0, len(tokens) - page_size + 1, page_size)
        found = (pages.get(tuple(tokens[start : start + page_size])) for start in starts)
        return list(itertools.takewhile(lambda each: each is not None, found))  # type: ignore[arg-type]

    monkeypatch.setattr(PrefixTree, "find", find)


def copies_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagedKVCache, "_copy", lambda *_: None)


def no_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        HashedGrammar, "_allowed", lambda self, block: Allowed(block, np.ones((len(block) + 1, self._vocab_size), bool))
    )


def masks_of_the_block_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    right = HashedGrammar._allowed_beside

    def allowed(matcher: HashedGrammar, answer: Allowed, *branch: Any) -> list[np.ndarray]:
        return [answer.tokens[0]] * len(right(matcher, answer, *branch))

    monkeypatch.setattr(HashedGrammar, "_allowed_beside", allowed)


def vectors_of_another_row(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Target.tapped
    monkeypatch.setattr(Target, "tapped", lambda target, rows: right(target, [max(0, row - 1) for row in rows]))


def blame_without_a_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recovery, "decode_own_text", lambda _: None)
    monkeypatch.setattr(recovery, "MAX_IN_A_ROW", 1 << 30)


def no_second_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Recovery, "after_step", lambda self, batch: [self.end(share.slot, RuntimeError()) for share in batch.shares]
    )


def own_texts_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DraftedText, "close", lambda _: None)


def own_texts_not_cut_back(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = DraftedText.begin

    def begun(text: DraftedText, job: DraftJob, rule: ProposalRule) -> None:
        begin(text, replace(job, truncate_to=text._state.length if text._state else 0), rule)

    monkeypatch.setattr(DraftedText, "begin", begun)


def whole_branches_of_blocks_that_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    def cut(share: Share, most_rows: int) -> Share:
        block = None if share.block is None else share.block[: most_rows - share.num_tokens]
        return replace(share, block=block)

    monkeypatch.setattr(batching, "cut", cut)


DEFECTS = (
    no_rollback,
    lost_pages,
    pages_of_others,
    pages_without_parents,
    copies_of_nothing,
    no_grammar,
    masks_of_the_block_beside_it,
    vectors_of_another_row,
    blame_without_a_probe,
    no_second_try,
    own_texts_left_open,
    own_texts_not_cut_back,
    whole_branches_of_blocks_that_are_cut,
)


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_found_soon(defect, monkeypatch) -> None:
    defect(monkeypatch)
    with pytest.raises(AssertionError):
        run_all(range(QUICK))

"""Failures in an engine: a session's, those of a step that is too large, and the verifier's own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from collecting_outbox import CollectingOutbox

from outrider.cloud.serving.engine import Engine
from outrider.cloud.serving.recovery import MAX_IN_A_ROW
from outrider.cloud.serving.slots import ANYBODY, Owner
from outrider.cloud.target import distribution
from outrider.cloud.target.distribution import masked
from outrider.cloud.target.target import SessionRows, Target
from outrider.cloud.target.transformers_backend import TransformersBackend
from outrider.cloud.target.verification import VerificationInput
from outrider.cloud.testing import tiny_llama
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto.errors import Internal, Unavailable
from outrider.proto.session.verifier import VerifierRules, VerifierSession
from outrider.proto.testing import word_tokenizer
from outrider.proto.types import (
    Commit,
    Draft,
    DraftToken,
    FinishReason,
    Goaway,
    Open,
    Opened,
    Patience,
    Report,
    Sampling,
    token_ids,
)

VOCAB = 61
POISON = 60
TOKENS = 12
SAMPLING = Sampling(max_tokens=TOKENS, temperature=1.0, ignore_eos=True, logit_bias=((POISON, -100.0),))
TIMEOUT_S = 60.0


class Bench:
    """An engine that is driven by hand, and the frames of its sessions."""

    def __init__(self, **config: Any) -> None:
        self.target = Target(tiny_llama(sharpness=60), word_tokenizer(VOCAB), kv_tokens=4096, page_size=16)
        self.rules = VerifierRules("v", "tiny", self.target.tokenizer_sha256, VOCAB, 1024, frozenset({2}))
        self.failures = 0
        config = {"threads": 1, "max_sessions": 8, **config}
        self.engine = Engine(
            TransformersBackend(self.target), self.rules, VerifierConfig(**config), on_failure=self._failed
        )
        self.boxes: dict[int, CollectingOutbox] = {}
        self.forward_calls = 0
        self._forward = self.target.forward

    def _failed(self) -> None:
        self.failures += 1

    def fails(self, does: Callable[[list[SessionRows]], bool], error: Exception | None = None) -> None:
        """Let the target fail from now on, in the steps for which `does` is true."""

        def forward(batch: list[SessionRows]) -> torch.Tensor:
            self.forward_calls += 1
            if does(batch):
                raise error or RuntimeError("CUDA error: device-side assert triggered")
            return self._forward(batch)

        self.target.forward = forward  # type: ignore[method-assign]

    def open(
        self, key: int, owner: Owner = ANYBODY, *, prompt: tuple[int, ...] = (), **changes: Any
    ) -> CollectingOutbox:
        box = self.boxes[key] = CollectingOutbox()
        sampling = replace(SAMPLING, seed=key)
        fields = {"prompt": prompt or (5, 6, 10 + key), "sampling": sampling, "drafting": False} | changes
        frame = Open("tiny", self.rules.tokenizer_sha256, session=f"s{key}", **fields)
        self.engine.post_open(key, frame, box, owner=replace(owner, isolation=str(key)))  # each reads its own prompt
        return box

    def run(self, steps: int = 10_000) -> None:
        """Do what the engine's thread does, until there is nothing to do."""
        until = time.monotonic() + TIMEOUT_S
        for _ in range(steps):
            assert time.monotonic() < until
            self.engine.turn()
            if self.engine.failed or not (self.engine.sessions.num_running or self.engine.inbox):
                return

    def write(self, sessions: int, steps: int = 10_000) -> None:
        """Let as many sessions decode."""
        for key in range(sessions):
            self.open(key)
        self.run(steps)

    @property
    def corrupted(self) -> float | None:
        """Sessions that ended since there was no number to draw from."""
        metrics = self.engine.metrics
        whose = dict(zip(("model_name", "verifier"), metrics._whose, strict=True))
        return metrics.registry.get_sample_value("outrider:corrupted_requests_total", whose)

    def text(self, key: int) -> list[int]:
        return [t for item in self.boxes[key].items.queue if isinstance(item, Commit) for t in token_ids(item.tokens)]

    def end(self, key: int) -> Any:
        """The error or reason with which a session ended."""
        item = self.boxes[key].items.queue[-1]
        return item.finish if isinstance(item, Commit) else item

    def ends(self, sessions: int) -> list[type]:
        return [type(self.end(key)) for key in range(sessions)]


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.fixture(scope="module")
def texts() -> dict[int, list[int]]:
    """Texts of sessions 0 to 7 where nothing fails."""
    healthy = Bench()
    healthy.write(8)
    return {key: healthy.text(key) for key in range(8)}


def has(token: int) -> Callable[[list[SessionRows]], bool]:
    return lambda batch: any(token in rows.tokens for rows in batch)


# === the verifier's own ===========================================================================================


def test_a_target_that_fails_for_everybody_sends_all_elsewhere(bench) -> None:
    for key in range(4):
        bench.open(key)
    bench.open(4, keep_s=60.0, sampling=Sampling(max_tokens=1))
    while not bench.engine.sessions.num_parked:
        bench.engine.turn()
    bench.fails(lambda _: True)
    bench.run()
    assert all(isinstance(bench.boxes[key].items.queue[0], Opened) for key in range(5)), "before any error"
    assert bench.ends(5) == [Unavailable] * 5, "the edge resumes"
    assert bench.engine.failed
    assert bench.failures == 1
    assert bench.engine.sessions.num_running == bench.engine.sessions.num_parked == 0
    assert bench.engine.backend.capacity.used_pages == 0
    assert bench.forward_calls < 10, "it is noticed soon"
    late = bench.open(9)
    bench.engine.turn()
    assert isinstance(late.items.queue[-1], Unavailable)


def test_an_outbox_that_fails_keeps_no_other_session_from_being_told(bench, monkeypatch) -> None:
    bench.write(3, steps=2)
    bench.fails(lambda _: True)
    monkeypatch.setattr(bench.boxes[1], "put", lambda _: 1 // 0)
    bench.run()
    assert bench.failures == 1
    assert isinstance(bench.end(0), Unavailable)
    assert isinstance(bench.end(2), Unavailable)


def test_a_target_that_says_no_numbers_to_anybody_gives_no_text(bench) -> None:
    forward = bench.target.forward
    bench.target.forward = lambda batch: torch.full_like(forward(batch), math.nan)
    bench.write(3)
    assert bench.engine.failed
    for key in range(3):
        assert bench.text(key) == []
        assert isinstance(bench.end(key), Unavailable)


def test_texts_of_several_keys_that_fail_in_a_row_fail_the_verifier(bench) -> None:
    """Its own text does not fail."""
    bench.fails(lambda batch: any(rows.cache.length == 0 and rows.tokens[0] >= 10 for rows in batch))
    for key in range(MAX_IN_A_ROW):
        assert not bench.engine.failed
        bench.open(key, Owner(f"key {key}"), prompt=(10 + key,))
        bench.run()
    assert bench.engine.failed
    assert bench.ends(MAX_IN_A_ROW) == [Internal, Internal, Unavailable]


@pytest.mark.parametrize("owner", [Owner("one key"), ANYBODY])
def test_texts_of_one_key_never_fail_a_verifier_whose_own_text_succeeds(bench, owner) -> None:
    bench.fails(has(POISON))
    for key in range(2 * MAX_IN_A_ROW):
        bench.open(key, owner, prompt=(5 + key, POISON))
        if key % 2:  # two at a time
            bench.run()
    assert not bench.engine.failed
    assert {*bench.ends(2 * MAX_IN_A_ROW)} == {Internal}


def test_planning_that_fails_for_nobody_alone_fails_the_verifier_soon(bench, monkeypatch) -> None:
    plan = bench.engine.batching.plan
    calls = 0

    def together_only(candidates: Any, *rest: Any) -> Any:
        nonlocal calls
        calls += 1
        candidates = list(candidates)
        assert len(candidates) == 1, "a defect"
        return plan(candidates, *rest)

    monkeypatch.setattr(type(bench.engine.batching), "plan", lambda _, *arguments: together_only(*arguments))
    bench.write(3)
    assert bench.engine.failed
    assert calls <= 4 * MAX_IN_A_ROW
    assert bench.ends(3) == [Unavailable] * 3


def test_a_success_between_them_clears_the_count_of_failed_texts(bench, texts) -> None:
    bench.fails(has(POISON))
    for key in range(2 * MAX_IN_A_ROW):
        bench.open(key, Owner(f"key {key}"), prompt=(key + 5, POISON) if key % 2 else ())
        bench.run()
    assert not bench.engine.failed
    assert [bench.text(key) for key in (0, 2, 4)] == [texts[0], texts[2], texts[4]]


# === a session's own ==============================================================================================


@pytest.mark.parametrize("poisoned", [0, 3, 7])
def test_a_session_that_fails_alone_ends_and_the_texts_of_the_others_stay(bench, texts, poisoned) -> None:
    bench.fails(has(POISON))
    for key in range(8):
        bench.open(key, prompt=(5, POISON) if key == poisoned else ())
    bench.run()
    assert isinstance(bench.end(poisoned), Internal)
    others = [key for key in range(8) if key != poisoned]
    assert {key: bench.text(key) for key in others} == {key: texts[key] for key in others}
    assert bench.engine.batching.limit.rows == math.inf, "its size was not at fault"
    assert not bench.engine.failed


def test_one_failure_of_the_device_amid_anothers_failures_ends_nobody_else(bench, texts) -> None:
    alone = 0

    def does(batch: list[SessionRows]) -> bool:
        nonlocal alone
        innocent = [rows.tokens for rows in batch] == [(5, 6, 10)]
        alone += innocent
        return has(POISON)(batch) or (innocent and alone == 1)

    bench.fails(does)
    bench.open(0)
    bench.open(1, prompt=(5, POISON))
    bench.run()
    assert isinstance(bench.end(1), Internal)
    assert bench.text(0) == texts[0]


def test_one_failure_of_the_verifiers_own_text_is_not_its_end(bench) -> None:
    own = 0

    def does(batch: list[SessionRows]) -> bool:
        nonlocal own
        own += not has(POISON)(batch)
        return has(POISON)(batch) or own == 1

    bench.fails(does)
    bench.open(0, prompt=(5, POISON))
    bench.run()
    assert isinstance(bench.end(0), Internal)
    assert not bench.engine.failed


def test_the_rest_of_a_long_prompt_does_not_clear_one_bad_token_in_it(bench, texts) -> None:
    bench.fails(has(POISON))
    bench.open(0)
    bench.open(1, prompt=(*[7] * 300, POISON, *[8] * 200))
    bench.run()
    assert isinstance(bench.end(1), Internal)
    assert bench.text(0) == texts[0]
    assert bench.engine.batching.limit.rows == math.inf


def test_settings_that_make_no_numbers_end_the_session_that_has_them(bench, texts, monkeypatch) -> None:
    """No door lets such settings in; a verifier does not rest on that."""
    spoiled = replace(SAMPLING, repetition_penalty=1.5)

    def spoiling(scores: torch.Tensor, session: VerificationInput) -> torch.Tensor:
        return masked(scores, session) * (math.nan if session.sampling.penalises else 1)

    monkeypatch.setattr(distribution, "masked", spoiling)
    for key in range(2):
        bench.open(2 * key)
        bench.open(2 * key + 1, prompt=(5, 6, POISON), sampling=spoiled)
    bench.run()
    assert not bench.engine.failed
    assert [bench.text(key) for key in (0, 2)] == [texts[0], texts[2]]
    assert [(bench.text(key), type(bench.end(key))) for key in (1, 3)] == [([], Internal)] * 2
    assert bench.corrupted == 2


@pytest.mark.parametrize("method", ["on_verified", "on_report"])
def test_a_defect_in_a_sessions_machine_ends_it_alone(bench, texts, monkeypatch, method) -> None:
    right = getattr(VerifierSession, method)

    def broken(session: VerifierSession, *arguments: Any) -> Any:
        if session.id == "s1":
            raise KeyError("a defect")
        return right(session, *arguments)

    monkeypatch.setattr(VerifierSession, method, broken)
    for key in range(3):
        bench.open(key)
        bench.engine.post_frame(key, Report(False), lambda: None)
    bench.run()
    assert isinstance(bench.end(1), Internal)
    assert (bench.text(0), bench.text(2)) == (texts[0], texts[2])
    assert not bench.engine.failed


def test_a_whole_text_that_cannot_be_kept_is_no_failed_text(bench, texts, monkeypatch) -> None:
    bench.open(0, keep_s=60.0)
    bench.run(steps=2)
    release, left = bench.engine.backend.release, iter(range(1))

    def fails(handle: Any) -> None:
        release(handle)
        if next(left, None) is not None:
            raise RuntimeError("no memory")

    monkeypatch.setattr(bench.engine.backend, "release", fails)
    bench.run()
    assert bench.text(0) == texts[0]
    *_, last, end = bench.boxes[0].items.queue
    assert last.finish is FinishReason.LENGTH
    assert isinstance(end, Goaway), "its edge begins the next turn with another stream"


def test_a_defect_in_an_admission_is_answered_and_keeps_nobody_else_out(bench, texts, monkeypatch) -> None:
    admit = bench.engine.sessions.admit

    def broken(key: int, *rest: Any) -> Any:
        return 1 // 0 if key == 1 else admit(key, *rest)

    monkeypatch.setattr(bench.engine.sessions, "admit", broken)
    bench.write(2)
    assert isinstance(bench.end(1), Internal)
    assert bench.text(0) == texts[0]


def test_a_session_for_which_memory_lacks_alone_may_go_on_elsewhere(bench, texts) -> None:
    bench.fails(lambda batch: any(rows.cache.length >= 40 for rows in batch), torch.OutOfMemoryError("no memory"))
    bench.open(0)
    bench.open(1, prompt=(7,) * 60)
    bench.run()
    assert isinstance(bench.end(1), Unavailable)
    assert bench.text(0) == texts[0]
    assert not bench.engine.failed


# === a step that is too large =====================================================================================


def rows_of(batch: list[SessionRows]) -> int:
    return sum(len(rows.tokens) for rows in batch)


@pytest.mark.parametrize("most", [1, 2, 5])
@pytest.mark.parametrize("error", [RuntimeError("too many"), torch.OutOfMemoryError("too many")])
def test_steps_that_are_too_large_shrink_and_no_text_changes(bench, texts, most, error) -> None:
    failed = 0

    def too_large(batch: list[SessionRows]) -> bool:
        nonlocal failed
        failed += rows_of(batch) > most
        return rows_of(batch) > most

    for key in range(8):
        bench.open(key)
    bench.run(steps=1)  # prompts are read
    bench.fails(too_large, error)
    bench.run()
    assert {key: bench.text(key) for key in range(8)} == texts
    assert bench.engine.batching.limit.rows <= most
    assert failed <= 16, "it remembers"
    assert not bench.engine.failed


def test_one_failure_that_is_gone_at_once_makes_no_step_smaller(bench, texts) -> None:
    left = iter(range(1))
    for key in range(4):
        bench.open(key)
    bench.fails(lambda _: next(left, None) is not None)
    bench.run()
    assert {key: bench.text(key) for key in range(4)} == {key: texts[key] for key in range(4)}
    assert bench.engine.batching.limit.rows == math.inf


@pytest.mark.usefixtures("all_drafts_pay")
def test_drafts_that_make_steps_fail_make_nobody_elses_smaller(bench, texts) -> None:
    bench.fails(has(POISON))
    bench.open(0)
    bench.open(1, drafting=True, patience=Patience(0.0))
    bench.engine.turn()
    for chain in range(4):
        start = 3 + len(bench.text(1))
        bench.engine.post_frame(1, Draft(chain, start, (DraftToken(POISON),)), lambda: None)
        bench.engine.turn()
    bench.run()
    assert (bench.text(0), bench.text(1)) == (texts[0], texts[1])
    assert bench.engine.batching.limit.rows == math.inf

"""An engine whose steps verify branches, in trouble or not: texts stay what they are, and no page is lost."""

from __future__ import annotations

import random
import time
from dataclasses import replace

import pytest
import torch
from collecting_outbox import CollectingOutbox

from outrider.cloud.serving.batching import Batching
from outrider.cloud.serving.engine import Engine
from outrider.cloud.target.target import Target
from outrider.cloud.target.transformers_backend import TransformersBackend
from outrider.cloud.testing import tiny_llama
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto.session import VerifierRules
from outrider.proto.testing import word_tokenizer
from outrider.proto.types import BlockBranch, Commit, DraftToken, Open, Sampling, token_ids

VOCAB, TOKENS, TIMEOUT_S = 61, 12, 30.0
SAMPLING = Sampling(max_tokens=TOKENS, temperature=1.0, ignore_eos=True, presence_penalty=0.3)


class Bench:
    """An engine driven by hand."""

    def __init__(self, kv_tokens=4096):
        self.target = Target(tiny_llama(sharpness=60), word_tokenizer(VOCAB), kv_tokens=kv_tokens, page_size=16)
        rules = VerifierRules("v", "tiny", self.target.tokenizer_sha256, VOCAB, 1024, frozenset({2}))
        self.engine = Engine(TransformersBackend(self.target), rules, VerifierConfig(threads=1, max_sessions=8))
        self.hash = self.target.tokenizer_sha256
        self.boxes = {}

    def fails(self, does):
        forward = self.target.forward

        def failing(batch):
            if does(batch):
                raise torch.OutOfMemoryError("no memory for so many rows")
            return forward(batch)

        self.target.forward = failing

    def run(self, sessions=6):
        for key in range(sessions):
            self.boxes[key] = CollectingOutbox()
            sampling = replace(SAMPLING, seed=key)
            frame = Open("tiny", self.hash, (5, 6, 10 + key), sampling, f"s{key}", drafting=False)
            self.engine.post_open(key, frame, self.boxes[key], isolation=str(key))
        until = time.monotonic() + TIMEOUT_S
        while time.monotonic() < until:
            self.engine.turn()
            if self.engine.failed or not self.engine.slots.unfinished():
                break
        return {key: self.text(key) for key in range(sessions)}

    def commits(self, key):
        return [item for item in self.boxes[key].items.queue if isinstance(item, Commit)]

    def text(self, key):
        return [token for commit in self.commits(key) for token in token_ids(commit.tokens)]


@pytest.fixture(scope="module")
def texts():
    return Bench().run()


@pytest.fixture(autouse=True)
def branches(texts, monkeypatch):
    """Have each step that decodes verify a block that goes wrong, with a right and a wrong branch where it does."""
    share_of, rng = Batching.share_of, random.Random(4)

    def with_branches(batching, slot, max_tokens):
        share = share_of(batching, slot, max_tokens)
        if share.block is None or slot.key not in texts:
            return share
        done, room = slot.session.generated, slot.session.max_useful_drafts
        ahead = texts[slot.key][done : done + room]
        index = rng.randrange(len(ahead) + 1)
        block = [*ahead[:index], *(0 for _ in ahead[index:])]
        right, wrong = ahead[index : index + rng.randrange(1, 5)], [1, 2][: room - index]
        beside = [drafts for drafts in ([right, wrong] if right[:1] != [1] else [right]) if drafts and drafts[0]]
        branches = tuple(BlockBranch(index, tuple(map(DraftToken, drafts))) for drafts in beside)
        return replace(share, block=tuple(map(DraftToken, block)), branches=branches)

    monkeypatch.setattr(Batching, "share_of", with_branches)


def test_branches_change_no_text_and_save_steps(texts):
    bench = Bench()
    assert bench.run() == texts
    assert all(len(text) == TOKENS for text in texts.values())
    assert max(len(bench.commits(key)) for key in texts) < TOKENS
    assert bench.engine.backend.capacity.used_pages == 0


@pytest.mark.parametrize("most", [1, 3, 8])
def test_steps_that_are_too_large_for_branches_shrink_and_no_text_changes(texts, most):
    bench = Bench()
    bench.fails(lambda batch: sum(len(rows.tokens) for rows in batch) > max(most, len(batch) > 1 and 3))
    assert bench.run() == texts
    assert not bench.engine.failed
    assert bench.engine.backend.capacity.used_pages == 0


def test_a_step_that_fails_once_leaves_no_branch_behind(texts):
    bench, calls = Bench(), iter(range(1 << 20))
    bench.fails(lambda _: next(calls) % 3 == 1)
    assert bench.run() == texts
    assert bench.engine.backend.capacity.used_pages == 0


def test_where_the_pages_are_few_texts_are_the_same_without_branches(texts):
    bench = Bench(kv_tokens=16 * 6)
    assert bench.run() == texts
    assert bench.engine.backend.capacity.used_pages == 0

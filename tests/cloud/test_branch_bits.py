"""A branch's rows have the bits of the same tokens in a plain chain, on any architecture and in every kind of pass."""

from __future__ import annotations

import random

import pytest
import torch
from random_models import VOCAB, architectures, save_random_model

from outrider.cloud.target.backend import StepRow, VerificationBranch
from outrider.cloud.target.chunked_attention import ChunkedBatch
from outrider.cloud.target.kv_cache import BranchCache
from outrider.cloud.target.target import FREE, ROUNDED, TILES, TOGETHER, SessionRows
from outrider.cloud.target.target_loading import load_target
from outrider.cloud.target.transformers_backend import TransformersBackend
from outrider.cloud.target.verification import VerificationInput
from outrider.proto.types import BlockBranch, DraftToken, Guarantee, Sampling, token_ids

ARCHITECTURES = architectures(positions=512)
ARCHITECTURES["gemma3_text"] |= {"sliding_window": 40}
FAR = {f"{name} far": ARCHITECTURES[name] | {"max_position_embeddings": 1024} for name in ("qwen3", "gemma2")}


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    folders, made = {}, {}

    def target_of(architecture, dtype="float32", exact="auto", page_size=16):
        key = architecture, dtype, exact, page_size
        if architecture not in folders:
            folders[architecture] = tmp_path_factory.mktemp(architecture)
            config = (ARCHITECTURES | FAR)[architecture]
            save_random_model(folders[architecture], architecture.split()[0], **config)
        if key not in made:
            options = {"dtype": dtype, "exact": exact, "page_size": page_size}
            made[key] = load_target(str(folders[architecture]), kv_tokens=4096, **options)
        return made[key]

    return target_of


def tokens(rng, count):
    return tuple(rng.choices(range(3, VOCAB), k=count))


def chain(target, text, wanted):
    """[wanted, vocab] after the last tokens of a text that is read at once."""
    cache = target.pool.allocate(len(text))
    logits = target.forward([SessionRows(cache, tuple(text), wanted)])
    cache.truncate(0)
    target.pool.release(cache)
    return logits


class Trees:
    """Sessions of a backend with a random block and random branches each, and the logits of the rows of a step."""

    def __init__(self, target, rng, lengths):
        self.target, self.backend = target, TransformersBackend(target)
        self.forward = target.forward
        self.texts, self.blocks, self.branches, self.handles = [], [], [], []
        for i, length in enumerate(lengths):
            block = tokens(rng, rng.randrange(7))
            places = [(j, token) for j in range(len(block) + 1) for token in (5, 60) if (*block, 0)[j] != token]
            some = rng.sample(places, min(4, len(places)))
            branches = [BlockBranch(j, drafts((token, *tokens(rng, rng.randrange(4))))) for j, token in some]
            handle = self.backend.open((), str(i))
            self.backend.reserve(handle, length + 12)
            self.texts.append(tokens(rng, length))
            self.blocks.append(block)
            self.branches.append(branches)
            self.handles.append(handle)

    def rows(self):
        """Read but for two tokens of each text, and return the rows of the step that verifies."""
        read = [StepRow(handle, text[:-2], None) for handle, text in zip(self.handles, self.texts, strict=True)]
        self.backend.step([row for row in read if row.tokens])
        made = []
        for handle, text, block, branches in zip(self.handles, self.texts, self.blocks, self.branches, strict=True):
            whole = VerificationInput(Sampling(), text, len(text), drafts(block))
            beside = tuple(VerificationBranch.of(whole, branch) for branch in branches)
            made.append(StepRow(handle, text[handle.length :], whole, branches=beside))
        return made

    def logits(self, rows):
        """Rows of logits of a step: all blocks', then all branches'."""
        seen = []

        def forward(batch):
            seen.append(self.forward(batch))
            return seen[-1]

        self.target.forward = forward
        try:
            self.output = self.backend.step(rows)
        finally:
            del self.target.forward
        return seen[0]

    def chains(self):
        """The same rows, each text, block and branch as a chain of its own."""
        plain = [
            chain(self.target, (*text, *block), len(block) + 1)
            for text, block in zip(self.texts, self.blocks, strict=True)
        ]
        for text, block, branches in zip(self.texts, self.blocks, self.branches, strict=True):
            plain += [
                chain(self.target, (*text, *block[:index], *token_ids(beside)), len(beside))
                for index, beside in branches
            ]
        return torch.cat(plain)

    def sessions(self):
        """The same rows of one step in which each text, block and branch is a session of its own."""
        of_branches = [
            ((*text, *block[:index]), token_ids(beside), len(beside))
            for text, block, branches in zip(self.texts, self.blocks, self.branches, strict=True)
            for index, beside in branches
        ]
        of_blocks = [
            (text[:-2], (*text[-2:], *block), len(block) + 1)
            for text, block in zip(self.texts, self.blocks, strict=True)
        ]
        batch = []
        for before, own, wanted in (*of_blocks, *of_branches):
            batch.append(SessionRows(self.target.pool.allocate(len(before) + len(own)), own, wanted))
            self.target.forward([SessionRows(batch[-1].cache, before, 0)])
        logits = self.target.forward(batch)
        for rows in batch:
            rows.cache.truncate(0)
            self.target.pool.release(rows.cache)
        return logits

    def close(self):
        for handle in self.handles:
            handle.truncate(0)
            self.backend.release(handle)


def drafts(some):
    return tuple(map(DraftToken, some))


def same_bits(target, seed, lengths=(5, 40, 250, 14)):
    trees = Trees(target, random.Random(seed), lengths)
    together, apart = trees.logits(trees.rows()), trees.chains()
    trees.close()
    assert target.pool.free_pages == target.pool.page_count
    return torch.equal(together, apart)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_row_of_a_branch_has_the_bits_of_a_chain(architecture, targets):
    target = targets(architecture)
    assert target.passes.guarantee is Guarantee.BYTES
    assert all(same_bits(target, seed) for seed in range(2))


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gpt2"])
def test_a_branch_is_another_session_to_a_pass_in_16_bits_too(architecture, targets):
    target = targets(architecture, "bfloat16")
    trees = Trees(target, random.Random(3), (5, 40, 250, 14))
    together, apart = trees.logits(trees.rows()), trees.sessions()
    trees.close()
    assert torch.equal(together, apart)


@pytest.mark.parametrize(("kind", "page_size"), [("together", 1), ("together", 24), ("rounded", 64), ("tiles", 4)])
def test_it_has_them_in_every_kind_of_pass_and_on_pages_of_any_size(kind, page_size, targets):
    target = targets("gemma2", page_size=page_size)
    before = target.passes
    target.passes = {"together": TOGETHER[2], "rounded": ROUNDED[2], "tiles": TILES}[kind]
    try:
        assert same_bits(target, 4, (5, 40, 70))
    finally:
        target.passes = before


def test_free_passes_compute_the_same_but_for_rounding(targets):
    target = targets("mistral", exact="off")
    assert target.passes == FREE
    trees = Trees(target, random.Random(6), (5, 40, 250))
    together, apart = trees.logits(trees.rows()), trees.chains()
    assert (together - apart).abs().max() < 1e-4 * apart.abs().max()
    trees.close()


def test_a_text_goes_on_after_a_branch_with_the_bits_of_a_chain(targets):
    target = targets("gemma2")
    for seed in range(4):
        rng = random.Random(seed)
        trees = Trees(target, rng, (5, 40, 250))
        for i, text in enumerate(trees.texts):  # a branch that begins with the target's token
            block = trees.blocks[i]
            for index in range(len(block) + 1):
                right = int(chain(target, (*text, *block[:index]), 1).argmax())
                if index == len(block) or right != block[index]:
                    trees.branches[i] = [BlockBranch(index, drafts((right, *tokens(rng, 3))))]
                    break
        trees.logits(trees.rows())
        assert set(trees.output.followed) == {0, 1, 2}
        for handle, text, block, ((index, beside),) in zip(
            trees.handles, trees.texts, trees.blocks, trees.branches, strict=True
        ):
            path = (*text, *block[:index], *token_ids(beside))
            assert handle.tokens == list(path)
            trees.backend.truncate(handle, len(text) + index + 1)
            rest = (*path[handle.length :], 7, 8, 9)
            trees.backend.reserve(handle, handle.length + len(rest))
            got = target.forward([SessionRows(handle, rest, len(rest))])
            assert torch.equal(got, chain(target, (*path, 7, 8, 9), len(rest)))
        trees.close()


@pytest.mark.parametrize("architecture", FAR)
def test_branches_far_into_a_text_have_the_bits_of_chains(architecture, targets):
    assert same_bits(targets(architecture), 7, (253, 254, 300, 509, 620))  # some end in another chunk than they begin


def test_whole_chunks_before_a_branch_are_gathered_once(targets, monkeypatch):
    target, counts = targets("qwen3 far"), []
    trees = Trees(target, random.Random(7), (300, 620))
    rows, right = trees.rows(), target.pool.gather

    def gather(layer, units, out):
        if layer == 0:
            counts.append(len(units) * out[0].shape[1] // (2 * 8))  # positions of 2 heads of 8
        right(layer, units, out)

    monkeypatch.setattr(target.pool, "gather", gather, raising=False)
    trees.logits(rows)
    of_sessions, of_branches = 320 + 640, [64] * len(trees.branches[0]) + [128] * len(trees.branches[1])
    assert len(of_branches) > 4
    assert sum(counts) == of_sessions + sum(of_branches)
    trees.close()


def test_a_chunk_in_which_a_branch_begins_is_not_that_of_its_session(targets, monkeypatch):
    right = ChunkedBatch._blocks

    def blocks(self, spans):
        return [block._replace(shared=block.whole) for block in right(self, spans)]

    target = targets("qwen3")
    assert all(same_bits(target, seed, (253, 254)) for seed in range(3))
    monkeypatch.setattr(ChunkedBatch, "_blocks", blocks)
    assert not all(same_bits(target, seed, (253, 254)) for seed in range(3))


def test_a_branch_at_the_position_of_its_row_has_other_bits(targets, monkeypatch):
    right = BranchCache.beside.__func__

    def beside(cls, pool, cache, base, count, lent):
        return right(cls, pool, cache, max(1, base - 1), count, lent)

    monkeypatch.setattr(BranchCache, "beside", classmethod(beside))
    assert not same_bits(targets("llama"), 0)


def test_where_few_pages_are_free_some_branches_are_left_out_and_none_is_lost(targets):
    target = targets("llama")
    trees = Trees(target, random.Random(1), (40, 40))
    rows = trees.rows()
    full = target.pool.allocate(target.pool.free_pages * 16 - 16)
    logits = trees.logits(rows)
    assert sum(len(block) + 1 for block in trees.blocks) < len(logits)
    asked = sum(row.verification.rows + sum(len(each.drafts) for each in row.branches) for row in rows)
    assert len(logits) < asked
    target.pool.release(full)
    trees.close()

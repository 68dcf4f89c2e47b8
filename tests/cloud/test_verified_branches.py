"""Branches beside a block change no text: every tree of a tiny vocabulary, on a target whose logits are a table.

The target stores each token as its key and reads the text before a row back from the cache, so that a position, a slot
or a page that is wrong shows as another text. Wrong rules and wrong caches must fail: the negative controls below.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from table_target import decode_trees

from outrider.cloud.target.backend import VerificationBranch
from outrider.cloud.target.kv_cache import BranchCache
from outrider.proto.types import FinishReason, Sampling, token_ids

VOCAB, LENGTH, PROMPT = 3, 4, (1, 0, 2, 2, 0)
SAMPLINGS = {
    "greedy": Sampling(),
    "greedy, penalised": Sampling(repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.9),
    "temperature 1": Sampling(temperature=1.0),
    "penalised": Sampling(temperature=1.0, repetition_penalty=2.5, presence_penalty=0.8, frequency_penalty=0.7),
    "n-grams": Sampling(temperature=1.0, no_repeat_ngram_size=2),
    "cut": Sampling(temperature=1.4, top_k=2, min_p=0.05, logit_bias=((1, 0.7),)),
}


@cache
def logits_after(prefix):
    """[VOCAB] of a target whose every context is different."""
    rng = random.Random(f"table {prefix}")
    return tuple(rng.gauss(0, 1.6) for _ in range(VOCAB))


def trees(nodes):
    """Every block with every set of branches beside it, of `nodes` drafts at most: (block, ((index, drafts), ...))."""
    for block in (chain for size in range(nodes + 1) for chain in chains(size)):
        places = [
            (index, token)
            for index in range(len(block) + 1)
            for token in range(VOCAB)
            if index == len(block) or token != block[index]
        ]
        yield from ((block, branches) for branches in sets_of_branches(places, nodes - len(block)))


def chains(size):
    return [()] if size == 0 else [(*chain, token) for chain in chains(size - 1) for token in range(VOCAB)]


def sets_of_branches(places, nodes):
    if not places:
        yield ()
        return
    (index, token), *others = places
    yield from sets_of_branches(others, nodes)
    for size in range(nodes):
        for tail in chains(size):
            for further in sets_of_branches(others, nodes - 1 - size):
                yield ((index, (token, *tail)), *further)


decode = partial(decode_trees, logits_after, prompt=PROMPT, length=LENGTH)


def same_text(sampling, nodes=3, seeds=(1,), **options):
    """Whether every tree of `nodes` drafts at most gives the text that no drafts give."""
    every = list(trees(nodes))
    plain, _ = decode(sampling, [(seed, ((), ())) for seed in seeds], **options)
    texts, followed = decode(sampling, [(seed, tree) for seed in seeds for tree in every], **options)
    assert followed > len(every) // 5, "branches are followed, or this shows nothing"
    return all(text == plain[i // len(every)] for i, text in enumerate(texts))


@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_tree_of_a_tiny_vocabulary_gives_the_text_without_drafts(name):
    assert same_text(SAMPLINGS[name], 3 if name in ("temperature 1", "penalised") else 2)


def test_the_rows_of_logits_are_those_of_the_path():
    def watch(result):
        rows = [
            logits_after((*slot.session.transcript, *token_ids(verified.block[:j])))
            for slot, verified in result.verified
            for j in range(len(verified.tokens_by_target))
        ]
        assert torch.equal(result.logits, torch.tensor(rows))

    assert same_text(SAMPLINGS["temperature 1"], 2, watch=watch)
    assert same_text(SAMPLINGS["temperature 1"], 2, watch=watch, prompt_logprobs=1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_ends_at_its_stop_token_along_a_branch_too(temperature):
    sampling = Sampling(temperature=temperature)
    ends = [end for _, end in decode(sampling, [(seed, ((), ())) for seed in range(3)], eos=frozenset({2}))[0]]
    assert FinishReason.EOS in ends
    assert same_text(sampling, 2, range(3), eos=frozenset({2}))


def test_a_text_is_held_on_until_its_least_tokens_along_a_branch_too():
    sampling, seeds = Sampling(temperature=1.0, min_tokens=3), range(3)
    free, _ = decode(replace(sampling, min_tokens=0), [(seed, ((), ())) for seed in seeds], eos=frozenset({2}))
    assert min(len(text) for text, _ in free) < len(PROMPT) + 3
    assert same_text(sampling, 2, seeds, eos=frozenset({2}))


def test_there_are_as_many_trees_as_counted_by_hand():
    assert sum(1 for _ in trees(1)) == 1 + 3 + 3  # nothing; a block; a branch
    assert len(set(trees(2))) == len(list(trees(2)))


# === negative controls ===========================================================================================


def penalise_by_the_brother(monkeypatch):
    """Count the block's draft beside a branch as if it came before it."""
    right = VerificationBranch.of.__func__

    def of(cls, whole, branch, allowed=None):
        made = right(cls, whole, branch, allowed)
        if branch.index == len(whole.block):
            return made
        counts = made.verification.counts.followed_by((whole.block[branch.index].id,))
        return replace(made, verification=replace(made.verification, counts=counts))

    monkeypatch.setattr(VerificationBranch, "of", classmethod(of))


def count_rows_for_depth(monkeypatch):
    right = VerificationBranch.of.__func__

    def of(cls, whole, branch, allowed=None):
        made = right(cls, whole, branch, allowed)
        rows = len(whole.transcript) + len(whole.block) + 1
        return replace(made, verification=replace(made.verification, transcript=range(rows)))

    monkeypatch.setattr(VerificationBranch, "of", classmethod(of))


def keep_the_dead_branch(monkeypatch):
    def replace_end(self, pool, cache):
        cache.truncate(self.base)
        ends = min(self.length, cache.capacity - 1)
        pool.copy(0, self.slots[self.base : ends], cache.slots[self.base + 1 : ends + 1])  # behind the draft that died
        cache.extend(self.tokens)

    monkeypatch.setattr(BranchCache, "replace_end", replace_end)


def forget_to_copy(monkeypatch):
    def replace_end(self, pool, cache):
        cache.truncate(self.base)
        cache.extend(self.tokens)

    monkeypatch.setattr(BranchCache, "replace_end", replace_end)


def copy_no_page_that_is_left(monkeypatch):
    monkeypatch.setattr(BranchCache, "copies", property(lambda self: self.borrowed))


def attend_from_another_depth(monkeypatch):
    right = BranchCache.beside.__func__

    def beside(cls, pool, cache, base, count, lent):
        return right(cls, pool, cache, max(1, base - 1), count, lent)

    monkeypatch.setattr(BranchCache, "beside", classmethod(beside))


@pytest.mark.parametrize(
    ("defect", "name"),
    [
        (penalise_by_the_brother, "penalised"),
        (count_rows_for_depth, "temperature 1"),
        (keep_the_dead_branch, "temperature 1"),
        (forget_to_copy, "temperature 1"),
        (copy_no_page_that_is_left, "temperature 1"),
        (attend_from_another_depth, "temperature 1"),
    ],
)
def test_a_defect_gives_other_texts(defect, name, monkeypatch):
    defect(monkeypatch)
    assert not same_text(SAMPLINGS[name], 2, (1, 2))

"""Grammars along branches: their masks are those of the same drafts in a block, and texts stay those of the rule."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import tiny_grammars
from table_target import decode_trees
from tiny_grammars import EOS, PROMPT, VOCAB

from outrider.cloud.grammar.grammar import GrammarMatcher
from outrider.proto.types import Grammar, GrammarKind, Sampling

GRAMMAR = Grammar(GrammarKind.REGEX, "a|b|ab|ba|bab|aab|abba")
MOST = 5  # tokens that a word and its EOS take
CHAINS = [chain for size in range(4) for chain in itertools.product(range(VOCAB), repeat=size)]


matcher_of = partial(tiny_grammars.matcher_of, GRAMMAR)


@cache
def logits_after(prefix):
    rng = random.Random(f"grammar {prefix}")
    return tuple(rng.gauss(0, 1.5) for _ in range(VOCAB))


def masks_agree(matcher, block, index, drafts):
    """Whether a branch is allowed as the same drafts are in a block, asked of a fresh matcher."""
    found = matcher.ask(block, lambda: None, ((index, drafts),)).result().branches
    alone = matcher_of().ask((*block[:index], *drafts), lambda: None).result()
    if index > len(matcher_of().ask(block, lambda: None).result().block) or len(alone.block) <= index:
        return found == {}
    return [*found] == [(index, drafts)] and np.array_equal(found[index, drafts], alone.tokens[index + 1 :])


def test_a_branch_is_allowed_as_the_same_drafts_are_in_a_block():
    rng, matcher = random.Random(5), matcher_of()
    for _ in range(250):
        block, drafts = rng.choice(CHAINS), rng.choice(CHAINS[1:])
        assert masks_agree(matcher, block, rng.randrange(len(block) + 1), drafts)


def test_an_answer_about_other_branches_is_worth_what_both_have_in_common():
    matcher = matcher_of()
    asked = ((0, (1, 0, 1)), (1, (1,)), (2, (1,)))
    matcher.ask((0, 0), lambda: None, asked)
    here = matcher.allowed((0, 0), asked)
    assert {branch: len(rows) for branch, rows in here.branches.items()} == dict(zip(asked, (3, 1, 1), strict=True))
    other = matcher.allowed((0, 2), ((0, (1, 0, 0)), (0, (2,)), (2, (1,))))
    assert other.block == (0,)
    assert {branch: len(rows) for branch, rows in other.branches.items()} == {(0, (1, 0, 0)): 2}


def test_the_longer_of_two_branches_that_begin_alike_keeps_its_masks() -> None:
    matcher = matcher_of()
    for asked in itertools.permutations(((0, (1,)), (0, (1, 0, 1)), (0, (1, 0)))):
        answer = matcher.ask((0,), lambda: None, asked).result().about((0,), asked)
        assert {branch: len(rows) for branch, rows in answer.branches.items()} == {
            branch: len(branch[1]) for branch in asked
        }
        matcher.advance(())


def decode(sampling, trees, kind=GrammarMatcher):
    """The texts of a seed and a tree each, which is verified in every step."""
    sampling, matcher = replace(sampling, grammar=GRAMMAR), partial(matcher_of, kind)
    options = {"prompt": PROMPT, "length": MOST, "eos": frozenset({EOS}), "matcher": matcher}
    return decode_trees(logits_after, sampling, trees, **options)


def random_tree(rng):
    block = rng.choice(CHAINS)
    places = [(j, t) for j in range(len(block) + 1) for t in range(VOCAB) if (*block, -1)[j] != t]
    places = rng.sample(places, 3)
    places.insert(rng.randrange(4), rng.choice(places))  # no branch has another's mask, even where two begin alike
    return block, [(j, (t, *rng.choice(CHAINS[:21]))) for j, t in places]


def same_text(sampling, kind=GrammarMatcher):
    rng, seeds = random.Random(1), range(3)
    plain, _ = decode(sampling, [(seed, ((), ())) for seed in seeds])
    pairs = [(seed, random_tree(rng)) for seed in seeds for _ in range(50)]
    texts, followed = decode(sampling, pairs, kind)
    assert followed > 25, "branches are followed, or this shows nothing"
    return all(text == plain[seed] for text, (seed, _) in zip(texts, pairs, strict=True))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_any_tree_gives_the_text_that_the_grammar_gives_without_drafts(temperature):
    assert same_text(Sampling(temperature=temperature, frequency_penalty=0.5))


class MasksOfTheBlock(GrammarMatcher):
    """Wrong: a branch has the masks of the block beside it."""

    def _allowed_beside(self, answer, index, drafts):
        right = super()._allowed_beside(answer, index, drafts)
        return right if len(answer.tokens) < index + 2 else [answer.tokens[index + 1]] * len(right)


class StaysInTheBranch(GrammarMatcher):
    """Wrong: after a branch the state is that of its drafts."""

    def _allowed_beside(self, answer, index, drafts):
        back, self._back_to_the_text = self._back_to_the_text, lambda: None
        try:
            return super()._allowed_beside(answer, index, drafts)
        finally:
            self._back_to_the_text, self._drafts = back, 0


@pytest.mark.parametrize("wrong", [MasksOfTheBlock, StaysInTheBranch])
def test_a_matcher_that_confuses_branches_fails(wrong):
    rng, matcher = random.Random(5), matcher_of(wrong)
    places = [(rng.choice(CHAINS), rng.choice(CHAINS[1:])) for _ in range(200)]
    assert not all(masks_agree(matcher, block, rng.randrange(len(block) + 1), some) for block, some in places)


def test_texts_with_masks_of_the_block_are_others():
    assert not same_text(Sampling(temperature=1.0, frequency_penalty=0.5), MasksOfTheBlock)

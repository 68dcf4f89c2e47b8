"""The conformance suite's part about branches, for backends whose facts say that they verify them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from conformance import SETTINGS, Check, Suite, Text
from conformance_oracle import VOCAB

from outrider.cloud.target.backend import StepRow, VerificationBranch
from outrider.proto.types import BlockBranch, DraftToken, Sampling, token_ids

Tree = tuple[tuple[int, ...], Sequence[BlockBranch]]  # a block, and the branches beside it


def row_of(text: Text, tree: Tree, *, tapped: bool = False) -> StepRow:
    """Return a text's row of a step that verifies a tree."""
    block, branches = tree
    row = text.row(block, tapped=tapped)
    verification = row.verification
    assert verification is not None, "a tree follows the last token of a transcript"
    beside = []
    for branch in branches:
        mask = None if text.allowed is None else np.stack([text.allowed] * len(branch.drafts))
        beside.append(VerificationBranch.of(verification, branch, mask))
    row = replace(row, branches=tuple(beside))
    longest = max(len(row.path(branch)) for branch in (None, *range(len(beside))))
    text.suite.backend.reserve(text.sequence, len(text.transcript) + longest)
    return row


def check_every_tree_of_drafts(suite: Suite) -> None:
    """Verify all blocks of up to two drafts with every draft beside them, each with another after it, and go on."""
    three = (5, 17, 40)
    sampling = Sampling(temperature=1.0, allowed_tokens=three, frequency_penalty=2.0)
    start = Text(suite, suite.prompt(14), sampling)
    start.advance()
    for count in range(3):
        for block in itertools.product(three, repeat=count):
            for tail in three:
                branches = [
                    BlockBranch(index, _drafts((token, tail)))
                    for index in range(count + 1)
                    for token in three
                    if index == count or token != block[index]
                ]
                text = start.again()
                text.sampling = replace(sampling, seed=suite.rng.getrandbits(60))
                row = row_of(text, (block, branches))
                output = suite.step([row])
                text.take(row, output.sampled[0], output.followed.get(0))
                text.advance()
                text.close()
    start.close()


def check_trees_in_ragged_company(suite: Suite) -> None:
    """Let sessions of all settings, some with a grammar, verify random trees in common steps, and tap some of them."""
    layers = (1, 3)
    suite.backend.tap(layers)
    allowed = np.zeros(VOCAB, dtype=bool)
    allowed[suite.rng.sample(range(3, VOCAB), 20)] = True
    texts = [
        Text(suite, suite.prompt(suite.rng.randrange(1, 40)), sampling, str(i), allowed if i == 1 else None)
        for i, sampling in enumerate((*SETTINGS.values(), Sampling(temperature=1.0, frequency_penalty=0.8)))
    ]
    followed = 0
    for turn in range(14):
        company = [text for text in texts if turn < 2 or suite.rng.random() < 0.8] or texts
        rows = [row_of(text, _tree(suite, text), tapped=text is not texts[0]) for text in company]
        output = suite.step(rows)
        tapped = []
        for i, (text, row, sampled) in enumerate(zip(company, rows, output.sampled, strict=True)):
            followed += i in output.followed
            if text.take(row, sampled, output.followed.get(i)) and row.tapped:
                tapped.append(text)
        for text, got in zip(tapped, output.taps if output.taps is not None else (), strict=True):
            wanted = suite.oracle.entering(text.transcript[:-1], layers)
            assert float((got.cpu() - wanted).norm() / wanted.norm()) < 1e-3, "the residual stream of another position"
    assert followed > 14, "trees are followed, or this shows nothing"
    for text in texts:
        text.close()
    assert suite.backend.capacity.used_pages == 0


def check_log_probabilities_along_a_branch(suite: Suite) -> None:
    """Ask for log probabilities, and follow a branch from each place of a block."""
    sampling = Sampling(temperature=0.7, seed=9)
    text = Text(suite, suite.prompt(12), sampling)
    text.advance()
    for index in range(3):
        good = suite.drafts(text, index + 2, good=1.0)
        wrong = tuple(token % (VOCAB - 4) + 3 for token in good[index:])
        row = row_of(text, ((*good[:index], *wrong), ()))
        assert row.verification is not None
        asked = replace(row.verification, logprobs=True, top_logprobs=3)
        branch = VerificationBranch.of(asked, BlockBranch(index, _drafts(good[index:])))
        output = suite.step([replace(row, verification=asked, branches=(branch,))])
        assert output.followed == {0: 0}
        (sampled,) = output.sampled
        assert sampled is not None
        assert token_ids(sampled.tokens)[:-1] == good
        before = list(text.transcript)
        for token in sampled.tokens:
            own = suite.oracle.logits(before).log_softmax(-1)[0]
            assert token.logprob is not None
            assert abs(token.logprob - own[token.id].item()) < 1e-2
            assert [t for t, _ in token.top] == own.topk(3).indices.tolist()
            before.append(token.id)
        text.take(replace(row, branches=(branch,)), sampled, 0)
    text.close()


def _tree(suite: Suite, text: Text) -> Tree:
    """Return a random block and branches beside it, of which some begin with the rule's token."""
    block = suite.drafts(text, suite.rng.randrange(4), good=0.5)
    branches = []
    for index in range(len(block) + 1):
        right = text.again()
        right.transcript += block[:index]
        first, *rest = suite.drafts(right, suite.rng.randrange(1, 4), good=0.9)
        right.close()
        if index == len(block) or first != block[index]:
            branches.append(BlockBranch(index, _drafts((first, *rest))))
    return block, branches


def _drafts(tokens: Sequence[int]) -> tuple[DraftToken, ...]:
    return tuple(map(DraftToken, tokens))


BRANCH_CHECKS: dict[str, Check] = {
    check.__name__.removeprefix("check_"): check
    for check in (check_every_tree_of_drafts, check_trees_in_ragged_company, check_log_probabilities_along_a_branch)
}

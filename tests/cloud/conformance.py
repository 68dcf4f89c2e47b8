"""The conformance suite: what every backend must do, checked against transformers' own forward pass.

A test file makes a `Suite` of its backend, on the folder of `save_conformance_target` (`conformance_oracle.py`), and
calls each of `CHECKS`; of a backend that verifies branches, `BRANCH_CHECKS` of `branch_conformance.py` too. The
expected token is worked out from the plain model's logits and the documented rule, at every position that a check
meets, so a text cannot go astray unnoticed. Wrong backends must fail: `test_conformance.py` has some.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from conformance_oracle import VOCAB, Oracle

from outrider.cloud.target.backend import Backend, Handle, StepOutput, StepRow
from outrider.cloud.target.distribution import processed_logits
from outrider.cloud.target.sampler import Sampled
from outrider.cloud.target.verification import VerificationInput
from outrider.proto.errors import ResourceExhausted
from outrider.proto.types import DraftToken, Sampling, token_ids

ROUNDING = 2e-3  # between float32 passes of different shapes, on scores; a wrong token is off by 0.5 and more
MAX_STEPS = 200  # that a backend may put a row off
LONGEST = 80  # tokens of a text that is written at random
SETTINGS = {
    "greedy": Sampling(),
    "temperature 1": Sampling(temperature=1.0),
    "cut": Sampling(temperature=1.3, top_k=20, top_p=0.9, min_p=0.01),
    "adjusted": Sampling(temperature=0.8, repetition_penalty=1.4, presence_penalty=0.5, logit_bias=((7, 1.5),)),
    "restricted": Sampling(temperature=1.0, allowed_tokens=tuple(range(3, 30))),
    "without repeats": Sampling(temperature=0.7, no_repeat_ngram_size=2),
    "held on": Sampling(temperature=1.0, min_tokens=9, stop_tokens=tuple(range(20, 60))),
}


@dataclass
class Text:
    """A session of the suite, which checks each token that it is given.

    Attributes:
        transcript: prompt and text.
        sequence: its sequence in the backend.
        allowed: [vocab] bool, the tokens that its grammar allows; None: all.
    """

    suite: Suite
    prompt: tuple[int, ...]
    sampling: Sampling
    isolation: str = ""
    allowed: np.ndarray | None = None
    transcript: list[int] = field(init=False)
    sequence: Handle = field(init=False)

    def __post_init__(self) -> None:
        self.transcript = list(self.prompt)
        self.sequence = self.suite.backend.open(self.prompt, self.isolation)
        assert self.sequence.length < len(self.prompt), "the last token of a transcript must be computed"

    @property
    def tokens(self) -> list[int]:
        """Text alone."""
        return self.transcript[len(self.prompt) :]

    def again(self) -> Text:
        """Return another session with the same text so far, which reads what it does not find."""
        other = Text(self.suite, self.prompt, self.sampling, self.isolation, self.allowed)
        self.suite.backend.release(other.sequence)
        other.transcript = list(self.transcript)
        other.sequence = self.suite.backend.open(self.transcript, self.isolation)
        return other

    def row(self, block: Sequence[int] = (), *, max_tokens: int = 1 << 20, tapped: bool = False) -> StepRow:
        """Return the next `max_tokens` tokens, with the drafts of `block` [k] where these are the last."""
        backend, start = self.suite.backend, self.sequence.length
        assert start < len(self.transcript), "more is valid than was kept"
        backend.reserve(self.sequence, len(self.transcript) + len(block))
        tokens = tuple(self.transcript[start : start + max_tokens])
        if start + len(tokens) < len(self.transcript):
            return StepRow(self.sequence, tokens, None)
        mask = None if self.allowed is None else np.stack([self.allowed] * (len(block) + 1))
        drafts = tuple(map(DraftToken, block))
        eos = self.suite.oracle.eos_tokens
        verification = VerificationInput(self.sampling, self.transcript, len(self.prompt), drafts, mask, eos_tokens=eos)
        return StepRow(self.sequence, tokens, verification, tapped)

    def take(self, row: StepRow, sampled: Sampled | None, branch: int | None = None) -> bool:
        """Check the tokens of a row, along the branch that was followed, and commit them; return whether any came."""
        if sampled is None or row.verification is None:
            assert sampled is None, "a row that only reads has no tokens"
            return False
        block = token_ids(row.path(branch))[: len(sampled.tokens) - 1]
        assert len(sampled.tokens) == len(block) + 1, "one token after each draft that was verified, and one more"
        for j, token in enumerate(sampled.tokens):
            before = [*self.transcript, *block[:j]]
            self.suite.check_token(before, token.id, self)
        agreed = next((j for j, draft in enumerate(block) if draft != sampled.tokens[j].id), len(block))
        self.transcript += token_ids(sampled.tokens[: agreed + 1])
        self.suite.backend.truncate(self.sequence, min(self.sequence.length, len(self.transcript) - 1))
        return True

    def advance(self, block: Sequence[int] = (), *, max_tokens: int = 1 << 20) -> int:
        """Step alone until there are tokens; return how many came."""
        before = len(self.transcript)
        for _ in range(MAX_STEPS):
            row = self.row(block, max_tokens=max_tokens)
            if self.take(row, self.suite.step([row]).sampled[0]):
                return len(self.transcript) - before
        raise AssertionError("the backend puts a row off for ever")

    def write(self, tokens: int, *, drafts: Callable[[], Sequence[int]] = tuple) -> list[int]:
        """Write until the text has `tokens` tokens or a few more, and return the first of them."""
        while len(self.tokens) < tokens:
            self.advance(drafts())
        return self.tokens[:tokens]

    def close(self) -> None:
        """Give its pages back."""
        self.suite.backend.release(self.sequence)


@dataclass
class Suite:
    """A backend and its oracle.

    Attributes:
        backend: the one to check, on the folder of `oracle`; nothing else uses it.
        oracle: the plain model.
        fail_next_step: makes the target's next pass raise; None: the backend has no way to do that.
        spoil_next_step: puts this number among the logits of the target's next pass; None: as above.
        rng: of the texts and drafts that are tried.
    """

    backend: Backend
    oracle: Oracle
    fail_next_step: Callable[[], None] | None = None
    spoil_next_step: Callable[[float], None] | None = None
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    def step(self, rows: Sequence[StepRow]) -> StepOutput:
        """Make a step, and check its shape."""
        lengths = [row.handle.length for row in rows]
        output = self.backend.step(rows)
        assert len(output.sampled) == len(rows)
        for row, length, sampled in zip(rows, lengths, output.sampled, strict=True):
            computed = row.handle.length - length
            if sampled is not None:
                assert computed == len(row.tokens) + len(sampled.tokens) - 1, "as long as what was computed"
            elif row.verification is None and computed >= 0:
                assert computed <= len(row.tokens), "no more than was asked for"
        return output

    def check_token(self, before: Sequence[int], token: int, text: Text) -> None:
        """Check that the rule gives `token` after `before`, but for rounding."""
        scores = self.oracle.scores(before, text.sampling, len(text.prompt), text.allowed)
        best = int(scores.argmax())
        off = float(scores[best] - scores[token])
        assert off <= ROUNDING, f"token {token} after {len(before)} tokens, where {best} scores {off:.3g} more"

    def prompt(self, length: int) -> tuple[int, ...]:
        """Return a random prompt."""
        return tuple(self.rng.choices(range(3, VOCAB), k=length))

    def drafts(self, text: Text, count: int, *, good: float = 0.7) -> tuple[int, ...]:
        """Return `count` drafts, each the rule's token by the chance `good`."""
        block: list[int] = []
        for _ in range(count):
            scores = self.oracle.scores([*text.transcript, *block], text.sampling, len(text.prompt), text.allowed)
            right = self.rng.random() < good
            block.append(int(scores.argmax()) if right else self.rng.randrange(3, VOCAB))
        return tuple(block)


def check_texts_are_those_of_the_rule(suite: Suite) -> None:
    """Write a text with each setting, without drafts and with good and bad ones; all are the same text."""
    for seed, sampling in enumerate(SETTINGS.values()):
        settings = Sampling(**{name: getattr(sampling, name) for name in Sampling.__slots__} | {"seed": seed << 60})
        prompt = suite.prompt(5 + seed)
        plain = Text(suite, prompt, settings)
        expected = plain.write(12)
        for good in (1.0, 0.6, 0.0):
            drafted = Text(suite, prompt, settings)
            found = drafted.write(12, drafts=lambda: suite.drafts(drafted, 3, good=good))  # noqa: B023 - called at once
            assert found == expected, "drafts change no text"
            drafted.close()
        plain.close()


def check_every_block_of_drafts(suite: Suite) -> None:
    """Verify all blocks of up to three drafts over three tokens, and go on after each."""
    three = (5, 17, 40)
    sampling = Sampling(temperature=1.0, seed=11, allowed_tokens=three)
    start = Text(suite, suite.prompt(9), sampling)
    start.advance()
    for count in range(4):
        for block in itertools.product(three, repeat=count):
            text = start.again()
            text.advance(block)
            text.advance()
            text.close()
    start.close()


def check_texts_follow_the_law(suite: Suite) -> None:
    """Compare texts of two tokens over many seeds with their exact law, by chi-square."""
    three, prompt, seeds = (5, 17, 40), suite.prompt(6), 400
    law: dict[tuple[int, ...], float] = {}
    for first, second in itertools.product(three, repeat=2):
        p = [
            torch.softmax(suite.oracle.logits(before)[0, list(three)].double(), 0)[three.index(token)].item()
            for before, token in ((prompt, first), ((*prompt, first), second))
        ]
        law[first, second] = p[0] * p[1]
    found: Counter[tuple[int, ...]] = Counter()
    for first in range(0, seeds, 16):
        texts = [
            Text(suite, prompt, Sampling(temperature=1.0, seed=seed, allowed_tokens=three))
            for seed in range(first, first + 16)
        ]
        _together(suite, texts, 2, lambda _: suite.rng.choices(three, k=suite.rng.randrange(3)))
        found.update(tuple(text.tokens[:2]) for text in texts)
        for text in texts:
            text.close()
    statistic = sum((found[outcome] - seeds * p) ** 2 / (seeds * p) for outcome, p in law.items() if seeds * p >= 1)
    freedom = len(law) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 10, f"chi-square {statistic:.1f} of {freedom} degrees"


def check_prompts_in_any_pieces(suite: Suite) -> None:
    """Read one prompt in pieces of many sizes; the text is the same."""
    prompt, sampling = suite.prompt(50), Sampling(temperature=1.0, seed=3)
    found = []
    for size in (1 << 20, 1, 7, 16, 33):
        text = Text(suite, prompt, sampling, isolation=str(size))
        while text.sequence.length + size < len(prompt):
            suite.step([text.row(max_tokens=size)])
        found.append(text.write(8))
        text.close()
    assert all(each == found[0] for each in found)


def check_ragged_company(suite: Suite) -> None:
    """Let sessions of all settings, with drafts of all lengths, share their steps, some of which they sit out."""
    texts = [
        Text(suite, suite.prompt(suite.rng.randrange(1, 40)), Sampling(temperature=i % 2, seed=i), str(i))
        for i in range(9)
    ]
    _together(suite, texts, 12, lambda text: suite.drafts(text, suite.rng.randrange(5)))
    for text in texts:
        text.close()


def check_rollback(suite: Suite) -> None:
    """Compute wrong tokens, forget them, and go on as if they had never been, from any length."""
    prompt, sampling = suite.prompt(30), Sampling(temperature=1.0, seed=5)
    text = Text(suite, prompt, sampling)
    expected = text.write(10)
    for length in (len(text.transcript) - 3, len(prompt) + 1, len(prompt) - 1, 17, 16, 3, 0):
        suite.backend.truncate(text.sequence, min(text.sequence.length, length))
        start, kept = text.sequence.length, text.transcript
        text.transcript = [*kept[:start], *suite.prompt(5)]
        suite.step([text.row(max_tokens=4)])
        suite.backend.truncate(text.sequence, start)
        suite.backend.truncate(text.sequence, min(text.sequence.length, len(prompt) - 1))
        text.transcript = kept[: len(prompt)]
        assert text.write(10) == expected
    text.close()


def check_masks(suite: Suite) -> None:
    """Let a grammar's mask decide; no token outside it is ever drawn."""
    for seed in range(6):
        allowed = np.zeros(VOCAB, dtype=bool)
        allowed[suite.rng.sample(range(3, VOCAB), 4)] = True
        text = Text(suite, suite.prompt(7), Sampling(temperature=2.0 * (seed % 2), seed=seed), allowed=allowed)
        text.write(6, drafts=lambda: suite.drafts(text, 2))  # noqa: B023 - called at once
        assert allowed[text.tokens].all()
        text.close()


def check_log_probabilities(suite: Suite) -> None:
    """Compare log p of the processed distribution, and of the model's own where wanted, with the oracle's."""
    sampling = Sampling(temperature=0.7, seed=9, top_k=30)
    text = Text(suite, suite.prompt(12), sampling)
    for wanted in (False, True):
        row = text.row(suite.drafts(text, 2, good=1.0))
        assert row.verification is not None
        asked = VerificationInput(
            sampling, text.transcript, len(text.prompt), row.verification.block, None, wanted, 3 if wanted else 0
        )
        (sampled,) = suite.step([StepRow(row.handle, row.tokens, asked)]).sampled
        assert sampled is not None
        before = list(text.transcript)
        for token in sampled.tokens:
            processed = processed_logits(
                suite.oracle.logits(before), VerificationInput(sampling, before, len(text.prompt), ())
            )
            expected = torch.log_softmax(processed.double(), -1)[0, token.id].item()
            assert abs((token.logp or 0.0) - expected) < 1e-2
            own = torch.log_softmax(suite.oracle.logits(before).double(), -1)[0]
            assert (token.logprob is not None) == wanted
            if token.logprob is not None:
                assert abs(token.logprob - own[token.id].item()) < 1e-2
                assert [t for t, _ in token.top] == own.topk(3).indices.tolist()
            before.append(token.id)
        text.take(row, sampled)
    text.close()


def check_taps(suite: Suite) -> None:
    """Compare the taps of the newest valid position with the plain model's hidden states, in mixed company."""
    layers = (1, 3)
    suite.backend.tap(layers)
    texts = [Text(suite, suite.prompt(6 + i), Sampling(temperature=1.0, seed=i), str(i)) for i in range(4)]
    for text in texts:
        text.advance()
    for good in (1.0, 0.5, 0.0, 0.7):
        rows = [text.row(suite.drafts(text, i, good=good), tapped=i != 1) for i, text in enumerate(texts)]
        output = suite.step(rows)
        tapped = []
        for i, (text, row, sampled) in enumerate(zip(texts, rows, output.sampled, strict=True)):
            if text.take(row, sampled) and i != 1:
                tapped.append(text)
        assert output.taps is not None
        assert output.taps.shape[0] == len(tapped)
        for text, got in zip(tapped, output.taps, strict=True):
            wanted = suite.oracle.entering(text.transcript[:-1], layers)
            assert float((got.cpu() - wanted).norm() / wanted.norm()) < 1e-3, "the residual stream of another position"
    for text in texts:
        text.close()


def check_pages(suite: Suite) -> None:
    """Refuse more pages than there are, give back what is released, and lose none."""
    backend = suite.backend
    before = backend.capacity
    assert before.free_pages == before.pages, "nothing is open"
    assert backend.open().num_pages == 0
    text = Text(suite, suite.prompt(20), Sampling())
    text.advance()
    held = text.sequence.num_pages
    assert held >= before.pages_for(20)
    try:
        backend.reserve(text.sequence, (before.pages + 1) * before.page_size)
    except ResourceExhausted:
        assert text.sequence.num_pages == held
    else:
        raise AssertionError("pages were given that there are not")
    backend.reserve(text.sequence, 10 * before.page_size)
    assert text.sequence.num_pages == 10
    backend.reserve(text.sequence, text.sequence.length)
    assert text.sequence.num_pages == before.pages_for(text.sequence.length)
    text.write(6)
    text.close()
    assert backend.capacity == before


def check_what_is_shared(suite: Suite) -> None:
    """Open texts that begin alike, at once and one after the other; a prefix is shared within one isolation alone."""
    prompt, sampling = suite.prompt(45), Sampling(temperature=1.0, seed=21)
    first = Text(suite, prompt, sampling, "mine")
    assert first.sequence.length == 0
    expected = first.write(10)
    first.close()
    theirs = Text(suite, prompt, sampling, "theirs")
    assert theirs.sequence.length == 0, "another's prompt shows in what is computed already"
    assert theirs.write(10) == expected
    other = Text(suite, (*prompt[:30], *suite.prompt(10)), sampling, "mine")
    assert other.sequence.length <= 30
    again = Text(suite, prompt, sampling, "mine")
    _together(suite, [other, again], 10, lambda text: suite.drafts(text, 2))
    assert again.tokens[:10] == expected
    for text in (theirs, other, again):
        text.close()


def check_rejected_drafts(suite: Suite) -> None:
    """Have drafts rejected; while their text goes on and after its end, nobody finds them, nor a neighbour the text."""
    text = Text(suite, suite.prompt(30), Sampling(temperature=1.0, seed=23), "mine")
    rejected = []
    while len(text.tokens) < 24:
        before, block = tuple(text.transcript), suite.drafts(text, 20, good=0.3)
        text.advance(block)
        agreed = next((j for j, token in enumerate(text.transcript[len(before) :]) if token != block[j]), len(block))
        rejected.append(((*before, *block), len(before) + agreed))
    for ended in (False, True):
        if ended:
            text.close()
        for drafted, agreed in rejected:
            for isolation, most in (("mine", agreed), ("theirs", 0)):
                found = suite.backend.open((*drafted, 3), isolation)
                assert found.length <= most, "a draft that was rejected shows in what is computed already"
                suite.backend.release(found)


def check_a_failed_step(suite: Suite) -> None:
    """Let the target fail once amid a text; the same step then succeeds, and nothing is lost."""
    if suite.fail_next_step is None:
        return
    texts = [Text(suite, suite.prompt(8 + i), Sampling(temperature=1.0, seed=i), str(i)) for i in range(3)]
    for text in texts:
        text.advance()
    for _ in range(3):
        rows = [text.row(suite.drafts(text, 2)) for text in texts]
        lengths = [text.sequence.length for text in texts]
        suite.fail_next_step()
        try:
            suite.backend.step(rows)
        except Exception:  # a target may raise anything
            assert [text.sequence.length for text in texts] == lengths
        else:
            raise AssertionError("a failed step must raise")
        _together(suite, texts, len(texts[0].tokens) + 1, lambda text: suite.drafts(text, 2))
    for text in texts:
        text.close()


def check_no_numbers(suite: Suite) -> None:
    """Let a logit be no number: there is no text of it, whatever hides it from the law, and the same step goes well."""
    if suite.spoil_next_step is None:
        return
    hidden = np.zeros(VOCAB, bool)
    hidden[3:9] = True
    for i, sampling in enumerate(SETTINGS.values()):
        text = Text(suite, suite.prompt(8), sampling, f"no number {i}", hidden if i % 2 else None)
        for number in (math.nan, math.inf):
            text.advance()
            row = text.row(suite.drafts(text, 2))
            length = text.sequence.length
            suite.spoil_next_step(number)
            try:
                suite.backend.step([row])
            except FloatingPointError:
                assert text.sequence.length == length
            else:
                raise AssertionError(f"a logit of {number} must raise")
        text.write(3, drafts=lambda text=text: suite.drafts(text, 2))  # type: ignore[misc]
        text.close()


def check_anything_in_any_order(suite: Suite) -> None:
    """Open, read, draft, take over, roll back and close at random; every token is the rule's, and no page is lost."""
    rng, texts = suite.rng, list[Text]()
    prompts = [suite.prompt(40) for _ in range(2)]
    for turn in range(150):
        act = rng.random()
        if len(texts) < 3 or (act < 0.1 and len(texts) < 8):
            prompt = (*rng.choice(prompts)[: rng.randrange(1, 40)], *suite.prompt(rng.randrange(1, 10)))
            texts.append(Text(suite, prompt, Sampling(temperature=turn % 2, seed=turn), rng.choice("ab")))
        elif act < 0.15:
            texts.append(rng.choice(texts).again())
        elif act < 0.2:
            text = rng.choice(texts)
            suite.backend.truncate(text.sequence, rng.randrange(text.sequence.length + 1))
        elif act < 0.3:
            texts.pop(rng.randrange(len(texts))).close()
        for text in [text for text in texts if len(text.transcript) > LONGEST]:
            texts.remove(text)
            text.close()
        company = [text for text in texts if rng.random() < 0.7]
        rows = [
            text.row(suite.drafts(text, rng.randrange(4)), max_tokens=rng.choice((1, 3, 16, 1 << 20)))
            for text in company
        ]
        if rows:
            output = suite.step(rows)
            for text, row, sampled in zip(company, rows, output.sampled, strict=True):
                text.take(row, sampled)
    for text in texts:
        text.close()
    assert suite.backend.capacity.used_pages == 0


def _together(suite: Suite, texts: Sequence[Text], tokens: int, drafts: Callable[[Text], Sequence[int]]) -> None:
    """Write all texts to at least `tokens` tokens in common steps, some of which each sits out."""
    for _ in range(MAX_STEPS):
        writing = [text for text in texts if len(text.tokens) < tokens]
        if not writing:
            return
        company = [text for text in writing if suite.rng.random() < 0.8] or writing
        rows = [text.row(drafts(text)) for text in company]
        for text, row, sampled in zip(company, rows, suite.step(rows).sampled, strict=True):
            text.take(row, sampled)
    raise AssertionError("the backend puts rows off for ever")


Check = Callable[[Suite], None]
CHECKS: dict[str, Check] = {
    name.removeprefix("check_"): check
    for name, check in list[tuple[str, Any]](globals().items())
    if name.startswith("check_")
}

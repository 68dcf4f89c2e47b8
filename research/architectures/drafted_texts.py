"""Greedy texts of a backend under drafts of which some are right, at once, in pieces, sent away and resumed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.cloud.target.backend import Backend, Handle, StepRow
from outrider.cloud.target.verification import VerificationInput
from outrider.proto.types import DraftToken, Sampling, token_ids

MAX_DRAFTS = 8
_PIECE = 13  # tokens of a prompt that a step reads at most
_SENT_AWAY = 0.08  # chance before each step, which other sessions' pages then take


@dataclass
class DraftedText:
    """A text in progress, which should become `expected` [n], the tokens of its prompt included.

    Attributes:
        right: chance that a draft is the expected token.
    """

    prompt: tuple[int, ...]
    expected: Sequence[int]
    right: float
    sampling: Sampling = field(default_factory=Sampling)
    transcript: list[int] = field(init=False)
    handle: Handle | None = None

    def __post_init__(self) -> None:
        self.transcript = list(self.prompt)

    @property
    def finished(self) -> bool:
        return len(self.transcript) >= len(self.expected)

    @property
    def equal(self) -> bool:
        """Whether it is what was expected."""
        return self.transcript[: len(self.expected)] == list(self.expected)

    def row(self, backend: Backend, rng: random.Random, vocab: int) -> StepRow:
        """Return its part of a step."""
        if self.handle is None:
            self.handle = backend.open(self.transcript)
        start = self.handle.length
        tokens = tuple(self.transcript[start : start + _PIECE])
        if start + len(tokens) < len(self.transcript):
            backend.reserve(self.handle, len(self.transcript))
            return StepRow(self.handle, tokens, None)
        ahead = self.expected[len(self.transcript) : len(self.transcript) + rng.randrange(MAX_DRAFTS + 1)]
        drafts = [token if rng.random() < self.right else rng.randrange(3, vocab) for token in ahead]
        backend.reserve(self.handle, len(self.transcript) + len(drafts))
        block = tuple(map(DraftToken, drafts))
        return StepRow(self.handle, tokens, VerificationInput(self.sampling, self.transcript, len(self.prompt), block))

    def send_away(self, backend: Backend) -> None:
        """Give up its place; it comes again with its transcript."""
        if self.handle is not None:
            backend.release(self.handle)
        self.handle = None


def write(backend: Backend, texts: Sequence[DraftedText], *, at_once: int, vocab: int, seed: int) -> int:
    """Write `texts`, `at_once` of them at a time, and return the number of steps."""
    rng, steps = random.Random(seed), 0
    waiting, writing = list(texts), list[DraftedText]()
    while waiting or writing:
        while waiting and len(writing) < at_once:
            writing.append(waiting.pop(0))
        for text in writing:
            if rng.random() < _SENT_AWAY:
                text.send_away(backend)
        rows = [text.row(backend, rng, vocab) for text in writing]
        for text, row, sampled in zip(writing, rows, backend.step(rows).sampled, strict=True):
            if sampled is None or row.verification is None:
                continue
            block = token_ids(row.verification.block)
            ids = token_ids(sampled.tokens)
            agreed = next((j for j, draft in enumerate(block) if draft != ids[j]), len(block))
            text.transcript += ids[: agreed + 1]
            backend.truncate(row.handle, min(row.handle.length, len(text.transcript) - 1))
        for text in [text for text in writing if text.finished]:
            text.send_away(backend)
            writing.remove(text)
        steps += 1
    return steps

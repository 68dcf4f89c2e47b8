"""A target without a model: its distribution hashes the whole prefix, and its tokens follow the shipped noise."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from operator import add

import numpy as np

from outrider.proto.noise import gumbel
from outrider.proto.types import CommittedToken, DraftToken, FinishReason, Sampling

MODEL, TOKENIZER = "toy", "ab" * 32
SECRET = b"a secret of sixteen bytes or more"  # of all leases
VOCAB, EOS, CONTEXT = 8, 0, 96
_ROWS = 1 << 10
_EOS_EVERY = 24  # rows of which one favours EOS


def _rows() -> list[list[float]]:
    """Return log probabilities [_ROWS][VOCAB] in sixteenths, which every number format on the wire keeps."""
    rng, rows = random.Random(0), []
    for number in range(_ROWS):
        favour = 3.0 if number % _EOS_EVERY == 0 else -4.0
        logits = [favour, *(rng.uniform(-1.5, 1.5) for _ in range(VOCAB - 1))]
        total = math.log(sum(map(math.exp, logits)))
        rows.append([round(16 * (logit - total)) / 16 for logit in logits])
    return rows


ROWS = _rows()


@functools.cache
def _noise(seed: int, position: int) -> list[float]:
    noise: list[float] = gumbel(seed, position, np.arange(VOCAB)).tolist()
    return noise


class ToyTarget:
    """The target's choice after any prefix, by the rule y = argmax(log p + G), for one seed and temperature."""

    def __init__(self, sampling: Sampling) -> None:
        self._seed = sampling.seed
        self._greedy = sampling.temperature == 0
        self._known: dict[tuple[int, ...], CommittedToken] = {}

    def token(self, prefix: tuple[int, ...]) -> CommittedToken:
        """Return the token after `prefix` [n], with its log probability."""
        found = self._known.get(prefix)
        if found is None:
            row = ROWS[hash(prefix) % _ROWS]  # Python hashes tuples of integers alike in every process
            scores = row if self._greedy else list(map(add, row, _noise(self._seed, len(prefix))))
            token = scores.index(max(scores))
            found = self._known[prefix] = CommittedToken(token, row[token])
        return found

    def after(self, transcript: Sequence[int], block: Sequence[DraftToken]) -> tuple[CommittedToken, ...]:
        """Return the tokens [k + 1] after the transcript and after each draft of `block` [k]."""
        prefix, tokens = tuple(transcript), []
        for draft in block:
            tokens.append(self.token(prefix))
            prefix += (draft.id,)
        return (*tokens, self.token(prefix))

    def text(self, prompt: tuple[int, ...], max_tokens: int) -> tuple[tuple[CommittedToken, ...], FinishReason]:
        """Return the text of plain decoding, and why it ends: what every schedule is held to."""
        text, prefix = list[CommittedToken](), prompt
        while True:
            text.append(self.token(prefix))
            prefix += (text[-1].id,)
            if text[-1].id == EOS:
                return tuple(text), FinishReason.EOS
            if len(text) == max_tokens:
                return tuple(text), FinishReason.LENGTH


class ToyTargets:
    """The targets of one schedule, which all of its parts share for speed alone."""

    def __init__(self) -> None:
        self._targets: dict[tuple[int, float], ToyTarget] = {}

    def of(self, sampling: Sampling) -> ToyTarget:
        """Return the target for texts of this seed and temperature."""
        key = sampling.seed, sampling.temperature
        if key not in self._targets:
            self._targets[key] = ToyTarget(sampling)
        return self._targets[key]

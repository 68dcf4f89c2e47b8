"""Drafters that need no model, for tests, examples, simulations and negative controls."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from outrider.drafters.proposals import ProposalRule
from outrider.drafters.protocol import Drafter, DraftState, TokenPrefix, check_scorable, steering_of
from outrider.proto.errors import Internal
from outrider.proto.noise import random_bits
from outrider.proto.types import DraftToken

Script = Sequence[int] | Callable[[Sequence[int]], int | None]


class ScriptedDrafter:
    """Drafter with a script: tokens by absolute position, or a function of the prefix (None: no proposal)."""

    version = "1"
    steering = None

    def __init__(self, script: Script, *, q: float = 0.9, name: str = "scripted") -> None:
        """Make the drafter; `q` is the probability it gives to its own token, and 1 - q to any other."""
        self.name = name
        self._script = script
        self._q = q

    def open(self, rule: ProposalRule) -> DraftState:
        """Begin an empty prefix."""
        return _ScriptedState(self._script, self._q)


class _ScriptedState(TokenPrefix):
    def __init__(self, script: Script, q: float) -> None:
        super().__init__()
        self._script = script
        self._q = q

    def _next(self) -> int | None:
        if callable(self._script):
            return self._script(self.tokens)
        return self._script[self.length] if self.length < len(self._script) else None

    def propose(self, n: int) -> tuple[DraftToken, ...]:
        drafts: list[DraftToken] = []
        while len(drafts) < n and (token := self._next()) is not None:
            drafts.append(DraftToken(token, self._q))
            self.extend((token,))
        return tuple(drafts)

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        check_scorable(self.length)
        probability = np.empty(len(tokens))
        for index, token in enumerate(tokens):
            probability[index] = self._q if token == self._next() else 1 - self._q
            self.extend((token,))
        return np.log(np.maximum(probability, 1e-9)).astype(np.float32)


class GarbageDrafter:
    """Drafter of uniformly random tokens, a pure function of (seed, position); no text may change by it."""

    version = "1"
    steering = None

    def __init__(self, vocab: int, seed: int = 0, *, name: str = "garbage") -> None:
        self.name = name
        self._vocab = vocab
        self._seed = seed

    def open(self, rule: ProposalRule) -> DraftState:
        """Begin an empty prefix."""
        return _GarbageState(self._vocab, self._seed)


class _GarbageState(TokenPrefix):
    def __init__(self, vocab: int, seed: int) -> None:
        super().__init__()
        self._vocab = vocab
        self._seed = seed

    def propose(self, n: int) -> tuple[DraftToken, ...]:
        bits = [random_bits(self._seed, self.length + ahead, np.zeros(1, dtype=np.int64))[0] for ahead in range(n)]
        tokens = tuple(int(value) % self._vocab for value in bits)
        self.extend(tokens)
        return tuple([DraftToken(token, 1 / self._vocab) for token in tokens])

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        check_scorable(self.length)
        self.extend(tokens)
        return np.full(len(tokens), -math.log(self._vocab), dtype=np.float32)


class FailingDrafter:
    """Drafter that breaks once a state has proposed `after_n` tokens of `inner`, as a bad model file would."""

    def __init__(self, after_n: int = 0, inner: Drafter | None = None) -> None:
        self._after_n = after_n
        self._inner = inner if inner is not None else GarbageDrafter(vocab=2, name="failing")
        self.name = self._inner.name
        self.version = self._inner.version
        self.steering = steering_of(self._inner)

    def open(self, rule: ProposalRule) -> DraftState:
        """Begin an empty prefix, with all its proposals before it."""
        return _FailingState(self._inner.open(rule), self._after_n)  # type: ignore[return-value]


class _FailingState:
    def __init__(self, inner: DraftState, after_n: int) -> None:
        self._inner = inner
        self._left = after_n

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def propose(self, n: int) -> tuple[DraftToken, ...]:
        if n > 0:
            self._check_whole()
        proposal = self._inner.propose(min(n, self._left))
        self._left -= len(proposal)
        return proposal

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        self._check_whole()
        return self._inner.score(tokens)

    def propose_forced(self, tokens: Sequence[int]) -> tuple[DraftToken, ...]:
        self._check_whole()
        return self._inner.propose_forced(tokens)

    def _check_whole(self) -> None:
        if self._left == 0:
            raise Internal("the drafter fails here, as its test asks")

"""Drafting without a model, from what followed the same words before in this prompt and text.

Sources: Saxena 2023, "Prompt Lookup Decoding"; He et al. 2023, "REST: Retrieval-Based Speculative Decoding". Unlike
theirs, the continuations are weighed, so that every proposal comes with an honest q. With c_n(t) how often token t
followed the last n tokens, N_n the sum of these counts and D_n how many tokens have one,

    q_n(t) = (c_n(t) + D_n q_{n-1}(t)) / (N_n + D_n),      q_0(t) = 1 / vocabulary size

which is the interpolation of Witten and Bell (1991, method C): one continuation seen once gets a half, and the
rest is left to shorter matches. q_n is a distribution over the whole vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from outrider.drafters.proposals import NO_PROPOSAL, ProposalRule
from outrider.drafters.protocol import TokenPrefix, check_scorable, check_truncation
from outrider.proto.errors import InvalidArgument
from outrider.proto.token_counts import TokenCounts
from outrider.proto.types import DraftToken

POSITIONS_READ = 16  # newest ends of an n-gram; a common word has thousands, and a bound keeps a token's price constant


class NgramPositions:
    """Positions where the n-grams of one length ended: the last ones in a dict, earlier ones by links between them."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._last: dict[tuple[int, ...], int] = {}
        self._earlier: list[int] = []  # [length]; for each end, the end of the same n-gram before it; -1: none

    def append(self, tokens: list[int]) -> None:
        """Add the n-gram that ends with the newest of `tokens`."""
        gram = tuple(tokens[-self._n :])
        self._earlier.append(self._last.get(gram, -1))
        self._last[gram] = len(tokens) - 1

    def pop(self, tokens: list[int]) -> None:
        """Forget the n-gram that ends with the newest of `tokens`."""
        gram = tuple(tokens[-self._n :])
        earlier = self._earlier.pop()
        if earlier < 0:
            del self._last[gram]
        else:
            self._last[gram] = earlier

    def before(self, length: int) -> Iterator[int]:
        """Yield up to `POSITIONS_READ` earlier ends, newest first, of the n-gram that ends at token `length`."""
        position = self._earlier[length - 1] if length >= self._n else -1
        for _ in range(POSITIONS_READ):
            if position < 0:
                return
            yield position
            position = self._earlier[position]


class NgramDrafter:
    """Drafter that proposes the continuation of the longest suffix that was seen before.

    Args:
        longest: tokens of the longest suffix looked up; shorter ones down to one token follow.
        vocab_size: number of tokens that share the probability of the unseen; need not be exact.
    """

    version = "1"
    steering = None

    def __init__(self, *, longest: int = 3, vocab_size: int = 1 << 16, name: str = "ngram") -> None:
        if longest < 1:
            raise InvalidArgument(f"{longest} is below 1; the suffix needs a token", field="ngram.longest")
        if vocab_size < 1:
            raise InvalidArgument(f"{vocab_size} is below 1", field="ngram.vocab_size")
        self.name = name
        self.longest = longest
        self.vocab_size = vocab_size

    def open(self, rule: ProposalRule) -> NgramState:
        return NgramState(rule, self.longest, self.vocab_size)


class NgramState(TokenPrefix):
    """Tokens of one session and where each of their n-grams ended last."""

    def __init__(self, rule: ProposalRule, longest: int, vocab_size: int) -> None:
        super().__init__()
        self._rule, self._counted = rule, rule.counts()
        self._vocab_size = vocab_size
        self._positions = [NgramPositions(n) for n in range(1, longest + 1)]  # shortest first, as q is built

    def extend(self, tokens: Sequence[int]) -> None:
        """Append known tokens, O(longest) each."""
        for token in tokens:
            self.tokens.append(int(token))
            for positions in self._positions:
                positions.append(self.tokens)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; the index becomes what it was when they were the last."""
        check_truncation(length, self.length)
        while self.length > length:
            for positions in self._positions:
                positions.pop(self.tokens)
            self.tokens.pop()
        self._token_counts()

    def propose(self, n: int) -> tuple[DraftToken, ...]:
        """Append and return up to n tokens, for as long as the last token has been seen before."""
        choices: list[DraftToken] = []
        while len(choices) < n:
            believed = self._probabilities()
            if not believed:
                break
            candidates = sorted(believed, key=believed.__getitem__, reverse=True)  # stable: the newest first
            chosen = self._rule.choose(
                self.length,
                np.array(candidates, dtype=np.int64),
                np.log(np.array([believed[token] for token in candidates])),
                0.0,
                self._token_counts(),
            )
            if chosen is NO_PROPOSAL:
                break
            choices.append(chosen)
            self.extend((chosen.id,))
        return tuple(choices)

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """Append tokens and return log q of each [m] float32, the module's q_n over the whole vocabulary."""
        check_scorable(self.length)
        log_q = np.empty(len(tokens), dtype=np.float32)
        for index, token in enumerate(tokens):
            log_q[index] = math.log(self._probability(int(token)))
            self.extend((token,))
        return log_q

    def follow(self, rule: ProposalRule) -> None:
        self._rule, self._counted = rule, rule.counts()

    def close(self) -> None:
        super().close()
        self._positions = []

    def _token_counts(self) -> TokenCounts | None:
        if (counts := self._counted) is not None:
            counts.truncate(self.length)
            counts.extend(self.tokens[counts.length :])
        return counts

    def _counts(self) -> Iterator[Counter[int]]:
        """Count what followed the last 1, 2, ... `longest` tokens, as far as they occurred before."""
        for positions in self._positions:
            counts = Counter(self.tokens[position + 1] for position in positions.before(self.length))
            if not counts:
                return
            yield counts

    def _probabilities(self) -> dict[int, float]:
        """Return q of every token that followed the last token before."""
        floor = 1 / self._vocab_size
        believed: dict[int, float] = {}
        for counts in self._counts():
            if not believed:
                believed = dict.fromkeys(counts, floor)
            total = counts.total() + len(counts)
            for token in believed:
                believed[token] = (counts[token] + len(counts) * believed[token]) / total
        return believed

    def _probability(self, token: int) -> float:
        """Return q of one token, seen before or not."""
        q = 1 / self._vocab_size
        for counts in self._counts():
            q = (counts[token] + len(counts) * q) / (counts.total() + len(counts))
        return q

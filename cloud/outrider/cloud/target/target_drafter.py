"""A model of transformers as a verifier's own drafter, in any architecture that is served as a target."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from outrider.cloud.target.kv_cache import SessionCache
from outrider.cloud.target.kv_size import bytes_per_token
from outrider.cloud.target.target import SessionRows, Target
from outrider.cloud.target.target_loading import load_target, multiplies_in_bfloat16
from outrider.drafters import DraftState, ProposalRule
from outrider.drafters.proposals import NO_PROPOSAL
from outrider.drafters.protocol import TokenPrefix, check_scorable, check_truncation
from outrider.proto.errors import ResourceExhausted
from outrider.proto.token_counts import TokenCounts
from outrider.proto.types import DraftToken

CANDIDATES = 64


def load_target_drafter(folder: Path, *, texts: int) -> TargetDrafter:
    """Load the model in a folder, with room for `texts` of full length; raises like `load_target`.

    Its rows need not keep their bits, since no text depends on them.
    """
    dtype = "bfloat16" if multiplies_in_bfloat16() else "float32"
    return TargetDrafter(load_target(str(folder), dtype=dtype, exact="off", max_sessions=texts), folder)


class TargetDrafter:
    """A drafter that is a loaded model; its states take turns.

    Attributes:
        version: first twelve hexadecimal digits of a hash of its config and of the sizes of its files.
        tokenizer_sha256: hash of its tokenizer.
        position_bytes: memory that a position of a text takes.
        turns: held while a state computes.
    """

    steering = None

    def __init__(self, target: Target, folder: Path) -> None:
        self.target = target
        self.name = folder.name
        self.version = _version_of(folder)
        self.tokenizer_sha256 = target.tokenizer_sha256
        self.position_bytes = bytes_per_token(target.model.config.get_text_config(), target.dtype)
        self.turns = threading.Lock()

    def open(self, rule: ProposalRule) -> DraftState:
        return TargetDraftState(self, rule)


class TargetDraftState(TokenPrefix):
    """A text's prefix in a model, of whose tokens the last is always left to the next pass."""

    def __init__(self, drafter: TargetDrafter, rule: ProposalRule) -> None:
        super().__init__()
        self._drafter = drafter
        self._cache: SessionCache | None = None
        self._num_computed = 0  # first tokens that the cache holds
        self._num_given = 0  # first tokens that are not proposals of its own
        self.follow(rule)

    def follow(self, rule: ProposalRule) -> None:
        self._rule, self._counts = rule, rule.counts()

    def extend(self, tokens: Sequence[int]) -> None:
        super().extend(tokens)
        self._num_given = self.length

    def truncate(self, length: int) -> None:
        check_truncation(length, self.length)
        del self.tokens[length:]
        self._num_given, self._num_computed = min(self._num_given, length), min(self._num_computed, length)
        self._token_counts()

    def propose(self, n: int) -> tuple[DraftToken, ...]:
        """Append and return up to n tokens, fewer at the end of the context or where memory is full."""
        choices: list[DraftToken] = []
        while len(choices) < n and 0 < self.length < self._drafter.target.context_length:
            try:
                (logits,) = self._logits(1)
            except ResourceExhausted:
                break
            best = logits.topk(self._rule.candidates_wanted(min(CANDIDATES, len(logits))))
            total = float(logits.logsumexp(-1))
            counts = self._token_counts()
            chosen = self._rule.choose(self.length, best.indices.numpy(), best.values.numpy(), total, counts)
            if chosen is NO_PROPOSAL:
                break
            choices.append(chosen)
            self.tokens.append(chosen.id)
        return tuple(choices)

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """Append `tokens` [m] and return log q of each [m] float32."""
        check_scorable(self.length)
        self.extend(tokens)
        log_q = self._logits(len(tokens) + 1)[:-1].log_softmax(-1)
        scored: np.ndarray = log_q[torch.arange(len(tokens)), torch.tensor(tokens)].numpy()
        return scored

    def close(self) -> None:
        super().close()
        if self._cache is not None:
            with self._drafter.turns:
                self._drafter.target.pool.release(self._cache)
            self._cache = None

    def _logits(self, wanted: int) -> torch.Tensor:
        """Return logits [wanted, vocab] float32, on the host, after each of the last `wanted` tokens."""
        target = self._drafter.target
        with self._drafter.turns:
            if self._cache is None:
                self._cache = target.pool.open()
            cache = self._cache
            cache.truncate(min(self._num_computed, self.length - wanted, cache.length))
            target.pool.resize(cache, self.length)
            rows = SessionRows(
                cache,
                tuple(self.tokens[cache.length :]),
                wanted,
                drafts=self.length - max(self._num_given, cache.length),
            )
            logits = target.forward([rows]).cpu()
        self._num_computed = self.length
        return logits

    def _token_counts(self) -> TokenCounts | None:
        counts = self._counts
        if counts is not None:
            counts.truncate(min(counts.length, self.length))
            counts.extend(self.tokens[counts.length :])
        return counts


def _version_of(folder: Path) -> str:
    found = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        found.update(f"{file.name} {file.stat().st_size}".encode())
    return found.hexdigest()[:12]

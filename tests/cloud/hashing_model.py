"""A model whose logits hash what is in the KV cache: one wrong position, page or rollback, and another text comes."""

from __future__ import annotations

import functools
import hashlib
import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from outrider.cloud.target.attention import RaggedBatch
from outrider.cloud.target.target import FREE, Passes, Target
from outrider.proto.testing import word_tokenizer

EOS = 2
POISON, NO_NUMBER = 3, 5  # in a prompt; no text holds them
PLAIN = 6  # the first token that is nothing special
HIDDEN, LAYERS = 8, 2


@dataclass(frozen=True)
class Language:
    """Logits and hidden states after every text: fixed, and unpredictable without the whole text."""

    seed: int
    vocab_size: int

    def _rng(self, text: tuple[int, ...], salt: int) -> np.random.Generator:
        data = np.array([self.seed, salt, *text], dtype=np.int32).tobytes()
        return np.random.default_rng(int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little"))

    @functools.lru_cache(maxsize=1 << 14)  # noqa: B019 - a language lives as long as its test
    def logits(self, text: tuple[int, ...]) -> np.ndarray:
        """[vocab] float32; tokens that came lately are likely, so that penalties matter."""
        logits = self._rng(text, 0).standard_normal(self.vocab_size, dtype=np.float32) * np.float32(2.5)
        logits[list(text[-6:])] += 4
        logits[[POISON, NO_NUMBER]] = -math.inf
        if NO_NUMBER in text:
            logits[:] = math.nan
        return logits

    def hidden(self, text: tuple[int, ...], layer: int) -> np.ndarray:
        """[HIDDEN] float32, what enters a layer at the last position."""
        return self._rng(text, 1 + layer).standard_normal(HIDDEN, dtype=np.float32)


class HashingModel(nn.Module):
    """A transformers model from outside: tokens go into the paged KV cache, and its texts' logits come out.

    Attributes:
        complaints: what was wrong with the cache; a failure of the engine's own would pass for a failure of the device.
    """

    generation_config = None

    def __init__(self, language: Language, context_length: int) -> None:
        super().__init__()
        self.language = language
        self.complaints: list[str] = []
        self.weight = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.layers = nn.ModuleList(nn.Identity() for _ in range(LAYERS))
        self._text_config = SimpleNamespace(
            vocab_size=language.vocab_size,
            max_position_embeddings=context_length,
            num_hidden_layers=LAYERS,
            hidden_size=HIDDEN,
            eos_token_id=EOS,
        )
        self.config = SimpleNamespace(get_text_config=lambda: self._text_config)

    def set_attn_implementation(self, name: str) -> None:
        """Nothing attends here but `forward`."""

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        use_cache: bool,
        logits_to_keep: torch.Tensor,
        outrider_batch: RaggedBatch,
    ) -> Any:
        tokens, batch = input_ids[0], outrider_batch
        self.on_rows(len(tokens))
        if POISON in tokens.tolist():
            raise RuntimeError("CUDA error: device-side assert triggered, as by one text")
        batch.write(0, tokens.float().view(-1, 1, 1), position_ids[0].float().view(-1, 1, 1))
        self.on_written()
        texts: list[tuple[int, ...]] = [()] * len(tokens)
        for span in batch.spans:
            keys, values = batch.pool.read(0, span.cache, span.context)
            held = tuple(keys[:, 0, 0].int().tolist())
            if values[:, 0, 0].tolist() != list(range(span.context)):
                self.complaints.append(f"positions {values[:, 0, 0].tolist()} of {span.context}")
            for row in range(span.count):
                texts[span.first + row] = held[: span.start + row + 1]
        for number, layer in enumerate(self.layers):
            if layer._forward_pre_hooks:
                hidden = np.stack([self.language.hidden(text, number) for text in texts])
                layer(torch.from_numpy(hidden)[None])
        logits = np.stack([self.language.logits(texts[row]) for row in logits_to_keep.tolist()])
        return SimpleNamespace(logits=torch.from_numpy(logits)[None])

    def on_rows(self, rows: int) -> None:
        """May raise before anything is written."""

    def on_written(self) -> None:
        """May raise when the cache has been written."""


def hashing_target(model: HashingModel, *, kv_tokens: int, page_size: int, passes: Passes = FREE) -> Target:
    tokenizer = word_tokenizer(model.language.vocab_size)
    return Target(model, tokenizer, kv_tokens=kv_tokens, page_size=page_size, passes=passes)

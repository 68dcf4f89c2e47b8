"""A drafter with low-rank changes of all its matrices, which alone learn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from outrider.cloud.export.parent import Parent
from outrider.cloud.learning.trainer_settings import RANK
from outrider.cloud.models.heads import SmallEmbedding, head_terms, spread, tokens_of


class Change(nn.Module):
    """The change B A of a matrix, 0 at first: B [rows, rank] is 0, A [rank, columns] is random."""

    def __init__(self, rows: int, columns: int, rank: int) -> None:
        super().__init__()
        self.A = nn.Parameter(torch.randn(rank, columns) * columns**-0.5)
        self.B = nn.Parameter(torch.zeros(rows, rank))
        self.active = True

    def of(self, x: torch.Tensor, rows: slice = slice(None)) -> torch.Tensor | float:
        """Return B[rows] A x for `x` [..., columns]; 0 while it is not active."""
        return functional.linear(functional.linear(x, self.A), self.B[rows]) if self.active else 0.0


class _Changed(nn.Module):
    """A product with W + B A, of whose rows this takes `rows`."""

    def __init__(self, linear: nn.Linear, change: Change, rows: slice) -> None:
        super().__init__()
        self.linear = linear
        self.change = change
        self.rows = rows

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self.linear(x) + self.change.of(x, self.rows)
        return product


class AdaptedDrafter(nn.Module):
    """A parent in torch, and a change of rank `rank` of each of its products and of the embedding, which is the head.

    Queries, keys and values are one matrix in the graph, so they share their A.

    Attributes:
        known: int64, ascending, the tokens that it knows; None: all.
    """

    def __init__(self, parent: Parent, *, rank: int = RANK, seed: int = 0) -> None:
        super().__init__()
        self.rank = rank
        self.vocab_size: int = parent.model.config.vocab_size
        self.context_length = parent.package.context_length
        self._body = deepcopy(parent.model.model)
        embedding, self.known = parent.model.get_input_embeddings(), tokens_of(parent.model)
        _, self._embedding = head_terms(parent.model.lm_head, torch.empty(0))
        self._rows = embedding.rows if isinstance(embedding, SmallEmbedding) else None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self._changes = dict(self._put_into(parent))
            rows, columns = self._embedding.shape
            self._head = Change(rows, columns, rank)
        self._changes[parent.head] = self._head
        self._parameters_of_changes = nn.ModuleList(self._changes.values())

    def _put_into(self, parent: Parent) -> Iterator[tuple[str, Change]]:
        for layer, names in zip(self._body.layers, parent.layers, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            for part, owner, attributes in (
                ("qkv", attention, ("q_proj", "k_proj", "v_proj")),
                ("o", attention, ("o_proj",)),
                ("gate", mlp, ("gate_proj",)),
                ("up", mlp, ("up_proj",)),
                ("down", mlp, ("down_proj",)),
            ):
                linears = [getattr(owner, attribute) for attribute in attributes]
                rows = sum(linear.out_features for linear in linears)
                change = Change(rows, linears[0].in_features, self.rank)
                first = 0
                for attribute, linear in zip(attributes, linears, strict=True):
                    end = first + linear.out_features
                    setattr(owner, attribute, _Changed(linear, change, slice(first, end)))
                    first = end
                yield names[part], change

    def forward(self, tokens: torch.Tensor, picked: torch.Tensor) -> torch.Tensor:
        """Return float32 log-probabilities [n, vocab] after the picked prefixes.

        Args:
            tokens: int64 [rows, length]; what is to the right of a prefix changes nothing.
            picked: int64 [n], `row * length + index` of the last token of each prefix.
        """
        return self.logits(self.hidden(tokens).flatten(0, 1)[picked]).log_softmax(-1)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [..., vocab] of states after the last norm [..., hidden]."""
        logits: torch.Tensor = functional.linear(hidden, self._embedding) + self._head.of(hidden)
        if self.known is None:
            return logits
        return spread(logits, logits.logsumexp(-1, keepdim=True), self.known, self.vocab_size)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the states after the last norm, float32 [rows, length, hidden], of tokens int64 [rows, length]."""
        if self._rows is not None:
            tokens = self._rows[tokens].long()
        embedded = functional.embedding(tokens, self._embedding)
        if self._head.active:
            embedded = embedded + functional.embedding(tokens, self._head.B) @ self._head.A
        hidden: torch.Tensor = self._body(inputs_embeds=embedded, use_cache=False).last_hidden_state
        return hidden

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Compute as the parent does inside the `with` block."""
        for change in self._changes.values():
            change.active = False
        try:
            yield
        finally:
            for change in self._changes.values():
                change.active = True

    def learned(self) -> list[nn.Parameter]:
        """Return what learns: A and B of each matrix, in the graph's order."""
        return list(self._parameters_of_changes.parameters())

    def matrices(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """Return copies of A [rank, columns] and B [rows, rank] of each matrix, float32, by its name in the graph."""
        return {
            name: (change.A.detach().cpu().numpy().copy(), change.B.detach().cpu().numpy().copy())
            for name, change in self._changes.items()
        }

    @torch.no_grad()
    def load(self, matrices: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> None:
        """Replace A and B of every matrix by copies that `matrices` has returned."""
        for name, change in self._changes.items():
            for parameter, array in zip((change.A, change.B), matrices[name], strict=True):
                parameter.copy_(torch.from_numpy(np.asarray(array, dtype=np.float32)))

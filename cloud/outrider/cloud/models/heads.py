"""Small output heads of drafters, over the tokens that a drafter knows.

A drafter reads all of its head for every token. One that knows a part of the vocabulary alone (FastDraft; VocabTrim,
arXiv 2506.22694) has one small matrix for head and embedding.

A model with such a head is saved as any other; `HEAD` in its config.json says how to load it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from outrider.proto.errors import InvalidArgument

HEAD = "outrider_head"  # entry of config.json: the shape of a small head

# A token that a head lacks has the probability e^-20 (2e-9): all of them together have less than a thousandth at any
# vocabulary, none is a candidate, and what is made of scores (divergences, means of log q) stays finite.
MISSING_NATS = 20.0


class SmallHead(nn.Module):
    """The head in the place of `lm_head`: `up` [tokens, hidden].

    Attributes:
        vocab: tokens of the model, for all of which `forward` answers.
        tokens: int64 [tokens], ascending, those that `up` has rows for.
    """

    tokens: torch.Tensor

    def __init__(self, hidden: int, vocab: int, tokens: int) -> None:
        super().__init__()
        self.vocab = vocab
        self.up = nn.Linear(hidden, tokens, bias=False)
        self.register_buffer("tokens", torch.arange(tokens))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [..., vocab] of states after the last norm [..., hidden]."""
        logits: torch.Tensor = self.up(hidden)
        return spread(logits, logits.logsumexp(-1, keepdim=True), self.tokens, self.vocab)


def spread(logits: torch.Tensor, log_normalizer: torch.Tensor, tokens: torch.Tensor, vocab: int) -> torch.Tensor:
    """Return logits [..., vocab] of logits [..., tokens] for `tokens`; the others are at `MISSING_NATS`.

    `log_normalizer` is [..., 1], that of `logits`.
    """
    shape = logits.shape[:-1]
    missing = (log_normalizer - MISSING_NATS).expand(*shape, vocab)
    return missing.scatter(-1, tokens.expand(*shape, len(tokens)), logits)


class SmallEmbedding(nn.Module):
    """The embedding of a drafter that knows `head.tokens` alone: the rows of that head, which it does not own.

    Attributes:
        rows: int32 [vocab], the row of each token: its own, or the one of the nearest token that has one.
    """

    rows: torch.Tensor

    def __init__(self, vocab: int, head: SmallHead) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(vocab, dtype=torch.int32))
        self._head = [head]  # in a list, so that its weights are not listed twice

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return float [..., hidden] of tokens int64 [...]."""
        return nn.functional.embedding(self.rows[tokens], self._head[0].up.weight)


@torch.no_grad()
def reduce_vocabulary(model: PreTrainedModel, tokens: torch.Tensor) -> None:
    """Leave `tokens` (int64, ascending) alone in a model, with one matrix for embedding and head.

    Other tokens are read as the kept one whose embedding has the greatest cosine with theirs. A model that knows a part
    of its vocabulary already, `tokens` among them, is left with fewer.

    Raises:
        InvalidArgument: its head is not its embedding.
    """
    if tokens_of(model) is None and not model.config.tie_word_embeddings:
        raise InvalidArgument("the drafter's head is not its embedding; begin with another drafter", field="vocabulary")
    vocab, device = model.config.vocab_size, model.device
    weight = model.get_input_embeddings()(torch.arange(vocab, device=device)).float()
    tokens = tokens.to(device)
    unit = nn.functional.normalize(weight, dim=-1)
    rows = torch.cat([(part @ unit[tokens].T).argmax(-1) for part in unit.split(1024)])
    rows[tokens] = torch.arange(len(tokens), device=device)
    set_vocabulary(model, vocab, weight[tokens], tokens, rows)


@torch.no_grad()
def set_vocabulary(model: Any, vocab: int, weight: torch.Tensor, tokens: torch.Tensor, rows: torch.Tensor) -> None:
    """Give a model of `vocab` tokens the embedding and head `weight` [tokens, hidden].

    `tokens` are those of `SmallHead`, `rows` those of `SmallEmbedding`.
    """
    head = SmallHead(weight.shape[1], vocab, len(tokens))
    embedding = SmallEmbedding(vocab, head)
    head.load_state_dict({"tokens": tokens, "up.weight": weight})
    embedding.rows.copy_(rows)
    model.model.embed_tokens, model.lm_head = embedding.to(weight.device), head.to(weight.device)
    model.config.vocab_size, model.config.tie_word_embeddings = vocab, False
    setattr(model.config, HEAD, {"tokens": len(tokens)})


def tokens_of(model: PreTrainedModel) -> torch.Tensor | None:
    """Return the tokens that a model's head can predict, int64 [tokens]; None: all."""
    head = model.get_output_embeddings()
    return head.tokens if isinstance(head, SmallHead) else None


@contextmanager
def head_of_kept_tokens(model: PreTrainedModel) -> Iterator[None]:
    """Let the model return logits for `tokens_of` alone inside the `with` block."""
    head: Any = model.lm_head
    if tokens_of(model) is None:
        yield
        return
    model.lm_head = head.up
    try:
        yield
    finally:
        model.lm_head = head


def has_small_head(folder: Path) -> bool:
    """Return whether `load_with_small_head` is needed to load the model of a folder."""
    config = folder / "config.json"
    return config.is_file() and HEAD in json.loads(config.read_text(encoding="utf-8"))


def load_with_small_head(folder: Path, *, dtype: str, attention: str | None) -> PreTrainedModel:
    """Load a model whose config.json has `HEAD`; OSError, ValueError: it is unreadable, or has other tensors."""
    from safetensors.torch import load_file

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    made: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model: PreTrainedModel = made
    model.lm_head = SmallHead(config.hidden_size, config.vocab_size, getattr(config, HEAD)["tokens"])
    made.model.embed_tokens = SmallEmbedding(config.vocab_size, made.lm_head)
    state: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("model*.safetensors")):  # steering lies beside them
        state |= load_file(shard)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{folder} holds other tensors than its config.json says: {error}") from error
    made.to(getattr(torch, dtype)).eval()
    return model


def head_terms(head: nn.Module, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return states and the matrix whose product with them are the logits of a head of any kind, of `tokens_of` alone.

    `hidden` is [..., hidden], after the last norm.
    """
    return hidden, head.up.weight if isinstance(head, SmallHead) else head.get_parameter("weight")

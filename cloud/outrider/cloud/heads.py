"""Small output heads of drafters: low rank in place of the whole matrix from hidden state to vocabulary.

A drafter reads all of its head for every token, and one row of its embedding. So a head of its own, hidden -> rank ->
vocabulary (SlimSpec), costs a token less than a tied one of full rank, though the file holds both.

A model with such a head is saved as any other; `HEAD` in its config.json says how to load it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from outrider.proto.errors import InvalidArgument

HEAD = "outrider_head"  # entry of config.json: the shape of a small head


class SmallHead(nn.Module):
    """The product of two matrices, `down` [rank, hidden] and `up` [vocab, rank], in the place of `lm_head`."""

    def __init__(self, hidden: int, vocab: int, rank: int) -> None:
        super().__init__()
        self.down = nn.Linear(hidden, rank, bias=False)
        self.up = nn.Linear(rank, vocab, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [..., vocab] of states after the last norm [..., hidden]."""
        logits: torch.Tensor = self.up(self.down(hidden))
        return logits


@torch.no_grad()
def reduce_head(model: PreTrainedModel, *, rank: int) -> None:
    """Replace a model's head by the nearest of rank `rank` (truncated SVD); the embedding stays as it is.

    Raises:
        InvalidArgument: the head is as small already.
    """
    lm_head: Any = model.get_output_embeddings()
    if isinstance(lm_head, SmallHead):
        raise InvalidArgument("the drafter has such a head already; leave this out to train it on", field="head_rank")
    vocab, hidden = lm_head.weight.shape
    if rank >= hidden:
        raise InvalidArgument(f"{rank} saves nothing of a head of rank {hidden}; give less", field="head_rank")
    head = SmallHead(hidden, vocab, rank)
    weight = lm_head.weight.detach().float().cpu()
    _, directions = torch.linalg.eigh(weight.T @ weight)  # ascending: the right singular vectors
    kept = directions.flip(1)[:, :rank]
    head.down.weight.copy_(kept.T)
    head.up.weight.copy_(weight @ kept)
    model.lm_head = head.to(lm_head.weight.device)
    model.config.tie_word_embeddings = False
    setattr(model.config, HEAD, {"rank": rank})


def has_small_head(folder: Path) -> bool:
    """Return whether `load_with_small_head` is needed to load the model of a folder."""
    config = folder / "config.json"
    return config.is_file() and HEAD in json.loads(config.read_text(encoding="utf-8"))


def load_with_small_head(folder: Path, *, dtype: str, attention: str | None) -> PreTrainedModel:
    """Load a model whose config.json has `HEAD`.

    Raises:
        OSError, ValueError: it cannot be read, or its tensors are not those of its config.json.
    """
    from safetensors.torch import load_file

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    shape = getattr(config, HEAD)
    made: Any = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    model: PreTrainedModel = made
    model.lm_head = SmallHead(config.hidden_size, config.vocab_size, int(shape["rank"]))
    state: dict[str, torch.Tensor] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        state |= load_file(shard)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{folder} holds other tensors than its config.json says: {error}") from error
    made.to(getattr(torch, dtype)).eval()
    return model


def loss_terms(
    head: nn.Module, hidden: torch.Tensor, logits_by_target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return states, matrix and target's logits whose `forward_kl` is that of a head of any kind.

    Args:
        head: the drafter's `lm_head`.
        hidden: [rows, block, hidden], after the last norm.
        logits_by_target: [rows, block, vocab].
    """
    if isinstance(head, SmallHead):
        return head.down(hidden), head.up.weight, logits_by_target
    return hidden, head.get_parameter("weight"), logits_by_target

"""Tiny random models of any architecture, saved as a hub repository would hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from outrider.proto.testing import word_tokenizer

# Shape of a model of transformers that costs next to nothing.
VOCAB = 97
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def save_random_model(folder: Path, architecture: str, **config: Any) -> Any:
    """Save a model of `config` and a tokenizer of as many words, and return the model as transformers runs it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(7)
    made = AutoConfig.for_model(architecture, **config)
    model = AutoModelForCausalLM.from_config(made, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)  # so that attention is not nearly uniform
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(word_tokenizer(config["vocab_size"]))
    return model

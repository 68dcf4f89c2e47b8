"""Tiny random models of any architecture, saved as a hub repository would hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from outrider.proto.testing import word_tokenizer


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

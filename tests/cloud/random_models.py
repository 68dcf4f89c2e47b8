"""Tiny random models of any architecture, saved as a hub repository would hold them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from outrider.cloud.testing import save_byte_tokenizer
from outrider.proto.testing import word_tokenizer

# Shape of a model of transformers that costs next to nothing.
VOCAB = 97
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GPT2: dict[str, Any] = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "eos_token_id": 2}


def architectures(positions: int) -> dict[str, dict[str, Any]]:
    """Return configs of small models by transformers' name of the architecture, with room for so many positions."""
    small = SMALL | {"max_position_embeddings": positions}
    heads = small | {"head_dim": 8}
    return {
        "llama": small,
        "qwen2": small,
        "qwen3": heads,
        "mistral": small | {"sliding_window": 8},
        "gemma2": heads | {"sliding_window": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
        "gemma3_text": heads | {"sliding_window": 8, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
        "phi3": small,
        "gpt_neox": {k: v for k, v in small.items() if k != "num_key_value_heads"},
        "gpt2": GPT2 | {"n_positions": positions},
    }


# Shape of a Llama for the byte tokenizer, wide enough for blocks of weights of few bits.
BYTE_LLAMA: dict[str, Any] = {
    "vocab_size": 258, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 64, "max_position_embeddings": 128, "initializer_range": 0.15,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


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


def save_with_byte_tokenizer(model: Any, folder: Path) -> Path:
    """Save a model of 258 tokens and the byte tokenizer, and return the folder."""
    model.save_pretrained(folder)
    save_byte_tokenizer(folder)
    return folder


def teacher_of(target: Path | str, folder: Path, texts: Iterable[str], tokens: int = 3000) -> Path:
    """Have a target read pieces of texts, and return the teacher's folder, of `tokens` tokens or some more."""
    from outrider.cloud.training.teacher_writing import write_teacher
    from outrider.cloud.training.training_settings import TeacherWriting

    folder.mkdir(exist_ok=True)
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    writing = TeacherWriting(
        target=str(target),
        texts=(folder / "texts.jsonl",),
        output=folder / "says",
        tokens=tokens,
        read=1.0,
        rows=16,
        new_tokens=30,
        longest=30,
        threads=1,
        dtype="float32",
    )
    write_teacher(writing)
    return writing.output

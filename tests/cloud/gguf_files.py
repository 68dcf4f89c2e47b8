"""Small GGUF files of a random Llama, with a tokenizer and a chat template, as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM

from outrider.cloud.testing import tiny_llama

TEMPLATE = "{% for message in messages %}<bos>{{ message['content'] }}<eos>{% endfor %}"
_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


def byte_tokenizer() -> Tokenizer:
    """Return byte-level BPE of 261 tokens: `<bos>`, `<eos>`, the 256 bytes, and three merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]
    tokens = ["<bos>", "<eos>", *alphabet, *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    return tokenizer


def byte_llama(seed: int = 1) -> LlamaForCausalLM:
    """Return a random Llama for that tokenizer, wide enough for blocks of weights of few bits."""
    return tiny_llama(
        seed=seed,
        sharpness=60.0,
        vocab_size=261,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        max_position_embeddings=256,
        bos_token_id=0,
        eos_token_id=1,
    )


def write_gguf(
    file: Path,
    model: LlamaForCausalLM | None = None,
    *,
    architecture: str = "llama",
    kind: str = "BF16",
    left_out: str = "",
    more: dict[str, Any] | None = None,
) -> Path:
    """Write `file` and return it.

    Args:
        file: where to.
        model: Llama for `byte_tokenizer`; None: `byte_llama`.
        architecture: name that the file gives.
        kind: GGML's type of the matrices.
        left_out: part of the name of tensors that the file shall lack.
        more: further strings and integers of its metadata.
    """
    model = model or byte_llama()
    config = model.config
    writer = gguf.GGUFWriter(str(file), architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    _add_tokenizer(writer, byte_tokenizer())
    for key, value in (more or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    for name, weight in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        layer, stem = (stem.split(".")[2], stem.split(".", 3)[3]) if ".layers." in stem else ("", stem)
        name = ".".join(filter(None, ("blk" if layer else "", layer, _NAMES[stem], suffix)))
        values = weight.float().numpy()
        for part, heads in (("attn_q", config.num_attention_heads), ("attn_k", config.num_key_value_heads)):
            if part in name:  # llama.cpp has the halves of each head in turn
                values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        quantized = gguf.GGMLQuantizationType[kind if values.ndim > 1 else "F32"]
        if not left_out or left_out not in name:
            values = np.ascontiguousarray(values)
            integers = quantized == gguf.GGMLQuantizationType.I32  # which no model has
            stored = values.astype(np.int32) if integers else gguf.quants.quantize(values, quantized)
            writer.add_tensor(name, stored, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda each: each[1])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token for token, _ in vocabulary])
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL if index < 2 else kinds.NORMAL for _, index in vocabulary])
    writer.add_token_merges([each if isinstance(each, str) else " ".join(each) for each in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)

"""A small random model of every causal language model that the installed transformers has."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outrider.cloud.testing import VOCAB

_MOST_PARAMETERS = 8_000_000
NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
# What a config is given of it is what it has fields for.
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 256,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 16,
    "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256, "d_model": 32, "n_layers": 4, "n_heads": 4,
    "ffn_dim": 48, "word_embed_proj_dim": 32, "max_seq_len": 256, "rotary_dim": 8,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_routed_experts": 4, "shared_expert_intermediate_size": 32, "n_group": 1, "topk_group": 1,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "mamba_n_heads": 8, "mamba_d_state": 8, "mamba_d_head": 8, "mamba_n_groups": 1,
    "ssm_state_size": 8, "state_size": 8,
    "first_k_dense_replace": 1,
}  # fmt: skip
_LINEAR = ["linear_attention", "full_attention"] * 2
_SHARED: dict[str, Any] = {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2}
_BY_LAYER = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
_BLT = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "intermediate_size": 48}
_MORE: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_types": _LINEAR},
    "bamba": {"attn_layer_indices": [1, 3]},
    "blenderbot": {"encoder_layers": 1, "decoder_layers": 2},
    "blt": {"patcher_config": _BLT, "encoder_config": _BLT, "decoder_config": _BLT, "global_config": _BLT,
            "encoder_hash_byte_group_vocab": 500},
    "cohere_compass_text": {"layer_types": ["full_attention"] * 4},
    "dbrx": {"attn_config": {"kv_n_heads": 2}, "ffn_config": {"ffn_hidden_size": 48}},
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {**_SHARED, **_BY_LAYER, "laurel_rank": 4},
    "gemma4_text": {**_SHARED, **_BY_LAYER, "global_head_dim": 16},
    "gemma4_unified_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "num_heads": 4, "window_size": 16},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"layer_types": _LINEAR},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"ffn_hidden_size": 48, "expert_ffn_hidden_size": 48, "zero_expert_num": 2, "moe_topk": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "plbart": {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "qwen4_exp_text": {"moe_intermediate_size": 48, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
                       "indexer_budget": 16, "indexer_compress_ratio": 4, "hc_lowrank": 8},
    "reformer": {"is_decoder": True, "attention_head_size": 8, "axial_pos_embds": False,
                 "attn_layers": ["local", "lsh"]},
    "roc_bert": {"pronunciation_vocab_size": 10, "shape_vocab_size": 10},
    "whisper": {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "xlstm": {"num_heads": 4, "hidden_size": 128},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 9, "attn_layer_period": 3, "attn_layer_offset": 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip


# Families that run one session a pass, and those that are no decoders of text; all others share passes.
ONE_BY_ONE = {
    "axk2", "blenderbot", "bloom", "codegen", "deepseek_v32", "deepseek_v4", "diffllama", "doge", "falcon", "git",
    "glm_moe_dsa", "gpt_neo", "gpt_neox_japanese", "gptj", "hrm_text", "hy_v4", "inkling2_text", "inkling_text",
    "llama4", "llama4_text", "minimax", "mpt", "nemotron", "openai-gpt", "phimoe", "qwen4_exp_text",
    "recurrent_gemma", "reformer", "rwkv", "stablelm", "trocr",
    "whisper", "xglm", "xlstm", "zamba", "zamba2", "zaya",
}  # fmt: skip
REFUSED = {
    "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "blenderbot-small", "camembert", "cpmant",
    "data2vec-text", "electra", "ernie", "marian", "mbart", "megatron-bert", "mvp", "pegasus",
    "plbart", "prophetnet", "rembert", "roberta", "roberta-prelayernorm", "roc_bert",
    "roformer", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet", "xmod",
}  # fmt: skip
# Parts of models of sound and pictures, whose language models stand under names of their own, and three that this
# transformers cannot make from a small config.
NOT_SMALL = {
    "blt", "cohere_compass_text", "dbrx", "dots3_note", "dots3_note_text", "emu3", "fuyu", "gemma3", "gemma3n",
    "gemma4", "gemma4_assistant", "gemma4_unified", "gemma4_unified_assistant", "got_ocr2", "mllama", "moshi",
    "moss_transcribe_diarize", "musicgen", "musicgen_melody", "qwen4_exp",
}  # fmt: skip


def small_model(name: str, **shape: int) -> Any:
    """Return a model of `name` in float32 whose attention is far from uniform, and whose states tell in its texts.

    `shape` takes the place of what its config has otherwise.
    """
    config = AutoConfig.for_model(name, **(_fields(CONFIG_MAPPING[name]) | _MORE.get(name, {}) | shape))
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())
    if size >= _MOST_PARAMETERS:
        raise ValueError(f"{name} has {size} parameters; give its config a smaller shape")
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
                if parameter.dim() == 3 and parameter.shape[1] == 1:  # of a convolution
                    parameter.mul_(10)
                parameter[(parameter == 0).flatten(1).all(dim=1)] = 0.1  # what embeds padding
    return model


def _fields(kind: Any) -> dict[str, Any]:
    """Return what a config class, and those of its parts, have fields for."""
    known = set(kind.attribute_map).union(*(inspect.get_annotations(base) for base in kind.__mro__))
    fields = {field: value for field, value in _SHAPE.items() if field in known}
    if "kv_lora_rank" in known:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    parts = {name: part for name, part in kind.sub_configs.items() if part is not AutoConfig}
    return fields | {name: _fields(part) for name, part in parts.items()}

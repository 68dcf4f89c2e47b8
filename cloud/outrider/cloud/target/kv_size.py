"""The size of the KV cache and of its sessions where nobody has set it: what memory and model allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from outrider.proto.errors import ModelRefused

CPU_SHARE = 0.25  # of the memory at hand; others need theirs, and pages take memory only when they are written
GPU_SHARE = 0.85  # of what the weights leave; the rest is for activations and logits
_CONTEXT = 32768  # positions a session, where neither the model nor the operator says how many
# Types of layers that transformers' configs name: with a state beside or in place of keys, and without keys.
STATE_LAYERS = {"linear_attention", "conv", "mamba", "hybrid"}
_WITHOUT_KEYS = {"linear_attention", "conv", "mamba", "moe", "mlp"}
_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def session_length(config: Any, asked: int) -> int:
    """Return the most positions of a session: `asked` (0: nothing is), but no more than the model was made for."""
    made_for = int(getattr(config, "max_position_embeddings", 0) or asked or _CONTEXT)
    return min(asked or made_for, made_for)


def kv_tokens_by_memory(config: Any, dtype: torch.dtype, device: torch.device, most: int, others: int = 0) -> int:
    """Return for how many positions of `dtype` there is memory beside the weights, which are loaded, `most` at most.

    Sessions may keep `others` bytes besides.

    Raises:
        ModelRefused: there is no memory for 16 positions.
    """
    on_gpu = device.type == "cuda"
    memory = GPU_SHARE * torch.cuda.mem_get_info(device)[0] if on_gpu else CPU_SHARE * available_bytes()
    tokens = min(most, int((memory - others) // max(1, bytes_per_token(config, dtype))))
    if tokens < 16:
        message = f"{memory / 2**20:.0f} MiB of memory are too few for a KV cache"
        raise ModelRefused(message, field="kv_tokens", code="OUT-404")
    return tokens


def check_memory(kv_tokens: int, config: Any, dtype: torch.dtype) -> None:
    """Raise ModelRefused where a CPU has no memory for so many positions, whose pages take theirs when written."""
    needed, available = kv_tokens * bytes_per_token(config, dtype), available_bytes()
    if needed > available:
        message = (
            f"{kv_tokens:,} positions take {needed / 2**30:.1f} GiB, and {available / 2**30:.1f} GiB of memory are "
            "left; give fewer, or 0 for as many as fit"
        )
        raise ModelRefused(message, field="kv_tokens", code="OUT-404")


def bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes that keys and values of one position take in all layers."""
    layers = getattr(config, "per_layer_config", None) or [config] * config.num_hidden_layers  # Gemma 4's differ
    types = getattr(config, "layer_types", None) or []
    if len(types) == len(layers):
        layers = [layer for layer, kind in zip(layers, types, strict=True) if kind not in _WITHOUT_KEYS]
    numbers = 0
    for layer in layers:
        query_heads = getattr(layer, "num_attention_heads", 0)  # no layer of Mamba has any
        if getattr(layer, "kv_lora_rank", None):  # latent attention, which keeps one vector for all heads
            numbers += layer.kv_lora_rank + layer.qk_rope_head_dim
        elif query_heads:
            heads = getattr(layer, "num_key_value_heads", None) or query_heads
            numbers += 2 * heads * (getattr(layer, "head_dim", None) or layer.hidden_size // query_heads)
    return int(numbers * dtype.itemsize)


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int:
    """Return the memory that this process may still take: the machine's, or its container's (cgroup 2) if less."""
    lines = (line.split() for line in meminfo.read_text().splitlines())
    available = next(int(words[1]) * 1024 for words in lines if words[0] == "MemAvailable:")
    try:
        limit, used = ((cgroup / name).read_text().strip() for name in ("memory.max", "memory.current"))
        return min(available, max(0, int(limit) - int(used)))
    except (OSError, ValueError):  # no container, or "max"
        return available

"""The precision of a target: what decides how its logits round, as one short text."""

from __future__ import annotations

from typing import Any

import torch


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type as options have it, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def precision_of(
    dtype: torch.dtype, *, engine: str = "", device: str = "cpu", quantization: str = "", kv_dtype: str = ""
) -> str:
    """Return what decides the rounding of a target, such as `bfloat16` or `vllm bfloat16, fp8 KV cache`.

    Where two of these texts are equal, so are bytes, as far as guarantees and machines allow; else some are not. Empty
    settings stand for our own engine, weights that are not quantised, and keys and values of `dtype`.
    """
    parts = [f"{engine} {dtype_name(dtype)}".strip()]
    parts += [f"{quantization} weights"] if quantization else []
    parts += [f"{kv_dtype} KV cache"] if kv_dtype not in ("", "auto", dtype_name(dtype)) else []
    parts += [f"on {device}"] if device != "cpu" else []
    return ", ".join(parts)


def quantization_of(config: Any) -> str:
    """Return how the weights of a model with this transformers config are quantised; empty: not at all."""
    settings = getattr(config, "quantization_config", None)
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    return str(getattr(method, "value", method) or "")

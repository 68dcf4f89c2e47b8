"""The inputs and outputs of an exported graph; the edge's side is in `outrider.drafters.onnx`.

n new tokens join a cache in which p positions are filled. The cache is one pair of arrays a layer with room for c
positions, c >= p + n; past and present are the same memory, so the graph writes n rows and copies none.

A steered drafter's graph takes a bias of every layer's up projection besides. They are the outputs of a second small
graph, which runs once a steering vector, not once a token.
"""

from __future__ import annotations

from typing import Any

from outrider.proto.errors import OutriderError

MODEL_FILE, MANIFEST_FILE = "model.onnx", "manifest.json"
STEERING_GRAPH_FILE = "steering.onnx"

# The caches follow, for every layer past_key.L and past_value.L, present_key.L and present_value.L.
INPUTS: dict[str, dict[str, Any]] = {
    "tokens": {"dtype": "int64", "shape": [1, "n"]},
    "logit_rows": {"dtype": "int64", "shape": ["m"]},
    "candidate_count": {"dtype": "int64", "shape": [1]},
    "last_position": {"dtype": "int32", "shape": [1]},
    "length": {"dtype": "int32", "shape": []},
}
OUTPUTS: dict[str, dict[str, Any]] = {
    "candidate_tokens": {"dtype": "int64", "shape": ["m", "candidate_count"]},
    "candidate_logits": {"dtype": "float32", "shape": ["m", "candidate_count"]},
    "log_normalizer": {"dtype": "float32", "shape": ["m"]},
    "logits": {"dtype": "float32", "shape": ["m", "vocab_size"]},
}
VECTOR = "vector"  # name of the steering graph's only input, float32 [rank]


class ExportMismatch(OutriderError):
    """ONNX Runtime and torch disagree about the exported model; nothing was published."""


def cache_port(dtype: str) -> dict[str, Any]:
    """Return what a manifest says of each of the cache's inputs and outputs."""
    return {"dtype": dtype, "shape": [1, "kv_heads", "c", "head_dim"]}


def cache_names(side: str, layers: int) -> list[str]:
    """Return the names of the cache's inputs (`side` "past") or outputs ("present"), by layer, keys first."""
    return [f"{side}_{kind}.{layer}" for layer in range(layers) for kind in ("key", "value")]


def steering_names(layers: int) -> list[str]:
    """Return the names of the biases, float32 [mlp] each: a steered graph's last inputs."""
    return [f"steering.{layer}" for layer in range(layers)]

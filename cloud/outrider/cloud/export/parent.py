"""A drafter's graph as a torch model: the floats that its 8-bit weights stand for, in the architecture they came from.

Packages carry ONNX graphs alone. What the exporter writes (`outrider.cloud.export`) is a Llama, or with a window a
Mistral, so its shape can be read off the graph: products in their order, norms, and the attributes of attention.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from outrider.cloud.export.quantised import ROWS
from outrider.cloud.models.heads import set_vocabulary
from outrider.drafters.adapters import weights_of
from outrider.drafters.packages import DrafterPackage
from outrider.proto.errors import ModelRefused

PRODUCTS = ("qkv", "o", "gate", "up", "down")  # of a layer, in a graph's order
MAX_ROTATION_ERROR = 2.0**-22  # of an angle, a position: some times what float32 rounds

SmallModel = LlamaForCausalLM | MistralForCausalLM


@dataclass(frozen=True, slots=True, eq=False)
class Parent:
    """A drafter in torch, frozen, and the names that its matrices have in the graph.

    Attributes:
        model: float32, on the CPU.
        layers: names of each layer's matrices, by `PRODUCTS`.
        head: name of the head's matrix, which is the embedding's too; of the tokens alone that the drafter knows.
    """

    package: DrafterPackage
    model: SmallModel
    layers: tuple[Mapping[str, str], ...]
    head: str


def load_parent(package: DrafterPackage) -> Parent:
    """Return a package's graph as a torch model, without its adapter.

    Raises:
        ModelRefused: the graph is no Llama or Mistral with tied embeddings, as `outrider train drafter` makes them.
    """
    graph = onnx.load(package.model_path, load_external_data=False).graph
    try:
        weights = weights_of(package)
    except ModelRefused as error:
        raise ModelRefused(f"drafter {package.name} cannot be trained on: {error.message}", field="drafter") from error
    names, layers = list(weights), package.cache.layers
    lookup, rows = _lookup(graph)
    if lookup.removesuffix(ROWS) != names[-1]:
        raise _refusal(package, "its head is not its embedding but a matrix of its own")
    if len(names) != layers * len(PRODUCTS) + 1:
        raise _refusal(package, f"its graph has {len(names)} products, not {layers * len(PRODUCTS) + 1}")
    by_layer = tuple(
        dict(zip(PRODUCTS, names[first : first + len(PRODUCTS)], strict=True))
        for first in range(0, len(names) - 1, len(PRODUCTS))
    )
    model = _empty_model(package, graph, weights, by_layer)
    _fill(model, package, graph, [{part: weights[name] for part, name in layer.items()} for layer in by_layer])
    embedding = torch.tensor(weights[names[-1]])
    if rows is None:
        with torch.no_grad():
            model.get_input_embeddings().get_parameter("weight").copy_(embedding)
    else:
        set_vocabulary(model, package.vocab_size, embedding, _known_tokens(graph), rows)
    model.requires_grad_(False)
    return Parent(package, model, by_layer, names[-1])


def _lookup(graph: Any) -> tuple[str, torch.Tensor | None]:
    """Return the name of the matrix that tokens are looked up in, and the row of each token where a table says it."""
    tables = {tensor.name for tensor in graph.initializer if len(tensor.dims) == 1}
    name, rows = "tokens", None
    while (node := next((node for node in graph.node if name in node.input), None)) is not None:
        if node.input[0] in tables:
            rows = torch.from_numpy(_array(graph, node.input[0]).astype(np.int64))
        elif node.input[0] != name:
            return node.input[0], rows
        name = node.output[0]
    return "", None


def _known_tokens(graph: Any) -> torch.Tensor:
    """Return the tokens of the head's rows, which candidates are translated by."""
    translation = next(node for node in graph.node if "candidate_tokens" in node.output)
    return torch.from_numpy(_array(graph, translation.input[0]).astype(np.int64))


def _refusal(package: DrafterPackage, why: str) -> ModelRefused:
    return ModelRefused(
        f"drafter {package.name} cannot be trained on: {why}; give one that `outrider train drafter` made "
        "with a whole head",
        field="drafter",
    )


def _empty_model(
    package: DrafterPackage, graph: Any, weights: Mapping[str, np.ndarray], layers: tuple[Mapping[str, str], ...]
) -> SmallModel:
    attention = [node for node in graph.node if node.op_type == "GroupQueryAttention"]
    if len(attention) != len(layers):
        raise _refusal(package, "its layers do not attend once each")
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in attention[0].attribute}
    heads, head_dim = attributes["num_heads"], package.cache.head_dim
    norms = [node for node in graph.node if node.op_type.endswith("SimplifiedLayerNormalization")]
    epsilon = next(a.f for a in norms[0].attribute if a.name == "epsilon") if norms else 0.0
    known, hidden = list(weights.values())[-1].shape
    settings: dict[str, Any] = {
        "vocab_size": known,
        "hidden_size": hidden,
        "num_hidden_layers": len(layers),
        "num_attention_heads": heads,
        "num_key_value_heads": package.cache.kv_heads,
        "head_dim": head_dim,
        "intermediate_size": len(weights[layers[0]["up"]]),
        "max_position_embeddings": package.context_length,
        "tie_word_embeddings": True,
        "rms_norm_eps": epsilon,
        "rope_theta": _rope_theta(package, graph, attention[0], head_dim),
    }
    expected = {
        "qkv": ((heads + 2 * package.cache.kv_heads) * head_dim, hidden),
        "o": (hidden, heads * head_dim),
        "gate": (settings["intermediate_size"], hidden),
        "up": (settings["intermediate_size"], hidden),
        "down": (hidden, settings["intermediate_size"]),
    }
    for layer in layers:
        if any(weights[name].shape != expected[part] for part, name in layer.items()):
            raise _refusal(package, "its products have other shapes than a Llama's")
    if attributes.get("softcap") or not np.isclose(attributes["scale"], head_dim**-0.5):
        raise _refusal(package, "its attention is scaled as no Llama's is")
    window = attributes.get("local_window_size", -1)
    if window > 0:
        return MistralForCausalLM(MistralConfig(**settings, sliding_window=window))
    return LlamaForCausalLM(LlamaConfig(**settings))


def _rope_theta(package: DrafterPackage, graph: Any, attention: Any, head_dim: int) -> float:
    """Return the base of the rotations, from the angles of position 1: theta^(-2j / head_dim) for pair j."""
    cos, sin = (_array(graph, name) for name in attention.input[7:9])
    angles = np.arctan2(sin[1].astype(np.float64), cos[1])
    theta = float(angles[1] ** (-head_dim / 2)) if len(angles) > 1 else 10000.0
    theta = float(f"{theta:.4g}")
    expected = np.arange(len(cos))[:, None] * theta ** (-2 * np.arange(head_dim // 2) / head_dim)
    if np.abs(np.cos(expected) - cos).max() > MAX_ROTATION_ERROR * len(cos):
        raise _refusal(package, "it rotates positions as no plain Llama does")
    return theta


def _fill(model: SmallModel, package: DrafterPackage, graph: Any, layers: list[Mapping[str, np.ndarray]]) -> None:
    """Copy the layers' matrices and all norms."""
    norms = [
        _array(graph, node.input[2 if node.op_type.startswith("Skip") else 1])
        for node in graph.node
        if node.op_type.endswith("SimplifiedLayerNormalization")
    ]
    if len(norms) != 2 * len(layers) + 1:
        raise _refusal(package, f"its graph has {len(norms)} norms, not {2 * len(layers) + 1}")
    state = {"model.norm.weight": norms[-1]}
    for index, layer in enumerate(layers):
        keys = package.cache.kv_heads * package.cache.head_dim
        q, k, v = np.split(layer["qkv"], [-2 * keys, -keys])
        parts = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v}
        parts |= {"self_attn.o_proj": layer["o"]}
        parts |= {f"mlp.{part}_proj": layer[part] for part in ("gate", "up", "down")}
        parts |= {"input_layernorm": norms[2 * index], "post_attention_layernorm": norms[2 * index + 1]}
        state |= {f"model.layers.{index}.{name}.weight": array for name, array in parts.items()}
    tensors = {name: torch.tensor(array) for name, array in state.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    if unexpected or {name for name in missing if "embed" not in name and "lm_head" not in name}:
        raise _refusal(package, f"its matrices do not make a Llama: {[*missing, *unexpected]}")


def _array(graph: Any, name: str) -> np.ndarray:
    tensor = next(tensor for tensor in graph.initializer if tensor.name == name)
    array: np.ndarray = onnx.numpy_helper.to_array(tensor)
    return array

"""A drafter to begin with that was made elsewhere: a small causal language model of the target's tokenizer, pruned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from outrider.cloud.models.family_index import load_causal_lm
from outrider.cloud.target.target import tokenizer_json
from outrider.cloud.training.same_tokenizer import check_tokenizer
from outrider.proto.errors import InvalidArgument
from outrider.proto.tokenizer import tokenizer_hash

FIELD = "source"
MAX_LOGITS_ERROR = 1e-3  # in standard deviations


def read_pruned(
    source: str, target: PreTrainedModel, target_source: str, *, layers: Sequence[int], context: int
) -> PreTrainedModel:
    """Load the model of a folder or hub name in float32, with some of its layers, ready for training.

    Args:
        source: folder or hub name.
        target: model that it is to draft for.
        target_source: folder or hub name of that.
        layers: numbers of the layers to keep, or one number of how many (`kept_layers`); empty: all.
        context: longest sequence of the drafter, which may be less than the model's own.

    Raises:
        InvalidArgument: it has another tokenizer, no such layers, or is built in another way than is understood here.
    """
    refusal = f"{source!r} is no causal language model with safetensors weights"
    model: Any = load_causal_lm(source, refusal, field=FIELD, device=str(target.device))
    check_tokenizer(source, tokenizer_hash(tokenizer_json(source, source)), target_source, field=FIELD)
    if not (hasattr(model, "model") and hasattr(model.model, "layers") and hasattr(model, "lm_head")):
        raise InvalidArgument(f"{source!r} is a {model.config.model_type}, whose layers are not found", field=FIELD)
    if model.config.vocab_size != target.config.vocab_size:  # of one tokenizer: they differ in unused rows at the end
        model.resize_token_embeddings(target.config.vocab_size, mean_resizing=False)
    _check_logits(model, source)
    if layers:
        keep_layers(model, kept_layers(layers, len(model.model.layers)))
    model.config.max_position_embeddings = min(model.config.max_position_embeddings, context)
    model.train().requires_grad_(True)
    pruned: PreTrainedModel = model
    return pruned


def kept_layers(wanted: Sequence[int], layers: int) -> list[int]:
    """Return the numbers of the layers to keep of `layers`.

    Of a count n the first n - 1 and the last are kept: what goes is one block before the last layer, which loses least
    when layers are dropped whole (Gromov et al., arXiv 2403.17887; Minitron, arXiv 2408.11796).
    """
    if len(wanted) == 1 and wanted[0] > 0:
        count = wanted[0]
        kept = [*range(count - 1), layers - 1]
    else:
        count, kept = len(wanted), sorted(set(wanted))
    if count > layers or kept[-1] >= layers or len(kept) < count:
        raise InvalidArgument(f"it has layers 0 to {layers - 1}; name each once, or give a count", field="keep_layers")
    return kept


def keep_layers(model: Any, kept: Sequence[int]) -> None:
    """Drop all other layers of a model, and what its configuration says of them."""
    config = model.config
    model.model.layers = nn.ModuleList([model.model.layers[index] for index in kept])
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[index] for index in kept]
    config.num_hidden_layers = len(kept)


@torch.no_grad()
def _check_logits(model: Any, source: str) -> None:
    """Refuse a model whose logits are more than a product of its last state and its head."""
    tokens = torch.arange(min(8, model.config.vocab_size), device=model.device)[None]
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    logits = model(input_ids=tokens, use_cache=False).logits
    error = (hidden @ model.lm_head.weight.T - logits).abs().max()
    if not float(error) <= MAX_LOGITS_ERROR * float(logits.std()):
        raise InvalidArgument(
            f"{source!r} does more to its logits than multiply (it caps or scales them, or adds a bias)", field=FIELD
        )

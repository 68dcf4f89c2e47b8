"""Distillation of a drafter: the run from a teacher's folder to a model folder."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from outrider.cloud.export.parent import load_parent
from outrider.cloud.models.family_index import load_causal_lm
from outrider.cloud.models.heads import reduce_vocabulary, tokens_of
from outrider.cloud.target.target_loading import tokenizer_json
from outrider.cloud.training.measured_acceptance import logits_of
from outrider.cloud.training.optimizers import Muon, adam, linear_fall
from outrider.cloud.training.run import TrainingResult, TrainingRun, carry_out
from outrider.cloud.training.training_settings import DrafterShape, DrafterTraining
from outrider.cloud.training.training_texts import Texts, check_tokenizer, check_tokenizer_of_folder
from outrider.drafters import embedded_packages, find_package
from outrider.proto.errors import InvalidArgument
from outrider.proto.tokenizer import tokenizer_hash

SmallLlama = LlamaForCausalLM | MistralForCausalLM  # they differ in Mistral's sliding window
DECAY_FRACTION = 0.4  # last share of the budget, over which the learning rates fall to zero
MAX_LOGITS_ERROR = 1e-3  # in standard deviations
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def train_drafter(
    config: DrafterTraining,
    *,
    on_step: Callable[[int], None] = lambda _: None,
    stopping: Callable[[], bool] = lambda: False,
) -> TrainingResult:
    """Distil a drafter and write it to `config.output`, with the arguments and errors of `carry_out`.

    Raises:
        InvalidArgument: the drafter to start from has another tokenizer than the target.
    """
    if config.start in embedded_packages():
        check_tokenizer(config.start, find_package(config.start).tokenizer_sha256, config.target, field="start")
    elif config.start is not None:
        check_tokenizer_of_folder(Path(config.start), config.target, field="start")
    return carry_out(partial(_DrafterRun, config), config, on_step, stopping)


def matrices_and_others(drafter: SmallLlama) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Return the layers' matrices, which Muon trains, and the rest: embedding, head and norms."""
    matrices = [p for p in drafter.model.layers.parameters() if p.ndim == 2]
    return matrices, [p for p in drafter.parameters() if not any(p is matrix for matrix in matrices)]


def build_drafter(target: PreTrainedModel, shape: DrafterShape) -> SmallLlama:
    """Make a drafter with the target's vocabulary and special tokens, which starts from its embedding."""
    config = target.config
    settings: dict[str, Any] = {
        "vocab_size": config.vocab_size,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.mlp,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        **{name: getattr(config, name) for name in SPECIAL_TOKENS},
    }
    drafter: Any
    if shape.window is None:
        drafter = LlamaForCausalLM(LlamaConfig(**settings))
    else:
        drafter = MistralForCausalLM(MistralConfig(**settings, sliding_window=shape.window))
    embedding, by_target = (m.get_input_embeddings().get_parameter("weight").detach() for m in (drafter, target))
    embedding.copy_(start_embedding(by_target, embedding))
    moved: SmallLlama = drafter.to(target.device)
    return moved


def read_drafter(folder: Path, target: PreTrainedModel, *, field: str) -> SmallLlama:
    """Load a trained drafter in float32, ready for more training.

    Raises:
        InvalidArgument: no Llama or Mistral in safetensors is there, or it counts other tokens than the target.
    """
    drafter = load_causal_lm(
        folder, f"{folder} holds no drafter in safetensors", field=field, device=str(target.device)
    )
    if not isinstance(drafter, SmallLlama):
        kind = drafter.config.model_type
        raise InvalidArgument(f"{folder} holds a {kind}; drafters are trained as llama or mistral", field=field)
    return _in_training(drafter, target, f"in {folder}", field)


def read_start(start: str, target: PreTrainedModel) -> SmallLlama:
    """Load an embedded drafter, the floats that its 8-bit weights stand for, or else `read_drafter` of a folder.

    On 3,003 tokens of the target's own text they are 0.578 nats a token from it, as the weights before rounding are.
    """
    if start not in embedded_packages():
        return read_drafter(Path(start), target, field="start")
    drafter: Any = load_parent(find_package(start)).model
    drafter.requires_grad_(True)
    for name in SPECIAL_TOKENS:
        for config in (drafter.config, drafter.generation_config):
            setattr(config, name, getattr(target.config, name))
    return _in_training(drafter.to(target.device), target, start, "start")


def _in_training(drafter: SmallLlama, target: PreTrainedModel, whose: str, field: str) -> SmallLlama:
    if drafter.config.vocab_size != target.config.vocab_size:
        counts = f"{drafter.config.vocab_size} tokens, the target {target.config.vocab_size}"
        raise InvalidArgument(f"the drafter {whose} has {counts}; take one of this target", field=field)
    drafter.train()
    return drafter


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
    model: Any = load_causal_lm(source, refusal, field="source", device=str(target.device))
    check_tokenizer(source, tokenizer_hash(tokenizer_json(source, source)), target_source, field="source")
    if not (hasattr(model, "model") and hasattr(model.model, "layers") and hasattr(model, "lm_head")):
        raise InvalidArgument(f"{source!r} is a {model.config.model_type}, whose layers are not found", field="source")
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
            f"{source!r} does more to its logits than multiply (it caps or scales them, or adds a bias)", field="source"
        )


def start_embedding(embedding_by_target: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Return the target's embedding on its first principal directions (from the SVD, not centred).

    Tokens that are near for the target are then near for the drafter from the first step on. On the reference
    target, forty steps led to a KL of 2.67 nats a token, and to 3.53 from a random embedding.

    Args:
        embedding_by_target: [vocab, target hidden].
        random: [vocab, hidden]; its last columns stay where the drafter is wider than the target.

    Returns:
        [vocab, hidden], float32.
    """
    embedding = embedding_by_target.detach().float().cpu()
    _, directions = torch.linalg.eigh(embedding.T @ embedding)  # ascending: the right singular vectors
    kept = min(random.shape[1], embedding.shape[1])
    start = random.clone()
    start[:, :kept] = embedding @ directions.flip(1)[:, :kept]
    return start


def _kept_tokens(count: int, drafter: SmallLlama, texts: Texts) -> torch.Tensor:
    """Return those that end a text, and the most frequent of what is trained on; `count` in all, int64 ascending."""
    vocab, known = drafter.config.vocab_size, tokens_of(drafter)
    knows = vocab if known is None else len(known)
    if count >= knows:
        raise InvalidArgument(f"{count} saves nothing of a vocabulary of {knows}; give less", field="vocabulary")
    special = [getattr(drafter.config, name) for name in SPECIAL_TOKENS]
    always = {token for each in special for token in (each if isinstance(each, list) else [each]) if token is not None}
    among = None if known is None else known.cpu().numpy()
    read = texts.rows.tokens.numpy()[texts.places]
    return torch.from_numpy(most_frequent(read, vocab, count, always, among=among))


def most_frequent(
    tokens: np.ndarray, vocab: int, count: int, always: Collection[int], *, among: np.ndarray | None = None
) -> np.ndarray:
    """Return `count` tokens of a vocabulary, ascending int64: `always`, then those most frequent in `tokens`.

    Among tokens that no text has the lower ids come first, which byte-pair encodings merged earlier. With `among`
    (int64) there are these alone.
    """
    counts = np.bincount(tokens, minlength=vocab).astype(float)
    counts[sorted(always)] = np.inf
    if among is not None:
        counts[np.setdiff1d(np.arange(vocab), among)] = -1
    return np.sort(np.argsort(-counts, kind="stable")[:count])


class _DrafterRun(TrainingRun):
    def __init__(self, config: DrafterTraining, target: PreTrainedModel, texts: Texts) -> None:
        drafter: Any
        if config.source is not None:
            source, layers = config.source, config.keep_layers
            drafter = read_pruned(source, target, config.target, layers=layers, context=config.shape.context)
        elif config.start is None:
            drafter = build_drafter(target, config.shape)
        else:
            drafter = read_start(config.start, target)
        if config.vocabulary is not None:
            reduce_vocabulary(drafter, _kept_tokens(config.vocabulary, drafter, texts))
        matrices, others = matrices_and_others(drafter)
        super().__init__(
            config,
            target,
            texts,
            drafter=drafter,
            students={"drafter": logits_of(drafter)},
            optimizers=[Muon(matrices, lr=config.matrix_lr), adam(others, config.other_lr)],
            fall=linear_fall(DECAY_FRACTION),
        )

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.drafter.model(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden

"""The model to export, and its own forward pass run in two ways: to look at it, and to trace it.

No model code is copied. Attention goes through a function registered in transformers' attention interface, and the
rotation of queries and keys, which ONNX Runtime's attention does by itself, is replaced while either pass runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, DynamicCache, PreTrainedModel

from outrider.cloud.models.family_index import load_causal_lm
from outrider.cloud.target.recurrence import attach
from outrider.proto.drafter_format import CacheShape
from outrider.proto.errors import InvalidArgument

ATTENTION = "outrider_export"
ROTATION = "apply_rotary_pos_emb"  # transformers' name for it, in every file of a model that rotates
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # names in configs
DRAWN_TEXTS, DRAWN_LENGTH = 4, 96  # texts of each kind, and the most tokens of one
HEADROOM, MAX_LEVEL = 1.1, 127  # of the numbers in a cache of int8
SEED = 1  # of the texts that scales are found on, which are other ones than those that the graph is checked on


@dataclass(frozen=True)
class RotationTable:
    """The rotation of queries and keys: cosines and sines, float32 [context_length, head_dim / 2] each."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class CacheScales:
    """The floats that a level of a layer's keys and values stands for, float32 [1, kv_heads, 1, head_dim] each."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(frozen=True)
class Architecture:
    """The facts about a model that tracing needs.

    Attributes:
        shape: shape of its KV cache.
        rotations: [layers]; None: no rotation.
        windows: [layers], positions that a layer sees, the own one counted; None: all.
        scales: [layers], those of keys and values in a cache of int8; empty: the cache is float32.
    """

    shape: CacheShape
    rotations: tuple[RotationTable | None, ...]
    windows: tuple[int | None, ...]
    scales: tuple[CacheScales, ...] = ()

    @property
    def reach(self) -> int | None:
        """Tokens that an output depends on, the last one counted; None: all. Each layer sees a window further."""
        seen = [window - 1 for window in self.windows if window is not None]
        return sum(seen) + 1 if len(seen) == len(self.windows) else None


@dataclass(frozen=True)
class AttentionSettings:
    """The attention of a layer; `window`: positions seen, the own one counted; None: all."""

    scale: float
    window: int | None
    softcap: float | None


class Pass(Protocol):
    """The stand-in for attention and rotation during one forward pass."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, settings: AttentionSettings
    ) -> torch.Tensor:
        """Return [1, n, heads, head_dim], given `query` [1, heads, n, head_dim], `key`, `value` [1, kv_heads, …]."""

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return queries and keys for attention. `cos`, `sin`: [1, n, head_dim]."""


def load(folder: Path, attention: str | None = None) -> PreTrainedModel:
    """Load the model in float32, with transformers' own attention or another that it has registered."""
    model = load_causal_lm(folder, "no causal language model to export", field="source_folder", attention=attention)
    model.eval().requires_grad_(False)
    return model


def load_for_export(folder: Path) -> PreTrainedModel:
    """Load the model in float32, with attention left to the `Pass` of each forward.

    Raises:
        InvalidArgument: its layers keep or choose what a drafter's graph cannot.
    """
    AttentionInterface.register(ATTENTION, _attend)
    model = load(folder, ATTENTION)
    config = model.config.get_text_config()
    reason = ""
    if attach(model):
        reason = "some of its layers keep a state, which ONNX Runtime's attention has no cache for"
    elif getattr(config, "kv_lora_rank", None):
        reason = "its keys and values differ in size (latent attention)"
    elif any(getattr(config, name, None) for name in _EXPERTS):
        reason = "its experts are chosen by what a tensor holds, which a trace cannot follow"
    if reason:
        message = f"{config.model_type}: {reason}; export a model whose layers are plain attention and products"
        raise InvalidArgument(message, field="source_folder")
    return model


def context_length(model: PreTrainedModel) -> int:
    """Return the positions that the model was made for."""
    return int(model.config.max_position_embeddings)


def forward(
    model: PreTrainedModel, tokens: torch.Tensor, first_position: Any, logit_rows: torch.Tensor, through: Pass
) -> torch.Tensor:
    """Return the logits [m, vocab] in float32 of the model's own forward pass over `tokens` [1, n]."""
    with _rotation_replaced(model, through.rotate):
        logits: torch.Tensor = model(
            input_ids=tokens,
            position_ids=(torch.arange(tokens.shape[1]) + first_position)[None],
            use_cache=False,
            logits_to_keep=logit_rows,
            outrider_pass=through,
        ).logits[0]
    return logits.float()


def look_at(model: PreTrainedModel) -> Architecture:
    """Run the model over all its positions to find its architecture: configuration fields differ between models."""
    look = _Look()
    tokens = torch.zeros(1, context_length(model), dtype=torch.int64)
    with torch.no_grad():
        forward(model, tokens, 0, torch.zeros(1, dtype=torch.int64), look)
    if len(set(look.shapes)) != 1:
        raise InvalidArgument(f"its layers' caches differ in shape: {sorted(set(look.shapes))}", field="source_folder")
    kv_heads, head_dim = look.shapes[0]
    if look.tables and len(look.tables) != len(look.shapes):
        raise InvalidArgument("only some of its layers rotate queries and keys", field="source_folder")
    if any(2 * table.cos.shape[-1] != head_dim for table in look.tables):
        raise InvalidArgument(
            "it rotates a part of each head only; export a model that rotates whole heads", field="source_folder"
        )
    rotations = tuple(look.tables) or (None,) * len(look.shapes)
    return Architecture(CacheShape(len(look.shapes), kv_heads, head_dim), rotations, tuple(look.windows))


@torch.inference_mode()
def drawn_texts(plain: PreTrainedModel, *, seed: int) -> torch.Tensor:
    """Return int64 [2 * DRAWN_TEXTS, length]: texts of random tokens, then texts that the model writes."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = plain.config.vocab_size
    length = min(DRAWN_LENGTH, context_length(plain))
    random = torch.randint(vocabulary, (DRAWN_TEXTS, length), generator=generator)
    written = torch.randint(vocabulary, (DRAWN_TEXTS, 2), generator=generator)
    while written.shape[1] < length:
        p = plain(input_ids=written, logits_to_keep=1).logits[:, -1].float().softmax(-1)
        written = torch.cat([written, torch.multinomial(p, 1, generator=generator)], dim=1)
    return torch.cat([random, written])


@torch.inference_mode()
def with_int8_cache(architecture: Architecture, plain: PreTrainedModel) -> Architecture:
    """Return the architecture of a model with a cache of 8-bit numbers in place of float32.

    It has one scale for each channel of a head's keys and values, found on texts of `plain`, the model with
    transformers' own attention. The graph's attention rounds new keys and values when it writes them, and multiplies
    with the levels. A scale is fixed, so what is larger than any of the texts had is cut off at `HEADROOM` times that.
    """
    filled: Any = DynamicCache()
    plain(input_ids=drawn_texts(plain, seed=SEED), past_key_values=filled, use_cache=True, logits_to_keep=1)
    scales = tuple(
        CacheScales(_scales(_turned(layer.keys) if rotation else layer.keys.abs()), _scales(layer.values.abs()))
        for layer, rotation in zip(filled.layers, architecture.rotations, strict=True)
    )
    return replace(architecture, shape=replace(architecture.shape, dtype="int8"), scales=scales)


def _turned(keys: torch.Tensor) -> torch.Tensor:
    """Return the largest that each number of `keys` [rows, kv_heads, n, head_dim] is at any position.

    Rotation turns the pairs of channel j and j + head_dim / 2 and keeps their lengths.
    """
    first, second = keys.chunk(2, dim=-1)
    lengths = torch.hypot(first, second)
    return torch.cat([lengths, lengths], dim=-1)


def _scales(sizes: torch.Tensor) -> torch.Tensor:
    """Return the scales [1, kv_heads, 1, head_dim] of `sizes` [rows, kv_heads, n, head_dim], none of them zero."""
    largest = sizes.float().amax(dim=(0, 2), keepdim=True)
    return (HEADROOM / MAX_LEVEL * largest).clamp(min=1e-6)


class _Look:
    """A pass that records every layer's shape of keys and window, and the angles of every position."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.windows: list[int | None] = []
        self.tables: list[RotationTable] = []

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,  # noqa: ARG002 - the protocol's
        settings: AttentionSettings,
    ) -> torch.Tensor:
        self.shapes.append((key.shape[1], key.shape[3]))
        self.windows.append(settings.window)
        return torch.zeros_like(query).transpose(1, 2)

    def rotate(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        half = cos.shape[-1] // 2
        table = RotationTable(cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())
        known = (same for same in self.tables if torch.equal(same.cos, table.cos) and torch.equal(same.sin, table.sin))
        self.tables.append(next(known, table))  # layers that rotate alike share one table in the file
        return query, key


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    *,
    outrider_pass: Pass,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attend, by transformers' interface of attention functions."""
    window = sliding_window if sliding_window is not None else getattr(module, "sliding_window", None)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return outrider_pass.attend(query, key, value, AttentionSettings(scale, window, softcap)), None


@contextmanager
def _rotation_replaced(model: PreTrainedModel, rotate: Callable[..., Any]) -> Iterator[None]:
    """Let `rotate` stand in for the rotation in the files that the model's layers come from."""
    files = {sys.modules[type(part).__module__] for part in model.modules()}
    originals = {file: vars(file)[ROTATION] for file in files if ROTATION in vars(file)}
    for file in originals:
        setattr(file, ROTATION, rotate)
    try:
        yield
    finally:
        for file, original in originals.items():
            setattr(file, ROTATION, original)

"""The target: any decoder-only model of transformers, run on ragged batches."""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from outrider.cloud import attention
from outrider.cloud.attention import RaggedBatch, RowSpan
from outrider.cloud.call_source import Pass
from outrider.cloud.family_index import embedded_targets, load_tokenizer, resolve_target, tokenizer_file
from outrider.cloud.kv_cache import PagedKVCache, SessionCache
from outrider.cloud.kv_size import kv_tokens_by_memory
from outrider.cloud.packed_linear import Packing, pack_linears
from outrider.cloud.steering import Taps
from outrider.cloud.straight_pass import PassInputs, StraightPass, own_pass, straight_pass
from outrider.proto.errors import ModelRefused, NotFound
from outrider.proto.tokenizer import tokenizer_hash

TILE_ROWS = 16
# Relative to the size of the logits; rounding gives a tenth of this, a wrong mask or cache 0.3 or more.
_CHECK_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
_CONTEXT = 32768  # positions a session, where neither the model nor the operator says how many
# These scale by the longest session of the step, so that one session would change another's text.
_ROPE_ACROSS_SESSIONS = ("dynamic", "longrope")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SessionRows:
    """One session's rows of a step: `tokens` [n] from position cache.length on, logits for the last `wanted`."""

    cache: SessionCache
    tokens: tuple[int, ...]
    wanted: int


class Target:
    """A loaded target and its KV cache.

    Attributes:
        packing: how the linear layers multiply, where `load_target` has chosen it.
        straight: the model's pass in a straight line; None: the model runs as it is written.
        model_pass: the function that runs, of what `PassInputs` has.
    """

    def __init__(
        self,
        model: Any,
        tokenizer_json: str,
        *,
        kv_tokens: int,
        page_size: int,
        context_length: int = 0,
        max_sessions: int = 32,
        batch_invariant: bool = False,
        packing: Packing | None = None,
        straight: StraightPass | None = None,
    ) -> None:
        self.model = model
        self.straight = straight
        self.model_pass: Pass = straight.compiled() if straight else partial(own_pass, model)
        self.packing = packing or Packing()
        self.tokenizer_json = tokenizer_json
        self.tokenizer_sha256 = tokenizer_hash(tokenizer_json)
        self.batch_invariant = batch_invariant
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        config = model.config.get_text_config()
        _refuse_what_sees_other_sessions(config)
        self.vocab_size = int(config.vocab_size)
        made_for = int(getattr(config, "max_position_embeddings", 0) or context_length or _CONTEXT)
        longest = min(context_length or made_for, made_for)
        kv_tokens = kv_tokens or kv_tokens_by_memory(config, self.dtype, self.device, max_sessions * longest)
        self.eos_tokens = _eos_tokens(model)
        self.pool = PagedKVCache(kv_tokens, page_size, self.dtype, self.device)
        self.context_length = min(longest, self.pool.page_count * page_size)
        model.set_attn_implementation(attention.NAME)
        self._tapped: Taps | None = None

    def tap(self, layers: Sequence[int]) -> None:
        """Keep what enters `layers`, and no other, in every later step, for `tapped`.

        Raises:
            ModelRefused: it has no such layers, or they cannot be found.
        """
        if self._tapped is not None:
            self._tapped.close()
        self._tapped = Taps(self.model, layers)
        if self.straight is not None:
            self.model_pass = self.straight.compiled(layers)

    def tapped(self, layers: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
        """Return [n, taps * hidden] float32: the residual stream into `layers` in `rows` [n] of the newest logits."""
        if self._tapped is None:
            raise RuntimeError("the target is not tapped")
        return self._tapped.of(layers, rows)

    @torch.inference_mode()
    def forward(self, batch: list[SessionRows]) -> torch.Tensor:
        """Return logits [sum of wanted, vocab] float32 of one pass over all sessions' rows, and extend their caches."""
        if self._tapped is not None:
            self._tapped.begin()
        if self.batch_invariant:
            return self._forward_tiles(batch)
        spans, first = [], 0
        for rows in batch:
            spans.append(RowSpan(rows.cache, first, len(rows.tokens), rows.cache.length))
            first += len(rows.tokens)
        wanted = [
            span.first + span.count - rows.wanted + i
            for rows, span in zip(batch, spans, strict=True)
            for i in range(rows.wanted)
        ]
        logits = self._run([token for rows in batch for token in rows.tokens], spans, wanted)
        self._keep_tapped(wanted)
        for rows in batch:
            rows.cache.length += len(rows.tokens)
        return logits

    def _run(self, tokens: list[int], spans: list[RowSpan], wanted: list[int]) -> torch.Tensor:
        slots = torch.cat([span.cache.slots[span.start : span.context] for span in spans])
        positions = [p for span in spans for p in range(span.start, span.context)]
        given = PassInputs(
            torch.tensor([tokens], device=self.device),
            torch.tensor([positions], device=self.device),
            torch.tensor(wanted or [0], device=self.device),
            RaggedBatch(self.pool, spans, slots),
        )
        logits, *entered = self.model_pass(*given)
        if self._tapped is not None and entered:
            self._tapped.enter(entered)
        return logits[0, : len(wanted)].float()

    def _keep_tapped(self, rows: list[int]) -> None:
        if self._tapped is not None:
            self._tapped.keep(rows)

    def _forward_tiles(self, batch: list[SessionRows]) -> torch.Tensor:
        """Compute every row in a tile of TILE_ROWS rows, where it attends alone.

        All matrix products then have one shape, so a row gives the same bits whatever shares its step: the kernels of
        one shape add in one order, which a test checks.
        """
        flat = [(rows, i) for rows in batch for i in range(len(rows.tokens))]
        kept: list[torch.Tensor] = []
        for first in range(0, len(flat), TILE_ROWS):
            tile = flat[first : first + TILE_ROWS]
            filled = tile + [tile[-1]] * (TILE_ROWS - len(tile))  # copies of the last row write what it writes
            spans = [RowSpan(rows.cache, j, 1, rows.cache.length + i) for j, (rows, i) in enumerate(filled)]
            logits = self._run([rows.tokens[i] for rows, i in filled], spans, list(range(TILE_ROWS)))
            wanted = [j for j, (rows, i) in enumerate(tile) if i >= len(rows.tokens) - rows.wanted]
            self._keep_tapped(wanted)
            kept.extend(logits[j] for j in wanted)
        for rows in batch:
            rows.cache.length += len(rows.tokens)
        return torch.stack(kept) if kept else torch.empty(0, self.vocab_size)

    @torch.inference_mode()
    def check(self) -> float:
        """Compare ragged, chunked passes with the model's own forward, and return the relative difference of logits.

        Raises:
            ModelRefused: they disagree, so this architecture needs more than keys, values and positions.
        """
        length = min(24, self.context_length, self.pool.page_count * self.pool.page_size)
        tokens = torch.randint(0, self.vocab_size, (length,), generator=torch.Generator().manual_seed(0)).tolist()
        cache = self.pool.allocate(length)
        cuts = [0, length // 3, length // 3 + 1, length]
        try:
            pieces = [
                self.forward([SessionRows(cache, tuple(tokens[a:b]), b - a)]) for a, b in itertools.pairwise(cuts)
            ]
        except (TypeError, AttributeError, NotImplementedError) as error:
            raise ModelRefused(f"this architecture cannot run on a paged KV cache: {error}", field="target") from error
        finally:
            self.pool.release(cache)
        self.model.set_attn_implementation("eager")
        plain = self.model(input_ids=torch.tensor([tokens], device=self.device), use_cache=False).logits[0].float()
        self.model.set_attn_implementation(attention.NAME)
        difference = float((torch.cat(pieces) - plain).norm() / plain.norm())
        if not difference <= _CHECK_TOLERANCE[self.dtype]:
            raise ModelRefused(
                f"paged attention differs from the model's own by {difference:.2g}; the architecture is not supported",
                field="target",
            )
        return difference


def load_target(
    target: str,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    kv_tokens: int = 0,
    page_size: int = 16,
    context_length: int = 0,
    max_sessions: int = 32,
    batch_invariant: bool = False,
    packed: bool = True,
    straight: bool = True,
) -> Target:
    """Load from the embedded family, a folder or the hub: safetensors only, no remote code, checked before use.

    With `kv_tokens` 0 the KV cache takes what memory allows, but no more than `max_sessions` of full length fill. On a
    CPU the linear layers get a second, packed copy of their weights where that is faster and memory allows it, unless
    `packed` is false.

    Raises:
        NotFound: no such model, or the hub cannot be reached.
        ModelRefused: pickled weights, code of its own, no fast tokenizer, or an architecture that fails the check.
    """
    source = resolve_target(target)
    tokenizer = tokenizer_json(source, target)
    model = load_model(source, target, device=device, dtype=dtype)
    shortened = straight_pass(model) if straight and device == "cpu" else None
    products = model if shortened is None else shortened.linears
    packing = pack_linears(products, fixed=batch_invariant) if packed else None  # before the KV cache counts memory
    loaded = Target(
        model,
        tokenizer,
        kv_tokens=kv_tokens,
        page_size=page_size,
        context_length=context_length,
        max_sessions=max_sessions,
        batch_invariant=batch_invariant,
        packing=packing,
        straight=shortened,
    )
    difference = loaded.check()
    log.info("loaded %s: %s on %s, paged attention agrees to %.1e", target, dtype, device, difference)
    if packed and loaded.device.type == "cpu":
        log.info("linear layers of %s: %s", target, packing)
    return loaded


def load_model(source: str, target: str, *, device: str, dtype: str) -> Any:
    """Load transformers' model of a folder or hub name, with the rules and errors of `load_target`."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False
        )
    except OSError as error:
        raise NotFound(
            f"cannot load {target!r}: {_first_line(error)}; give a folder, a hub name that this machine can reach, "
            f"or one of {', '.join(embedded_targets())}",
            field="target",
        ) from error
    except ValueError as error:
        raise ModelRefused(f"{target!r}: {_first_line(error)}", field="target") from error
    try:
        return model.to(device).eval()
    except (RuntimeError, AssertionError) as error:  # the latter is what a torch without CUDA raises
        raise ModelRefused(f"cannot move {target!r} to {device}: {_first_line(error)}", field="device") from error


def tokenizer_json(source: str, target: str) -> str:
    """Return the text of the fast tokenizer's file; where a repository has none, transformers converts another."""
    if (file := tokenizer_file(source)) is not None:
        return file.read_text(encoding="utf-8")
    try:
        tokenizer = load_tokenizer(source)
    except (OSError, ValueError) as error:
        raise NotFound(f"cannot load the tokenizer of {target!r}: {_first_line(error)}", field="target") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelRefused(f"{target!r} has no fast tokenizer (tokenizer.json)", field="target")
    return str(json.dumps(json.loads(backend.to_str())))


def _refuse_what_sees_other_sessions(config: Any) -> None:
    """Refuse what the check on one short session cannot find."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {part.get("rope_type") for part in rope.values() if isinstance(part, dict)}
    for kind in _ROPE_ACROSS_SESSIONS:
        if kind in kinds:
            raise ModelRefused(f"RoPE of type {kind!r} depends on what shares a step; not supported", field="target")
    if getattr(config, "attention_chunk_size", None):
        raise ModelRefused("chunked attention is not supported", field="target")


def _eos_tokens(model: Any) -> frozenset[int]:
    eos = model.generation_config.eos_token_id if model.generation_config is not None else None
    if eos is None:
        eos = model.config.get_text_config().eos_token_id
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:300]


def register() -> None:
    """Make the attention function known to transformers; done once on import."""
    from transformers import AttentionInterface

    AttentionInterface.register(attention.NAME, attention.paged_attention)


register()

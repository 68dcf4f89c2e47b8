"""Which architectures the paged KV cache can serve: those that keep keys and values between tokens, and nothing else.

An architecture is judged by what it keeps, never by a distance alone: the rounding of a 16-bit type hides a state that
is lost between two steps. What it keeps is seen in the cache that transformers builds for it and in its modules, after
a pass of its own. What it computes is then compared in float32, whatever the type of its weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.cloud.target import attention, latent_attention
from outrider.cloud.target.attention import RaggedBatch, RowSpan, rounded_up
from outrider.cloud.target.backend import quantization_of
from outrider.cloud.target.kv_cache import PagedKVCache, SessionCache
from outrider.cloud.target.recorded.straight_pass import own_pass
from outrider.cloud.target.recurrence import attach
from outrider.proto.errors import ModelRefused

# Relative to the size of the logits; rounding gives a tenth of this, a wrong mask or cache 0.3 or more.
CHECK_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
_CHECKED, _CHECKED_AT_MOST = 24, 1056  # tokens; Gemma 3 has windows of 512 and 1024
REJECTED = 5  # tokens
_BEYOND_WINDOW = 16  # tokens past the end of a window
_AFFORDED = 2e12  # weights times tokens that a CPU may multiply in float32 while a verifier loads; some seconds
_PAGE = 16
# These scale by the longest session of the step, so that one session would change another's text.
_ROPE_ACROSS_SESSIONS = ("dynamic", "longrope")
_KEPT = {"keys", "values"}
_PLAIN_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}  # not every transformers has the last
_STATE_LAYERS = {f"LinearAttention{also}Layer" for also in ("", "AndFullAttention", "AndSlidingWindowAttention")}
_STATES = {"conv_states", "recurrent_states"}
_ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_NARROW = (torch.bfloat16, torch.float16)
_CACHES = ("past_key_values", "cache_params")
_ANSWERS = {"loss", "aux_loss", "logits", *_CACHES, "hidden_states", "attentions", "router_logits"}
# What a model raises that cannot run as a decoder of tokens alone, or not over this cache.
CANNOT_RUN = (TypeError, AttributeError, NotImplementedError, RuntimeError, ValueError, LookupError, AssertionError)


def checked_length(config: Any) -> int:
    """Return how many tokens to check: more than a sliding window has, unless it is too long."""
    beyond = int(getattr(config, "sliding_window", None) or 0) + _BEYOND_WINDOW
    return max(_CHECKED, beyond) if beyond <= _CHECKED_AT_MOST else _CHECKED


def steps(length: int) -> list[int]:
    """Return where a text of `length` tokens is cut for a check: a step of many, of one, and of many again."""
    return [0, length // 3, length // 3 + 1, length]


def check_positions(config: Any) -> None:
    """Refuse rotations that depend on the longest session of a step, which a check of one short session cannot find."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {part.get("rope_type") for part in rope.values() if isinstance(part, dict)}
    for kind in _ROPE_ACROSS_SESSIONS:
        if kind in kinds:
            raise ModelRefused(f"RoPE of type {kind!r} depends on what shares a step; not supported", field="target")


@torch.inference_mode()
def check_architecture(model: Any) -> float:
    """Check a model as transformers loads it, and return the relative difference of its logits in steps, in float32.

    Raises:
        ModelRefused: it keeps more between tokens than keys and values, or computes something else in steps.
    """
    config = model.config.get_text_config()
    length = checked_length(config)
    if length > _CHECKED and model.device.type == "cpu" and model.num_parameters() * length > _AFFORDED:
        length = _CHECKED
    tokens = torch.randint(0, config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    tokens = tokens.to(model.device)
    try:
        latent_attention.attach(model)
        attached = attach(model)
        _check_kinds(config, attached)
        computing = _Float32() if _judged_type(model) != model.dtype else nullcontext()  # type: ignore[no-untyped-call]
        with computing:
            before = _held_by_modules(model)
            model.set_attn_implementation("eager")
            output = model(input_ids=tokens, use_cache=True)
            if changed := sorted(name for name, value in _held_by_modules(model).items() if before.get(name) != value):
                raise _more_is_kept(config, ", ".join(changed))
            kept = _check_kept(config, output, attached)
            model.set_attn_implementation(attention.NAME)
            logits, pool = _in_steps(model, tokens)
    except torch.OutOfMemoryError:
        raise
    except CANNOT_RUN as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise ModelRefused(f"{config.model_type} cannot run on a paged KV cache: {reason}", field="target") from error
    if missing := len(kept - set(pool.layers)):
        raise ModelRefused(
            f"{config.model_type} has attention of its own in {missing} of {len(kept)} layers, which cannot read a "
            "paged KV cache; it is not supported",
            field="target",
        )
    own = output.logits[0].float()
    difference = float((logits - own).norm() / own.norm())
    if not difference <= CHECK_TOLERANCE[_judged_type(model)]:
        raise ModelRefused(
            f"{config.model_type} on a paged KV cache differs from the model's own pass by {difference:.2g}; it is not "
            "supported",
            field="target",
        )
    return difference


class _Float32(TorchDispatchMode):
    """Calls of operators in float32, whatever the type of weights; each weight is copied for its call alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What it writes to, or returns a view of, stays as it is.
        names = [argument.name for argument in func._schema.arguments]
        aliased = {argument.name for argument in func._schema.arguments if argument.alias_info is not None}
        given = dict(zip(names, args, strict=False)) | (kwargs or {})
        wide = {name: value if name in aliased else _widened(value) for name, value in given.items()}
        return func(*(wide[name] for name in names[: len(args)]), **{name: wide[name] for name in kwargs or {}})


def _widened(value: Any) -> Any:
    """Return `value` with float32 for each 16-bit tensor, or type, in it."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in _NARROW else value
    if isinstance(value, list | tuple):
        return type(value)(map(_widened, value))
    return torch.float32 if isinstance(value, torch.dtype) and value in _NARROW else value


def _judged_type(model: Any) -> torch.dtype:
    """Return the type in which a model is checked: float32, unless its weights are quantised for kernels of another."""
    dtype: torch.dtype = model.dtype if quantization_of(model.config) else torch.float32
    return dtype


def _in_steps(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, PagedKVCache]:
    """Return logits [n, vocab] float32 of `tokens` [1, n] read in three steps, and the cache that they filled.

    Before a step, others are read in their place, as drafts are that the target does not accept.
    """
    length = tokens.shape[1]
    pool = PagedKVCache(rounded_up(length, _PAGE), _PAGE, _judged_type(model), tokens.device)
    cache, logits = pool.allocate(length), []
    for start, end in itertools.pairwise(steps(length)):
        if start:
            _pass(model, pool, cache, tokens.flip(1)[:, : min(REJECTED, length - start)])
        cache.states.certain = end
        logits.append(_pass(model, pool, cache, tokens[:, start:end]))
        cache.extend(tokens[0, start:end].tolist())
    return torch.cat(logits), pool


def _pass(model: Any, pool: PagedKVCache, cache: SessionCache, tokens: torch.Tensor) -> torch.Tensor:
    """Return logits [n, vocab] float32 of `tokens` [1, n] read after what `cache` holds."""
    start, count = cache.length, tokens.shape[1]
    batch = RaggedBatch(pool, [RowSpan(cache, 0, count, start)], cache.slots[start : start + count])
    rows = torch.arange(count, device=tokens.device)
    wanted = rows.flip(0)  # some models do not look at which rows are wanted
    return own_pass(model, tokens, (start + rows)[None], wanted, batch)[0][0].float().flip(0)


def _check_kinds(config: Any, attached: int) -> None:
    """Refuse a config whose layers, by the cache that transformers builds for it, keep what nobody here can.

    That is what is neither keys and values nor, in `attached` layers, states of functions along the rows.
    """
    from transformers import DynamicCache

    if getattr(config, "attention_chunk_size", None):
        raise ModelRefused("chunked attention is not supported", field="target")
    others = [type(layer).__name__ for layer in DynamicCache(config=config).layers]
    if kinds := sorted(set(others) - _PLAIN_LAYERS - (_STATE_LAYERS if attached else set())):
        types = sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION_TYPES)
        raise _more_is_kept(config, f"layers of type {', '.join(types or kinds)} ({', '.join(kinds)})")


def _check_kept(config: Any, output: Any, attached: int) -> set[int]:
    """Return the layers whose keys and values a pass has kept; refuse what else it has but states in `attached`."""
    for name in sorted(set(output) - _ANSWERS):
        if _holds_tensors(output[name]):
            raise _more_is_kept(config, name)
    cache = next((output[name] for name in _CACHES if name in output), None)
    if cache is None or not hasattr(cache, "layers"):
        raise ModelRefused(f"{config.model_type} keeps no keys and values; it is no decoder of text", field="target")
    if names := [name for name, value in vars(cache).items() if name != "layers" and _holds_tensors(value)]:
        raise _more_is_kept(config, ", ".join(names))
    kept = set()
    for index, layer in enumerate(cache.layers):
        held = {name for name, value in vars(layer).items() if _holds_tensors(value)}
        attached -= bool(held & _STATES)
        if others := sorted(held - _KEPT - (_STATES if attached >= 0 else set())):
            raise _more_is_kept(config, f"{', '.join(others)} in layer {index}")
        if getattr(layer, "keys", None) is not None:
            kept.add(index)
    return kept


def _more_is_kept(config: Any, what: str) -> ModelRefused:
    return ModelRefused(
        f"{config.model_type} keeps more than keys and values between tokens: {what}; choose a target whose layers all "
        "are attention",
        field="target",
    )


def _holds_tensors(value: Any) -> bool:
    """Return whether a tensor is in `value`, which may be a cache of some architecture's own."""
    if isinstance(value, torch.Tensor):
        return value.dim() > 0  # a number of its own is no state
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensors, value))
    return hasattr(value, "__dict__") and not isinstance(value, type) and any(map(_holds_tensors, vars(value).values()))


def _held_by_modules(model: Any) -> dict[str, int]:
    """Return, for each tensor that a module has beside its parameters, its name and identity."""
    return {
        f"{type(module).__name__}.{name}": id(value)
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }

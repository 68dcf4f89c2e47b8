"""Loading a target: its weights, what serves its architecture, and how its rows keep their bits."""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Callable
from typing import Any

import torch

from outrider.cloud.models.family_index import embedded_targets, find_target, first_line, load_tokenizer, tokenizer_file
from outrider.cloud.target.architecture import check_architecture, check_positions
from outrider.cloud.target.backend import dtype_name
from outrider.cloud.target.experts import set_experts
from outrider.cloud.target.kv_size import check_memory
from outrider.cloud.target.own_cache import OwnCacheTarget
from outrider.cloud.target.packed_linear import pack_linears, replace_conv1d
from outrider.cloud.target.recorded.straight_pass import straight_pass
from outrider.cloud.target.target import FREE, ROUNDED, TILES, TOGETHER, Passes, Target
from outrider.cloud.verifier_config import AUTO, DTYPES
from outrider.proto.errors import ModelRefused, NotFound
from outrider.proto.plumbing.logs import STAGES
from outrider.proto.types import Guarantee

log, stages = logging.getLogger(__name__), logging.getLogger(STAGES)


def load_target(
    target: str,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    kv_tokens: int = 0,
    page_size: int = 16,
    context_length: int = 0,
    max_sessions: int = 32,
    exact: str = "auto",
    packed: bool = True,
    straight: bool = True,
) -> Target:
    """Load from the embedded family, a folder or the hub: safetensors only, no remote code, checked before use.

    With `kv_tokens` 0 the KV cache takes what memory allows, but no more than `max_sessions` of full length fill. On a
    CPU the linear layers get a second, packed copy of their weights where that is better and memory allows it, unless
    `packed` is false.

    With `exact` "auto", a row on a CPU keeps its bits whatever shares its step: in passes of all rows if a check finds
    that this processor's kernels allow it, else in tiles. On other devices "auto" is "off", since tiles would read all
    weights once for 16 rows.

    With `dtype` "auto" it is the type that `load_automatically` finds.

    Raises:
        NotFound: no such model, or the hub cannot be reached.
        ModelRefused: pickled weights, code of its own, no fast tokenizer, or an architecture that fails the check.
    """
    source = find_target(target)

    def load(chosen: str) -> Target:
        stages.info("reading weights as %s", chosen)
        tokenizer = tokenizer_json(source, target)
        model = load_model(source, target, device=device, dtype=chosen)
        stages.info("checking the architecture")
        kind = _kind(model)
        if device == "cpu":
            replace_conv1d(model)
            check_memory(kv_tokens, model.config.get_text_config(), next(model.parameters()).dtype)
        shortened = straight_pass(model) if straight and device == "cpu" and kind is Target else None
        products = model if shortened is None else shortened.linears
        stages.info("packing weights")
        # before the KV cache counts memory
        packing = pack_linears(products, exact=exact != "off") if packed and kind is Target else None
        loaded = kind(
            model,
            tokenizer,
            kv_tokens=kv_tokens,
            page_size=page_size,
            context_length=context_length,
            max_sessions=max_sessions,
            packing=packing,
            straight=shortened,
        )
        if kind is Target:
            stages.info("trying whether rows keep their bits")
            loaded.passes = _passes(loaded, exact)
        difference = loaded.check()
        log.info(
            "loaded %s: %s on %s, its passes agree with the model's own to %.1e", target, chosen, device, difference
        )
        if packing and loaded.device.type == "cpu":
            log.info("linear layers of %s: %s", target, packing)
        log.info("a row of %s keeps %s", target, loaded.passes.guarantee.value)
        return loaded

    return load_automatically(load, source, device=device, exact=exact) if dtype == AUTO else load(dtype)


def load_automatically(load: Callable[[str], Target], source: str, *, device: str, exact: str) -> Target:
    """Let `load` load the target at `source` in the type, one of `DTYPES`, that suits `device`.

    On a CPU that is bfloat16 where the processor multiplies in it and the target's rows keep their bits as `exact`
    asks, else float32; on other devices what the model's config says.

    Raises:
        NotFound, ModelRefused: it cannot be loaded in the type that is left.
    """
    if device.partition(":")[0] != "cpu":
        return load(configured_dtype(source))
    if exact != "off" and multiplies_in_bfloat16():
        wanted = Guarantee.BYTES_BY_TILES if exact == "tiles" else Guarantee.BYTES
        try:
            target = load("bfloat16")
            if target.passes.guarantee is wanted:
                return target
            found = target.passes.guarantee.value
            log.info("not in bfloat16: its rows keep %s there, and %s was wanted", found, wanted.value)
            del target
        except ModelRefused as error:
            log.info("not in bfloat16: %s", error)
        gc.collect()  # a model holds itself in cycles, and the KV cache of the next takes what memory is free
    return load("float32")


def multiplies_in_bfloat16() -> bool:
    """Return whether this processor has instructions for bfloat16; without them it is slower than float32."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def configured_dtype(source: str) -> str:
    """Return the type that the config of the model at `source` names; bfloat16 where it names none that is known."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError):
        return "bfloat16"  # whoever loads the model says what is wrong with it
    dtype = config.get_text_config().dtype or config.dtype
    name = dtype_name(dtype) if isinstance(dtype, torch.dtype) else str(dtype)
    return name if name in DTYPES else "bfloat16"


def _kind(model: Any) -> type[Target]:
    """Return the class that serves a model's architecture: on the paged KV cache if it can be."""
    check_positions(model.config.get_text_config())
    try:
        check_architecture(model)
    except ModelRefused as error:
        log.warning("any architecture, one session a pass, which is slow: %s", error.message)
        return OwnCacheTarget
    return Target


def _passes(target: Target, exact: str) -> Passes:
    """Return the first passes by which rows keep their bits, the cheapest first."""
    if exact == "off" or (exact == "auto" and target.device.type != "cpu"):
        return FREE
    least = target.packing.row_multiple
    # In 16-bit types torch's attention packs keys by the work of each thread, so by what else is in the call.
    together = TOGETHER if target.dtype == torch.float32 or torch.get_num_threads() == 1 else ()
    whole = (*together, *ROUNDED) if exact == "auto" and least else ()
    rounded = [passes for passes in whole if passes.multiple >= least]
    for target.passes in rounded:
        if target.keeps_bits():
            return target.passes
    before = set_experts(target.model)  # which then take a fifth longer
    for target.passes in (*rounded, TILES) if before else (TILES,):
        if target.keeps_bits():
            return target.passes
    if before:
        target.model.set_experts_implementation(before)
    log.warning("rows do not keep their bits on %s, not even in tiles; texts keep their distribution", target.device)
    return FREE


def load_model(source: str, target: str, *, device: str, dtype: str) -> Any:
    """Load transformers' model of a folder or hub name, with the rules and errors of `load_target`."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            source, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False
        )
    except OSError as error:
        raise NotFound(
            f"cannot load {target!r}: {first_line(error)}; give a folder, a hub name that this machine can reach, "
            f"or one of {', '.join(embedded_targets())}",
            field="target",
        ) from error
    except SafetensorError as error:
        message = f"the weights of {target!r} are damaged or cut off ({first_line(error)}); fetch or copy them again"
        raise ModelRefused(message, field="target") from error
    except ValueError as error:
        raise ModelRefused(f"{target!r}: {first_line(error)}", field="target") from error
    try:
        return model.to(device).eval()
    except (RuntimeError, AssertionError) as error:  # the latter is what a torch without CUDA raises
        raise ModelRefused(f"cannot move {target!r} to {device}: {first_line(error)}", field="device") from error


def tokenizer_json(source: str, target: str) -> str:
    """Return the text of the fast tokenizer's file; where a repository has none, transformers converts another."""
    if (file := tokenizer_file(source)) is not None:
        return file.read_text(encoding="utf-8")
    try:
        tokenizer = load_tokenizer(source)
    except (OSError, ValueError) as error:
        message = f"cannot load the tokenizer of {target!r}; is its tokenizer.json there? {first_line(error)}"
        raise NotFound(message, field="target") from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ModelRefused(f"{target!r} has no fast tokenizer (tokenizer.json)", field="target")
    return str(json.dumps(json.loads(backend.to_str())))

"""The type of weights and KV cache where the operator names none: the cheapest that keeps a text's bytes."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from outrider.cloud.target.passes import Passes
from outrider.cloud.target.precision import dtype_name
from outrider.cloud.verifier_config import DTYPES
from outrider.proto.errors import ModelRefused
from outrider.proto.types import Guarantee

log = logging.getLogger(__name__)


class LoadedTarget(Protocol):
    """A target, as far as the choice looks at it.

    Attributes:
        passes: how its rows are put into passes, with the promise that these keep.
    """

    passes: Passes


T = TypeVar("T", bound=LoadedTarget)


def load_automatically(load: Callable[[str], T], source: str, *, device: str, exact: str) -> T:
    """Let `load` load the target at `source` in the type, one of `DTYPES`, that suits `device`.

    On a CPU that is bfloat16 where the processor multiplies in it and the target's rows keep their bits as `exact`
    asks, else float32; on other devices what the model's config says.

    Raises:
        NotFound, ModelRefused: it cannot be loaded in the type that is left.
    """
    if device.partition(":")[0] != "cpu":
        return load(configured_dtype(source))
    if exact != "off" and multiplies_in_bfloat16():
        target = _if_kept(load, Guarantee.BYTES_BY_TILES if exact == "tiles" else Guarantee.BYTES)
        if target is not None:
            return target
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


def _if_kept(load: Callable[[str], T], guarantee: Guarantee) -> T | None:
    """Load in bfloat16, and return the target where it keeps `guarantee`."""
    try:
        target = load("bfloat16")
    except ModelRefused as error:
        log.info("not in bfloat16: %s", error)
        return None
    found = target.passes.guarantee
    if found is guarantee:
        return target
    log.info("not in bfloat16: its rows keep %s there, and %s was wanted", found.value, guarantee.value)
    return None

"""Linear layers on a CPU with weights in oneDNN's own layout, where that gives the same product sooner."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from outrider.cloud.kv_size import available_bytes

Product = Callable[[torch.Tensor], torch.Tensor]
Shape = tuple[int, int]
_Kind = tuple[Shape, torch.dtype]

# Relative difference from the plain product; rounding gives a twentieth of this, another layout or weight 1 or more.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
_MEMORY_SHARE = 0.5  # of the memory at hand; caches and activations need the rest
_LAYOUT_ROWS = 8  # rows for which oneDNN chooses the layout
_CHECKED_ROWS = 3
_TIMED_ROWS = (1, 5, 17)  # a step without drafts, one with a few, and several sessions or a long draft
_MIN_REPETITIONS, _MAX_REPETITIONS, _ENOUGH_S = 5, 50, 0.01
_COMPARED_ROWS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 24, 32, 33)
_TICK_S = 1e-9  # a time of zero has no ratio
# What torch raises where the operators, which are private, are missing, changed or not made for this processor.
_UNAVAILABLE = (AttributeError, TypeError, RuntimeError)

log = logging.getLogger(__name__)


class PackedLinear(nn.Linear):
    """`nn.Linear` with the same parameters and state, and a second copy of the weight in oneDNN's layout.

    A step multiplies a few rows by every weight. The plain product rearranges the weight in each call; at 5 to 80 rows
    the packed one is 1.3 to 2.5 times as fast.
    """

    _product: Product

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - the name it has in nn.Linear
        """Map [..., in_features] to [..., out_features]; the plain product where gradients are wanted."""
        return super().forward(input) if torch.is_grad_enabled() else self._product(input)


@dataclass(frozen=True, slots=True)
class Packing:
    """The products of a model's plain linear layers.

    Attributes:
        packed: shapes (out_features, in_features) with packed weights.
        plain: shapes with plain products.
        packed_bytes: size of the packed weights, which are copies.
        rows_keep_bits: whether a row's product had the same bits at all numbers of rows tried, 1 to 33, in all shapes.
    """

    packed: tuple[Shape, ...] = ()
    plain: tuple[Shape, ...] = ()
    packed_bytes: int = 0
    rows_keep_bits: bool = False

    def __str__(self) -> str:
        kept = "the same" if self.rows_keep_bits else "not the same"
        return (
            f"{len(self.packed)} of {len(self.packed) + len(self.plain)} shapes packed "
            f"({self.packed_bytes / 2**20:.0f} MiB), a row's bits {kept} beside others"
        )


@torch.inference_mode()
def pack_linears(model: nn.Module, *, fixed: bool = False, clock: Callable[[], float] = time.perf_counter) -> Packing:
    """Pack the plain linear layers of `model` in place, shape by shape, where the product is right and faster.

    A layer has one kind of product for every number of rows. Where the packed product has other bits than the plain
    one, the clock chooses between them in float32 alone, where such bits are not promised.

    Args:
        model: model on its device; layers elsewhere than on a CPU, or of other types than float32 and bfloat16, stay.
        fixed: whether the bits must not depend on the clock, so that the next process has the same.
        clock: seconds, for the calibration.
    """
    by_kind: defaultdict[_Kind, list[nn.Linear]] = defaultdict(list)
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.device.type == "cpu":
            by_kind[(module.out_features, module.in_features), module.weight.dtype].append(module)
    candidates = {kind: alike for kind, alike in by_kind.items() if kind[1] in _TOLERANCE}
    if not _fit_memory(itertools.chain(*candidates.values())):
        candidates = {}
    packed = {kind for kind, alike in candidates.items() if _pack(alike, fixed=fixed, clock=clock)}
    return Packing(
        tuple(shape for shape, dtype in by_kind if (shape, dtype) in packed),
        tuple(shape for shape, dtype in by_kind if (shape, dtype) not in packed),
        sum(_bytes(layer) for kind in packed for layer in by_kind[kind]),
        all(rows_keep_bits(alike[0], _inputs(alike[0], max(_COMPARED_ROWS))) for alike in by_kind.values()),
    )


def packed_product(layer: nn.Linear) -> Product:
    """Return the product of `layer` by a packed copy of its weight.

    Raises:
        AttributeError, TypeError, RuntimeError: this torch or this processor has no such product.
    """
    weight = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _LAYOUT_ROWS)
    multiply, bias = torch.ops.mkldnn._linear_pointwise, layer.bias

    def product(rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = multiply(rows, weight, bias, "none", [], "")
        return result

    return product


def faster(plain: Product, packed: Product, inputs: Iterable[torch.Tensor], clock: Callable[[], float]) -> bool:
    """Return whether `packed` takes less time than `plain`, by the geometric mean over `inputs`.

    The two take turns and the shortest of their times count, for the other work of the machine only adds.
    """
    log_ratio = 0.0
    for rows in inputs:
        times: tuple[list[float], list[float]] = [], []
        while len(times[0]) < _MIN_REPETITIONS or (
            len(times[0]) < _MAX_REPETITIONS and sum(times[0]) + sum(times[1]) < _ENOUGH_S
        ):
            for product, of_product in zip((plain, packed), times, strict=True):
                began = clock()
                product(rows)
                of_product.append(max(clock() - began, _TICK_S))
        log_ratio += math.log(min(times[0]) / min(times[1]))
    return log_ratio > 0


def rows_keep_bits(product: Product, rows: torch.Tensor) -> bool:
    """Return whether each of the `rows` [33, in_features] has the same product whatever the number of rows beside it.

    It is tried at the beginning and at the end of the rows, for several numbers from 1 to 33.
    """
    together = product(rows)
    return all(
        torch.equal(product(rows[:count]), together[:count]) and torch.equal(product(rows[-count:]), together[-count:])
        for count in _COMPARED_ROWS
    )


def _pack(alike: list[nn.Linear], *, fixed: bool, clock: Callable[[], float]) -> bool:
    """Pack layers of one shape if that is right and better, and return whether it is."""
    try:
        first = packed_product(alike[0])
        if not (_agrees(alike[0], first) and _is_better(alike[0], first, fixed=fixed, clock=clock)):
            return False
        products = [first, *map(packed_product, alike[1:])]
        if not all(map(_agrees, alike, products)):
            return False
    except _UNAVAILABLE as error:
        log.info("no packed product of %s: %s", alike[0], error)
        return False
    for layer, product in zip(alike, products, strict=True):
        layer.__class__ = PackedLinear
        layer._product = product  # type: ignore[assignment]
    return True


def _agrees(layer: nn.Linear, product: Product) -> bool:
    """Return whether `product` is that of `layer` but for rounding."""
    rows = _inputs(layer, _CHECKED_ROWS)
    plain = layer(rows).float()
    difference = float((product(rows).float() - plain).norm())
    if difference <= _TOLERANCE[layer.weight.dtype] * float(plain.norm()):
        return True
    log.warning("the packed product of %s differs by %.2g of %.2g; not used", layer, difference, plain.norm())
    return False


def _is_better(layer: nn.Linear, packed: Product, *, fixed: bool, clock: Callable[[], float]) -> bool:
    rounding_is_free = layer.weight.dtype == torch.float32 and not fixed
    if not rounding_is_free and not _same_bits(layer, packed, _inputs(layer, max(_COMPARED_ROWS))):
        return True
    return faster(layer, packed, [_inputs(layer, count) for count in _TIMED_ROWS], clock)


def _same_bits(plain: Product, packed: Product, rows: torch.Tensor) -> bool:
    return all(torch.equal(plain(rows[:count]), packed(rows[:count])) for count in _COMPARED_ROWS)


def _fit_memory(layers: Iterable[nn.Linear]) -> bool:
    needed, allowed = sum(map(_bytes, layers)), _MEMORY_SHARE * available_bytes()
    if needed > allowed:
        log.warning(
            "weights are not packed: the copy takes %.0f MiB of memory, and %.0f MiB are allowed",
            needed / 2**20,
            allowed / 2**20,
        )
    return needed <= allowed


def _inputs(layer: nn.Linear, count: int) -> torch.Tensor:
    rows = torch.randn(count, layer.in_features, generator=torch.Generator().manual_seed(count))
    return rows.to(layer.weight.dtype)


def _bytes(layer: nn.Linear) -> int:
    return layer.weight.numel() * layer.weight.element_size()

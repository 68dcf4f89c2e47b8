"""Linear layers on a CPU with weights in oneDNN's own layout, where that gives the same product sooner."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
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
# Rows of the products that are compared with the product of all of them: what steps and prompts have.
_COMPARED_ROWS = (1, 2, 3, 5, 8, 13, 4, 7, 31, 16, 33, 64, 100, 129, 96)
_MULTIPLES = (1, 2, 4, 8)
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
        row_multiple: number of rows (1, 2, 4 or 8) to whose multiples products are to be filled up so that each row has
            the same bits at every number of rows tried, in all layers; 0: there is none. 1 where nobody has asked.
    """

    packed: tuple[Shape, ...] = ()
    plain: tuple[Shape, ...] = ()
    packed_bytes: int = 0
    row_multiple: int = 1

    def __str__(self) -> str:
        kept = f"at multiples of {self.row_multiple} rows" if self.row_multiple > 1 else "beside any number of others"
        return (
            f"{len(self.packed)} of {len(self.packed) + len(self.plain)} shapes packed "
            f"({self.packed_bytes / 2**20:.0f} MiB), a row's bits {kept if self.row_multiple else 'not'} kept"
        )


def replace_conv1d(model: nn.Module) -> None:
    """Replace GPT-2's kind of linear layer in `model`, whose weight is transposed, by the common one on that weight."""
    from transformers.pytorch_utils import Conv1D

    for parent in list(model.modules()):
        for name, layer in parent.named_children():
            if type(layer) is Conv1D:
                linear = nn.Linear(layer.nx, layer.nf, device="meta")
                linear.weight, linear.bias = nn.Parameter(layer.weight.t(), requires_grad=False), layer.bias
                setattr(parent, name, linear.train(layer.training))


@torch.inference_mode()
def pack_linears(model: nn.Module, *, exact: bool = True, clock: Callable[[], float] = time.perf_counter) -> Packing:
    """Pack the plain linear layers of `model` in place, shape by shape, where the product is right and better.

    A layer has one kind of product for every number of rows. With `exact` it is the packed one, if its rows keep their
    bits; the clock may prefer the plain one only where it has the same bits, so that the next process has them too.
    Without `exact` the clock chooses.

    Args:
        model: model on its device; layers elsewhere than on a CPU, or of other types than float32 and bfloat16, stay.
        exact: whether rows should keep their bits.
        clock: seconds, for the calibration.
    """
    by_kind: defaultdict[_Kind, list[nn.Linear]] = defaultdict(list)
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.device.type == "cpu":
            by_kind[(module.out_features, module.in_features), module.weight.dtype].append(module)
    candidates = {kind: alike for kind, alike in by_kind.items() if kind[1] in _TOLERANCE}
    if not _fit_memory(itertools.chain(*candidates.values())):
        candidates = {}
    packed, multiples = set(), []
    for kind, alike in by_kind.items():
        products = _packed(alike) if kind in candidates else None
        chosen, multiple = False, 1
        if exact:
            chosen, multiple = _choose_by_bits(alike, products, clock) if products else (False, _multiple(alike, alike))
        elif products:
            chosen = _choose_by_time(alike, products, clock)
        multiples.append(multiple)
        if chosen and products:
            packed.add(kind)
            for layer, product in zip(alike, products, strict=True):
                layer.__class__ = PackedLinear
                layer._product = product  # type: ignore[assignment]
    return Packing(
        tuple(shape for shape, dtype in by_kind if (shape, dtype) in packed),
        tuple(shape for shape, dtype in by_kind if (shape, dtype) not in packed),
        sum(_bytes(layer) for kind in packed for layer in by_kind[kind]),
        0 if 0 in multiples else max(multiples, default=1),
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


def row_multiple(product: Product, rows: torch.Tensor) -> int:
    """Return the least of 1, 2, 4 and 8 at whose multiples each of `rows` [512, in_features] keeps its bits; 0: none.

    The product of all rows is compared with products of 1 to 129 of them, filled up with copies of their last row.
    """
    together = product(rows)
    return next((multiple for multiple in _MULTIPLES if _keeps_bits(product, rows, together, multiple)), 0)


def _keeps_bits(product: Product, rows: torch.Tensor, together: torch.Tensor, multiple: int) -> bool:
    first = 0
    for count in _COMPARED_ROWS:
        part = rows[first : first + count]
        filled = torch.cat([part, part[-1:].expand(-count % multiple, -1)])
        if not torch.equal(product(filled)[:count], together[first : first + count]):
            return False
        first += count
    return True


def _packed(alike: Sequence[nn.Linear]) -> list[Product] | None:
    """Return the packed products of layers of one shape; None: there are none, or one of them is wrong."""
    try:
        products = [packed_product(layer) for layer in alike]
        return products if all(map(_agrees, alike, products)) else None
    except _UNAVAILABLE as error:
        log.info("no packed product of %s: %s", alike[0], error)
        return None


def _choose_by_bits(
    plain: Sequence[nn.Linear], packed: Sequence[Product], clock: Callable[[], float]
) -> tuple[bool, int]:
    """Return whether to take the `packed` products of the layers `plain`, and the multiple of those that are taken."""
    of_packed = _multiple(plain, packed)
    if of_packed and not (all(map(_same_bits, plain, packed)) and not _choose_by_time(plain, packed, clock)):
        return True, of_packed
    of_plain = _multiple(plain, plain)
    if of_packed and of_packed != of_plain:
        return True, of_packed  # their bits are not equal everywhere, so the clock has no say
    return False, of_plain


def _choose_by_time(plain: Sequence[nn.Linear], packed: Sequence[Product], clock: Callable[[], float]) -> bool:
    return faster(plain[0], packed[0], [_inputs(plain[0], count) for count in _TIMED_ROWS], clock)


def _multiple(layers: Sequence[nn.Linear], products: Sequence[Product]) -> int:
    """Return the multiple at which the products of all layers keep a row's bits; 0: there is none."""
    rows = _inputs(layers[0], sum(_COMPARED_ROWS))
    found = [row_multiple(product, rows) for product in products]
    return 0 if 0 in found else max(found)


def _agrees(layer: nn.Linear, product: Product) -> bool:
    """Return whether `product` is that of `layer` but for rounding."""
    rows = _inputs(layer, _CHECKED_ROWS)
    plain = layer(rows).float()
    difference = float((product(rows).float() - plain).norm())
    if difference <= _TOLERANCE[layer.weight.dtype] * float(plain.norm()):
        return True
    log.warning("the packed product of %s differs by %.2g of %.2g; not used", layer, difference, plain.norm())
    return False


def _same_bits(layer: nn.Linear, packed: Product) -> bool:
    """Return whether products have the same bits at a few numbers of rows, from the first layer alone to the last."""
    return all(torch.equal(layer(rows), packed(rows)) for rows in (_inputs(layer, count) for count in (1, 5, 512)))


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

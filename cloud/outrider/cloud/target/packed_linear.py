"""Linear layers on a CPU with weights in oneDNN's own layout, in which a product of few rows takes less time."""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from outrider.cloud.target.kv_size import available_bytes

Product = Callable[[torch.Tensor], torch.Tensor]
Shape = tuple[int, int]
_Kind = tuple[Shape, torch.dtype, bool]  # with or without a bias

# Relative difference from the plain product; rounding gives a twentieth of this, another layout or weight 1 or more.
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
_MEMORY_SHARE = 0.5  # of the memory at hand; caches and activations need the rest
PACKED_ROWS = 4  # packed products of three to six rows take a fifth to a quarter less time than those of one or two
_LAYOUT_ROWS = 8  # rows for which oneDNN chooses the layout
_CHECKED_ROWS = 3
# Rows of the products that are compared with the product of all of them: what steps and prompts have.
_COMPARED_ROWS = (1, 2, 3, 5, 8, 13, 4, 7, 31, 16, 33, 64, 129)
_MULTIPLES = (1, 2, 4, 8)
_DISTINCT = 64  # rows of the weight of a trial, which repeat
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
def pack_linears(model: nn.Module, *, exact: bool = True) -> Packing:
    """Pack the plain linear layers of `model` in place, shape by shape, where the product is right.

    A layer has one kind of product for every number of rows. With `exact` it is the plain one where packed ones do not
    keep a row's bits. Nothing is timed to choose it, so that every process has the same bits.

    Args:
        model: model on its device; layers elsewhere than on a CPU, or of other types than float32 and bfloat16, stay.
        exact: whether rows should keep their bits.
    """
    by_kind: defaultdict[_Kind, list[nn.Linear]] = defaultdict(list)
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.device.type == "cpu":
            shape = module.out_features, module.in_features
            by_kind[shape, module.weight.dtype, module.bias is not None].append(module)
    candidates = {kind: alike for kind, alike in by_kind.items() if kind[1] in _TOLERANCE}
    if not _fit_memory(itertools.chain(*candidates.values())):
        candidates = {}
    packed, multiples = set(), []
    for kind, alike in by_kind.items():
        products = _packed(alike) if kind in candidates else None
        multiple = _multiple(alike[0], packed_product) if exact and products else int(not exact)
        if products and multiple:
            packed.add(kind)
            for layer, product in zip(alike, products, strict=True):
                layer.__class__ = PackedLinear
                layer._product = product  # type: ignore[assignment]
        multiples.append(multiple or _multiple(alike[0], lambda layer: layer))
    return Packing(
        tuple(kind[0] for kind in by_kind if kind in packed),
        tuple(kind[0] for kind in by_kind if kind not in packed),
        sum(layer.weight.nbytes for kind in packed for layer in by_kind[kind]),
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


def row_multiple(product: Product, rows: torch.Tensor) -> int:
    """Return the least of 1, 2, 4 and 8 at whose multiples each of `rows` [316, in_features] keeps its bits; 0: none.

    The product of all rows is compared with products of 1 to 129 of them, filled up with copies of their last row.
    """
    together = product(rows)
    sizes = list(_COMPARED_ROWS)

    def keeps_bits(multiple: int) -> bool:
        for part, wanted in zip(rows.split(sizes), together.split(sizes), strict=True):
            filled = torch.cat([part, part[-1:].expand(-len(part) % multiple, -1)])
            if not torch.equal(product(filled)[: len(part)], wanted):
                return False
        return True

    return next(filter(keeps_bits, _MULTIPLES), 0)


def _packed(alike: Sequence[nn.Linear]) -> list[Product] | None:
    """Return the packed products of layers of one shape; None: there are none, or one of them is wrong."""
    try:
        products = [packed_product(layer) for layer in alike]
        return products if all(map(_agrees, alike, products)) else None
    except _UNAVAILABLE as error:
        log.info("no packed product of %s: %s", alike[0], error)
        return None


def _multiple(layer: nn.Linear, product_of: Callable[[nn.Linear], Product]) -> int:
    """Return the multiple at which products of layers like `layer` keep a row's bits; 0: there is none.

    Kernels are chosen by shape and type, so one layer of another weight stands for all. Its sums are zero but for
    rounding, and so show any other order of adding, which one in 10,000 outputs in bfloat16 would show else.
    """
    half = layer.in_features // 2
    numbers = torch.randn(_DISTINCT, half, generator=torch.Generator().manual_seed(0)).to(layer.weight.dtype)
    rows = _inputs(layer, sum(_COMPARED_ROWS))
    rows[:, half : 2 * half] = rows[:, :half]
    weight = torch.zeros(_DISTINCT, layer.in_features, dtype=rows.dtype)
    weight[:, : 2 * half] = torch.cat([numbers, -numbers], dim=1)
    order = torch.randperm(layer.in_features, generator=torch.Generator().manual_seed(1))
    trial = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
    weight = weight[torch.arange(layer.out_features) % _DISTINCT][:, order]
    if not layer.weight.is_contiguous():  # GPT-2's are transposed
        weight = weight.t().contiguous().t()
    trial.weight = nn.Parameter(weight, requires_grad=False)
    if layer.bias is not None:
        trial.bias = nn.Parameter(torch.zeros_like(layer.bias), requires_grad=False)
    return row_multiple(product_of(trial), rows[:, order])


def _agrees(layer: nn.Linear, product: Product) -> bool:
    """Return whether `product` is that of `layer` but for rounding."""
    rows = _inputs(layer, _CHECKED_ROWS)
    plain = layer(rows).float()
    difference = float((product(rows).float() - plain).norm())
    if difference <= _TOLERANCE[layer.weight.dtype] * float(plain.norm()):
        return True
    log.warning("the packed product of %s differs by %.2g of %.2g; not used", layer, difference, plain.norm())
    return False


def _fit_memory(layers: Iterable[nn.Linear]) -> bool:
    needed, allowed = sum(layer.weight.nbytes for layer in layers), _MEMORY_SHARE * available_bytes()
    if needed > allowed:
        message = "weights are not packed: the copy takes %.0f MiB of memory, and %.0f MiB are allowed"
        log.warning(message, needed / 2**20, allowed / 2**20)
    return needed <= allowed


def _inputs(layer: nn.Linear, count: int) -> torch.Tensor:
    rows = torch.randn(count, layer.in_features, generator=torch.Generator().manual_seed(count))
    return rows.to(layer.weight.dtype)

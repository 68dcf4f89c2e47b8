"""Fewer calls in place of several, by what the several compute, whichever model makes them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from outrider.cloud.call_recorder import Call, CallSequence, Value, part


def fused(sequence: CallSequence, model: nn.Module) -> CallSequence:
    """Return the same pass with shorter norms and rotary positions, and joint products.

    Plain linear layers of `model` that have the same input become one product; their weights and biases become parts of
    one, so that they take no more memory than before.
    """
    return _joined(_turned(_scaled(sequence)), model)


def first_half_negated(sine: torch.Tensor, half: int) -> torch.Tensor:
    """Return `sine` [..., 2 * half] with the other sign in its first half."""
    return torch.cat((-sine[..., :half], sine[..., half:]), -1)


def over_root_mean_square(rows: torch.Tensor, root: float, floor: torch.Tensor) -> torch.Tensor:
    """Return `rows` [..., root ** 2] divided by the root of their mean square and the square of `floor`."""
    return rows.div(torch.linalg.vector_norm(rows, 2, -1, True).div_(root).hypot_(floor))


def _scaled(sequence: CallSequence) -> CallSequence:
    """Have float32 rows divided by their root mean square, where models multiply them by an inverse of five calls."""
    made_by = {call.result: call for call in sequence.calls}
    return replace(sequence, calls=[_by_size(call, made_by) or call for call in sequence.calls])


def _by_size(call: Call, made_by: Mapping[Value, Call]) -> Call | None:
    """Return the same result by `over_root_mean_square`, where `call` is the last of what gives that."""
    factors = _given(made_by, call.result, "mul", 2)
    for rows, inverse in (factors, factors[::-1]):
        mean, epsilon = _given(made_by, _given(made_by, inverse, "rsqrt", 1)[0], "add", 2)
        squares, *over = _given(made_by, mean, "mean", 3)
        if isinstance(rows, Value) and over == [-1, True] and _given(made_by, squares, "pow", 2) == (rows, 2):
            example = rows.example
            if example.dtype == torch.float32 and isinstance(epsilon, float):
                arguments = rows, example.shape[-1] ** 0.5, example.new_tensor(epsilon**0.5)
                return replace(call, function=over_root_mean_square, arguments=arguments, keywords={})
    return None


def _turned(sequence: CallSequence) -> CallSequence:
    """Have rotary positions roll a head by half, where models cut it, negate a half and join them again.

    `cat(-x2, x1) * sin` is `roll(x) * cat(-sin1, sin2)` to the bit, and the second factor is the same for all layers.
    """
    made_by = {call.result: call for call in sequence.calls}
    signed: dict[Value, Value] = {}
    calls: list[Call] = []
    for call in sequence.calls:
        turned = _turned_half(call, made_by)
        if turned is None:
            calls.append(call)
            continue
        head, sine, half = turned
        if sine not in signed:
            signed[sine] = Value()
            calls.append(Call(first_half_negated, (sine, half), {}, signed[sine]))
        rolled = Value()
        calls.append(Call(torch.Tensor.roll, (head, half, -1), {}, rolled))
        calls.append(Call(torch.Tensor.mul, (rolled, signed[sine]), {}, call.result))
    return replace(sequence, calls=calls)


def _turned_half(call: Call, made_by: Mapping[Value, Call]) -> tuple[Value, Value, int] | None:
    """Return head, sine and half of its size, where `call` multiplies a head with its halves exchanged by the sine."""
    exchanged, sine = _given(made_by, call.result, "mul", 2)
    halves, dimension = _given(made_by, exchanged, "cat", 2)
    if not (isinstance(sine, Value) and isinstance(halves, tuple | list) and len(halves) == 2 and dimension == -1):
        return None
    (negated,) = _given(made_by, halves[0], "neg", 1)
    head, last = _given(made_by, negated, "getitem", 2)
    again, first = _given(made_by, halves[1], "getitem", 2)
    if not (isinstance(head, Value) and head is again):
        return None
    half = head.example.shape[-1] // 2
    cut = (..., slice(None, half, None)), (..., slice(half, None, None))
    return (head, sine, half) if (first, last) == cut and head.example.shape[-1] == 2 * half else None


def _given(made_by: Mapping[Value, Call], value: Any, name: str, count: int) -> tuple[Any, ...]:
    """Return the arguments of the call that made `value`, or `count` times None where name or number are others."""
    maker = made_by.get(value) if isinstance(value, Value) else None
    if maker is not None and getattr(maker.function, "__name__", "").strip("_") == name:
        arguments = *maker.arguments, *maker.keywords.values()
        if len(arguments) == count:
            return arguments
    return (None,) * count


def _joined(sequence: CallSequence, model: nn.Module) -> CallSequence:
    """Have one product where plain linear layers of the model, each called once, have the same input."""
    owners = Counter(map(id, dict(model.named_parameters(remove_duplicate=False)).values()))
    called = Counter(call.function for call in sequence.calls if isinstance(call.function, nn.Linear))
    groups: defaultdict[Any, list[Call]] = defaultdict(list)
    for call in sequence.calls:
        layer = call.function
        if type(layer) is nn.Linear and called[layer] == 1 and owners[id(layer.weight)] == 1:
            groups[call.arguments, layer.bias is None, layer.weight.dtype].append(call)
    first: dict[Call, Sequence[Call]] = {group[0]: group for group in groups.values() if len(group) > 1}
    rest = {call for group in first.values() for call in group[1:]}
    calls: list[Call] = []
    for call in sequence.calls:
        if call in first:
            calls.extend(_one_product(first[call]))
        elif call not in rest:
            calls.append(call)
    return replace(sequence, calls=calls)


def _one_product(group: Sequence[Call]) -> list[Call]:
    """Return the calls of one product in place of a group, and of its parts."""
    layers = [call.function for call in group]
    whole, parts = Value(), Value()
    sizes = [layer.out_features for layer in layers]
    return [
        Call(_join(layers), group[0].arguments, {}, whole),
        Call(torch.Tensor.split_with_sizes, (whole, sizes, -1), {}, parts),
        *(Call(part, (parts, i), {}, call.result) for i, call in enumerate(group)),
    ]


def _join(layers: Sequence[nn.Linear]) -> nn.Linear:
    """Return a layer whose outputs are those of `layers` side by side, and let them share its parameters."""
    with torch.inference_mode(False), torch.no_grad():  # so that they stay parameters like others
        together = nn.Linear(layers[0].in_features, 1, bias=layers[0].bias is not None, device="meta")
        together.out_features = sum(layer.out_features for layer in layers)
        for name in dict(together.named_parameters()):
            parameters = [getattr(layer, name) for layer in layers]
            shared = nn.Parameter(torch.cat([each.detach() for each in parameters]), requires_grad=False)
            setattr(together, name, shared)
            for each, mine in zip(parameters, shared.split([len(each) for each in parameters]), strict=True):
                each.data = mine
    return together.eval()

"""Fewer calls for the same pass: none twice, none in vain, one product for the rows that several layers share."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from outrider.cloud.call_recorder import Call, CallSequence, RowCount, Value, leaves, part, replaced, values_in


def simplified(recording: CallSequence) -> CallSequence:
    """Return the same pass without calls that the rows do not decide, and without equal or unused ones."""
    return trimmed(_turned(_unique(_folded(recording))), list(recording.outputs))


def trimmed(recording: CallSequence, outputs: Sequence[str]) -> CallSequence:
    """Return the pass that gives `outputs` alone, without the calls that they do not need."""
    needed = {recording.outputs[name] for name in outputs}
    kept = []
    for call in reversed(recording.calls):
        if not call.pure or call.result in needed:
            kept.append(call)
            needed.update(values_in((call.arguments, call.keywords)))
    return replace(recording, calls=kept[::-1], outputs={name: recording.outputs[name] for name in outputs})


def joined(recording: CallSequence, model: nn.Module) -> CallSequence:
    """Return the pass with one product where plain linear layers of `model` have the same input.

    Their weights and biases become parts of one, so that they take no more memory than before.
    """
    owners = Counter(map(id, dict(model.named_parameters(remove_duplicate=False)).values()))
    called = Counter(call.function for call in recording.calls if isinstance(call.function, nn.Linear))
    groups: defaultdict[Any, list[Call]] = defaultdict(list)
    for call in recording.calls:
        layer = call.function
        if type(layer) is nn.Linear and called[layer] == 1 and owners[id(layer.weight)] == 1:
            groups[call.arguments, layer.bias is None, layer.weight.dtype].append(call)
    first: dict[Call, Sequence[Call]] = {group[0]: group for group in groups.values() if len(group) > 1}
    rest = {call for group in first.values() for call in group[1:]}
    calls: list[Call] = []
    for call in recording.calls:
        if call in first:
            calls.extend(_one_product(first[call]))
        elif call not in rest:
            calls.append(call)
    return replace(recording, calls=calls)


def _one_product(group: Sequence[Call]) -> list[Call]:
    """Return the calls of one product in place of a group, and of its parts."""
    layers = [call.function for call in group]
    whole, parts = Value(None), Value(None)
    sizes = [layer.out_features for layer in layers]
    return [
        Call(_join(layers), group[0].arguments, {}, whole),
        Call(torch.Tensor.split_with_sizes, (whole, sizes, -1), {}, parts),
        *(Call(part, (parts, i), {}, call.result) for i, call in enumerate(group)),
    ]


@torch.no_grad()
def _join(layers: Sequence[nn.Linear]) -> nn.Linear:
    """Return a layer whose outputs are those of `layers` side by side, and let them share its parameters."""
    with torch.inference_mode(False):
        together = nn.Linear(layers[0].in_features, 1, bias=layers[0].bias is not None, device="meta")
        together.out_features = sum(layer.out_features for layer in layers)
        for name in dict(together.named_parameters()):
            parameters = [getattr(layer, name) for layer in layers]
            shared = nn.Parameter(torch.cat([each.detach() for each in parameters]), requires_grad=False)
            setattr(together, name, shared)
            for each, mine in zip(parameters, shared.split([len(each) for each in parameters]), strict=True):
                each.data = mine
    return together.eval()


def _folded(recording: CallSequence) -> CallSequence:
    """Keep the results of the calls that weights and fixed sizes alone decide."""
    constants: dict[Value, Any] = {}
    calls = []
    for call in recording.calls:
        call = _changed(call, constants)
        if call.pure and not any(
            isinstance(leaf, Value | RowCount) for leaf in leaves((call.arguments, call.keywords))
        ):
            constants[call.result] = call.result.example
        else:
            calls.append(call)
    return replace(recording, calls=calls)


def _unique(recording: CallSequence) -> CallSequence:
    """Make calls that are equal once."""
    same: dict[Value, Value] = {}
    known: dict[Any, Value] = {}
    calls = []
    for call in recording.calls:
        call = _changed(call, same)
        key = _key((call.function, call.arguments, dict(call.keywords)))
        if call.pure and key in known:
            same[call.result] = known[key]
        else:
            known[key] = call.result
            calls.append(call)
    return replace(recording, calls=calls, outputs=replaced(recording.outputs, same))


def _turned(recording: CallSequence) -> CallSequence:
    """Have rotary positions roll a head by half, where models cut it, negate a half and join them again.

    `cat(-x2, x1) * sin` is `roll(x) * cat(-sin1, sin2)` to the bit, and the second factor is the same for all layers.
    """
    made_by = {call.result: call for call in recording.calls}
    signed: dict[Value, Value] = {}
    calls: list[Call] = []
    for call in recording.calls:
        turned = _turned_half(call, made_by)
        if turned is None:
            calls.append(call)
            continue
        head, sine, half = turned
        if sine not in signed:
            signed[sine] = Value(None)
            calls.append(Call(first_half_negated, (sine, half), {}, signed[sine]))
        rolled = Value(None)
        calls.append(Call(torch.Tensor.roll, (head, half, -1), {}, rolled))
        calls.append(Call(torch.Tensor.mul, (rolled, signed[sine]), {}, call.result))
    return replace(recording, calls=calls)


def _turned_half(call: Call, made_by: Mapping[Value, Call]) -> tuple[Value, Value, int] | None:
    """Return head, sine and half of its size, where `call` multiplies a head with its halves exchanged by the sine."""

    def given(value: Any, name: str, count: int) -> tuple[Any, ...]:
        """Return the arguments of the call that made a value; nothing, if it has another name or number of them."""
        maker = made_by.get(value) if isinstance(value, Value) else None
        if maker is None or getattr(maker.function, "__name__", "").strip("_") != name:
            return (None,) * count
        arguments = *maker.arguments, *maker.keywords.values()
        return arguments if len(arguments) == count else (None,) * count

    exchanged, sine = given(call.result, "mul", 2)
    halves, dimension = given(exchanged, "cat", 2)
    if not (isinstance(sine, Value) and isinstance(halves, tuple | list) and len(halves) == 2 and dimension == -1):
        return None
    head, last = given(given(halves[0], "neg", 1)[0], "getitem", 2)
    again, first = given(halves[1], "getitem", 2)
    if not (isinstance(head, Value) and head is again):
        return None
    half = head.example.shape[-1] // 2
    cut = (..., slice(None, half, None)), (..., slice(half, None, None))
    return (head, sine, half) if (first, last) == cut and head.example.shape[-1] == 2 * half else None


def first_half_negated(sine: torch.Tensor, half: int) -> torch.Tensor:
    """Return `sine` [..., 2 * half] with the other sign in its first half."""
    return torch.cat((-sine[..., :half], sine[..., half:]), -1)


def _changed(call: Call, replacements: Mapping[Value, Any]) -> Call:
    arguments, keywords = replaced(call.arguments, replacements), replaced(call.keywords, replacements)
    return replace(call, arguments=arguments, keywords=keywords)


def _key(structure: Any) -> Any:
    """Return what two equal calls have in common, to be looked up."""
    match structure:
        case tuple() | list():
            return tuple(map(_key, structure))
        case dict():
            return tuple((name, _key(each)) for name, each in structure.items())
        case slice():
            return "slice", _key((structure.start, structure.stop, structure.step))
        case bool() | int() | float() | str() | None | RowCount():
            return type(structure), structure
        case _:
            return id(structure)

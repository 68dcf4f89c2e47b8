"""Fewer calls for the same pass: none in vain, none twice, and one in place of several, whichever model makes them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from outrider.cloud.target.recorded.call_recorder import (
    Call,
    CallSequence,
    RowCount,
    Value,
    leaves,
    part,
    replaced,
    values_in,
)


def shortened(recording: CallSequence, model: nn.Module) -> CallSequence:
    """Return the same pass with shorter norms and rotary positions, joint products, and without needless calls.

    Calls that sizes and weights alone decide are made now, equal ones once, and after the last attention the wanted
    rows are computed alone. Plain linear layers of `model` that have the same input become one product; their weights
    and biases become parts of one, so that they take no more memory than before.
    """
    outputs = list(recording.outputs)
    sequence = _wanted_early(trimmed(_unique(_folded(recording)), outputs))
    made_by = {call.result: call for call in sequence.calls}
    sequence = replace(sequence, calls=[_by_size(call, made_by) or call for call in sequence.calls])
    return _turned_together(_joined(trimmed(_turned(sequence), outputs), model))


def trimmed(sequence: CallSequence, outputs: Sequence[str]) -> CallSequence:
    """Return the pass that gives `outputs` alone, without the calls that they do not need."""
    needed = {sequence.outputs[name] for name in outputs}
    kept = []
    for call in reversed(sequence.calls):
        if not call.pure or call.result in needed:
            kept.append(call)
            needed.update(values_in((call.arguments, call.keywords)))
    return replace(sequence, calls=kept[::-1], outputs={name: sequence.outputs[name] for name in outputs})


def _folded(sequence: CallSequence) -> CallSequence:
    """Keep the results of the calls that weights and fixed sizes alone decide."""
    constants: dict[Value, Any] = {}
    calls = []
    for call in sequence.calls:
        call = call.with_replaced(constants)
        if call.pure and not any(
            isinstance(leaf, Value | RowCount) for leaf in leaves((call.arguments, call.keywords))
        ):
            constants[call.result] = call.result.example
        else:
            calls.append(call)
    return replace(sequence, calls=calls)


def _unique(sequence: CallSequence) -> CallSequence:
    same: dict[Value, Value] = {}
    known: dict[Any, Value] = {}
    calls = []
    for call in sequence.calls:
        call = call.with_replaced(same)
        key = _key((call.function, call.arguments, dict(call.keywords)))
        if call.pure and key in known:
            same[call.result] = known[key]
        else:
            known[key] = call.result
            calls.append(call)
    return replace(sequence, calls=calls, outputs=replaced(sequence.outputs, same))


def _wanted_early(sequence: CallSequence) -> CallSequence:
    """Take the wanted rows right after the last attention, for no row sees another from there on."""
    calls, wanted = sequence.calls, sequence.inputs["wanted"]
    first = 1 + max((i for i, call in enumerate(calls) if not call.pure), default=-1)
    while first < len(calls) and calls[first].function is part:
        first += 1
    rest = calls[first:]
    taking = [call for call in rest if call.arguments[1:] == ((slice(None), wanted, slice(None)),)]
    made = {call.result for call in rest}
    used = dict.fromkeys(value for call in rest for value in values_in((call.arguments, call.keywords)))
    entering = [value for value in used if value not in made and value is not wanted]
    uses = sum(wanted in values_in(call.arguments) for call in calls)
    plain = len(taking) == uses == 1 and taking[0] is not rest[-1]
    plain = plain and made & set(sequence.outputs.values()) == {rest[-1].result}
    if not plain or any(value.example.shape[:2] != (1, sequence.rows) for value in entering):
        return sequence
    few = {value: Value() for value in entering}
    sizes = {leaf for call in rest for leaf in leaves((call.arguments, call.keywords)) if isinstance(leaf, RowCount)}
    changed: dict[Any, Any] = {**few, **{size: replace(size, wanted=True) for size in sizes}}
    calls = calls[:first]
    calls += [Call(torch.Tensor.__getitem__, (value, (slice(None), wanted)), {}, few[value]) for value in entering]
    for call in rest:
        if call is taking[0]:
            changed[call.result] = replaced(call.arguments[0], changed)
        else:
            calls.append(call.with_replaced(changed))
    return replace(sequence, calls=calls)


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


def first_half_negated(sine: torch.Tensor, half: int) -> torch.Tensor:
    """Return `sine` [..., 2 * half] with the other sign in its first half."""
    return torch.cat((-sine[..., :half], sine[..., half:]), -1)


def turned(head: torch.Tensor, cosine: torch.Tensor, signed: torch.Tensor, half: int) -> torch.Tensor:
    """Return `head` [..., 2 * half] turned by its position, with the sine's first half negated in `signed`."""
    return (head * cosine).add_(head.roll(half, -1).mul_(signed))


def over_root_mean_square(rows: torch.Tensor, root: float, floor: torch.Tensor) -> torch.Tensor:
    """Return `rows` [..., root ** 2] divided by the root of their mean square and the square of `floor`."""
    return rows.div(torch.linalg.vector_norm(rows, 2, -1, True).div_(root).hypot_(floor))


def _by_size(call: Call, made_by: Mapping[Value, Call]) -> Call | None:
    """Return the same result by `over_root_mean_square`, where `call` is the last of a norm's calls in float32."""
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
    """Have rotary positions turn a head by `turned`, where models cut it, negate a half and join them again.

    `cat(-x2, x1) * sin` is `roll(x) * cat(-sin1, sin2)` to the bit, and the second factor is the same for all layers.
    """
    made_by = {call.result: call for call in sequence.calls}
    signed: dict[Value, Value] = {}
    calls: list[Call] = []
    for call in sequence.calls:
        if (found := _turn(call, made_by)) is not None:
            head, cosine, sine, half = found
            if sine not in signed:
                signed[sine] = Value()
                calls.append(Call(first_half_negated, (sine, half), {}, signed[sine]))
            call = Call(turned, (head, cosine, signed[sine], half), {}, call.result)
        calls.append(call)
    return replace(sequence, calls=calls)


def _turn(call: Call, made_by: Mapping[Value, Call]) -> tuple[Value, Value, Value, int] | None:
    """Return head, cosine, sine and half of the head's size, where `call` is the last that turns it."""
    first, second = _given(made_by, call.result, "add", 2)
    head, cosine = _given(made_by, first, "mul", 2)
    exchanged, sine = _given(made_by, second, "mul", 2)
    halves, dimension = _given(made_by, exchanged, "cat", 2)
    if not (isinstance(sine, Value) and isinstance(halves, tuple | list) and len(halves) == 2 and dimension == -1):
        return None
    (negated,) = _given(made_by, halves[0], "neg", 1)
    behind, before = _given(made_by, negated, "getitem", 2), _given(made_by, halves[1], "getitem", 2)
    if not (isinstance(head, Value) and isinstance(cosine, Value) and behind[0] is before[0] is head):
        return None
    half = head.example.shape[-1] // 2
    cut = (..., slice(half, None, None)), (..., slice(None, half, None))
    return (head, cosine, sine, half) if (behind[1], before[1]) == cut and head.example.shape[-1] == 2 * half else None


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


def _turned_together(sequence: CallSequence) -> CallSequence:
    """Have the first two parts of a product, queries and keys, turn in one call where they turn alike."""
    users: defaultdict[Value, list[Call]] = defaultdict(list)
    for call in sequence.calls:
        for value in values_in((call.arguments, call.keywords)):
            users[value].append(call)
    changed: dict[Call, list[Call]] = {}
    for call in sequence.calls:
        if call.function is torch.Tensor.split_with_sizes:
            parts = users[call.result]
            queries, keys = (_way_to_turn(each.result, users) for each in parts[:2])
            if queries and [step.arguments[1:] for step in queries] == [step.arguments[1:] for step in keys]:
                changed |= _one_turn(call, parts, queries, keys)
    return replace(sequence, calls=[new for call in sequence.calls for new in changed.get(call, [call])])


def _one_turn(
    split: Call, parts: Sequence[Call], queries: Sequence[Call], keys: Sequence[Call]
) -> dict[Call, list[Call]]:
    """Return what replaces the calls that split a product and rotate its first two parts: one rotation of both."""
    both, heads = Value(), Value()
    whole, (size, other, *sizes), _ = split.arguments
    turn = replace(queries[-1], result=Value())
    counts = [way[-1].arguments[0].example.shape[1] for way in (queries, keys)]
    return {
        split: [replace(split, arguments=(whole, [size + other, *sizes], -1))],
        **{each: [replace(each, arguments=(split.result, i))] for i, each in enumerate(parts[1:])},
        parts[0]: [Call(part, (split.result, 0), {}, both)],
        **{step: [] for step in (parts[1], *keys)},
        queries[0]: [queries[0].with_replaced({parts[0].result: both})],
        queries[-1]: [
            turn,
            Call(torch.Tensor.split_with_sizes, (turn.result, counts, 1), {}, heads),
            *(Call(part, (heads, i), {}, way[-1].result) for i, way in enumerate((queries, keys))),
        ],
    }


def _way_to_turn(value: Value, users: Mapping[Value, Sequence[Call]]) -> list[Call]:
    """Return the calls from a product's part to `turned`, where it only becomes heads, of any number, on the way."""
    way: list[Call] = []
    for function in (torch.Tensor.view, torch.Tensor.transpose, turned):
        calls = users.get(value, ())
        if len(calls) != 1 or calls[0].function != function:
            return []
        way.append(calls[0])
        value = calls[0].result
    as_heads = list(leaves(way[0].arguments[1:]))[2:3] == [-1] and way[1].arguments[1:] == (1, 2)
    return way if as_heads else []


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

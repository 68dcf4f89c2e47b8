"""Fewer calls for the same pass: none twice, none in vain, and after the last attention the wanted rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

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


def simplified(sequence: CallSequence) -> CallSequence:
    """Return the same pass without calls that the rows do not decide, and without equal or unused ones."""
    return _wanted_early(trimmed(_unique(_folded(sequence)), list(sequence.outputs)))


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
    """Make calls that are equal once."""
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

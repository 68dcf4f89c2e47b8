"""A model's pass as a list of torch calls, recorded while the model itself runs.

A decoder makes the same calls in every pass; only sizes follow the number of rows. So two passes over different numbers
of rows show which calls those are, and which of their integers are multiples of that number. A pass whose calls depend
on what its tensors hold is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

# What may be asked of a tensor, besides its attributes, without a look at its elements.
_FACTS = {"__len__", "dim", "element_size", "is_complex", "is_contiguous", "is_floating_point", "nelement"}
_FACTS |= {"ndimension", "numel", "size", "stride"}


class NotStraight(Exception):
    """Refusal of a pass that depends on more than its inputs' sizes; the message continues "the pass"."""


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """An input of the pass or the result of a call.

    Attributes:
        example: what it was in the recorded pass.
        number: index in the order of the recording's values, inputs first.
    """

    example: Any = None
    number: int = -1


@dataclass(frozen=True, slots=True)
class RowCount:
    """A multiple of the number of rows, or of wanted ones, where a call has it as an integer."""

    factor: int
    wanted: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One call: `function(*arguments, **keywords)`, where values may stand for objects.

    Attributes:
        pure: whether it does nothing but give its result.
    """

    function: Any
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    result: Value
    pure: bool = True

    def with_replaced(self, replacements: Mapping[Any, Any]) -> Call:
        arguments, keywords = replaced(self.arguments, replacements), replaced(self.keywords, replacements)
        return replace(self, arguments=arguments, keywords=keywords)


@dataclass(slots=True)
class CallSequence:
    """The calls of a pass over `rows` rows, in order, and what goes in and out by name."""

    rows: int
    inputs: dict[str, Value] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)
    outputs: dict[str, Value] = field(default_factory=dict)


def part(whole: Any, index: int) -> Any:
    """Return one of the results of a call that has several."""
    return whole[index]


class CallRecorder(TorchFunctionMode):
    """A mode of torch that records the calls made inside it, as they look from Python."""

    def __init__(self, rows: int, inputs: Mapping[str, Any]) -> None:
        """Record a pass over `rows` rows, which has `inputs` by name."""
        super().__init__()
        self._values: dict[int, Value] = {}
        self._paused = False
        self.recording = CallSequence(rows, {name: self._value(given) for name, given in inputs.items()})

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        keywords = kwargs or {}
        result = function(*args, **keywords)
        if not self._paused:
            self._note(function, args, keywords, result)
        return result

    def opaque(self, function: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any], *, pure: bool) -> Any:
        """Make a call that is one to the recording, whatever is called inside."""
        with self._pause():
            result = function(*arguments, **keywords)
        self._add(function, arguments, keywords, result, pure=pure)
        return result

    @contextmanager
    def leaves(self, modules: Collection[nn.Module]) -> Iterator[None]:
        """Have each of `modules` be one pure call inside the block; its function is the module."""

        def leaf(module: nn.Module) -> Callable[..., Any]:
            forward = module.forward

            def call(*arguments: Any, **keywords: Any) -> Any:
                with self._pause():
                    result = forward(*arguments, **keywords)
                self._add(module, arguments, keywords, result, pure=True)
                return result

            return call

        for module in modules:
            module.forward = leaf(module)
        try:
            yield
        finally:
            for module in modules:
                del module.forward

    def output(self, name: str, tensor: torch.Tensor) -> None:
        if id(tensor) not in self._values:
            raise NotStraight(f"gives {name} that no recorded call made")
        self.recording.outputs[name] = self._values[id(tensor)]

    @contextmanager
    def _pause(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _note(self, function: Any, arguments: Any, keywords: Mapping[str, Any], result: Any) -> None:
        name = getattr(function, "__name__", "")
        if _writes(name, keywords):
            raise NotStraight(f"writes to a tensor by {name}")
        if isinstance(result, torch.Tensor):
            if id(result) not in self._values:  # else it is an argument, as where a tensor has the wanted type already
                self._add(function, arguments, keywords, result, pure=True)
        elif isinstance(result, tuple | list) and any(isinstance(each, torch.Tensor) for each in result):
            self._add(function, arguments, keywords, result, pure=True)
        elif name != "__get__" and name not in _FACTS and values_in(self._named((arguments, keywords))):
            raise NotStraight(f"looks at what a tensor holds by {name}")

    def _add(self, function: Any, arguments: Any, keywords: Mapping[str, Any], result: Any, *, pure: bool) -> None:
        named, named_keywords = self._named(arguments), self._named(keywords)
        whole = self._value(result)
        self.recording.calls.append(Call(function, named, named_keywords, whole, pure))
        if isinstance(result, tuple | list):
            for i, each in enumerate(result):
                if isinstance(each, torch.Tensor) and id(each) not in self._values:
                    self.recording.calls.append(Call(part, (whole, i), {}, self._value(each)))

    def _value(self, example: Any) -> Value:
        """Return a new value; it keeps `example`, so that no later object has its id."""
        value = Value(example, len(self._values))
        self._values[id(example)] = value
        return value

    def _named(self, structure: Any) -> Any:
        """Return `structure` with values in place of inputs and results."""
        if (value := self._values.get(id(structure))) is not None:
            return value
        return _mapped(self._named, structure)


def leaves(structure: Any) -> Iterator[Any]:
    """Yield what the arguments of a call consist of, inside tuples, lists, dictionaries and slices."""
    match structure:
        case tuple() | list():
            parts: Collection[Any] = structure
        case dict():
            parts = structure.values()
        case slice():
            parts = structure.start, structure.stop, structure.step
        case _:
            yield structure
            return
    for each in parts:
        yield from leaves(each)


def values_in(structure: Any) -> list[Value]:
    """Return the values in the arguments of a call."""
    return [leaf for leaf in leaves(structure) if isinstance(leaf, Value)]


def replaced(structure: Any, replacements: Mapping[Any, Any]) -> Any:
    """Return the arguments of a call with `replacements` in place of values and row counts."""
    if isinstance(structure, Value | RowCount):
        return replacements.get(structure, structure)
    return _mapped(lambda each: replaced(each, replacements), structure)


def unified(one: CallSequence, other: CallSequence) -> CallSequence:
    """Return `one` with `RowCount` for integers that follow the number of rows; NotStraight: the calls differ."""
    outputs = [{name: value.number for name, value in each.outputs.items()} for each in (one, other)]
    if len(one.calls) != len(other.calls) or outputs[0] != outputs[1]:
        raise NotStraight("makes other calls for other rows")
    rows = one.rows, other.rows
    calls = []
    for a, b in zip(one.calls, other.calls, strict=True):
        if a.function != b.function or a.result.number != b.result.number or a.keywords.keys() != b.keywords.keys():
            raise NotStraight("makes other calls for other rows")
        arguments, keywords = _joint(a.arguments, b.arguments, rows), _joint(a.keywords, b.keywords, rows)
        calls.append(replace(a, arguments=arguments, keywords=keywords))
    return replace(one, calls=calls)


def _joint(one: Any, other: Any, rows: tuple[int, int]) -> Any:
    """Return the argument that stands for two recorded ones, of passes over `rows[0]` and `rows[1]` rows."""
    if one is other:
        return one
    if type(one) is not type(other):
        raise NotStraight("has arguments of other types for other rows")
    match one:
        case Value():
            same = one.number == other.number
        case torch.Tensor():
            same = one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
        case tuple() | list() if len(one) == len(other):
            return type(one)(_joint(a, b, rows) for a, b in zip(one, other, strict=True))
        case dict() if one.keys() == other.keys():
            return {key: _joint(each, other[key], rows) for key, each in one.items()}
        case slice():
            ends = (one.start, other.start), (one.stop, other.stop), (one.step, other.step)
            return slice(*(_joint(a, b, rows) for a, b in ends))
        case int() if one != other and one % rows[0] == 0 and one // rows[0] * rows[1] == other:
            return RowCount(one // rows[0])
        case _:
            same = bool(one == other)
    if not same:
        raise NotStraight("has arguments that are no multiples of its rows")
    return one


def _mapped(change: Callable[[Any], Any], structure: Any) -> Any:
    match structure:
        case tuple():
            return tuple(map(change, structure))
        case list():
            return list(map(change, structure))
        case dict():
            return {key: change(each) for key, each in structure.items()}
        case slice():
            return slice(change(structure.start), change(structure.stop), change(structure.step))
        case _:
            return structure


def _writes(name: str, keywords: Mapping[str, Any]) -> bool:
    """Return whether a call of this name changes a tensor in place."""
    operator = name.startswith("__")
    in_place = operator and (name.startswith("__i") and name not in ("__invert__", "__index__", "__int__", "__iter__"))
    named = name == "__setitem__" or (name.endswith("_") and not operator)
    return in_place or named or bool(keywords.get("inplace")) or keywords.get("out") is not None

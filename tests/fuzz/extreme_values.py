"""Messages and requests of valid form whose values are at the bounds of their types and beyond.

What may change is read from the protobuf descriptors, the JSON schemas of the daemon's requests and the types of the
client's arguments, so that a new field is covered without being listed here. A base that is right keeps the rest of a
message from being refused before the changed field is looked at.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st
from refusals import check_refusal

from outrider.proto.errors import OutriderError

MAX_SINGLE = 3.4028234663852886e38  # of float32
_WHOLE = [0, 1, 2, 3, 127, 255, 1000, (1 << 24) + 1]
_REAL = [0.0, 5e-324, 1e-45, 1e-12, 0.5, 1.0, 1.0000001, 2.0, 65504.0, 1e6, MAX_SINGLE, 1e39, 1e308]
_REALS = [*_REAL, *(-real for real in _REAL), math.inf, -math.inf, math.nan]
_REAL_ENDS = [-1e308, 1e308, math.inf, -math.inf, math.nan]
_TEXTS = ["", " ", "\0", "a", "s" * 64, "s" * 65, "\u202e\u0301", "\U0010ffff", "0" * 64, "../..", "{}", "[" * 3000]
_BYTES = [b"", b"\0", b"\xff" * 3, b"\0\x7c", b"\1" * 4097]
_LENGTHS = [0, 1, 2, 3, 20, 21, 64, 257, 4097]
_HUGE = [70_000, 130_000, 300_000]  # entries, below and above the vocabularies of real targets
_TIMES = [1] * 12 + [2, 30, 30_000, 30_000]
_COUNTS = [1, 1, 1, 2, 3]  # of the fields that are changed in one message

Path = tuple[FieldDescriptor, ...]


class Extreme:
    """One message, and what is extreme in it, which a failing test shows in place of the bytes."""

    def __init__(self, data: bytes, what: str) -> None:
        self.data = data
        self.what = what

    def __repr__(self) -> str:
        return self.what


def _often(ends: Sequence[Any], others: Sequence[Any]) -> st.SearchStrategy[Any]:
    return st.sampled_from(ends) | st.sampled_from([*ends, *others])


def _whole(low: int, high: int) -> st.SearchStrategy[int]:
    half = [high >> 1, (high >> 1) + 1]
    return _often(
        [low, high], [value for value in (*_WHOLE, *half, *(-each for each in _WHOLE)) if low <= value <= high]
    )


# --- protobuf ---

_WIRE = {
    FieldDescriptor.CPPTYPE_UINT32: _whole(0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: _whole(0, (1 << 64) - 1),
    FieldDescriptor.CPPTYPE_INT32: _whole(-1 << 31, (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: _whole(-1 << 63, (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: _often(_REAL_ENDS, _REALS),
    FieldDescriptor.CPPTYPE_FLOAT: _often(
        [-MAX_SINGLE, MAX_SINGLE, *_REAL_ENDS[2:]], [r for r in _REALS if abs(r) < 1e39]
    ),
    FieldDescriptor.CPPTYPE_BOOL: st.booleans(),
}


_REAL_TYPES = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)


def leaves(message: Descriptor, within: tuple[Descriptor, ...] = ()) -> Iterator[Path]:
    """Yield the way to each field of a message that holds no message itself, or that would hold its own kind."""
    for field in message.fields:
        inner = field.message_type
        if inner is None or inner in (*within, message):
            yield (field,)
        else:
            yield from ((field, *rest) for rest in leaves(inner, (*within, message)))


def changed(base: Any) -> st.SearchStrategy[Extreme]:
    """Return copies of a protobuf message that are extreme in up to three fields, and have entries many times.

    Its kinds stay what they are, and lists that belong together stay of one length unless one of them is changed.
    """
    kinds = {oneof.name: base.WhichOneof(oneof.name) for oneof in base.DESCRIPTOR.oneofs}

    def stays(path: Path) -> bool:
        oneof = path[0].containing_oneof
        return oneof is None or kinds[oneof.name] in (None, path[0].name)

    ways = [path for path in leaves(base.DESCRIPTOR) if stays(path)]
    reals = [path for path in ways if path[-1].cpp_type in _REAL_TYPES]
    numbers = [path for path in ways if path[-1].cpp_type in _WIRE and not path[-1].is_repeated]
    kinds_of_ways = [st.sampled_from(each) for each in (reals, numbers, ways) if each]

    @st.composite
    def messages(draw: Callable[[Any], Any]) -> Extreme:
        message = type(base).FromString(base.SerializeToString())
        times = draw(st.sampled_from(_TIMES))
        _repeat(message, times)
        what = [base.DESCRIPTOR.name, *([f"entries x {times}"] if times > 1 else [])]
        count = draw(st.sampled_from(_COUNTS if times == 1 else [0, 0, 1])) if ways else 0
        for _ in range(count):
            path = draw(st.one_of(kinds_of_ways))
            values = draw(_entries(path[-1]))
            _put(message, path, values)
            what.append(f"{'.'.join(field.name for field in path)} = {_shown(values)}")
        return Extreme(message.SerializeToString(), ", ".join(what))

    return messages()


def _shown(values: list[Any]) -> str:
    return repr(values) if len(repr(values[:9])) < 99 and len(values) < 9 else f"{len(values)} x {repr(values[0])[:20]}"


def _repeat(message: Any, times: int) -> None:
    for field, value in message.ListFields():
        if field.is_repeated and field.message_type is None:
            value.extend(list(value) * (times - 1))
        elif field.type == FieldDescriptor.TYPE_BYTES:
            setattr(message, field.name, value * times)
        elif field.message_type is not None and not field.is_repeated:
            _repeat(value, times)


def _put(message: Any, path: Path, values: list[Any]) -> None:
    *way, leaf = path
    for field in way:
        message = getattr(message, field.name)
        if field.is_repeated:
            message = message[0] if len(message) else message.add()
    if leaf.message_type is not None:
        getattr(message, leaf.name).add() if leaf.is_repeated else getattr(message, leaf.name).SetInParent()
    elif leaf.is_repeated:
        del getattr(message, leaf.name)[:]
        getattr(message, leaf.name).extend(values)
    else:
        setattr(message, leaf.name, values[0])


def _entries(field: FieldDescriptor) -> st.SearchStrategy[list[Any]]:
    one = _wire_value(field)
    if not field.is_repeated:
        return one.map(lambda value: [value])
    twins = st.tuples(one, st.sampled_from([*_LENGTHS, *_HUGE])).map(lambda drawn: [drawn[0]] * drawn[1])
    return st.lists(one, max_size=4) | twins


def _wire_value(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.message_type is not None:
        return st.none()  # an empty one
    if field.enum_type is not None:
        return st.sampled_from([*(value.number for value in field.enum_type.values), 99])
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return st.sampled_from(_BYTES if field.type == FieldDescriptor.TYPE_BYTES else _TEXTS)
    return _WIRE[field.cpp_type]


WHOLES = st.one_of(_whole(0, 1 << 31), _whole(-1 << 31, 1 << 64), st.sampled_from([20, 21, 128, 129, 10**400]))

# --- JSON ---

NUMERALS = st.tuples(
    st.sampled_from(["", "0", "00", "-", "+"]),
    st.sampled_from([1, 3, 7, 100]) | st.integers(0, 10**9),
    st.sampled_from(["", "", "9" * 4400]),
).map(lambda parts: "".join(map(str, parts))) | st.sampled_from(["", "1e3", "\u0663", "0x9", "1.0"])


def json_ways(schema: Mapping[str, Any]) -> list[tuple[str | int, ...]]:
    """Return the way to each field that a JSON schema names, through objects and lists."""
    parts = schema.get("$defs", {})
    found: dict[tuple[str | int, ...], None] = {}

    def go(here: Mapping[str, Any], way: tuple[str | int, ...], seen: tuple[str, ...]) -> None:
        if way:
            found[way] = None
        if (name := here.get("$ref", "").rpartition("/")[2]) and name not in seen:
            go(parts[name], way, (*seen, name))
        for other in (*here.get("anyOf", ()), *here.get("oneOf", ()), *here.get("allOf", ())):
            go(other, way, seen)
        for field, inner in here.get("properties", {}).items():
            go(inner, (*way, field), seen)
        if isinstance(here.get("items"), Mapping):
            go(here["items"], (*way, 0), seen)
        if isinstance(here.get("additionalProperties"), Mapping):
            go(here["additionalProperties"], (*way, "5"), seen)

    go(schema, (), ())
    return list(found)


def changed_body(base: Mapping[str, Any], ways: Sequence[tuple[str | int, ...]]) -> st.SearchStrategy[dict[str, Any]]:
    """Return copies of a JSON object in which one to three of the fields at `ways` are extreme."""

    @st.composite
    def bodies(draw: Callable[[Any], Any]) -> dict[str, Any]:
        body: Any = dict(base)
        for way in draw(st.lists(st.sampled_from(ways), min_size=1, max_size=3)):
            body = _with(body, way, draw(json_values()))
        return body

    return bodies()


def _with(inside: Any, way: tuple[str | int, ...], value: Any) -> Any:
    if not way:
        return value
    first, *rest = way
    if isinstance(first, int):
        return [_with(inside[0] if isinstance(inside, list) and inside else None, tuple(rest), value)]
    kept = dict(inside) if isinstance(inside, Mapping) else {}
    return kept | {first: _with(kept.get(first), tuple(rest), value)}


def json_values() -> st.SearchStrategy[Any]:
    """Return values of every type that JSON has, and NaN and infinities, which it has not."""
    plain = WHOLES | st.sampled_from([*_REALS, *_TEXTS, None, True, False, "\ud800"]) | NUMERALS
    lists = st.tuples(plain, st.sampled_from(_LENGTHS)).map(lambda drawn: [drawn[0]] * drawn[1])
    objects = st.dictionaries(st.sampled_from([*_TEXTS[:9], "5", "05", "type"]), plain, max_size=3)
    return plain | lists | objects


# --- Python ---


def arguments(hints: Mapping[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Return extreme values for up to three of the arguments with these types."""
    names = st.lists(st.sampled_from(sorted(hints)), min_size=1, max_size=3, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: values_of(hints[name]) for name in chosen}))


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Return values of a Python type, extreme ones above all; `st.nothing()` for types that callers do not make."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values_of(each) for each in inner])
    if origin is tuple and inner[-1:] != (...,):
        return st.tuples(*map(values_of, inner))
    if origin is not None and issubclass(origin, Collection) and not issubclass(origin, Mapping):
        few = st.lists(values_of(inner[0]), max_size=4)
        many = st.tuples(values_of(inner[0]), st.sampled_from(_LENGTHS)).map(lambda drawn: [drawn[0]] * drawn[1])
        return (few | many).map(tuple)
    if hint is type(None):
        return st.none()
    if hint is bool:
        return st.booleans()
    if hint is int:
        return WHOLES
    if hint is float:
        return _often(_REAL_ENDS, [*_REALS, 10**400])
    if hint is str:
        return st.sampled_from([*_TEXTS, "\ud800"])
    if isinstance(hint, type) and issubclass(hint, Enum):
        return st.sampled_from(list(hint))
    if dataclasses.is_dataclass(hint):
        return arguments(fields_of(hint)).map(lambda given: _built(hint, given))
    return st.nothing()


def fields_of(kind: Any) -> dict[str, Any]:
    """Return the types of a dataclass's fields, for `arguments`."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def _built(kind: Any, given: Mapping[str, Any]) -> Any:
    """Return what a dataclass makes of its fields; None: it refuses them, or lacks others."""
    needed = {field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING}
    if needed - set(given):
        return None
    try:
        return kind(**given)
    except OutriderError as error:
        check_refusal(error)
        return None

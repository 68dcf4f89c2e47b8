"""Tables that copy dataclasses to protobuf messages and back, field by field.

Fields of the same name are copied as they are, lists as tuples; a table names the makers of all others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from outrider.proto.errors import InvalidArgument

T = TypeVar("T")
M = TypeVar("M", bound=Message)


def parse(kind: Callable[[], M], data: bytes) -> M:
    """Return the message in `data`.

    Raises:
        InvalidArgument: `frame` is no such message.
    """
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise InvalidArgument(f"is not a {message.DESCRIPTOR.full_name} message", field="frame") from error
    return message


def to_microseconds(seconds: float) -> int:
    """Return whole microseconds, clipped to a uint32."""
    return min(0xFFFFFFFF, max(0, round(seconds * 1e6)))


def to_enum(kind: type[T], number: int, field: str) -> T:
    """Return the member of `kind` with this number.

    Raises:
        InvalidArgument: there is none; the error names `field`.
    """
    try:
        return kind(number)  # type: ignore[call-arg]  # an Enum
    except ValueError as error:
        raise InvalidArgument(f"{number} is not a {kind.__name__}", field=field) from error


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a dataclass on the wire.

    Attributes:
        encode: conversion of the value to fields of the message.
        decode: conversion of the message to the value.
    """

    encode: Callable[[Any], dict[str, Any]]
    decode: Callable[[Any], Any]


Maker = Callable[[str], Field]  # makes a field from its name


def plain(name: str) -> Field:
    """Copy a number, a string or bytes."""
    return Field(lambda value: {name: value}, lambda wire: getattr(wire, name))


def optional_number(name: str) -> Field:
    """Copy a number, or None where it is not set."""
    return Field(
        lambda value: {} if value is None else {name: value},
        lambda wire: getattr(wire, name) if wire.HasField(name) else None,
    )


def plain_list(name: str) -> Field:
    """Copy a list of numbers or strings as a tuple."""
    return Field(lambda values: {name: values}, lambda wire: tuple(getattr(wire, name)))


def enumeration(kind: type[Enum], field: str) -> Maker:
    """Copy an enum by its number; errors name `field`."""
    return lambda name: Field(
        lambda member: {name: member.value}, lambda wire: to_enum(kind, getattr(wire, name), field)
    )


def microseconds(name: str) -> Field:
    """Copy seconds as whole microseconds."""
    wire_name = name.removesuffix("_s") + "_us"
    return Field(lambda seconds: {wire_name: to_microseconds(seconds)}, lambda wire: getattr(wire, wire_name) / 1e6)


class Table(Generic[T]):
    """A dataclass and its message."""

    def __init__(
        self,
        kind: type[T],
        wire: Callable[..., Any],
        check: Callable[[Any], None] | None = None,
        /,
        **makers: Maker,
    ) -> None:
        """Pair a dataclass with the message class `wire`; `makers` make the fields that are not copied as they are.

        `check` raises InvalidArgument for messages that are refused by what the dataclass has no field for.
        """
        self._kind = kind
        self._wire = wire
        self._check = check
        lists = {entry.name for entry in wire.DESCRIPTOR.fields if entry.is_repeated}  # type: ignore[attr-defined]
        self._fields = {
            name: makers.pop(name, plain_list if name in lists else plain)(name)
            for name in (entry.name for entry in fields(kind))  # type: ignore[arg-type]  # a dataclass
        }
        if makers:
            raise TypeError(f"{kind.__name__} has no {', '.join(makers)}")

    def to_wire(self, value: T) -> Any:
        """Return the message that holds `value`."""
        wire: dict[str, Any] = {}
        for name, field in self._fields.items():
            wire.update(field.encode(getattr(value, name)))
        return self._wire(**wire)

    def from_wire(self, wire: Any) -> T:
        """Return the checked value that the message holds."""
        if self._check is not None:
            self._check(wire)
        return self._kind(**{name: field.decode(wire) for name, field in self._fields.items()})

    def encode(self, value: T) -> bytes:
        """Return the bytes of one message."""
        encoded: bytes = self.to_wire(value).SerializeToString()
        return encoded

    def decode(self, data: bytes) -> T:
        """Return the value in `data`.

        Raises:
            InvalidArgument: with the field named.
        """
        return self.from_wire(parse(self._wire, data))


def one(table: Table[Any], missing: str = "") -> Maker:
    """Copy a message; one that is not set counts as empty, or is an error about `missing` where that is given."""

    def maker(name: str) -> Field:
        def decode(wire: Any) -> Any:
            if missing and not wire.HasField(name):
                raise InvalidArgument("is missing", field=missing)
            return table.from_wire(getattr(wire, name))

        return Field(lambda value: {name: table.to_wire(value)}, decode)

    return maker


def optional(table: Table[Any]) -> Maker:
    """Copy a message, or None where it is not set."""
    return lambda name: Field(
        lambda value: {} if value is None else {name: table.to_wire(value)},
        lambda wire: table.from_wire(getattr(wire, name)) if wire.HasField(name) else None,
    )


def many(table: Table[Any], max_entries: int | None = None, field: str = "") -> Maker:
    """Copy messages; more than `max_entries` are an error about `field`."""

    def maker(name: str) -> Field:
        def decode(wire: Any) -> Any:
            entries = getattr(wire, name)
            # Checked before a tuple is built, so that a stranger's message cannot hold a server up.
            if max_entries is not None and len(entries) > max_entries:
                raise InvalidArgument(f"holds {len(entries)} entries; {max_entries} are the most", field=field)
            return tuple(map(table.from_wire, entries))

        return Field(lambda values: {name: list(map(table.to_wire, values))}, decode)

    return maker


class Single(Generic[T]):
    """A message whose only field stands for the whole."""

    def __init__(self, wire: Callable[..., Any], name: str, maker: Maker = plain) -> None:
        self._wire = wire
        self._field = maker(name)

    def encode(self, value: T) -> bytes:
        """Return the bytes of one message."""
        encoded: bytes = self._wire(**self._field.encode(value)).SerializeToString()
        return encoded

    def decode(self, data: bytes) -> T:
        """Return the value in `data`.

        Raises:
            InvalidArgument: with the field named.
        """
        value: T = self._field.decode(parse(self._wire, data))
        return value

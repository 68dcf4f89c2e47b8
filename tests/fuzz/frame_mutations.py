"""Damage to messages of protobuf's wire format, from single bits to whole fields, and to their order in a stream."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

LENGTH_DELIMITED = 2
ABSURD = (0, 1, 127, 128, 2047, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, (1 << 64) - 1)


class WireField(NamedTuple):
    """One field of a message: data[begin:end], its number and wire type, and where its value begins."""

    begin: int
    end: int
    number: int
    kind: int
    value: int


def wire_fields(data: bytes) -> list[WireField]:
    """Return the fields of a message, as far as it can be read."""
    found, at = [], 0
    while at < len(data):
        tag, value = read_varint(data, at)
        kind, end = tag & 7, value
        if kind == 0:
            _, end = read_varint(data, value)
        elif kind == LENGTH_DELIMITED:
            size, value = read_varint(data, value)
            end = value + size
        elif kind in (1, 5):
            end = value + (8 if kind == 1 else 4)
        if end > len(data) or end == at or kind in (3, 4, 6, 7):
            break
        found.append(WireField(at, end, tag >> 3, kind, value))
        at = end
    return found


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a number and where it ends."""
    number = shift = 0
    while at < len(data):
        number |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            break
        shift += 7
    return number, at


def varint(number: int) -> bytes:
    """Return a number as protobuf writes it."""
    made = bytearray()
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes([*made, number])


def mutated(rng: random.Random, data: bytes) -> bytes:
    """Return a message with one to four kinds of damage."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        data = rng.choice(DAMAGES)(rng, data)
    return data


def reordered(rng: random.Random, frames: Sequence[bytes]) -> list[bytes]:
    """Return the frames of a stream in another order, with some twice and some not at all."""
    kept = [frame for frame in frames if rng.random() < 0.9]
    kept += [rng.choice(frames) for _ in range(rng.randrange(3))]
    for _ in range(rng.randrange(4)):
        if len(kept) > 1:
            a, b = rng.sample(range(len(kept)), 2)
            kept[a], kept[b] = kept[b], kept[a]
    return kept


def _flip(rng: random.Random, data: bytes) -> bytes:
    made = bytearray(data or b"\0")
    made[rng.randrange(len(made))] ^= 1 << rng.randrange(8)
    return bytes(made)


def _overwrite(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at + rng.randrange(9) :]


def _truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _inside(rng: random.Random, data: bytes) -> bytes:
    """Damage a message within the message, and mend the lengths around it, so that the damage is read."""
    nested = [field for field in wire_fields(data) if field.kind == LENGTH_DELIMITED and field.value < field.end]
    if not nested:
        return _flip(rng, data)
    field = rng.choice(nested)
    inner = rng.choice(DAMAGES)(rng, data[field.value : field.end])
    tag = varint(field.number << 3 | LENGTH_DELIMITED)
    return data[: field.begin] + tag + varint(len(inner)) + inner + data[field.end :]


def _duplicate(rng: random.Random, data: bytes) -> bytes:
    fields = wire_fields(data)
    if not fields:
        return _flip(rng, data)
    field, before = rng.choice(fields), rng.choice(fields)
    copies = data[field.begin : field.end] * rng.choice((1, 1, 2, 50))
    return data[: before.begin] + copies + data[before.begin :]


def _drop(rng: random.Random, data: bytes) -> bytes:
    fields = wire_fields(data)
    if not fields:
        return _truncate(rng, data)
    field = rng.choice(fields)
    return data[: field.begin] + data[field.end :]


def _swap(rng: random.Random, data: bytes) -> bytes:
    """Give two fields each other's number."""
    fields = wire_fields(data)
    if len(fields) < 2:
        return _renumber(rng, data)
    first, second = sorted(rng.sample(fields, 2))
    tags = [varint(other.number << 3 | own.kind) for own, other in ((first, second), (second, first))]
    bodies = [data[field.begin + len(varint(field.number << 3 | field.kind)) : field.end] for field in (first, second)]
    between = data[first.end : second.begin]
    return data[: first.begin] + tags[0] + bodies[0] + between + tags[1] + bodies[1] + data[second.end :]


def _renumber(rng: random.Random, data: bytes) -> bytes:
    fields = wire_fields(data)
    if not fields:
        return _flip(rng, data)
    field = rng.choice(fields)
    old = len(varint(field.number << 3 | field.kind))
    tag = varint(rng.randrange(1, 24) << 3 | field.kind)
    return data[: field.begin] + tag + data[field.begin + old :]


def _absurd(rng: random.Random, data: bytes) -> bytes:
    """Replace a number, or the length of a field, by one that nobody would send."""
    fields = [field for field in wire_fields(data) if field.kind in (0, LENGTH_DELIMITED)]
    if not fields:
        return _overwrite(rng, data)
    field = rng.choice(fields)
    tag = varint(field.number << 3 | field.kind)
    rest = data[field.value : field.end] if field.kind == LENGTH_DELIMITED else b""
    return data[: field.begin] + tag + varint(rng.choice(ABSURD)) + rest + data[field.end :]


DAMAGES: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    *(_flip, _overwrite, _truncate, _inside, _inside, _duplicate, _drop, _swap, _renumber, _absurd),
)

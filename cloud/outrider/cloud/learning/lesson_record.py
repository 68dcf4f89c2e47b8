"""The record of lessons: part of one text with what the target said in the rows that verified it.

A verifier makes records (`outrider.cloud.learning.lessons`), a trainer reads them. An edge that learns from its own
texts makes them of what it knows (`record_of_text`). A file of records has each behind its length.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from outrider.proto.codec import SAMPLING
from outrider.proto.errors import InvalidArgument
from outrider.proto.salts import SALT_BYTES
from outrider.proto.types import MAX_TOKEN_ID, SHA256, Sampling

TOP = 64  # likeliest tokens of a row, which teach as much as all do if the mass of the rest is known
MAX_TOKENS = 1 << 17
MAX_ROWS = 4096
MAX_NAME = 256  # characters
MASS_TOLERANCE = 0.02  # of the sum of a row's probabilities, which are rounded
MAX_BYTES = 1 << 22  # of an encoded record
_MAGIC = b"OUTLESN2"
_HEADER = struct.Struct("<8sI")
_MAX_HEADER = 1 << 18
_LENGTH = struct.Struct("<I")
_LIMITS = (MAX_TOKENS, MAX_ROWS, TOP)  # of the sizes of arrays
_NARROW = 1 << 16  # token ids below it take two bytes

Teacher = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Likeliest tokens [m, s] uint32, log p of these [m, s] float16, log of the rest [m] float32, as a record has them."""


@dataclass(frozen=True, eq=False)
class LessonRecord:
    """The m rows of one text that are kept, and n tokens of it; all arrays are read-only.

    Attributes:
        model: id of the target.
        session_salt: [16] bytes, the same for all records of a session (`salted`).
        key_salt: [16] bytes, the same for all sessions of an API key.
        prompt_class: kind of text, as in leases, below 16; 0: unknown.
        sampling: settings of the text with the seed of its noise, by which a drafter's hits can be computed again.
        at_s: time of the first row, Unix seconds.
        start: absolute position of `tokens[0]`.
        first_generated: absolute position of the first token after the prompt.
        tokens: [n] uint32, the text from `start` on, prompt included.
        positions: [m] uint32, absolute position of the token that the target chose in each row.
        top_ids: [m, s] uint32, the s = min(64, vocabulary) likeliest tokens of the raw logits.
        top_logp: [m, s] float16, natural log of their probabilities, of the logits before any processing.
        rest_logp: [m] float32, natural log of the probability of all other tokens together; -inf: there are none.
        weights: [m] float32, 1 / probability that the row was kept, at least 1.
        tokenizer_sha256: hash of the target's tokenizer; empty: unknown, as in records of releases before.

    Raises:
        InvalidArgument: something does not fit together; the field is named.
    """

    model: str
    session_salt: bytes
    key_salt: bytes
    prompt_class: int
    sampling: Sampling
    at_s: float
    start: int
    first_generated: int
    tokens: np.ndarray
    positions: np.ndarray
    top_ids: np.ndarray
    top_logp: np.ndarray
    rest_logp: np.ndarray
    weights: np.ndarray
    tokenizer_sha256: str = ""

    def __post_init__(self) -> None:
        _check_facts(self)
        _check_arrays(self)
        for name in _ARRAYS:
            getattr(self, name).setflags(write=False)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def targets(self) -> np.ndarray:
        """The target's token in each row, [m] uint32."""
        targets: np.ndarray = self.tokens[self.positions - self.start]
        return targets

    def encode(self) -> bytes:
        """Return the record as bytes that `decode` reads."""
        sizes = [len(self.tokens), *self.top_ids.shape]
        narrow = bool(self.top_ids.max(initial=0) < _NARROW)
        header = {
            "model": self.model,
            "tokenizer": self.tokenizer_sha256,
            "session": self.session_salt.hex(),
            "key": self.key_salt.hex(),
            "class": self.prompt_class,
            "sampling": base64.b64encode(SAMPLING.encode(self.sampling)).decode(),
            "at_s": self.at_s,
            "start": self.start,
            "first_generated": self.first_generated,
            "sizes": sizes,
            "narrow": narrow,
        }
        packed = json.dumps(header, separators=(",", ":")).encode()
        arrays = [
            np.ascontiguousarray(getattr(self, name), dtype).tobytes()
            for name, dtype, _ in _layout(sizes, narrow=narrow)
        ]
        return b"".join([_HEADER.pack(_MAGIC, len(packed)), packed, *arrays])

    @classmethod
    def decode(cls, data: bytes) -> LessonRecord:
        """Return the record in `data`, which may come from anybody.

        Raises:
            InvalidArgument: it is none, or one that cannot be true; the field is named.
        """
        header, body = _split(data)
        try:
            sizes = [int(size) for size in header["sizes"]]
            facts: dict[str, Any] = {
                "model": str(header["model"]),
                "tokenizer_sha256": str(header.get("tokenizer", "")),
                "session_salt": bytes.fromhex(header["session"]),
                "key_salt": bytes.fromhex(header["key"]),
                "prompt_class": int(header["class"]),
                "sampling": SAMPLING.decode(base64.b64decode(header["sampling"], validate=True)),
                "at_s": float(header["at_s"]),
                "start": int(header["start"]),
                "first_generated": int(header["first_generated"]),
            }
            narrow = bool(header["narrow"])
        except (KeyError, TypeError, ValueError, OverflowError, binascii.Error) as error:
            raise InvalidArgument(f"lacks a field, or one is of a wrong type: {error!r}", field="lessons") from error
        return cls(**facts, **_unpacked(body, sizes, narrow=narrow))


_ARRAYS = tuple(field.name for field in fields(LessonRecord) if field.type == "np.ndarray")


def _layout(sizes: list[int], *, narrow: bool) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield name, encoded type and shape of each array."""
    n, m, s = sizes
    shapes = (n,), (m,), (m, s), (m, s), (m,), (m,)
    dtypes = "<u4", "<u4", "<u2" if narrow else "<u4", "<f2", "<f4", "<f4"
    yield from zip(_ARRAYS, dtypes, shapes, strict=True)


def _split(data: bytes) -> tuple[dict[str, Any], memoryview]:
    """Return the header and what follows it."""
    if len(data) > MAX_BYTES:
        raise InvalidArgument(f"has {len(data)} bytes; {MAX_BYTES} are the most", field="lessons")
    if len(data) < _HEADER.size:
        raise InvalidArgument("ends before its header", field="lessons")
    magic, length = _HEADER.unpack_from(data)
    if magic != _MAGIC:
        raise InvalidArgument("is no record of lessons, or one of another release", field="lessons")
    if length > min(_MAX_HEADER, len(data) - _HEADER.size):
        raise InvalidArgument("ends in its header, or that is too long", field="lessons")
    end = _HEADER.size + length
    try:
        header = json.loads(data[_HEADER.size : end])
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("has a header that is no JSON", field="lessons") from error
    if not isinstance(header, dict):
        raise InvalidArgument("has a header that is no JSON object", field="lessons")
    return header, memoryview(data)[end:]


def _unpacked(body: memoryview, sizes: list[int], *, narrow: bool) -> dict[str, Any]:
    """Return the arrays in `body`, whose size is checked before any is made."""
    if len(sizes) != len(_LIMITS) or any(not 0 <= size <= limit for size, limit in zip(sizes, _LIMITS, strict=True)):
        raise InvalidArgument(f"must be {len(_LIMITS)} numbers, at most {_LIMITS}", field="lessons.sizes")
    layout = list(_layout(sizes, narrow=narrow))
    needed = sum(math.prod(shape) * np.dtype(dtype).itemsize for _, dtype, shape in layout)
    if needed != len(body):
        raise InvalidArgument(f"make {needed} bytes of arrays, and there are {len(body)}", field="lessons.sizes")
    arrays, at = dict[str, np.ndarray](), 0
    for name, dtype, shape in layout:
        count = math.prod(shape)
        flat = np.frombuffer(body, dtype, count, at)
        arrays[name] = flat.astype(np.uint32 if name == "top_ids" else flat.dtype.newbyteorder("=")).reshape(shape)
        at += flat.nbytes
    return arrays


def _require(holds: object, field: str, message: str) -> None:
    if not holds:
        raise InvalidArgument(message, field=f"lessons.{field}")


def _check_facts(record: LessonRecord) -> None:
    _require(0 < len(record.model) <= MAX_NAME, "model", f"must have 1 to {MAX_NAME} characters")
    known = not record.tokenizer_sha256 or SHA256.fullmatch(record.tokenizer_sha256)
    _require(known, "tokenizer_sha256", "must be 64 hexadecimal digits")
    for name in ("session_salt", "key_salt"):
        _require(len(getattr(record, name)) == SALT_BYTES, name, f"must have {SALT_BYTES} bytes")
    _require(0 <= record.prompt_class < 16, "prompt_class", "must be in 0..15")
    _require(0 <= record.at_s < math.inf, "at_s", "must be Unix seconds")
    _require(0 <= record.start <= MAX_TOKEN_ID, "start", "must be a position")
    _require(0 < record.first_generated <= MAX_TOKEN_ID, "first_generated", "must be a position after a prompt")
    message = "has a grammar, a bias, allowed tokens, min_tokens or no_repeat_ngram_size, so that nothing is learned"
    _require(not record.sampling.constrains, "sampling", message)


def _check_arrays(record: LessonRecord) -> None:
    sizes = [len(record.tokens), *record.top_ids.shape]
    _require(len(sizes) == len(_LIMITS), "top_ids", "must have two axes")
    for size, limit, name in zip(sizes, _LIMITS, ("tokens", "positions", "top_ids"), strict=True):
        _require(size <= limit, name, f"holds {size}; {limit} are the most")
    for name, dtype, shape in _layout(sizes, narrow=False):
        array = getattr(record, name)
        _require(array.dtype == np.dtype(dtype), name, f"must be of type {dtype}, and is {array.dtype}")
        _require(array.shape == shape, name, f"must have shape {shape}, and has {array.shape}")
    for name in ("tokens", "top_ids"):
        most = getattr(record, name).max(initial=0)
        _require(most <= MAX_TOKEN_ID, name, f"holds a token id above {MAX_TOKEN_ID}")
    logp = record.top_logp.astype(np.float64)
    _require(bool(((logp > -math.inf) & (logp <= 0)).all()), "top_logp", "must be finite logs of probabilities")
    mass = np.exp(logp).sum(axis=1) + np.exp(record.rest_logp.astype(np.float64))
    _require(bool((np.abs(mass - 1) <= MASS_TOLERANCE).all()), "rest_logp", "must be the log of what the rest has")
    heavy = bool(((record.weights >= 1) & (record.weights < math.inf)).all())
    _require(heavy, "weights", "must be finite numbers, 1 or more")
    positions = record.positions.astype(np.int64)
    first, end = max(record.start + 1, record.first_generated), record.start + len(record.tokens)
    inside = bool(((positions >= first) & (positions < end)).all())
    _require(inside, "positions", "must be those of generated tokens of the text that have one before them")


def record_of_text(
    tokens: Sequence[int],
    first_generated: int,
    sampling: Sampling,
    *,
    model: str,
    session_salt: bytes,
    key_salt: bytes,
    prompt_class: int = 0,
    at_s: float = 0.0,
    teacher: Teacher | None = None,
    tokenizer_sha256: str = "",
) -> LessonRecord:
    """Return the record of a text that nobody verified here, with a row for each generated token.

    Args:
        tokens: [n] the text from position 0; what is beyond `MAX_ROWS` generated tokens is left out.
        first_generated: position of the first token after the prompt.
        sampling: settings with the seed.
        model: id of the target.
        session_salt: [16] bytes, the same for all texts of a session.
        key_salt: [16] bytes, the same for all texts of whom they are taken to be.
        prompt_class: kind of text.
        at_s: time, Unix seconds.
        teacher: the target's likeliest tokens in each row; None: unknown, and losses of tokens alone learn from it.
        tokenizer_sha256: hash of the target's tokenizer; empty: unknown.

    Raises:
        InvalidArgument: nothing may be learned from such a text, or it has no prompt.
    """
    tokens = tokens[: first_generated + MAX_ROWS]
    n = len(tokens) - first_generated
    nothing = np.zeros((n, 0), np.uint32), np.zeros((n, 0), np.float16), np.zeros(n, np.float32)
    top_ids, top_logp, rest_logp = teacher or nothing
    return LessonRecord(
        model=model,
        session_salt=session_salt,
        key_salt=key_salt,
        prompt_class=prompt_class,
        sampling=sampling,
        at_s=at_s,
        start=0,
        first_generated=first_generated,
        tokens=np.array(tokens, np.uint32),
        positions=np.arange(first_generated, first_generated + n, dtype=np.uint32),
        top_ids=top_ids,
        top_logp=top_logp,
        rest_logp=rest_logp,
        weights=np.ones(n, np.float32),
        tokenizer_sha256=tokenizer_sha256,
    )


def write_records(path: Path, records: Iterable[LessonRecord]) -> None:
    """Write a file, which is there whole or not at all."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("wb") as file:
        for record in records:
            encoded = record.encode()
            file.write(_LENGTH.pack(len(encoded)) + encoded)
    os.replace(unfinished, path)


def read_records(path: Path) -> list[LessonRecord]:
    """Return the records of a file.

    Raises:
        InvalidArgument: the file cannot be read, or holds something else.
    """
    records = []
    try:
        with path.open("rb") as file:
            while head := file.read(_LENGTH.size):
                size = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else MAX_BYTES + 1
                if size > MAX_BYTES:
                    raise InvalidArgument(f"{path} is no file of records", field="lessons")
                records.append(LessonRecord.decode(file.read(size)))
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror}", field="lessons") from error
    return records

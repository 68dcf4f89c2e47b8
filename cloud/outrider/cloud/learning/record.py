"""The record of lessons: part of one text with what the target said in the rows that verified it.

A verifier makes records (`outrider.cloud.learning.lessons`), a trainer reads them. Rows follow the transcript or, after
a draft that missed, the drafter's own tokens (Draft-OPD's replay, which costs no second pass).
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass, fields
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np

from outrider.proto.codec.decoding import SAMPLING
from outrider.proto.errors import InvalidArgument
from outrider.proto.salts import SALT_BYTES
from outrider.proto.types import Sampling
from outrider.proto.types.checks import MAX_TOKEN_ID, SHA256

TOP = 64  # likeliest tokens of a row, which teach as much as all do if the mass of the rest is known
MAX_TOKENS = 1 << 17
MAX_ROWS = 4096
MAX_BLOCKS = 4096
MAX_DRAFTS = 1 << 16
MAX_DRAFTERS = 255
MAX_NAME = 256  # characters
MASS_TOLERANCE = 0.02  # of the sum of a row's probabilities, which are rounded
NO_DRAFTER = 255  # in `drafted_by`
MAX_BYTES = 1 << 22  # of an encoded record
_MAGIC = b"OUTLESN1"
_HEADER = struct.Struct("<8sI")
_MAX_HEADER = 1 << 18
_NARROW = 1 << 16  # token ids below it take two bytes


class LessonKind(IntEnum):
    """Standing of a row: what verification made of the draft at its position. The numbers are in records."""

    ACCEPTED = 0  # the draft is the target's token
    MISSED = 1  # the draft is another, and the target's own token is committed
    OWN = 2  # there was no draft, and the target's own token is committed
    SUFFIX = 3  # an earlier draft of the block has missed, so the row follows what the drafter would have written


@dataclass(frozen=True, eq=False)
class LessonRecord:
    """Rows of one text, n tokens of it, and the b blocks of d drafts in all that m of the rows belong to.

    Row r stands in block `row_block[r]` after the first `row_index[r]` drafts of it: at absolute position
    `positions[r]`, which the draft of that index had proposed a token for. All arrays are read-only.

    Attributes:
        model: id of the target.
        session_salt: [16] bytes, the same for all records of a session (`salted`).
        key_salt: [16] bytes, the same for all sessions of an API key.
        prompt_class: kind of text, as in leases, below 16; 0: unknown.
        drafters: name@version of each drafter in `drafted_by`.
        sampling: settings of the text with the seed of its noise, by which a drafter's hits can be computed again.
        at_s: time of the first row, Unix seconds.
        start: absolute position of `tokens[0]`.
        first_generated: absolute position of the first token after the prompt.
        tokens: [n] uint32, the text from `start` on, prompt included.
        block_starts: [b] uint32, absolute position that the first draft of each block proposed a token for.
        block_ends: [b] uint32, end of each block's drafts in `drafts`.
        drafts: [d] uint32, drafted tokens, block after block.
        drafted_by: [d] uint8, index into `drafters` of the one that made each draft; `NO_DRAFTER`: unknown.
        row_block: [m] uint32, block of each row.
        row_index: [m] uint32, index of its draft in the block; the block's length: there was none.
        kinds: [m] uint8, `LessonKind` of each row.
        targets: [m] uint32, the target's token in each row: that of the text, unless the kind is `SUFFIX`.
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
    drafters: tuple[str, ...]
    sampling: Sampling
    at_s: float
    start: int
    first_generated: int
    tokens: np.ndarray
    block_starts: np.ndarray
    block_ends: np.ndarray
    drafts: np.ndarray
    drafted_by: np.ndarray
    row_block: np.ndarray
    row_index: np.ndarray
    kinds: np.ndarray
    targets: np.ndarray
    top_ids: np.ndarray
    top_logp: np.ndarray
    rest_logp: np.ndarray
    weights: np.ndarray
    tokenizer_sha256: str = ""

    def __post_init__(self) -> None:
        _check_facts(self)
        _check_arrays(self)
        _check_rows(self)
        for name in _ARRAYS:
            getattr(self, name).setflags(write=False)

    def __len__(self) -> int:
        return len(self.kinds)

    @cached_property
    def positions(self) -> np.ndarray:
        """Absolute position of each row, [m] int64."""
        positions: np.ndarray = self.block_starts.astype(np.int64)[self.row_block] + self.row_index
        return positions

    @cached_property
    def drafted(self) -> np.ndarray:
        """Drafted token of each row, [m] int64; -1: none."""
        return np.where(self._has_draft, self._of_draft(self.drafts), -1)

    @cached_property
    def row_drafter(self) -> np.ndarray:
        """Index into `drafters` of each row's drafter, [m] int64; -1: no draft, or unknown whose."""
        by = self._of_draft(self.drafted_by)
        return np.where(self._has_draft & (by != NO_DRAFTER), by, -1)

    @cached_property
    def _block_lengths(self) -> np.ndarray:
        return _lengths(self.block_ends)

    @cached_property
    def _block_begins(self) -> np.ndarray:
        begins: np.ndarray = self.block_ends.astype(np.int64) - self._block_lengths
        return begins

    @cached_property
    def _has_draft(self) -> np.ndarray:
        has_draft: np.ndarray = self.row_index < self._block_lengths[self.row_block]
        return has_draft

    def _of_draft(self, values: np.ndarray) -> np.ndarray:
        """Return [m] int64 of `values` [d]: that of each row's draft, and any where there is none."""
        padded = np.append(values, 0).astype(np.int64)
        return padded[np.where(self._has_draft, self._block_begins[self.row_block] + self.row_index, len(values))]

    def block_drafts(self, block: int) -> np.ndarray:
        """Return the drafts [k] uint32 of a block."""
        return self.drafts[self._block_begins[block] : self.block_ends[block]]

    def prefix(self, row: int) -> np.ndarray:
        """Return [p] uint32, the tokens from `start` on after which the target said what row `row` holds."""
        block = int(self.row_block[row])
        before = self.tokens[: int(self.block_starts[block]) - self.start]
        return np.concatenate([before, self.block_drafts(block)[: int(self.row_index[row])]])

    def rows_of(self, kind: LessonKind) -> np.ndarray:
        """Return [r] int64, the rows of one kind."""
        return np.flatnonzero(self.kinds == kind)

    def encode(self) -> bytes:
        """Return the record as bytes that `decode` reads."""
        sizes = [len(self.tokens), len(self.block_starts), len(self.drafts), *self.top_ids.shape]
        narrow = bool(self.top_ids.max(initial=0) < _NARROW)
        header = {
            "model": self.model,
            "tokenizer": self.tokenizer_sha256,
            "session": self.session_salt.hex(),
            "key": self.key_salt.hex(),
            "class": self.prompt_class,
            "drafters": self.drafters,
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
                "drafters": tuple(map(str, header["drafters"])),
                "sampling": SAMPLING.decode(base64.b64decode(header["sampling"], validate=True)),
                "at_s": float(header["at_s"]),
                "start": int(header["start"]),
                "first_generated": int(header["first_generated"]),
            }
            narrow = bool(header["narrow"])
        except (KeyError, TypeError, ValueError, OverflowError, binascii.Error) as error:
            raise InvalidArgument(f"lacks a field, or one is of a wrong type: {error!r}", field="lessons") from error
        return cls(**facts, **_unpacked(body, sizes, narrow=narrow))


def _lengths(ends: np.ndarray) -> np.ndarray:
    """Return [b] int64, the sizes of what ends at `ends` [b], each after the one before."""
    return np.diff(np.concatenate([np.zeros(1, np.int64), ends.astype(np.int64)]))


_ARRAYS = tuple(field.name for field in fields(LessonRecord) if field.type == "np.ndarray")


def _layout(sizes: list[int], *, narrow: bool) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield name, encoded type and shape of each array."""
    n, b, d, m, s = sizes
    shapes = (n,), (b,), (b,), (d,), (d,), (m,), (m,), (m,), (m,), (m, s), (m, s), (m,), (m,)
    ids = "<u2" if narrow else "<u4"
    dtypes = "<u4", "<u4", "<u4", "<u4", "u1", "<u4", "<u4", "u1", "<u4", ids, "<f2", "<f4", "<f4"
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
    limits = (MAX_TOKENS, MAX_BLOCKS, MAX_DRAFTS, MAX_ROWS, TOP)
    if len(sizes) != len(limits) or any(not 0 <= size <= limit for size, limit in zip(sizes, limits, strict=True)):
        raise InvalidArgument(f"must be {len(limits)} numbers, at most {limits}", field="lessons.sizes")
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
    _require(len(record.drafters) <= MAX_DRAFTERS, "drafters", f"holds more than {MAX_DRAFTERS}")
    for drafter in record.drafters:
        _require(0 < len(drafter) <= MAX_NAME, "drafters", f"holds a name without 1 to {MAX_NAME} characters")
    _require(0 <= record.at_s < math.inf, "at_s", "must be Unix seconds")
    _require(0 <= record.start <= MAX_TOKEN_ID, "start", "must be a position")
    _require(0 < record.first_generated <= MAX_TOKEN_ID, "first_generated", "must be a position after a prompt")
    sampling = record.sampling
    free = not (sampling.grammar or sampling.logit_bias or sampling.allowed_tokens or sampling.min_tokens)
    _require(free, "sampling", "has a grammar, a bias, allowed tokens or min_tokens, from which nothing is learned")


def _check_arrays(record: LessonRecord) -> None:
    sizes = [len(record.tokens), len(record.block_starts), len(record.drafts), *record.top_ids.shape]
    _require(len(sizes) == 5, "top_ids", "must have two axes")
    limits = (MAX_TOKENS, MAX_BLOCKS, MAX_DRAFTS, MAX_ROWS, TOP)
    for size, limit, name in zip(sizes, limits, ("tokens", "block_starts", "drafts", "kinds", "top_ids"), strict=True):
        _require(size <= limit, name, f"holds {size}; {limit} are the most")
    for name, dtype, shape in _layout(sizes, narrow=False):
        array = getattr(record, name)
        _require(array.dtype == np.dtype(dtype), name, f"must be of type {dtype}, and is {array.dtype}")
        _require(array.shape == shape, name, f"must have shape {shape}, and has {array.shape}")
    for name in ("tokens", "drafts", "targets", "top_ids"):
        most = getattr(record, name).max(initial=0)
        _require(most <= MAX_TOKEN_ID, name, f"holds a token id above {MAX_TOKEN_ID}")
    logp = record.top_logp.astype(np.float64)
    _require(bool(((logp > -math.inf) & (logp <= 0)).all()), "top_logp", "must be finite logs of probabilities")
    mass = np.exp(logp).sum(axis=1) + np.exp(record.rest_logp.astype(np.float64))
    _require(bool((np.abs(mass - 1) <= MASS_TOLERANCE).all()), "rest_logp", "must be the log of what the rest has")
    heavy = bool(((record.weights >= 1) & (record.weights < math.inf)).all())
    _require(heavy, "weights", "must be finite numbers, 1 or more")
    _require(bool((record.kinds <= max(LessonKind)).all()), "kinds", "holds a number that is no kind")
    by = record.drafted_by
    _require(bool(((by < len(record.drafters)) | (by == NO_DRAFTER)).all()), "drafted_by", "names no drafter")


def _check_rows(record: LessonRecord) -> None:
    end, lengths = record.start + len(record.tokens), _lengths(record.block_ends)
    divides = bool((lengths >= 0).all()) and int(lengths.sum()) == len(record.drafts)
    _require(divides, "block_ends", "do not divide the drafts")
    starts = record.block_starts.astype(np.int64)
    first = max(record.start + 1, record.first_generated)  # something comes before every row
    _require(bool(((starts >= first) & (starts <= end)).all()), "block_starts", "must be positions of the text")
    _require(bool((record.row_block < len(starts)).all()), "row_block", "names no block")
    _require(bool((record.row_index <= lengths[record.row_block]).all()), "row_index", "is after the block's end")
    kinds, drafted, targets = record.kinds, record.drafted, record.targets.astype(np.int64)
    missed = _missed_before(record)
    agrees = {
        LessonKind.ACCEPTED: (missed == 0) & (drafted == targets),
        LessonKind.MISSED: (missed == 0) & (drafted >= 0) & (drafted != targets),
        LessonKind.OWN: (missed == 0) & (drafted < 0),
        LessonKind.SUFFIX: missed > 0,
    }
    for kind, fits in agrees.items():
        _require(bool(fits[kinds == kind].all()), "kinds", f"calls a row {kind.name} that text and drafts do not")
    committed = kinds != LessonKind.SUFFIX
    places = record.positions[committed] - record.start
    _require(bool((places < len(record.tokens)).all()), "tokens", "end before the position of a row")
    _require(bool((record.tokens[places] == targets[committed]).all()), "targets", "differ from the text")


def _missed_before(record: LessonRecord) -> np.ndarray:
    """Return [m] int64, how many drafts of its block before each row differ from the text."""
    lengths = _lengths(record.block_ends)
    begins = record.block_ends.astype(np.int64) - lengths
    places = np.repeat(record.block_starts.astype(np.int64) - record.start - begins, lengths) + np.arange(lengths.sum())
    text = np.append(record.tokens.astype(np.int64), -1)
    differs = text[np.minimum(places, len(record.tokens))] != record.drafts
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(differs)])
    first: np.ndarray = begins[record.row_block]
    missed: np.ndarray = before[first + record.row_index] - before[first]
    return missed

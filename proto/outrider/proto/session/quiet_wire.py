"""Cells and beats of a quiet stream, which look alike whatever the text does: rules that both ends share.

From the answer to its Open on, a stream with `Open.quiet` carries cells of one size each way. The verifier sends one at
every beat, whether or not it has something to say, and the edge answers each after a fixed time. What does not fit a
cell goes on in the next. After its last frame the stream goes on with empty cells up to a number of beats that many
texts have. So an observer learns that number and the size of the Open, both of them rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from outrider.proto.errors import InvalidArgument
from outrider.proto.types import QuietWire

ANSWER_S = 0.004  # from a cell of the verifier to the edge's answer: about the time of a drafting job
MIN_BEATS = 16  # of a stream
UP_BYTES, DOWN_BYTES = 40, 72
MIN_OPENING_BYTES = 1024
PADDING_LENGTH_BYTES = 6
MAX_FRAME_BYTES = 8 << 20
MAX_SHIFT = 28
_SEVEN_BITS, _MORE = 0x7F, 0x80  # of a varint's bytes


def cells_of(*, facts: bool, top_logprobs: int, prompt: bool) -> QuietWire:
    """Return the cells of a text: what most of its drafts and commits fit into.

    Args:
        facts: whether commits have the model's own log probabilities.
        top_logprobs: likeliest tokens of each position.
        prompt: whether log probabilities of the prompt are wanted, too.
    """
    return QuietWire(UP_BYTES, DOWN_BYTES + 48 * facts + 24 * top_logprobs + 1024 * prompt)


class CellWriter:
    """Frames of one way of a stream, cut into cells of `size` bytes."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._waiting = bytearray()

    def __len__(self) -> int:
        """Return how many bytes wait for a cell."""
        return len(self._waiting)

    def put(self, frame: bytes) -> None:
        length = len(frame)
        while length > _SEVEN_BITS:
            self._waiting.append(length & _SEVEN_BITS | _MORE)
            length >>= 7
        self._waiting.append(length)
        self._waiting += frame

    def cell(self) -> bytes:
        """Return the next cell: what waits, as far as it fits, and zeros."""
        data = bytes(self._waiting[: self._size])
        del self._waiting[: self._size]
        return data.ljust(self._size, b"\0")


class CellReader:
    """Frames of one way of a stream, of `max_bytes` at most, put together from its cells of `size` bytes."""

    def __init__(self, size: int, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._size = size
        self._max_bytes = max_bytes
        self._length = self._shift = 0
        self._frame: bytearray | None = None  # of which bytes are missing; None: a length comes next

    def take(self, cell: bytes) -> Iterator[bytes]:
        """Yield the frames that end in a cell.

        Raises:
            InvalidArgument: it has another size, or a frame is too long.
        """
        if len(cell) != self._size:
            raise InvalidArgument(f"has {len(cell)} bytes; the stream's have {self._size}", field="cell.data")
        at = 0
        while at < len(cell):
            if self._frame is None:
                byte, at = cell[at], at + 1
                self._length |= (byte & _SEVEN_BITS) << self._shift
                self._shift += 7
                if self._length > self._max_bytes or self._shift > MAX_SHIFT:
                    raise InvalidArgument(f"holds a frame of more than {self._max_bytes} bytes", field="cell.data")
                if byte & _MORE:
                    continue
                self._shift = 0
                if not self._length:
                    continue  # padding
                self._frame = bytearray()
            part = cell[at : at + self._length - len(self._frame)]
            self._frame += part
            at += len(part)
            if len(self._frame) == self._length:
                whole, self._frame, self._length = bytes(self._frame), None, 0
                yield whole


def next_beat(period_s: float, now: float) -> float:
    """Return the next of the times at which all quiet streams of a verifier send, on the clock of `now`."""
    return (math.floor(now / period_s) + 1) * period_s


def ends_at_beat(beats: int) -> bool:
    """Return whether a stream that has nothing more to say ends after so many beats, as 16, 24, 32, 48, 64, 96."""
    leading = beats // 3 if beats % 3 == 0 else beats
    return beats >= MIN_BEATS and leading & (leading - 1) == 0


def opening_bytes(size: int) -> int:
    """Return the bytes of an Open whose own are `size`, and the length of its padding: a power of two."""
    return max(MIN_OPENING_BYTES, 1 << (size + PADDING_LENGTH_BYTES - 1).bit_length())

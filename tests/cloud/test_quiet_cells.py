"""Cells hold frames of any size, have one size themselves, and leave on the beat; what is said shows in neither."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.cloud.serving import quiet_cells as served
from outrider.proto import codec
from outrider.proto.errors import InvalidArgument
from outrider.proto.session.quiet_wire import (
    MIN_BEATS,
    MIN_OPENING_BYTES,
    CellReader,
    CellWriter,
    cells_of,
    ends_at_beat,
    opening_bytes,
)
from outrider.proto.types import Open, QuietWire, Sampling

QUIET = QuietWire(32, 48)
PERIOD_S = 0.25
HASH = "0" * 64
real_sleep = asyncio.sleep


# === cells ======================================================================================================


@given(st.lists(st.lists(st.binary(min_size=1, max_size=300), max_size=4), max_size=8), st.integers(32, 128))
def test_frames_of_any_sizes_come_out_of_cells_of_one_size(beats: list[list[bytes]], size: int) -> None:
    writer, reader = CellWriter(size), CellReader(size)
    cells, found = [], []
    for frames in beats:
        for frame in frames:
            writer.put(frame)
        cells.append(writer.cell())
    while len(writer):
        cells.append(writer.cell())
    for cell in [*cells, writer.cell()]:
        assert len(cell) == size
        found += reader.take(cell)
    assert found == [frame for frames in beats for frame in frames]


@given(st.lists(st.binary(min_size=32, max_size=32), max_size=50))
def test_any_cells_are_read_or_refused(cells: list[bytes]) -> None:
    reader = CellReader(32)
    with suppress(InvalidArgument):
        for cell in cells:
            [*reader.take(cell)]


def test_a_cell_of_another_size_and_a_frame_out_of_a_cell_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="has 33 bytes"):
        [*CellReader(32).take(bytes(33))]
    with pytest.raises(InvalidArgument, match="nothing else follows"):
        codec.decode_edge_cell(codec.encode_edge_frame(opening(3)))
    with pytest.raises(InvalidArgument, match="whose Open has no"):
        codec.decode_edge_frame(codec.encode_edge_cell(bytes(32)))
    assert codec.decode_edge_cell(codec.encode_edge_cell(b"a")) == codec.decode_cloud_cell(
        codec.encode_cloud_cell(b"a")
    )


@pytest.mark.parametrize(("up", "down"), [(31, 64), (64, 5000)])
def test_cells_of_no_use_and_turns_in_a_quiet_stream_are_refused(up: int, down: int) -> None:
    with pytest.raises(InvalidArgument, match=r"32\.\.4096"):
        QuietWire(up, down)
    with pytest.raises(InvalidArgument, match="one turn"):
        opening(3, keep_s=1.0)


# === the Open ===================================================================================================


def opening(length: int, **others: Any) -> Open:
    return Open(
        "m", HASH, (300,) * length, Sampling(), "s", quiet=cells_of(facts=False, top_logprobs=0, prompt=False), **others
    )


@pytest.mark.parametrize("length", [1, 40, *range(440, 480), 1000, 70000])
def test_an_open_has_a_size_that_many_prompts_have_and_is_read_as_without_padding(length: int) -> None:
    data = codec.encode_edge_frame(opening(length))
    size = opening_bytes(len(data))
    padded = codec.padded_edge_frame(data, size)
    assert len(padded) == size >= MIN_OPENING_BYTES
    assert size & (size - 1) == 0
    assert codec.decode_edge_frame(padded) == codec.decode_edge_frame(data) == opening(length)


# === the law: cells of one size, on the beat, up to a number of beats that many texts have ========================


class Clock:
    """Time that passes only where somebody sleeps until a beat."""

    def __init__(self) -> None:
        self.now = 7.03

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        for _ in range(20):
            await real_sleep(0)  # what is due comes first
        self.now += seconds


async def carried(frames: Sequence[tuple[float, bytes]], clock: Clock) -> list[tuple[float, bytes]]:
    """Times and messages of a stream whose frames come at such times after its beginning."""
    began = clock.now

    async def said() -> AsyncGenerator[bytes, None]:
        for at, frame in frames:
            while clock.now < began + at:
                await real_sleep(0)
            yield frame

    config: Any = SimpleNamespace(quiet_beat_s=PERIOD_S, stall_s=60.0)
    return [(clock.now, cell) async for cell in served.quiet_cells(b"opened", said(), QUIET, config)]


def check_law(messages: Sequence[tuple[float, bytes]]) -> None:
    """Nothing of a stream shows but the number of its beats, which is one of few."""
    size = len(codec.encode_cloud_cell(bytes(QUIET.down_bytes)))
    assert {len(message) for _, message in messages} == {size}, "cells have one size"
    beats = [at / PERIOD_S for at, _ in messages]
    assert all(abs(beat - round(beat)) < 1e-6 for beat in beats), "cells leave on the beat"
    assert [round(beat - beats[0]) for beat in beats] == [*range(len(beats))], "one cell a beat"
    assert len(beats) >= MIN_BEATS
    assert ends_at_beat(len(beats))


STREAMS = {
    "short": [(0.1, b"x")],
    "all at once": [(0.0, b"y" * 500)],
    "a frame now and then": [(0.3 * i, bytes([i + 1]) * (i * 7 % 90 + 1)) for i in range(40)],
    "a long wait": [(0.0, b"z"), (5.1, b"z" * 100)],
}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(served, "time", clock)
    monkeypatch.setattr(served, "asyncio", SimpleNamespace(**{**vars(asyncio), "sleep": clock.sleep}))
    return clock


@pytest.mark.parametrize("name", STREAMS)
async def test_whatever_is_said_cells_of_one_size_leave_on_the_beat(clock: Clock, name: str) -> None:
    messages = await carried(STREAMS[name], clock)
    check_law(messages)
    reader = CellReader(QUIET.down_bytes)
    found = [frame for _, message in messages for frame in reader.take(codec.decode_cloud_cell(message))]
    assert found == [b"opened", *(frame for _, frame in STREAMS[name])]


def test_numbers_of_beats_are_few() -> None:
    assert [number for number in range(200) if ends_at_beat(number)] == [16, 24, 32, 48, 64, 96, 128, 192]


def without_padding(writer: CellWriter) -> bytes:
    return CELL(writer).rstrip(b"\0")


def as_soon_as_can_be(period_s: float, now: float) -> float:
    return now + period_s / 3


def whenever_it_is_done(beats: int) -> bool:
    return beats > 0


CELL: Callable[[CellWriter], bytes] = CellWriter.cell


@pytest.mark.parametrize(
    ("where", "name", "defect"),
    [
        (CellWriter, "cell", without_padding),
        (served, "next_beat", as_soon_as_can_be),
        (served, "ends_at_beat", whenever_it_is_done),
    ],
)
async def test_a_defect_breaks_the_law(clock: Clock, monkeypatch: Any, where: Any, name: str, defect: Any) -> None:
    monkeypatch.setattr(where, name, defect)
    with pytest.raises(AssertionError):
        check_law(await carried(STREAMS["a frame now and then"], clock))


async def test_what_ends_a_stream_ends_its_cells_at_the_next_beat(clock: Clock) -> None:
    async def fails() -> AsyncGenerator[bytes, None]:
        yield b"x"
        raise InvalidArgument("is wrong", field="draft.start")

    config: Any = SimpleNamespace(quiet_beat_s=PERIOD_S, stall_s=60.0)
    with pytest.raises(InvalidArgument, match="is wrong"):
        [cell async for cell in served.quiet_cells(b"opened", fails(), QUIET, config)]


async def test_a_client_that_reads_no_empty_cells_is_left_after_a_while() -> None:
    async def one() -> AsyncGenerator[bytes, None]:
        yield b"x"

    async def reads_two() -> None:
        config: Any = SimpleNamespace(quiet_beat_s=0.01, stall_s=0.05)
        cells, read = served.quiet_cells(b"opened", one(), QUIET, config), 0
        async for _ in cells:
            read += 1
            if read == 2:
                await asyncio.sleep(60)

    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.create_task(reads_two())
    assert time.monotonic() - began < 30

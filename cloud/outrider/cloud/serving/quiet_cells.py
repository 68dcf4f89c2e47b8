"""The verifier's half of quiet streams: a cell at every beat in place of frames, and frames out of the edge's cells."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator

from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto import codec
from outrider.proto.errors import InvalidArgument
from outrider.proto.session.quiet_wire import CellReader, CellWriter, ends_at_beat, next_beat
from outrider.proto.types import QuietWire

SPARE_BYTES = 16  # of a message around its cell
MAX_WAITING_BYTES = 4096  # for cells; frames beyond wait in the outbox, where unread ones are counted


async def quiet_cells(
    first: bytes, frames: AsyncGenerator[bytes, None], quiet: QuietWire, config: VerifierConfig
) -> AsyncGenerator[bytes, None]:
    """Yield a message with a cell at every beat, with `first` and `frames` in them, and empty ones after their end."""
    writer, period_s, beats = CellWriter(quiet.down_bytes), config.quiet_beat_s, 0
    taken = asyncio.Event()
    writer.put(first)

    async def fill() -> None:
        async for frame in frames:
            writer.put(frame)
            while len(writer) > MAX_WAITING_BYTES:
                taken.clear()
                await taken.wait()

    filling = asyncio.create_task(fill())
    limit: asyncio.TimerHandle | None = None
    stream = asyncio.current_task()
    try:
        while not (filling.done() and not len(writer) and ends_at_beat(beats)):
            await asyncio.sleep(next_beat(period_s, time.monotonic()) - time.monotonic())
            if filling.done():
                filling.result()  # raises what ended the stream
                if limit is None and stream is not None:  # for a client that reads no empty cells
                    limit_s = config.stall_s + 2 * beats * period_s
                    limit = asyncio.get_running_loop().call_later(limit_s, stream.cancel)
            yield codec.encode_cloud_cell(writer.cell())
            taken.set()
            beats += 1
    finally:
        if limit is not None:
            limit.cancel()
        filling.cancel()
        await asyncio.gather(filling, return_exceptions=True)


async def frames_of_cells(messages: AsyncIterator[bytes], size: int) -> AsyncIterator[bytes]:
    """Yield the frames in the cells of `size` bytes that an edge sends; raises `InvalidArgument` for anything else."""
    reader = CellReader(size, codec.SMALL_FRAME_BYTES)
    async for message in messages:
        if len(message) > size + SPARE_BYTES:
            raise InvalidArgument(f"has {len(message)} bytes; a cell here has {size}", field="frame.cell")
        for frame in reader.take(codec.decode_edge_cell(message)):
            yield frame

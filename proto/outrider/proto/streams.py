"""Writes on both ends of a gRPC stream that may break or end at any moment (grpcio 1.85).

Client: once the server has ended the stream, gRPC's own `write` sets the call's status itself (`Internal error from
Core`). The messages before the end, the last commit among them, and the server's status can then no longer be read;
and since the call counts as done, cancelling it frees nothing: its memory stays for ever. `send_bytes` avoids that.

Server: a write that waits for room fails when the client goes away. gRPC notices the failed write and the client's end
in either order, and logs a traceback if the write comes first. `write_answers` ends such a call quietly.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from outrider.proto.errors import Unavailable
from outrider.proto.rpc_errors import to_status

GRPC_PREFIX_BYTES = 5  # flag and length before every message
# The stream has ended; the reading side meets the same end and has the reason.
ENDED = (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.InternalError)
# On a server the client is gone, and nobody will read what could not be sent.
CLIENT_GONE = grpc.aio.InternalError


async def send_bytes(call: Any, data: bytes) -> None:
    """Put `data` on the stream of `call`, made without serializers, once gRPC has room; raises one of `ENDED`."""
    await call.wait_for_connection()
    await call._cython_call.send_serialized_message(data)


def write_answers(
    answers: Callable[[Any, Any], AsyncGenerator[bytes, None]], unread_s: float | None = None
) -> Callable[[Any, Any], Awaitable[None]]:
    """Make the handler of a streaming method from a generator of its answers.

    The generator, called with the request (or the iterator of requests) and the context, is closed as soon as the
    client is gone, the call is cancelled, or an answer stays unread for `unread_s` seconds (None: however long). The
    call itself cannot end before the client reads that answer or goes.
    """

    async def handle(request: Any, context: Any) -> None:
        async with aclosing(answers(request, context)) as stream:
            try:
                async for data in stream:
                    async with _closed_after(stream, unread_s) as closing:
                        await context.write(data)
                    if closing:
                        await context.abort(*to_status(Unavailable("you left an answer unread too long; ask again")))
            except CLIENT_GONE:
                return

    return handle


@asynccontextmanager
async def _closed_after(
    stream: AsyncGenerator[bytes, None], seconds: float | None
) -> AsyncIterator[list[asyncio.Task[None]]]:
    """Close a generator that waits after `seconds`; what is yielded is then the task that does so."""
    closing: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()
    timer = None
    if seconds is not None:
        timer = loop.call_later(seconds, lambda: closing.append(loop.create_task(stream.aclose())))
    try:
        yield closing
    finally:
        if timer is not None:
            timer.cancel()
        await asyncio.gather(*closing, return_exceptions=True)

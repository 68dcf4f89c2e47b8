"""Writing on a stream to a server, without losing what the server has said.

Where the server has ended the stream, gRPC's own `write` makes the call's status its own (`Internal error from Core`,
grpcio 1.85). The messages that came before the end, the last commit among them, can then not be read, nor can the
server's status; and since the call counts as done, cancelling it frees nothing: its memory stays for ever.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio

# The stream has ended; the reading side meets the same end and tells why.
ENDED = (grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.InternalError)


async def send_bytes(call: Any, data: bytes) -> None:
    """Put `data` on the stream of `call`, which was made without serializers; waits until gRPC has room for it.

    Raises:
        grpc.aio.AioRpcError, asyncio.InvalidStateError, grpc.aio.InternalError: one of `ENDED`.
    """
    await call.wait_for_connection()
    await call._cython_call.send_serialized_message(data)

"""How many bytes a second the link carries.

Neither way is a test of the line. Up is the time of one large health call beyond that of a small one: gRPC opens its
window as it goes, so the line may carry more. Down is one file from the coordinator, which need not be where the
verifier is. Sessions need little: some 25 bytes a token up, and 30 down.
"""

from __future__ import annotations

import time
from typing import Any

import grpc
import grpc.aio

from outrider.edge.doctor.answers import ask_health
from outrider.edge.doctor.endpoint import Endpoint
from outrider.edge.doctor.finding import Finding, failed, ok, warning
from outrider.edge.doctor.visit import PATIENT_S, Visit
from outrider.proto import codec
from outrider.proto.rpc_errors import from_rpc_error
from outrider.proto.types import RemoteFile

LOADS = (16 << 10, 128 << 10, 512 << 10)  # bytes up, each only if the one before was quick
QUICK_S = 0.1
MOST_DOWN_BYTES = 2 << 20
MOST_DOWN_S = 2.0
SLOW_BYTES_S = 16 << 10  # 128 kbit/s: 200 tokens a second with their drafts, and room


async def measure(visit: Visit) -> Finding:
    """Up to the verifier; down from the coordinator, where there is one."""
    verifier = visit.verifier
    assert verifier is not None  # noqa: S101 - needed by this check
    try:
        up = await _up(verifier)
        down = await _down(visit)
    except grpc.aio.AioRpcError as error:
        return failed(
            f"a larger message does not get through: {from_rpc_error(error).message}",
            f"see whether `outrider {verifier.role}` still runs; a proxy on the way may bound messages",
        )
    words = f"at least {_shown(up)} up to the {verifier.role}"
    words += f", {_shown(down)} down from the coordinator" if down else "; down is not measured without a coordinator"
    figures = {"up_bytes_s": up} | ({"down_bytes_s": down} if down else {})
    slow = [way for way, rate in (("up", up), ("down", down)) if rate and rate < SLOW_BYTES_S]
    if slow:
        return warning(
            f"{words}: slow {' and '.join(slow)}",
            "drafts will queue; give a small --window, or see `outrider bench --up 0.1 --down 0.1` for what is left",
            **figures,
        )
    return ok(words, **figures)


async def _up(at: Endpoint) -> float:
    async with at.channel() as channel:
        await _load(channel, at, 1)
        small_s = min([await _load(channel, at, 1) for _ in range(3)])
        rate = 0.0
        for size in LOADS:
            seconds = await _load(channel, at, size)
            rate = max(rate, size / max(1e-4, seconds - small_s))
            if seconds > QUICK_S:
                break
    return rate


async def _load(channel: grpc.aio.Channel, at: Endpoint, size: int) -> float:
    """Seconds of a health call about a service whose name is so long; that there is none such is the answer."""
    began = time.monotonic()
    try:
        await ask_health(channel, "x" * size, at.metadata)
    except grpc.aio.AioRpcError as error:
        if error.code() != grpc.StatusCode.NOT_FOUND:
            raise
    return time.monotonic() - began


async def _down(visit: Visit) -> float:
    """Bytes a second of the largest file that the coordinator serves, cut short; 0: there is none."""
    at, lease = visit.coordinator, visit.lease
    if at is None or lease is None:
        return 0.0
    files = [file for manifest in lease.drafters for file in manifest.files]
    files += [lease.tokenizer] if lease.tokenizer is not None else []
    if not files:
        return 0.0
    largest: RemoteFile = max(files, key=lambda file: file.bytes)
    async with at.channel() as channel:
        method: Any = channel.unary_stream(f"/{codec.CONTROL_SERVICE}/FetchFile")
        request = codec.encode_fetch(largest.sha256, 0)
        call = method(request, timeout=PATIENT_S + MOST_DOWN_S, metadata=at.metadata)
        began, came = time.monotonic(), 0
        async for data in call:
            came += len(data)
            if came >= MOST_DOWN_BYTES or time.monotonic() - began > MOST_DOWN_S:
                break
        seconds = time.monotonic() - began
        call.cancel()
    return came / max(1e-4, seconds)


def _shown(rate: float) -> str:
    megabits = 8 * rate / 1e6
    return f"{megabits:.1f} Mbit/s" if megabits < 100 else f"{megabits:.0f} Mbit/s"

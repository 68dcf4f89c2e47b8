"""How long the way to the verifier and back is."""

from __future__ import annotations

import statistics
import time

import grpc.aio

from outrider.edge.doctor.answers import ask_health
from outrider.edge.doctor.endpoint import Endpoint
from outrider.edge.doctor.finding import Finding, failed, ok, warning
from outrider.proto.rpc_errors import from_rpc_error

CALLS = 20
MOST_S = 4.0  # in all
LONG_S = 0.25
UNEVEN = 3.0


async def measure(at: Endpoint) -> Finding:
    """Of small health calls, one after the other, on a warm connection: the network and the server's answering."""
    try:
        seconds = sorted(await _measured(at))
    except grpc.aio.AioRpcError as error:
        return failed(
            f"the {at.role} stops answering: {from_rpc_error(error).message}",
            f"see whether `outrider {at.role}` still runs, and try `outrider doctor` again",
        )
    median_s, slow_s = statistics.median(seconds), seconds[int(0.9 * (len(seconds) - 1))]
    words = f"{1000 * median_s:.1f} ms, one in ten over {1000 * slow_s:.1f} ms ({len(seconds)} health calls)"
    figures = {"median_s": median_s, "p90_s": slow_s, "least_s": seconds[0], "calls": float(len(seconds))}
    if median_s > LONG_S:
        return warning(
            f"{words}: so long that drafts gain little",
            f"run a verifier nearer by; `outrider bench --rtt {1000 * median_s:.0f}` shows what such a link costs",
            **figures,
        )
    if slow_s > UNEVEN * median_s and slow_s - median_s > 0.05:
        return warning(
            f"{words}: uneven, which delays what misses",
            f"a wire instead of Wi-Fi, or less load; `outrider bench --rtt {1000 * median_s:.0f} "
            f"--jitter {1000 * (slow_s - median_s) / 2:.0f}` shows what it costs",
            **figures,
        )
    return ok(words, **figures)


async def _measured(at: Endpoint) -> list[float]:
    async with at.channel() as channel:
        await ask_health(channel, at.service, at.metadata)  # connects
        seconds: list[float] = []
        until = time.monotonic() + MOST_S
        while len(seconds) < CALLS and time.monotonic() < until:
            began = time.monotonic()
            await ask_health(channel, at.service, at.metadata)
            seconds.append(time.monotonic() - began)
        return seconds

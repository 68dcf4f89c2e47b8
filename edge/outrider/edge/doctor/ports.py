"""Whether the server's port takes connections, and how fast."""

from __future__ import annotations

import asyncio
import statistics
import time

from outrider.edge.doctor.endpoint import Endpoint
from outrider.edge.doctor.finding import Finding, failed, ok
from outrider.edge.doctor.visit import PATIENT_S

TRIES = 3


async def connect(at: Endpoint) -> Finding:
    """The time of a TCP handshake, the median of a few."""
    seconds: list[float] = []
    try:
        for _ in range(TRIES):
            began = time.monotonic()
            async with asyncio.timeout(PATIENT_S):
                _, writer = await asyncio.open_connection(at.host, at.port)
            seconds.append(time.monotonic() - began)
            writer.close()
    except ConnectionRefusedError:
        return failed(
            f"nothing listens on {at.address}",
            f"start `outrider {at.role} --listen …`, or mend the port in {at.option}; a server that listens on "
            "127.0.0.1 is reached from its own machine only",
        )
    except OSError as error:  # TimeoutError among them
        why = error.strerror or f"no answer within {PATIENT_S:g} s"
        return failed(
            f"{at.address} cannot be reached: {why}",
            f"a firewall or a wrong address; see `outrider {at.role} --listen` over there and {at.option} here",
        )
    median_s = statistics.median(seconds)
    return ok(f"connected in {1000 * median_s:.1f} ms", connect_s=median_s)

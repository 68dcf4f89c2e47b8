"""Whether the server's name resolves."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time

from outrider.edge.doctor.endpoint import Endpoint
from outrider.edge.doctor.finding import Finding, failed, ok
from outrider.edge.doctor.visit import PATIENT_S


async def resolve(at: Endpoint) -> Finding:
    """The addresses of its host."""
    if _is_address(at.host):
        return ok(f"{at.host} is an address, there is nothing to look up")
    began = time.monotonic()
    try:
        async with asyncio.timeout(PATIENT_S):
            found = await asyncio.get_running_loop().getaddrinfo(at.host, at.port, type=socket.SOCK_STREAM)
    except OSError as error:  # gaierror and TimeoutError among them
        why = error.strerror or f"no answer within {PATIENT_S:g} s"
        return failed(
            f"the name {at.host!r} is not known here: {why}",
            f"check the spelling in {at.option}; `getent hosts {at.host}` asks the same resolver",
        )
    seconds = time.monotonic() - began
    addresses = sorted({str(entry[4][0]) for entry in found})
    return ok(f"{at.host} is {', '.join(addresses)}", addresses=", ".join(addresses), seconds=seconds)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True

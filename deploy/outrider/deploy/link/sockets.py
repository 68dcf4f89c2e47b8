"""Sockets of the relay."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time

from outrider.proto.errors import ConfigError

_log = logging.getLogger(__name__)

_RECEIVE_BUFFER = 64 << 10  # small: what waits there is a queue that the link cannot see
_SO_TIMESTAMPNS = 35  # Linux; the socket module does not have it
_TIMESPEC = struct.Struct("@qq")
_MAX_LATE_S = 0.05  # an older kernel stamp is not believed: the wall clock may have been set
_ABORT = struct.pack("ii", 1, 0)  # struct linger: close() sends a reset


async def resolve(host: str, port: int, field: str) -> tuple[int, tuple[str, int]]:
    """Return family and address of a host; raises `ConfigError` on `field`."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"there is no host {host!r}: {error.strerror}", field=field) from error
    family, _, _, _, address = found[0]
    return family, (str(address[0]), int(address[1]))


def new_socket(family: int) -> socket.socket:
    """Return a TCP socket that is not connected."""
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
    return made


def prepare(end: socket.socket) -> None:
    """Turn off Nagle's algorithm and turn on receive stamps."""
    end.setblocking(False)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        end.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
    except OSError:
        _log.debug("no receive stamps here; a late wake-up of the relay counts as delay")


def receive(source: socket.socket, size: int) -> tuple[bytes, float]:
    """Return bytes and their age in seconds by the kernel's stamp, since the relay may have been woken late."""
    data, control, _, _ = source.recvmsg(size, socket.CMSG_SPACE(_TIMESPEC.size))
    for level, kind, value in control:
        if level == socket.SOL_SOCKET and kind == _SO_TIMESTAMPNS and len(value) == _TIMESPEC.size:
            seconds, nanoseconds = _TIMESPEC.unpack(value)
            age_s = (time.time_ns() - seconds * 1_000_000_000 - nanoseconds) / 1e9
            return data, age_s if 0 <= age_s <= _MAX_LATE_S else 0.0
    return data, 0.0


def abort(end: socket.socket) -> None:
    """Close with a reset."""
    try:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
    except OSError:
        _log.debug("the other end was faster")
    end.close()

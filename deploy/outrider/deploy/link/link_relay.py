"""The shell around two pipes: real TCP connections, moved through an emulated link.

All connections share the link like a cable. A new one costs a round trip before its first byte moves, like TCP's
handshake. Loss and congestion control are not emulated: TCP shows a loss as delay, which jitter, stalls
and traces bring, and a connection that has lived for a while has grown its window.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import selectors
import socket
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any

from outrider.deploy.link.connection import RelayedConnection, Timer, Way, abort
from outrider.deploy.link.link_traces import LinkTrace
from outrider.deploy.link.pipe import Pipe
from outrider.deploy.link.radio import Radio
from outrider.deploy.link.shape import LinkShape
from outrider.proto.address import is_loopback, split_address
from outrider.proto.errors import ConfigError, Unavailable

_log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 400  # two sockets each, and select() ends at 1,024
_PR_SET_TIMERSLACK = 29
_RECEIVE_BUFFER = 64 << 10  # small: what waits there is a queue that the link cannot see


def _tcp_socket(family: int) -> socket.socket:
    """Return a TCP socket of this machine that is not connected."""
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
    return made


@dataclass(frozen=True, slots=True)
class Counters:
    """TCP payload that the link has delivered since its start, in bytes, and accepted connections."""

    up_bytes: int
    down_bytes: int
    connections: int


class LinkRelay:
    """A listener that carries every connection over the link to one address.

    Args:
        to: `host:port` of the verifier.
        shape: initial shape.
        seed: seed of the jitter.
        radio: radio of the edge; None: it never sleeps.
    """

    def __init__(self, to: str, shape: LinkShape, seed: int = 0, radio: Radio | None = None) -> None:
        self._to = split_address(to, "to")
        self._shape = shape
        self._radio = radio
        self._next_point: asyncio.TimerHandle | None = None  # of a trace
        timer = Timer()
        self._up = Way(Pipe(shape.up, 2 * seed), timer, self._wake)
        self._down = Way(Pipe(shape.down, 2 * seed + 1), timer, self._wake)
        self._connections: set[RelayedConnection] = set()
        self._accepted = 0
        self._connecting: set[asyncio.Task[None]] = set()
        self._accepting: asyncio.Task[None] | None = None
        self._listener: socket.socket | None = None
        self._target: tuple[int, tuple[str, int]] = (socket.AF_INET, ("", 0))

    async def start(self, listen: str = "127.0.0.1:0") -> str:
        """Listen, and return the address as `host:port`.

        Raises:
            ConfigError: `listen` is not loopback, or `to` is no address.
            Unavailable: the port is taken.
        """
        host, port = split_address(listen, "listen")
        if not is_loopback(host):
            raise ConfigError(
                f"{listen!r} is not a loopback address; the link is for this machine only", field="listen"
            )
        family, address = await _resolve(host, port, "listen")
        listener = _tcp_socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            listener.close()
            raise Unavailable(f"cannot listen on {listen}: {error.strerror}", field="listen") from error
        bound = listener.getsockname()[1]
        self._listener = listener
        try:
            self._target = await _resolve(*self._to, "to")
        except ConfigError:
            listener.close()
            raise
        listener.listen(128)
        self._accepting = asyncio.get_running_loop().create_task(self._accept(listener))
        return f"[{host}]:{bound}" if family == socket.AF_INET6 else f"{host}:{bound}"

    async def stop(self) -> None:
        """Cut everything and listen no longer."""
        self._end_trace()
        if self._accepting is not None and self._listener is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
            self._listener.close()
        self.cut()
        if self._connecting:
            await asyncio.wait(self._connecting)

    @property
    def counters(self) -> Counters:
        """Payload and connections since the start."""
        return Counters(self._up.delivered_bytes, self._down.delivered_bytes, self._accepted)

    def set_shape(self, shape: LinkShape) -> None:
        """Change the link to `shape` and end a trace."""
        self._end_trace()
        self._apply(shape)

    def play(self, trace: LinkTrace) -> None:
        """Play round trip and rates of `trace` in a loop; jitter and queue stay."""
        self._end_trace()
        self._follow(trace, self._shape, asyncio.get_running_loop().time())

    def stall(self, seconds: float) -> None:
        """Hold the link for `seconds`."""
        self._up.stall(seconds)
        self._down.stall(seconds)

    def cut(self) -> None:
        """Abort all connections; what is under way is lost."""
        for task in self._connecting:
            task.cancel()
        for connection in tuple(self._connections):
            connection.abort()
        self._up.clear()
        self._down.clear()

    def _end_trace(self) -> None:
        if self._next_point is not None:
            self._next_point.cancel()
            self._next_point = None

    def _follow(self, trace: LinkTrace, like: LinkShape, began: float) -> None:
        loop = asyncio.get_running_loop()
        # A timer may be early by its resolution; half a millisecond later is surely after the point it was set for.
        passed = loop.time() - began + 0.0005
        self._apply(replace(trace.at(passed), jitter_s=like.jitter_s, queue_bytes=like.queue_bytes))
        self._next_point = loop.call_at(began + trace.next_time(passed), self._follow, trace, like, began)

    def _apply(self, shape: LinkShape) -> None:
        self._shape = shape
        self._up.reshape(shape.up)
        self._down.reshape(shape.down)

    def _wake(self, now: float) -> float:
        """Hold the link while its radio wakes for what comes at `now`; return for how many seconds."""
        waits_s = self._radio.use(now) if self._radio else 0.0
        if waits_s:
            self.stall(waits_s)
        return waits_s

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                edge, _ = await loop.sock_accept(listener)
            except OSError as error:  # such as no file descriptors left; existing connections go on
                _log.warning("cannot accept a connection: %s", error)
                await asyncio.sleep(0.1)
                continue
            if len(self._connections) + len(self._connecting) >= _MAX_CONNECTIONS:
                _log.warning("there are %d connections already; one more is refused", _MAX_CONNECTIONS)
                abort(edge)
                continue
            self._accepted += 1
            task = loop.create_task(self._connect(edge))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    async def _connect(self, edge: socket.socket) -> None:
        family, address = self._target
        verifier = _tcp_socket(family)
        try:
            # The kernel has answered the edge's SYN at once. Over a real link the answer takes a round trip.
            await asyncio.sleep(self._wake(time.monotonic()) + self._shape.rtt_s)
            await asyncio.get_running_loop().sock_connect(verifier, address)
        except (OSError, asyncio.CancelledError) as error:
            if isinstance(error, OSError):
                _log.warning("%s:%d does not answer: %s", *self._to, error.strerror)
            abort(edge)
            abort(verifier)
            return
        RelayedConnection(edge, verifier, self._up, self._down, self._connections)


async def _resolve(host: str, port: int, field: str) -> tuple[int, tuple[str, int]]:
    """Return family and address of a host; raises `ConfigError` on `field`."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"there is no host {host!r}: {error.strerror}", field=field) from error
    family, _, _, _, address = found[0]
    return family, (str(address[0]), int(address[1]))


def run_on_time(work: Coroutine[Any, Any, int]) -> int:
    """Run `work` like `asyncio.run`, with timers that are exact to some 20 microseconds.

    A relay needs it, alone in its process: whatever else the event loop does makes the link late. select() takes its
    timeout in microseconds, where epoll_wait() rounds up to the next millisecond; and the kernel by default adds 50
    microseconds of slack to each timer of a process.
    """
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:  # Linux; elsewhere timers are a little later
        prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)
    gc.freeze()  # what was imported is never garbage; collections then take microseconds
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        return runner.run(work)

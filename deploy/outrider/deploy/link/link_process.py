"""A link in a process of its own: the parent's side, and the process, which never outlives it."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from outrider.deploy.link.link_relay import Counters, LinkRelay, Radio, run_on_time
from outrider.deploy.link.link_traces import LinkTrace, TracePoint
from outrider.deploy.link.shape import LinkShape
from outrider.deploy.process.child import Child, answer_requests
from outrider.proto.errors import ConfigError


class LinkProcess(Child):
    """An emulated link, as an async context manager.

        async with LinkProcess(to="127.0.0.1:5000", shape=LinkShape.of(rtt_ms=50, up_mbit=10)) as link:
            ...  # connect to link.address instead

    The link keeps time while the event loop of this process is busy, and ends with this process.

    Args:
        to: `host:port` of the verifier, connected to when an edge connects.
        shape: initial shape.
        trace: trace to play from the start; only jitter and queue of `shape` count then.
        seed: seed of the jitter.
        listen: loopback address; port 0 takes a free one.
        radio_idle_s: silence after which the edge's radio sleeps, in seconds; None: never.
    """

    def __init__(
        self,
        to: str,
        shape: LinkShape = LinkShape(),  # noqa: B008 - frozen
        trace: LinkTrace | None = None,
        seed: int = 0,
        listen: str = "127.0.0.1:0",
        radio_idle_s: float | None = None,
    ) -> None:
        super().__init__("outrider.deploy.link.link_process", "the link")
        self.address = ""
        self._opening = {
            "to": to,
            "listen": listen,
            "shape": asdict(shape),
            "seed": seed,
            "radio_idle_s": radio_idle_s,
        }
        self._trace = trace

    async def prepare(self) -> None:
        """Open the relay and play the trace."""
        self.address = await self.ask(self._opening)
        if self._trace is not None:
            await self.play(self._trace)

    async def set_shape(self, shape: LinkShape) -> None:
        """Change the link to `shape` and end a trace."""
        await self.ask({"do": "set_shape", "shape": asdict(shape)})

    async def play(self, trace: LinkTrace) -> None:
        """Play round trip and rates of `trace` in a loop; jitter and queue stay."""
        await self.ask({"do": "play", "trace": asdict(trace)})

    async def stall(self, seconds: float) -> None:
        """Hold the link for `seconds`, beginning now; return at once."""
        if not 0 <= seconds < math.inf:
            raise ConfigError(f"{seconds} must be a finite number of seconds, 0 or more", field="seconds")
        await self.ask({"do": "stall", "seconds": seconds})

    async def cut(self) -> None:
        """Abort all connections; new ones are accepted."""
        await self.ask({"do": "cut"})

    async def counters(self) -> Counters:
        """Return what the link has carried."""
        return Counters(**await self.ask({"do": "counters"}))


async def _obey() -> int:
    """Carry out requests until standard input ends, the first of which opens the relay; return the exit status."""
    relay: LinkRelay | None = None

    async def answer(request: Mapping[str, Any]) -> Any:
        nonlocal relay
        if relay is not None:
            return _do(relay, request)
        seed, idle_s = request["seed"], request["radio_idle_s"]
        radio = None if idle_s is None else Radio(idle_s, seed)
        relay = LinkRelay(request["to"], LinkShape(**request["shape"]), seed, radio)
        return await relay.start(request["listen"])

    await answer_requests(answer)
    if relay is not None:
        await relay.stop()
    return 0


def _do(relay: LinkRelay, request: Mapping[str, Any]) -> Any:
    match request["do"]:
        case "set_shape":
            relay.set_shape(LinkShape(**request["shape"]))
        case "play":
            points = tuple(TracePoint(**point) for point in request["trace"]["points"])
            relay.play(LinkTrace(request["trace"]["name"], points))
        case "stall":
            relay.stall(request["seconds"])
        case "cut":
            relay.cut()
        case "counters":
            return asdict(relay.counters)
    return None


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, and its end is ours
    sys.exit(run_on_time(_obey()))

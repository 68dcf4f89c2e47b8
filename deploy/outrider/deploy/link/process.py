"""A link in a process of its own."""

from __future__ import annotations

import math
from dataclasses import asdict

from outrider.deploy.child import Child
from outrider.deploy.link.relay import Counters
from outrider.deploy.link.shape import LinkShape
from outrider.deploy.link.traces import LinkTrace
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
    """

    def __init__(
        self,
        to: str,
        shape: LinkShape = LinkShape(),  # noqa: B008 - frozen
        trace: LinkTrace | None = None,
        seed: int = 0,
        listen: str = "127.0.0.1:0",
    ) -> None:
        super().__init__("outrider.deploy.link", "the link")
        self.address = ""
        self._opening = {"to": to, "listen": listen, "shape": asdict(shape), "seed": seed}
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

"""A link in a process of its own."""

from __future__ import annotations

import math
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from outrider.deploy.child import Child
from outrider.deploy.link.control import trace_to_mapping
from outrider.deploy.link.relay import Counters
from outrider.deploy.link.shape import LinkShape
from outrider.deploy.link.traces import LinkTrace
from outrider.proto.errors import ConfigError, Unavailable

_GRACE_S = 5.0


class LinkProcess:
    """An emulated link, as an async context manager.

        async with LinkProcess(to="127.0.0.1:5000", shape=LinkShape.of(rtt_ms=50, up_mbit=10)) as link:
            ...  # connect to link.address instead

    The event loop of this process may be busy: the link runs in another. That one ends with this one.

    Args:
        to: `host:port` of the verifier; it is connected to when an edge connects.
        shape: at the start.
        trace: played from the start; then only jitter and queue of `shape` count.
        seed: of the jitter.
        listen: a loopback address; port 0 takes a free one.
    """

    def __init__(
        self,
        to: str,
        shape: LinkShape = LinkShape(),  # noqa: B008 - frozen
        trace: LinkTrace | None = None,
        seed: int = 0,
        listen: str = "127.0.0.1:0",
    ) -> None:
        self.address = ""
        self._opening = {"do": "open", "to": to, "listen": listen, "shape": asdict(shape), "seed": seed}
        self._trace = trace
        self._child = Child("outrider.deploy.link", "the link", _GRACE_S)

    async def __aenter__(self) -> Self:
        await self._child.start(self._open)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._child.end()

    async def _open(self) -> None:
        self.address = await self._ask(self._opening)
        if self._trace is not None:
            await self.play(self._trace)

    async def set_shape(self, shape: LinkShape) -> None:
        """The link is like `shape` from now on; a trace ends."""
        await self._ask({"do": "set_shape", "shape": asdict(shape)})

    async def play(self, trace: LinkTrace) -> None:
        """Round trip and rates follow `trace` from its beginning, again and again; jitter and queue stay."""
        await self._ask({"do": "play", "trace": trace_to_mapping(trace)})

    async def stall(self, seconds: float) -> None:
        """The link stands still for `seconds`, beginning now; returns at once."""
        if not 0 <= seconds < math.inf:
            raise ConfigError(f"{seconds} must be a finite number of seconds, 0 or more", field="seconds")
        await self._ask({"do": "stall", "seconds": seconds})

    async def cut(self) -> None:
        """Abort all connections; new ones are accepted."""
        await self._ask({"do": "cut"})

    async def counters(self) -> Counters:
        """What the link has carried so far."""
        return Counters(**await self._ask({"do": "counters"}))

    async def _ask(self, request: dict[str, Any]) -> Any:
        answer = await self._child.ask(request)
        if "error" in answer:
            kind = ConfigError if answer["kind"] == "ConfigError" else Unavailable
            raise kind(answer["error"], field=answer["field"])
        return answer["ok"]

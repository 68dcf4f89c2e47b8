"""The process that `LinkProcess` starts: a relay that takes requests from it, and never outlives it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from outrider.deploy.child import answer_requests
from outrider.deploy.link.relay import Relay, run_on_time
from outrider.deploy.link.shape import LinkShape
from outrider.deploy.link.traces import LinkTrace, TracePoint


async def _obey() -> int:
    """Carry out requests until standard input ends, the first of which opens the relay; return the exit status."""
    relay: Relay | None = None

    async def answer(request: Mapping[str, Any]) -> Any:
        nonlocal relay
        if relay is not None:
            return _do(relay, request)
        relay = Relay(request["to"], LinkShape(**request["shape"]), request["seed"])
        return await relay.start(request["listen"])

    await answer_requests(answer)
    if relay is not None:
        await relay.stop()
    return 0


def _do(relay: Relay, request: Mapping[str, Any]) -> Any:
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

"""The process that `LinkProcess` starts: a relay that takes commands on standard input.

One JSON object a line each way. A request is `{"do": NAME, ...}`; its answer is `{"ok": ...}`, or
`{"error": MESSAGE, "field": NAME, "kind": ERROR}`. The relay ends with its standard input, so that it never outlives
its parent.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from outrider.deploy.child import requests
from outrider.deploy.link.relay import Relay, run_on_time
from outrider.deploy.link.shape import LinkShape
from outrider.deploy.link.traces import LinkTrace, TracePoint
from outrider.proto.errors import OutriderError


async def _obey() -> int:
    """Carry out requests until standard input ends, and return the exit status."""
    lines = await requests()
    opening = json.loads(await lines.readline() or "null")
    if opening is None:
        return 0
    try:
        relay = Relay(opening["to"], LinkShape(**opening["shape"]), opening["seed"])
        _answer({"ok": await relay.start(opening["listen"])})
    except OutriderError as error:
        _refuse(error)
        return 1
    while line := await lines.readline():
        try:
            _answer({"ok": _do(relay, json.loads(line))})
        except OutriderError as error:
            _refuse(error)
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


def _refuse(error: OutriderError) -> None:
    _answer({"error": error.message, "field": error.field, "kind": type(error).__name__})


def _answer(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, and its end is ours
    sys.exit(run_on_time(_obey()))

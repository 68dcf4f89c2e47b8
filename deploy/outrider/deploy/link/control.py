"""A relay that takes commands on standard input: the child's half of `process.LinkProcess`.

One JSON object a line each way. A request is `{"do": NAME, ...}`; its answer is `{"ok": ...}`, or
`{"error": MESSAGE, "field": NAME, "kind": ERROR}`. The relay ends with its standard input, so that it
never outlives its parent.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, astuple
from typing import Any

from outrider.deploy.child import requests
from outrider.deploy.link.relay import Relay
from outrider.deploy.link.shape import LinkShape
from outrider.deploy.link.traces import LinkTrace, TracePoint
from outrider.proto.errors import OutriderError


def trace_to_mapping(trace: LinkTrace) -> dict[str, Any]:
    """Return a trace as JSON has it."""
    return {"name": trace.name, "points": [astuple(point) for point in trace.points]}


def trace_from_mapping(mapping: Mapping[str, Any]) -> LinkTrace:
    """Return the trace that `trace_to_mapping` was given."""
    return LinkTrace(mapping["name"], tuple(TracePoint(*point) for point in mapping["points"]))


async def obey() -> int:
    """Carry out requests of standard input until it ends, and return the exit status."""
    lines = await requests()
    opening = json.loads(await lines.readline() or "null")
    if opening is None:
        return 0
    try:
        relay = Relay(opening["to"], LinkShape.from_mapping(opening["shape"]), opening["seed"])
        _answer({"ok": await relay.start(opening["listen"])})
    except OutriderError as error:
        _answer(_refusal(error))
        return 1
    while line := await lines.readline():
        try:
            _answer({"ok": _do(relay, json.loads(line))})
        except OutriderError as error:
            _answer(_refusal(error))
    await relay.stop()
    return 0


def _do(relay: Relay, request: Mapping[str, Any]) -> Any:
    match request["do"]:
        case "set_shape":
            relay.set_shape(LinkShape.from_mapping(request["shape"]))
        case "play":
            relay.play(trace_from_mapping(request["trace"]))
        case "stall":
            relay.stall(request["seconds"])
        case "cut":
            relay.cut()
        case "counters":
            return asdict(relay.counters)
    return None


def _refusal(error: OutriderError) -> dict[str, str]:
    return {"error": error.message, "field": error.field, "kind": type(error).__name__}


def _answer(answer: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()

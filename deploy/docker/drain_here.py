#!/usr/bin/env python
"""Drain the verifier of this container before the container ends.

outrider-drain-here

Ray is asked, for which the container has the token; no coordinator needs to let its pods drain verifiers. Without a
verifier here the exit status is 0 too.
"""

from __future__ import annotations

import sys
from typing import Any

import ray
import ray.exceptions

from outrider.coordinator.ray_cluster import ACTOR_PREFIX, NAMESPACE, connect_ray, verifier_names
from outrider.proto.errors import OutriderError

ANSWER_S = 5.0
GRACE_S = 10.0  # for its sessions to move


def main() -> int:
    """Drain the verifiers of this node; return 1 where one does not answer, or Ray does not."""
    try:
        connect_ray("auto")
        return max((drained(name) for name in verifier_names()), default=0)
    except OutriderError as error:
        print(f"outrider-drain-here: {error}", file=sys.stderr)  # noqa: T201 - a command
        return 1


def drained(name: str) -> int:
    """Drain a verifier, if it is on this node; return 1 where it should be and does not answer."""
    try:
        actor = ray.get_actor(ACTOR_PREFIX + name, namespace=NAMESPACE)
        where: Any = ray.get(actor.cpu_s.remote(), timeout=ANSWER_S)
    except (ray.exceptions.RayError, ValueError):
        return 0  # it loads, or is gone: it has no sessions
    if where[0] != ray.get_runtime_context().get_node_id():
        return 0
    try:
        sessions = ray.get(actor.drain.remote(GRACE_S), timeout=GRACE_S + ANSWER_S)
    except ray.exceptions.RayError as error:
        print(f"outrider-drain-here: {name}: {error}", file=sys.stderr)  # noqa: T201 - a command
        return 1
    print(f"{name} drains; it had {sessions} sessions")  # noqa: T201 - a command
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""gRPC's health service, which anybody may call: checks are always answered, watchers are few."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

MAX_WATCHERS = 64


class BoundedHealth(health.aio.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    """A health service that refuses watchers beyond `MAX_WATCHERS`."""

    def __init__(self) -> None:
        super().__init__()
        self._watchers = 0

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: N802 - gRPC's name
        """Stream the changes of a service's health."""
        if self._watchers >= MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watch; use Check")
        self._watchers += 1
        try:
            await super().Watch(request, context)
        finally:
            self._watchers -= 1

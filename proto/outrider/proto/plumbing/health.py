"""gRPC's health service, which anybody may call: checks are always answered, watchers are few and hold nothing up."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

MAX_WATCHERS = 64


class BoundedHealth(health.aio.HealthServicer):  # type: ignore[misc]  # grpc_health has no types
    """A health service that refuses watchers beyond `MAX_WATCHERS`, and waits for none when a health changes."""

    def __init__(self) -> None:
        super().__init__()
        self._watchers = 0
        self._changed = asyncio.Event()

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: N802 - gRPC's name
        """Stream the changes of a service's health; a client that takes no answer holds this call alone."""
        if self._watchers >= MAX_WATCHERS:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many watch; use Check")
        self._watchers += 1
        said = None
        try:
            while True:
                changed = self._changed
                status = self._server_status.get(request.service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
                if status != said:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    said = status
                await changed.wait()
        finally:
            self._watchers -= 1

    async def _set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        self._server_status[service] = status
        self._changed.set()
        self._changed = asyncio.Event()

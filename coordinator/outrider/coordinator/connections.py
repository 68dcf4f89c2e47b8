"""Limits of a coordinator's connections, which cost nothing to open and a descriptor to keep."""

from __future__ import annotations

import resource

MAX_CONNECTIONS = 8192
SPARE_DESCRIPTORS = 256  # for files, for verifiers and for Ray
HANDSHAKE_S = 10.0  # for TLS and the first frame of HTTP/2
IDLE_S = 300.0  # without a call; an edge connects again with its next one, and most always watch for drafters


def connection_limits() -> dict[str, int]:
    """Return gRPC's options for a server that keeps some descriptors for itself.

    A connection beyond the limit is closed as soon as it is accepted.
    """
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = MAX_CONNECTIONS
    if descriptors != resource.RLIM_INFINITY:
        room = min(room, max(descriptors - SPARE_DESCRIPTORS, descriptors // 2))
    return {
        "grpc.max_allowed_incoming_connections": room,
        "grpc.server_handshake_timeout_ms": round(HANDSHAKE_S * 1000),
        "grpc.max_connection_idle_ms": round(IDLE_S * 1000),
    }

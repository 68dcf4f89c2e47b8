"""gRPC options that both ends must share: keepalive that the other side permits, and bounded messages."""

from __future__ import annotations

KEEPALIVE_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000
MOST_MESSAGE_BYTES = 8 * 1024 * 1024  # an Open with a prompt of a million tokens, and room

_LIMITS = [
    ("grpc.max_receive_message_length", MOST_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MOST_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

CLIENT_OPTIONS = [*_LIMITS, ("grpc.enable_retries", 0), ("grpc.max_reconnect_backoff_ms", 2_000)]

# A server refuses pings closer together than this ("too many pings"); half the client's interval leaves room.
SERVER_OPTIONS = [
    *_LIMITS,
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.so_reuseport", 0),
]

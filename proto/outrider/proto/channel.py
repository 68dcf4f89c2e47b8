"""Names and options of gRPC that both ends share: keepalive that the other side permits, and bounded messages."""

from __future__ import annotations

HEALTH_METHOD = "/grpc.health.v1.Health/Check"
REPORT_METHOD = "/outrider.Verifier/Report"  # asked by coordinators and edges that have a verifier's address alone
ENGINE_SERVICE = "outrider.Engine"  # of which a verifier says whether its engine is well, also while it drains
HEALTHY = b"\x08\x01"  # a HealthCheckResponse that says SERVING
LEASE_METADATA = "outrider-lease-bin"  # of a decoding call, which takes no place without it
KEEPALIVE_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000
MAX_MESSAGE_BYTES = 8 * 1024 * 1024  # an Open with a prompt of a million tokens, and room
_LIMITS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # gRPC waits a minute for the answer to a ping otherwise
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]

OWN_CONNECTION = ("grpc.use_local_subchannel_pool", 1)  # a new channel gets the old one and its backoff otherwise

CLIENT_OPTIONS = [
    *_LIMITS,
    ("grpc.enable_retries", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),  # then 1.6 times as long with each failure
    ("grpc.max_reconnect_backoff_ms", 2_000),
]

# A decoding stream is a trickle of small frames on an uplink that may be thin. gRPC would probe its bandwidth and top
# up two flow-control windows with every write, in as many bytes as the drafts themselves (measured: 17 + 26 with each
# message of 30). A stream window below the connection's initial 64 KiB leaves the connection's nothing to top up until
# it is used up (`edge.link.Channels` then reconnects); the stream's own is topped up by every write.
DECODING_WINDOW_BYTES = 16 * 1024
CONNECTION_WINDOW_BYTES = 65_535
DECODING_OPTIONS = [
    *CLIENT_OPTIONS,
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", DECODING_WINDOW_BYTES),
    OWN_CONNECTION,
]

# A server refuses pings closer than this ("too many pings"); half the client's interval leaves room.

SERVER_OPTIONS = [
    *_LIMITS,
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.so_reuseport", 0),
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 1024 * 1024),
]

"""Conversion between domain types and protobuf bytes, all of it.

Bytes from a stranger become a checked domain object or raise `InvalidArgument` that names the field.
"""

from __future__ import annotations

from outrider.proto.codec.control_codec import (
    CONTROL_SERVICE,
    decode_chunk,
    decode_drafter_query,
    decode_drafters,
    decode_drain,
    decode_drained,
    decode_fetch,
    decode_lease,
    decode_lease_request,
    decode_nothing,
    decode_report,
    decode_status,
    encode_chunk,
    encode_drafter_query,
    encode_drafters,
    encode_drain,
    encode_drained,
    encode_fetch,
    encode_lease,
    encode_lease_request,
    encode_nothing,
    encode_report,
    encode_status,
)
from outrider.proto.codec.decoding_codec import (
    DECODE_METHOD,
    DECODING_SERVICE,
    SMALL_FRAME_BYTES,
    decode_cloud_frame,
    decode_edge_frame,
    encode_cloud_frame,
    encode_edge_frame,
)

__all__ = [
    "CONTROL_SERVICE",
    "DECODE_METHOD",
    "DECODING_SERVICE",
    "SMALL_FRAME_BYTES",
    "decode_chunk",
    "decode_cloud_frame",
    "decode_drafter_query",
    "decode_drafters",
    "decode_drain",
    "decode_drained",
    "decode_edge_frame",
    "decode_fetch",
    "decode_lease",
    "decode_lease_request",
    "decode_nothing",
    "decode_report",
    "decode_status",
    "encode_chunk",
    "encode_cloud_frame",
    "encode_drafter_query",
    "encode_drafters",
    "encode_drain",
    "encode_drained",
    "encode_edge_frame",
    "encode_fetch",
    "encode_lease",
    "encode_lease_request",
    "encode_nothing",
    "encode_report",
    "encode_status",
]

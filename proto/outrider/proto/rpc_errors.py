"""The only translation of the error tree to and from gRPC."""

from __future__ import annotations

import grpc
from google.protobuf.message import DecodeError

from outrider.proto.errors import Internal, OutriderError, bounded_retry_s
from outrider.proto.v1 import decoding_pb2 as pb

DETAIL_KEY = "outrider-error-bin"


def _leaves_first(error_type: type[OutriderError]) -> list[type[OutriderError]]:
    found: list[type[OutriderError]] = []
    for sub in error_type.__subclasses__():
        found.extend(_leaves_first(sub))
    return [*found, error_type]


# The broadest error of each status code, for answers without our detail.
_BY_STATUS = {kind.status: kind for kind in _leaves_first(OutriderError)} | {Internal.status: Internal}


def to_status(error: OutriderError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """Return the status code, message and trailing metadata that carry `error` over gRPC."""
    detail = pb.ErrorDetail(
        kind=type(error).__name__, message=error.message, field=error.field, retry_after_s=error.retry_after_s
    )
    return grpc.StatusCode[error.status], str(error), ((DETAIL_KEY, detail.SerializeToString()),)


def _detail(value: bytes) -> pb.ErrorDetail | None:
    try:
        result: pb.ErrorDetail = pb.ErrorDetail.FromString(value)
        return result
    except DecodeError:
        return None  # a proxy has changed it; the status still tells the kind


def from_rpc_error(rpc_error: grpc.RpcError) -> OutriderError:
    """Return the error that a failed call stands for; without our detail the status code decides."""
    code = rpc_error.code()
    by_status = _BY_STATUS.get(code.name, Internal)
    for key, value in rpc_error.trailing_metadata() or ():
        if key == DETAIL_KEY and (detail := _detail(value)) is not None:
            kinds = {kind.__name__: kind for kind in _leaves_first(OutriderError)}
            kind = kinds.get(detail.kind, by_status)
            return kind(detail.message, field=detail.field, retry_after_s=bounded_retry_s(detail.retry_after_s))
    other = "OUT-107" if code is grpc.StatusCode.UNIMPLEMENTED else ""  # a server without this service
    return by_status(rpc_error.details() or code.name.lower().replace("_", " "), code=other)

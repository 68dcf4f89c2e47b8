"""The error tree, and its only translation to and from gRPC status.

Every error that reaches a user is one of these. Its message says what is wrong and how to mend it; `field` names
the part of the request at fault; `retry_after_s` is set where the same request may succeed later.
"""

from __future__ import annotations

from typing import ClassVar

import grpc
from google.protobuf.message import DecodeError

from outrider.proto.v1 import decoding_pb2 as pb

DETAIL_KEY = "outrider-error-bin"


class OutriderError(Exception):
    """Anything that Outrider refuses or that failed in it."""

    status: ClassVar[grpc.StatusCode] = grpc.StatusCode.INTERNAL

    def __init__(self, message: str, *, field: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class InvalidArgument(OutriderError, ValueError):
    """The request is malformed, whatever the state of the system."""

    status = grpc.StatusCode.INVALID_ARGUMENT


class PromptTooLong(InvalidArgument):
    """The prompt leaves no room for one token in the target's context."""


class UnknownToken(InvalidArgument):
    """A token id that the target's vocabulary does not have."""


class ConfigError(InvalidArgument):
    """An option, a config-file key or an environment variable is wrong."""


class FailedPrecondition(OutriderError):
    """The request would be right elsewhere."""

    status = grpc.StatusCode.FAILED_PRECONDITION


class TokenizerMismatch(FailedPrecondition):
    """Edge and target do not share a tokenizer."""


class ModelRefused(FailedPrecondition):
    """A model that cannot be loaded, exported or trusted as it is."""


class UnsupportedProtocol(FailedPrecondition):
    """The two ends speak different versions of the contract."""


class Unauthenticated(OutriderError):
    """The lease or the API key is missing, forged, or for somebody else."""

    status = grpc.StatusCode.UNAUTHENTICATED


class LeaseExpired(Unauthenticated):
    """The lease was right, but is too old: ask for a new one."""


class PermissionDenied(OutriderError):
    """Whoever asks is known, and may not do this."""

    status = grpc.StatusCode.PERMISSION_DENIED


class NotFound(OutriderError):
    """No such model, drafter, verifier or file."""

    status = grpc.StatusCode.NOT_FOUND


class ResourceExhausted(OutriderError):
    """Too many sessions, no KV memory left, or more drafts than the credit allows."""

    status = grpc.StatusCode.RESOURCE_EXHAUSTED


class Unavailable(OutriderError):
    """Nobody answers just now: the other side is down, draining or restarting."""

    status = grpc.StatusCode.UNAVAILABLE


class DeadlineExceeded(OutriderError):
    """The time that the caller allowed is over."""

    status = grpc.StatusCode.DEADLINE_EXCEEDED


class Cancelled(OutriderError):
    """The caller gave up."""

    status = grpc.StatusCode.CANCELLED


class DataLoss(OutriderError):
    """Content does not have the hash that was promised."""

    status = grpc.StatusCode.DATA_LOSS


class Internal(OutriderError):
    """A defect of Outrider itself."""


def _leaves_first(error_type: type[OutriderError]) -> list[type[OutriderError]]:
    found: list[type[OutriderError]] = []
    for sub in error_type.__subclasses__():
        found.extend(_leaves_first(sub))
    return [*found, error_type]


# What a client that knows only the status code makes of it: the broadest error with that code.
_BY_STATUS = {kind.status: kind for kind in _leaves_first(OutriderError)} | {grpc.StatusCode.INTERNAL: Internal}


def to_status(error: OutriderError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """The status code, message and trailing metadata that carry `error` over gRPC."""
    detail = pb.ErrorDetail(
        kind=type(error).__name__, message=error.message, field=error.field, retry_after_s=error.retry_after_s
    )
    return error.status, str(error), ((DETAIL_KEY, detail.SerializeToString()),)


def _detail(value: bytes) -> pb.ErrorDetail | None:
    try:
        return pb.ErrorDetail.FromString(value)
    except DecodeError:
        return None  # somebody between us and the server has touched it; the status still tells the kind


def from_rpc_error(rpc_error: grpc.RpcError) -> OutriderError:
    """The error of this tree that a failed call stands for; statuses from elsewhere map by their code."""
    code = rpc_error.code()
    for key, value in rpc_error.trailing_metadata() or ():
        if key == DETAIL_KEY and (detail := _detail(value)) is not None:
            kinds = {kind.__name__: kind for kind in _leaves_first(OutriderError)}
            kind = kinds.get(detail.kind, _BY_STATUS.get(code, Internal))
            return kind(detail.message, field=detail.field, retry_after_s=detail.retry_after_s)
    message = rpc_error.details() or code.name.lower().replace("_", " ")
    return _BY_STATUS.get(code, Internal)(message)

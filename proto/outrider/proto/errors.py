"""The error tree.

Every error that reaches a user is one of these. Its message says what is wrong and how to mend it; `field` names
the part of the request at fault; `retry_after_s` is set where the same request may succeed later. `status` is the name
of the gRPC status that carries it; `outrider.proto.rpc_errors` translates.
"""

from __future__ import annotations

from typing import ClassVar


class OutriderError(Exception):
    """Anything that Outrider refuses or that failed in it."""

    status: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, field: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


class InvalidArgument(OutriderError, ValueError):
    """The request is malformed, whatever the state of the system."""

    status = "INVALID_ARGUMENT"


class PromptTooLong(InvalidArgument):
    """The prompt leaves no room for one token in the target's context."""


class UnknownToken(InvalidArgument):
    """A token id that the target's vocabulary does not have."""


class ConfigError(InvalidArgument):
    """An option, a config-file key or an environment variable is wrong."""


class FailedPrecondition(OutriderError):
    """The request would be right elsewhere."""

    status = "FAILED_PRECONDITION"


class TokenizerMismatch(FailedPrecondition):
    """Edge and target do not share a tokenizer."""


class ModelRefused(FailedPrecondition):
    """A model that cannot be loaded, exported or trusted as it is."""


class UnsupportedProtocol(FailedPrecondition):
    """The two ends speak different versions of the contract."""


class Unauthenticated(OutriderError):
    """The lease or the API key is missing, forged, or for somebody else."""

    status = "UNAUTHENTICATED"


class LeaseExpired(Unauthenticated):
    """The lease was right, but is too old: ask for a new one."""


class PermissionDenied(OutriderError):
    """Whoever asks is known, and may not do this."""

    status = "PERMISSION_DENIED"


class NotFound(OutriderError):
    """No such model, drafter, verifier or file."""

    status = "NOT_FOUND"


class ResourceExhausted(OutriderError):
    """Too many sessions, no KV memory left, or more drafts than the credit allows."""

    status = "RESOURCE_EXHAUSTED"


class Unavailable(OutriderError):
    """Nobody answers just now: the other side is down, draining or restarting."""

    status = "UNAVAILABLE"


class DeadlineExceeded(OutriderError):
    """The time that the caller allowed is over."""

    status = "DEADLINE_EXCEEDED"


class Cancelled(OutriderError):
    """The caller gave up."""

    status = "CANCELLED"


class DataLoss(OutriderError):
    """Content does not have the hash that was promised."""

    status = "DATA_LOSS"


class Internal(OutriderError):
    """A defect of Outrider itself."""

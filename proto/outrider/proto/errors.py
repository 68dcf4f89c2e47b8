"""The error tree.

Every error that reaches a user is one of these. Its message says what is wrong and how to mend it; `field` names the
part of the request at fault; `retry_after_s` is set if the same request may succeed later. `status` names the gRPC
status that carries it; `outrider.proto.rpc_errors` translates. Where somebody must act, the message ends with a code of
`outrider.proto.error_codes`: its own, or the usual one of its kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from outrider.proto.error_codes import code_in, coded

MAX_RETRY_AFTER_S = 3600.0


class OutriderError(Exception):
    """Anything that Outrider refuses or that fails in it."""

    status: ClassVar[str] = "INTERNAL"
    usual_code: ClassVar[str] = ""

    def __init__(self, message: str, *, field: str = "", retry_after_s: float = 0.0, code: str = "") -> None:
        message = coded(code or self.usual_code, message)
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message

    @property
    def code(self) -> str:
        """Stable code, `OUT-…`, for programs and `outrider explain`; empty: the message says it all."""
        return code_in(self.message)


def bounded_retry_s(seconds: float) -> float:
    """Return another machine's time to wait as far as it can be taken for one: 0 to an hour; NaN is 0."""
    return min(seconds, MAX_RETRY_AFTER_S) if seconds > 0 else 0.0


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the end of an error about an unknown word: `; did you mean NAME?`, or nothing where none is near."""
    import difflib  # here, since most words are known

    near = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {near[0]}?" if near else ""


class InvalidArgument(OutriderError, ValueError):
    """The request is malformed, whatever the state of the system."""

    status = "INVALID_ARGUMENT"


class PromptTooLong(InvalidArgument):
    """The prompt leaves no room for one token in the target's context."""

    usual_code = "OUT-304"


class UnknownToken(InvalidArgument):
    """The target's vocabulary does not have a token id."""


class ConfigError(InvalidArgument):
    """An option, a config-file key or an environment variable is wrong."""


class FailedPrecondition(OutriderError):
    """The request would be right elsewhere."""

    status = "FAILED_PRECONDITION"


class TokenizerMismatch(FailedPrecondition):
    """Edge and target do not share a tokenizer."""

    usual_code = "OUT-406"


class ModelRefused(FailedPrecondition):
    """A model cannot be loaded, exported or trusted as it is."""

    usual_code = "OUT-403"


class Fenced(FailedPrecondition):
    """The session goes on in a later stream, or the verifier in a later process."""


class UnsupportedProtocol(FailedPrecondition):
    """The two ends speak different versions of the contract."""

    usual_code = "OUT-108"


class Unauthenticated(OutriderError):
    """The lease or the API key is missing, forged, or for somebody else."""

    status = "UNAUTHENTICATED"


class LeaseExpired(Unauthenticated):
    """The lease is genuine but too old; ask for a new one."""

    usual_code = "OUT-204"


class PermissionDenied(OutriderError):
    """The caller is known, and may not do this."""

    status = "PERMISSION_DENIED"
    usual_code = "OUT-202"


class NotFound(OutriderError):
    """There is no such model, drafter, verifier or file."""

    status = "NOT_FOUND"


class ResourceExhausted(OutriderError):
    """There are too many sessions, no KV memory is left, or drafts exceed the credit."""

    status = "RESOURCE_EXHAUSTED"


class Unavailable(OutriderError):
    """The other side is down, draining or restarting."""

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
    usual_code = "OUT-405"


class Internal(OutriderError):
    """Outrider itself has a defect."""

    usual_code = "OUT-901"

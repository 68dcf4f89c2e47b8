"""A caller's request, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.proto.errors import InvalidArgument
from outrider.proto.types import MAX_TOP_LOGPROBS, NumberRange, Sampling, ServiceGoal, require, require_text

_TOP_LOGPROBS = NumberRange(0, MAX_TOP_LOGPROBS)
ServiceLike = ServiceGoal | str | Mapping[str, float] | None


def checked_sampling(sampling: Sampling, overrides: dict[str, Any]) -> Sampling:
    """Return `sampling` with single fields replaced.

    Raises:
        InvalidArgument: there is no such field, or a value is not allowed.
    """
    unknown = set(overrides) - set(Sampling.__dataclass_fields__)
    if unknown:
        raise InvalidArgument(f"has no {', '.join(sorted(unknown))}", field="sampling")
    return replace(sampling, **overrides)


def checked_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Return stop strings as a tuple, a single one too.

    Raises:
        InvalidArgument: one is empty, or no text.
    """
    texts = tuple(stop) if isinstance(stop, Iterable) and not isinstance(stop, str) else (stop,)
    for text in texts:
        require_text(text, "stop")
        require(bool(text), "stop", "holds an empty string, which would stop any text")
    return texts


def checked_service(service: ServiceLike) -> ServiceGoal | None:
    """Return a caller's service; raises `InvalidArgument` where it is none."""
    return None if service is None else ServiceGoal.parse(service)


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whom a text is for, where a client decodes for several.

    Attributes:
        isolation: mark of the tenant, as `Open.isolation`; empty: its texts share what was computed with all here.
        learning: whether its texts may be shared, kept and learned from, where the client's config says so too.
    """

    isolation: bytes = b""
    learning: bool = True


ANYBODY = Tenant()


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """A caller's id, and its request for probabilities and a service; see `Client.generate`.

    Raises:
        InvalidArgument: `top_logprobs` without log probabilities, or a value that is out of its range or no number.
    """

    logprobs: bool | None = None
    top_logprobs: int = 0
    request_id: str = ""
    prompt_logprobs: int | None = None
    tenant: Tenant = ANYBODY
    service: ServiceGoal | None = None

    def __post_init__(self) -> None:
        require_text(self.request_id, "request_id")
        message = f"must be a whole number in {_TOP_LOGPROBS}"
        require(_TOP_LOGPROBS.allows(self.top_logprobs), "top_logprobs", message)
        of_prompt = 0 if self.prompt_logprobs is None else self.prompt_logprobs
        require(_TOP_LOGPROBS.allows(of_prompt), "prompt_logprobs", message)
        require(self.logprobs is not False or not self.top_logprobs, "top_logprobs", "needs logprobs; leave them on")

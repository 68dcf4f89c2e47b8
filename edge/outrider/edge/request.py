"""A caller's request, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.proto.errors import InvalidArgument
from outrider.proto.types import MAX_TOP_LOGPROBS, Open, Sampling


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
        InvalidArgument: one is empty.
    """
    if isinstance(stop, str):
        stop = (stop,)
    if any(not text for text in stop):
        raise InvalidArgument("holds an empty string, which would stop any text", field="stop")
    return tuple(stop)


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """A caller's id, and its request for probabilities; see `Client.generate`.

    Raises:
        InvalidArgument: `top_logprobs` without log probabilities, or more for the prompt than there are.
    """

    logprobs: bool | None = None
    top_logprobs: int = 0
    request_id: str = ""
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        if self.logprobs is False and self.top_logprobs:
            raise InvalidArgument("needs logprobs; leave them on", field="top_logprobs")
        if not 0 <= (self.prompt_logprobs or 0) <= MAX_TOP_LOGPROBS:
            raise InvalidArgument(f"must be in 0..{MAX_TOP_LOGPROBS}", field="prompt_logprobs")

    def applied_to(self, frame: Open) -> Open:
        """Return the frame that opens the session so."""
        return replace(
            frame,
            session=f"{self.request_id[:47]}-{frame.session[:16]}" if self.request_id else frame.session,
            logp=frame.logp and self.logprobs is not False,
            logprobs=bool(self.logprobs) or self.top_logprobs > 0,
            top_logprobs=self.top_logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )

"""A caller's request, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outrider.proto.errors import InvalidArgument
from outrider.proto.types import Open, Sampling


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


def request_probabilities(frame: Open, logprobs: bool | None, top_logprobs: int) -> Open:
    """Return the Open with its request for probabilities."""
    if logprobs is False and top_logprobs:
        raise InvalidArgument("needs logprobs; leave them on", field="top_logprobs")
    wanted = bool(logprobs) or top_logprobs > 0
    return replace(frame, logp=frame.logp and logprobs is not False, logprobs=wanted, top_logprobs=top_logprobs)

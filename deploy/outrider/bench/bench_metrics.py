"""Metrics of many texts together, measured or replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from outrider.proto.session import EdgeStatistics

EntryT = TypeVar("EntryT")
KeyT = TypeVar("KeyT", bound=Hashable)


class Decoded(Protocol):
    """A decoded text.

    Attributes:
        arrivals: [n] seconds from the request to each token.
        seconds: time from the request to the end.
        statistics: target steps and right drafts.
    """

    @property
    def arrivals(self) -> Sequence[float]: ...

    @property
    def seconds(self) -> float: ...

    @property
    def statistics(self) -> EdgeStatistics: ...


def grouped(entries: Iterable[EntryT], key: Callable[[EntryT], KeyT]) -> dict[KeyT, list[EntryT]]:
    """Group entries by a key, both in order of appearance."""
    found: dict[KeyT, list[EntryT]] = {}
    for entry in entries:
        found.setdefault(key(entry), []).append(entry)
    return found


def pooled(texts: Sequence[Decoded], seconds: float | None = None) -> dict[str, Any]:
    """Return tokens, seconds, tokens a second, steps a token and acceptance of all texts together.

    Acceptance is the chance that a draft is right, given those before it in its chain; None: none was compared.

    Args:
        texts: one text or more.
        seconds: time that they took together; None: one after the other.
    """
    tokens = sum(len(text.arrivals) for text in texts)
    seconds = sum(text.seconds for text in texts) if seconds is None else seconds
    compared = sum(text.statistics.compared for text in texts)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "steps_per_token": sum(text.statistics.steps for text in texts) / tokens,
        "acceptance": sum(text.statistics.hits for text in texts) / compared if compared else None,
    }

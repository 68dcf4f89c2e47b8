"""Metrics of many texts together, measured or replayed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from statistics import median
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


def work_per_token(texts: Sequence[Decoded]) -> dict[str, Any]:
    """Return rows of steps, and ms of drafting at the verifier and at the edge, each a committed token."""
    tokens = sum(len(text.arrivals) for text in texts)
    counts = [text.statistics for text in texts]
    return {
        "rows_per_token": sum(count.steps + count.verified for count in counts) / tokens,
        "cloud_drafting_ms_per_token": 1e3 * sum(count.drafting_here_s for count in counts) / tokens,
        "edge_drafting_ms_per_token": 1e3 * sum(count.drafting_s + count.reading_s for count in counts) / tokens,
    }


def latencies(texts: Sequence[Decoded]) -> dict[str, Any]:
    """Return the median time to the first token, and [101] quantiles of the gaps between tokens, all in ms."""
    gaps = sorted(b - a for text in texts for a, b in itertools.pairwise(text.arrivals)) or [0.0]
    gaps_ms = tuple(1e3 * gaps[round(q / 100 * (len(gaps) - 1))] for q in range(101))
    return {
        "ttft_ms_p50": median(text.arrivals[0] for text in texts) * 1e3,
        "token_gap_ms_p50": gaps_ms[50],
        "token_gap_ms_p99": gaps_ms[99],
        "token_gaps_ms": gaps_ms,
    }

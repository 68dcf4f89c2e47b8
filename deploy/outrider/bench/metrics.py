"""Metrics of many texts together: measured, replayed, or by transformers; and their confidence intervals."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from statistics import median
from typing import Any, Protocol, TypeVar

import numpy as np
from pydantic.dataclasses import dataclass

from outrider.bench.record import RECORD
from outrider.bench.replay.traced import ReplayOutcome
from outrider.proto.session import EdgeStatistics

RESAMPLES = 2000

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
    def arrivals(self) -> Sequence[float]: ...  # noqa: D102 - above

    @property
    def seconds(self) -> float: ...  # noqa: D102

    @property
    def statistics(self) -> EdgeStatistics: ...  # noqa: D102


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


def bytes_per_token(outcomes: Sequence[ReplayOutcome]) -> dict[str, Any]:
    """Return the bytes a token on a replayed link, both ways."""
    tokens = sum(len(outcome.arrivals) for outcome in outcomes)
    return {
        "uplink_bytes_per_token": sum(outcome.uplink_bytes for outcome in outcomes) / tokens,
        "downlink_bytes_per_token": sum(outcome.downlink_bytes for outcome in outcomes) / tokens,
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


@dataclass(frozen=True, slots=True, config=RECORD)
class Interval:
    """The 95 % confidence interval of a metric."""

    low: float
    high: float


class Bootstrap:
    """Resamples of prompts, drawn within each domain and shared by all drafters, so that comparisons are paired.

    Intervals are by percentiles (Efron and Tibshirani 1993, chapters 8 and 13).
    """

    def __init__(self, domains: Sequence[str], *, seed: int, resamples: int = RESAMPLES) -> None:
        """Draw the resamples; `domains`: [n] domain of each prompt."""
        rng = np.random.default_rng(seed)
        self._domains = np.array(domains)
        self._drawn = np.zeros((resamples, len(domains)))  # times that each prompt is in each resample
        self._too_few = set[str]()
        for domain in dict.fromkeys(domains):
            columns = np.flatnonzero(self._domains == domain)
            share = np.full(len(columns), 1 / len(columns))
            self._drawn[:, columns] = rng.multinomial(len(columns), share, size=resamples)
            if len(columns) < 2:
                self._too_few.add(domain)

    def within(self, domain: str | None) -> np.ndarray:
        """Return [n] whether each prompt belongs to `domain`; None: all do."""
        return np.ones(len(self._domains), dtype=bool) if domain is None else self._domains == domain

    def sums(self, values: np.ndarray, domain: str | None = None) -> np.ndarray:
        """Return [resamples] sums of `values` [n] over the drawn prompts of `domain`; None: over all."""
        columns = self.within(domain)
        sums: np.ndarray = self._drawn[:, columns] @ values[columns]
        return sums

    def interval(self, resampled: np.ndarray, domain: str | None = None) -> Interval | None:
        """Return the interval of `resampled` [resamples]; None where a domain has one prompt: no two differ."""
        if self._too_few if domain is None else domain in self._too_few:
            return None
        low, high = np.percentile(resampled, (2.5, 97.5)).tolist()
        return Interval(low, high)

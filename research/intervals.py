"""Bytes of replayed texts, and confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic.dataclasses import dataclass

from outrider.bench.record import RECORD
from research.replay.traced import ReplayOutcome

RESAMPLES = 2000


def bytes_per_token(outcomes: Sequence[ReplayOutcome]) -> dict[str, Any]:
    """Return the bytes a token on a replayed link, both ways."""
    tokens = sum(len(outcome.arrivals) for outcome in outcomes)
    return {
        "uplink_bytes_per_token": sum(outcome.uplink_bytes for outcome in outcomes) / tokens,
        "downlink_bytes_per_token": sum(outcome.downlink_bytes for outcome in outcomes) / tokens,
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

"""Confidence intervals by resampling of the prompts (Efron and Tibshirani 1993, chapters 8 and 13: percentiles)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic.dataclasses import dataclass

from outrider.bench.record import RECORD

RESAMPLES = 2000
PERCENT = 95.0


@dataclass(frozen=True, slots=True, config=RECORD)
class Interval:
    """The 95 % confidence interval of a metric."""

    low: float
    high: float


class Bootstrap:
    """Resamples of prompts, drawn within each domain and shared by all drafters, so that comparisons are paired."""

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

    def sums(self, values: np.ndarray, domain: str | None = None) -> np.ndarray:
        """Return [resamples] sums of `values` [n] over the prompts drawn of `domain`; None: of all."""
        columns = np.ones(len(values), dtype=bool) if domain is None else self._domains == domain
        sums: np.ndarray = self._drawn[:, columns] @ values[columns]
        return sums

    def interval(self, resampled: np.ndarray, domain: str | None = None) -> Interval | None:
        """Return the interval of `resampled` [resamples]; None where a domain has one prompt: no two differ."""
        if self._too_few if domain is None else domain in self._too_few:
            return None
        rest = (100 - PERCENT) / 2
        low, high = np.percentile(resampled, (rest, 100 - rest))
        return Interval(float(low), float(high))

"""From the rounds of many texts to block efficiencies, ratios and their confidence intervals."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.bench.comparison.record import Ratio, TextRecord, Variant, VariantResult
from outrider.bench.comparison.rounds import Rounds
from outrider.bench.metrics import Bootstrap
from outrider.cloud.text_writer import WrittenText


@dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """The texts [n] of one temperature, and the rounds [n] of each variant through them."""

    temperature: float
    texts: Sequence[WrittenText]
    rounds: Mapping[Variant, Sequence[Rounds]]


class Summary:
    """Pooled results of one trial: all tokens over all steps, so that a long text counts for more."""

    def __init__(self, trial: Trial, *, seed: int) -> None:
        """Sum up `trial`; `seed` is that of the resampling."""
        self._trial = trial
        domain_of = [text.request.domain for text in trial.texts]
        self._bootstrap = Bootstrap(domain_of, seed=seed)
        self._tokens = np.array([len(text) for text in trial.texts])
        self._steps = {variant: np.array([r.steps for r in rounds]) for variant, rounds in trial.rounds.items()}
        self._domains = tuple(dict.fromkeys(domain_of))

    @property
    def _scopes(self) -> tuple[str | None, ...]:
        """Domains where there are several, and None: all prompts together."""
        return (*self._domains, None) if len(self._domains) > 1 else (None,)

    def results(self) -> list[VariantResult]:
        """Return the result of every variant, by domain."""
        return [self._result(domain, variant) for domain in self._scopes for variant in self._steps]

    def ratios(self, variant: Variant, others: Sequence[Variant]) -> list[Ratio]:
        """Return the ratios of `variant` to each of `others`, by domain."""
        return [self._ratio(domain, variant, other) for domain in self._scopes for other in others]

    def mean_ratios(self, variant: Variant, others: Sequence[Variant]) -> list[Ratio]:
        """Return the means of the domains' ratios; none where there is one domain."""
        return [self._mean_ratio(variant, other) for other in others] if len(self._domains) > 1 else []

    def texts(self) -> list[TextRecord]:
        """Return the texts behind the results."""
        return [
            TextRecord(
                self._trial.temperature,
                text.request.id,
                text.request.domain,
                text.prompt_length,
                len(text),
                tuple(int(steps[i]) for steps in self._steps.values()),
            )
            for i, text in enumerate(self._trial.texts)
        ]

    def _result(self, domain: str | None, variant: Variant) -> VariantResult:
        rounds = list(itertools.compress(self._trial.rounds[variant], self._bootstrap.within(domain)))
        compared = sum(r.compared for r in rounds)
        return VariantResult(
            temperature=self._trial.temperature,
            domain=domain,
            variant=variant,
            texts=len(rounds),
            tokens=sum(r.tokens for r in rounds),
            steps=sum(r.steps for r in rounds),
            block_efficiency=self._efficiency(domain, variant),
            interval=self._bootstrap.interval(self._resampled(domain, variant), domain),
            acceptance=sum(r.accepted for r in rounds) / compared if compared else None,
            first_ms=_median_ms([seconds for r in rounds for seconds in r.first_s]),
            next_ms=_median_ms([seconds for r in rounds for seconds in r.next_s]),
        )

    def _ratio(self, domain: str | None, variant: Variant, other: Variant) -> Ratio:
        interval = self._bootstrap.interval(self._resampled_ratio(domain, variant, other), domain)
        ratio = self._efficiency(domain, variant) / self._efficiency(domain, other)
        return Ratio(self._trial.temperature, domain, variant, other, ratio, interval)

    def _mean_ratio(self, variant: Variant, other: Variant) -> Ratio:
        ratios = [self._efficiency(domain, variant) / self._efficiency(domain, other) for domain in self._domains]
        resampled = [self._resampled_ratio(domain, variant, other) for domain in self._domains]
        interval = self._bootstrap.interval(np.mean(resampled, axis=0))
        return Ratio(self._trial.temperature, None, variant, other, float(np.mean(ratios)), interval)

    def _efficiency(self, domain: str | None, variant: Variant) -> float:
        here = self._bootstrap.within(domain)
        return float(self._tokens[here].sum() / self._steps[variant][here].sum())

    def _resampled(self, domain: str | None, variant: Variant) -> np.ndarray:
        """Return [resamples] block efficiencies."""
        tokens, steps = self._bootstrap.sums(self._tokens, domain), self._bootstrap.sums(self._steps[variant], domain)
        efficiencies: np.ndarray = tokens / steps
        return efficiencies

    def _resampled_ratio(self, domain: str | None, variant: Variant, other: Variant) -> np.ndarray:
        ratios: np.ndarray = self._resampled(domain, variant) / self._resampled(domain, other)
        return ratios


def _median_ms(seconds: Sequence[float]) -> float | None:
    return 1e3 * float(np.median(seconds)) if seconds else None

"""The record of `outrider learn-bench`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic.dataclasses import dataclass

from outrider.bench.record import RECORD, Count, Metric


@dataclass(frozen=True, slots=True, config=RECORD)
class HitShares:
    """Shares of a drafter's proposals that are the target's tokens, or errors of such, in texts at T = 0 and T = 1."""

    greedy: Metric
    sampled: Metric


@dataclass(frozen=True, slots=True, config=RECORD)
class LearningRun:
    """One arm on the stream, with one seed.

    Attributes:
        stream: domain that it learned.
        start: "warm" or "cold".
        rehearsed: share of a batch that is of other domains' texts.
        before, after: on fresh texts of the stream's domain, before and after.
        error: standard error of the change, over texts.
        kept_before, kept_after, kept_errors: the same on texts of other domains, by name.
        curve: (tokens served, share of hits on texts that were not learned from yet), as the stream went.
        exponent: b of the cumulative regret to the last drafter, which is fitted as t^b; None: there was no gain.
        half_gain_tokens: tokens served until half the gain was there; None: there was no gain.
        cpu_s: processor time of training.
    """

    stream: str
    arm: str
    start: str
    seed: Count
    rehearsed: Metric
    tokens: Count
    steps: Count
    before: HitShares
    after: HitShares
    error: HitShares
    kept_before: Mapping[str, HitShares]
    kept_after: Mapping[str, HitShares]
    kept_errors: Mapping[str, HitShares]
    curve: Sequence[tuple[Count, Metric]]
    exponent: float | None
    half_gain_tokens: Count | None
    cpu_s: Metric


@dataclass(frozen=True, slots=True, config=RECORD)
class LearningRuns:
    """All runs of a command."""

    command: str
    target: str
    drafter: str
    runs: tuple[LearningRun, ...]

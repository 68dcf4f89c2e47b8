"""Metrics of many texts together: measured, replayed, or by transformers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import median
from typing import Any, Protocol

from outrider.bench.replay.traced import Outcome
from outrider.proto.session import EdgeStatistics


class Decoded(Protocol):
    """A decoded text.

    Attributes:
        arrivals: [n] time of each token, in seconds of any clock.
        seconds: time from the request to the last token.
        first_token_s: seconds from the request to the first token.
        statistics: target steps and right drafts.
    """

    @property
    def arrivals(self) -> Sequence[float]: ...  # noqa: D102 - above

    @property
    def seconds(self) -> float: ...  # noqa: D102

    @property
    def first_token_s(self) -> float: ...  # noqa: D102

    @property
    def statistics(self) -> EdgeStatistics: ...  # noqa: D102


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


def bytes_per_token(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the bytes a token on a replayed link, both ways."""
    tokens = sum(len(outcome.arrivals) for outcome in outcomes)
    return {
        "uplink_bytes_per_token": sum(outcome.uplink_bytes for outcome in outcomes) / tokens,
        "downlink_bytes_per_token": sum(outcome.downlink_bytes for outcome in outcomes) / tokens,
    }


def latencies(texts: Sequence[Decoded]) -> dict[str, Any]:
    """Return the median time to the first token, and the quantiles of the gaps between tokens, ms."""
    gaps_ms = _gaps_ms([text.arrivals for text in texts])
    return {
        "ttft_ms_p50": median(text.first_token_s for text in texts) * 1e3,
        "token_gap_ms_p50": gaps_ms[50],
        "token_gap_ms_p99": gaps_ms[99],
        "token_gaps_ms": gaps_ms,
    }


def _gaps_ms(arrivals: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return [101] quantiles of the times between tokens; the tokens of one commit arrive together."""
    gaps = sorted(b - a for times in arrivals for a, b in itertools.pairwise(times)) or [0.0]
    return tuple(1e3 * gaps[round(q / 100 * (len(gaps) - 1))] for q in range(101))

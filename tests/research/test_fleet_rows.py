"""The arithmetic of a fleet's rows: quantiles, memory an edge, and what counts as broken."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from research.crowd.crowd_command import CrowdRow, bytes_an_edge, quantile, row_of
from research.crowd.crowd_fleet import Period

HUNDRED = [number / 100 for number in range(100, 0, -1)]


def row(**fields: object) -> CrowdRow:
    period = Period(seconds=10.0, leases=HUNDRED[40:], probes=[0.002, 0.2], cpu_s=5.0, edges_cpu_s=2.5)
    made = row_of("texts", replace(period, rss_bytes=100 << 20), edges=10, watching=10, rate=6.0, back_s=None)
    return replace(made, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(("share", "value"), [(0.5, 0.5), (0.99, 0.99), (0.995, 1.0), (1.0, 1.0), (0.0, 0.01)])
def test_a_quantile_is_a_value_that_was_seen(share: float, value: float) -> None:
    assert quantile(HUNDRED, share) == value


def test_there_is_no_quantile_of_nothing() -> None:
    assert quantile([], 0.99) is None


def test_a_row_has_rates_of_its_own_time() -> None:
    made = row()
    assert (made.leases, made.lease_p50_ms, made.lease_p99_ms) == (60, 300.0, 600.0)
    assert (made.cpu, made.edges_cpu, made.rss_mib, made.lag_p99_ms) == (0.5, 0.25, 100.0, 200.0)
    idle = row_of("rest", Period(seconds=1.0), edges=0, watching=0, rate=0.0, back_s=1.234)
    assert (idle.lease_p99_ms, idle.back_s, idle.breaks) == (None, 1.23, "")


def test_memory_an_edge_is_that_of_the_further_ones() -> None:
    at_rest = [row(edges=edges, rss_mib=mib) for edges, mib in ((0, 80.0), (500, 90.0), (1024, 112.0))]
    assert bytes_an_edge(at_rest) == 32 << 10


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, ""),
        ({"lease_p99_ms": 1000.0}, ""),
        ({"lease_p99_ms": 1500.0}, "the p99 of a lease is 1.5 s"),
        ({"failed": 1}, "1 texts fail and 0 come late"),
        ({"late": 2}, "0 texts fail and 2 come late"),
        ({"leases": 0, "lease_p99_ms": None}, "only 0 of 60 texts have a lease"),
    ],
)
def test_what_breaks_is_said(fields: dict[str, object], why: str) -> None:
    assert row(**fields).breaks == why


def test_texts_that_fail_and_are_refused_are_counted_by_all_their_reasons() -> None:
    period = Period(seconds=1.0, failed=Counter(a=2, b=1), refused=Counter(Unavailable=4), late=5)
    made = row_of("texts", period, edges=1, watching=1, rate=1.0, back_s=None)
    assert (made.failed, made.refused, made.late) == (3, 4, 5)

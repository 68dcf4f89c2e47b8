"""The arithmetic of a fleet's rows: quantiles, memory an edge, and what counts as broken."""

from __future__ import annotations

import pytest

from research.crowd.crowd_command import breaks, bytes_an_edge, quantile_ms

HUNDRED = [(number / 100,) for number in range(100, 0, -1)]
ROW = {"due": 60, "leases": 60, "lease_p99_ms": 600.0, "late": 0, "failed": 0, "refused": 1}


@pytest.mark.parametrize(("share", "value"), [(0.5, 500.0), (0.99, 990.0), (0.995, 1000.0), (1.0, 1000.0), (0.0, 10.0)])
def test_a_quantile_is_a_time_that_was_seen(share: float, value: float) -> None:
    assert quantile_ms(HUNDRED, share) == value


def test_there_is_no_quantile_of_nothing() -> None:
    assert quantile_ms([], 0.99) is None


def test_memory_an_edge_is_that_of_the_further_ones() -> None:
    at_rest = [{"edges": edges, "rss_mib": mib} for edges, mib in ((0, 80.0), (500, 90.0), (1024, 112.0))]
    assert bytes_an_edge(at_rest) == 32 << 10
    assert bytes_an_edge(at_rest[:1]) == 0


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, ""),
        ({"lease_p99_ms": 1000.0}, ""),
        ({"lease_p99_ms": 1500.0}, "the p99 of a lease is 1.5 s"),
        ({"failed": 1}, "1 texts fail and 0 come late"),
        ({"late": 2}, "0 texts fail and 2 come late"),
        ({"leases": 0, "lease_p99_ms": None}, "only 0 of 60 texts have a lease"),
        ({"due": 0, "leases": 0, "lease_p99_ms": None}, ""),
    ],
)
def test_what_breaks_is_said(fields: dict[str, object], why: str) -> None:
    assert breaks({**ROW, **fields}) == why

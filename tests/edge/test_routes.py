"""Routes without a coordinator: verifiers at fixed addresses, one after the other."""

from __future__ import annotations

import asyncio

import pytest

from outrider.edge.link.routes import DirectRoute


@pytest.mark.parametrize(
    ("lost", "next_one"),
    [("", "a:1"), ("a", "b:1"), ("ab", "c:1"), ("abc", "a:1"), ("bca", "b:1"), ("cab", "c:1"), ("cb", "a:1")],
)
def test_the_next_address_was_not_lost_or_else_was_lost_longest_ago(lost, next_one) -> None:
    route = DirectRoute(("a:1", "b:1", "c:1"), "tiny", "")
    lease = asyncio.run(route.lease("s", tuple(f"{name}:1" for name in lost)))
    assert lease.address == next_one

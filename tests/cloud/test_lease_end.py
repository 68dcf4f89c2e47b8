"""When a verifier sends away a session whose lease has ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from outrider.cloud.serving import stream_outbox
from outrider.cloud.serving.stream_outbox import LeaseEnds, StreamOutbox
from outrider.proto.lease import LeaseClaim
from outrider.proto.types import Goaway


def outbox(ends: LeaseEnds, lasts_s: float = -1.0) -> StreamOutbox:
    """Return that of a stream whose lease lasts for `lasts_s` more seconds."""
    made = StreamOutbox(asyncio.get_running_loop())
    ends.begin(made, LeaseClaim("v", "m", "s", time.time() + lasts_s))
    return made


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 60))


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0.001)


def test_one_that_no_coordinator_asks_sends_it_away_at_once() -> None:
    async def scenario() -> None:
        gone = outbox(LeaseEnds())
        assert isinstance(await gone.get(), Goaway)

    run(scenario)


def test_one_that_coordinators_ask_sends_it_away_when_the_next_asks_once() -> None:
    async def scenario() -> None:
        ends = LeaseEnds()
        ends.asked()
        late, valid, left = outbox(ends), outbox(ends, 600.0), outbox(ends)
        await turns()
        left.closed = True
        assert late.unread() == 0
        for _ in range(3):
            ends.asked()
        assert isinstance(await late.get(), Goaway)
        assert [late.unread(), valid.unread(), left.unread()] == [1, 0, 0]
        valid.end_of_lease.cancel()

    run(scenario)


def test_no_text_goes_on_for_ever_without_a_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_outbox, "OVERTIME_S", 0.01)

    async def scenario() -> None:
        ends = LeaseEnds()
        ends.asked()
        late = outbox(ends)
        assert isinstance(await late.get(), Goaway)
        ends.asked()
        await turns()
        assert late.unread() == 1, "told once"

    run(scenario)

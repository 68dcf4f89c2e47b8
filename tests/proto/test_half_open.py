"""Decoding streams that are not admitted yet: whose slots they take."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from outrider.proto.errors import ResourceExhausted
from outrider.proto.plumbing.connections import MAX_OF_SESSION, HalfOpenStreams


def test_a_key_takes_no_slots_of_a_session_of_another_key() -> None:
    refusals: list[None] = []
    streams = HalfOpenStreams(100, lambda: refusals.append(None))
    with ExitStack() as held:
        for _ in range(MAX_OF_SESSION):
            held.enter_context(streams.hold("ipv4:192.0.2.1:50", "s", "mallory"))
        with pytest.raises(ResourceExhausted), streams.hold("ipv4:192.0.2.1:50", "s", "mallory"):
            pass
        held.enter_context(streams.hold("ipv4:192.0.2.2:50", "s", "alice"))
    assert len(refusals) == 1

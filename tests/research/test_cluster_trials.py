"""Parts of the cluster of several nodes that need no namespace: the wire, and what a fault is said to have cost."""

from __future__ import annotations

import os
import random
import socket
import threading
import time

import pytest

from outrider.proto.errors import Unavailable
from research.cluster.hosts import check_rights
from research.cluster.nodes import until
from research.cluster.packet_wire import carry
from research.cluster.trials import Row, cost

KEPT = []  # a wire carries for ever, and must not find the descriptors of another test's


@pytest.fixture
def ends():
    """Two ends of a wire of 50 ms that loses nothing, and of one that loses every packet."""
    near, far = socket.socketpair(type=socket.SOCK_DGRAM), socket.socketpair(type=socket.SOCK_DGRAM)
    for pair in (near, far):
        for end in pair:
            end.settimeout(0.5)
    KEPT.append((near, far))
    return near, far


def carried(ends, loss: float) -> None:
    inside = ends[0][1].fileno(), ends[1][1].fileno()
    threading.Thread(target=carry, args=(inside, 0.05, loss, random.Random(1)), daemon=True).start()


def test_a_wire_hands_packets_over_both_ways_in_order_and_later(ends) -> None:
    carried(ends, 0.0)
    began = time.monotonic()
    for packet in (b"one", b"two"):
        ends[0][0].send(packet)
    ends[1][0].send(b"back")
    assert [ends[1][0].recv(9), ends[1][0].recv(9), ends[0][0].recv(9)] == [b"one", b"two", b"back"]
    assert time.monotonic() - began >= 0.05


def test_a_wire_that_loses_everything_hands_nothing_over(ends) -> None:
    carried(ends, 1.0)
    ends[0][0].send(b"one")
    with pytest.raises(TimeoutError):
        ends[1][0].recv(9)


def answer(times: list[float], text: str = "right", **changes: object) -> dict[str, object]:
    return {"question": 0, "text": text, "finish": "length", "error": "", "times": times, **changes}


@pytest.mark.parametrize(
    ("answers", "right", "lost", "gap_s", "holds"),
    [
        ([answer([0.0, 1.0, 9.0])], 1, 0, 8.0, True),
        ([answer([0.0, 1.0]), answer([2.0, 2.5], "wrong")], 1, 0, 1.0, False),
        ([answer([0.0, 1.0], "ri", finish=None)], 0, 1, 1.0, False),
        ([answer([0.0, 1.0], error="503")], 1, 1, 1.0, False),
    ],
)
def test_a_fault_costs_gaps_and_wrong_texts_and_lost_ones(answers, right, lost, gap_s, holds) -> None:
    row = cost("fault", answers, ["right"], since=0.0)
    assert (row.texts, row.right, row.lost, row.gap_s, row.holds) == (len(answers), right, lost, gap_s, holds)


def test_a_gap_counts_from_the_fault_on() -> None:
    assert cost("fault", [answer([0.0, 10.0, 11.0])], ["right"], since=9.5).gap_s == 1.0


def test_a_fault_that_met_no_text_shows_nothing() -> None:
    with pytest.raises(Unavailable, match="met no text"):
        cost("fault", [], ["right"], since=0.0)
    assert not Row("fault", 0, 0, 0, 0.0, failed=True).holds


def test_who_waits_in_vain_is_told_for_what() -> None:
    with pytest.raises(Unavailable, match="the sun rises"):
        until(lambda: False, 0.1, "the sun rises", every_s=0.01)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, who is told of a missing tool instead")
def test_a_missing_tool_is_named_with_its_package(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Unavailable, match="nftables"):
        check_rights()

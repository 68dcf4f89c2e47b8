"""The server of metrics, whose connections are few and leave room for a scrape."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry, Gauge

from outrider.proto.address import split_address
from outrider.proto.plumbing import metrics

MOST = 4
TIMEOUT_S = 60.0


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(metrics, "MAX_CLIENTS", MOST)
    monkeypatch.setattr(metrics._Handler, "timeout", 600.0)
    registry = CollectorRegistry()
    Gauge("outrider:answer", "An answer.", registry=registry).set(42)
    server = metrics.MetricsServer(registry, "127.0.0.1:0")
    yield server.address
    server.stop()


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as answer:
        return answer.read().decode()


def test_silent_connections_are_few_and_keep_no_scrape_out(address: str) -> None:
    with ExitStack() as opened:
        silent = []
        for _ in range(5 * MOST):
            source = ("127.0.0.2", 0)
            each = socket.create_connection(split_address(address, "address"), TIMEOUT_S, source)
            silent.append(opened.enter_context(each))
        for each in silent[: 4 * MOST]:  # the oldest ones
            assert each.recv(1) == b""
        for _ in range(2 * MOST):
            assert "outrider:answer 42.0" in scrape(address)


def test_who_has_most_connections_loses_the_oldest(address: str) -> None:
    with ExitStack() as opened:
        where = split_address(address, "address")
        first = opened.enter_context(socket.create_connection(where, TIMEOUT_S, ("127.0.0.1", 0)))
        for _ in range(5 * MOST):
            opened.enter_context(socket.create_connection(where, TIMEOUT_S, ("127.0.0.2", 0)))
        assert "outrider:answer 42.0" in scrape(address)
        first.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert b"200 OK" in first.recv(100)

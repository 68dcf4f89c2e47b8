"""Output of `outrider up` on a running cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from outrider.deploy.cli import parse
from outrider.deploy.local import servers
from outrider.deploy.local.local_cluster import LocalCluster


@pytest.mark.parametrize(
    ("options", "bound", "printed"),
    [(["--metrics-listen", "127.0.0.1:0"], "127.0.0.1:4711", ["http://127.0.0.1:4711/metrics"]), ([], "", [])],
    ids=["served", "not served"],
)
def test_the_metrics_of_the_coordinator_are_where_they_were_bound(options, bound, printed, monkeypatch, capsys) -> None:
    asked = []

    @asynccontextmanager
    async def cluster(config, *, verifiers, coordinator, trainer, link) -> AsyncIterator[LocalCluster]:
        asked.append(coordinator["metrics_listen"])
        yield LocalCluster("127.0.0.1:7000", {"coordinator": bound}, {})

    def at_once() -> asyncio.Event:
        stop = asyncio.Event()
        stop.set()
        return stop

    monkeypatch.setattr(servers, "local_cluster", cluster)
    monkeypatch.setattr(servers, "set_when_asked_to_end", at_once)
    assert servers.up(parse(["up", *options])) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" ")[2] for line in lines if "metrics" in line] == printed
    assert lines[0].startswith("coordinator on 127.0.0.1:7000")
    assert asked == ["127.0.0.1:0" if options else ""]

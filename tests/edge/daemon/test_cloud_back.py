"""The daemon says when the cloud is away and when it is back, and is soon there itself."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from outrider.edge.daemon.cloud import LOOK_EVERY_S, LOOK_SOON_S, Cloud
from outrider.edge.link.control_client import _plain
from outrider.proto.errors import ConfigError, OutriderError, Unavailable

SILENT = Unavailable("the coordinator at 127.0.0.1:1 does not answer", field="coordinator")


async def looks(cloud: Cloud, *errors: OutriderError | None) -> None:
    """Let a cloud look once for each of these, which it finds."""
    client: Any = cloud.client
    for client.away in errors:
        await cloud._look()


def test_a_cloud_that_was_away_is_as_loud_when_it_is_back(scripted, caplog) -> None:
    caplog.set_level(logging.INFO, "outrider.edge.daemon.cloud")

    async def scenario() -> None:
        cloud = Cloud(scripted())
        await looks(cloud, None)
        assert [record.levelname for record in caplog.records] == ["INFO"], "nobody has heard that it was away"
        assert cloud.found.is_set()
        caplog.clear()
        await looks(cloud, SILENT, SILENT, None, None)
        await cloud.close()

    asyncio.run(scenario())
    away, back = caplog.records
    assert (away.levelname, back.levelname) == ("WARNING", "WARNING")
    assert "does not answer" in away.getMessage()
    assert back.getMessage().startswith("the cloud is there, after ")


@pytest.mark.parametrize(
    ("error", "pause_s"),
    [(None, LOOK_EVERY_S), (SILENT, LOOK_SOON_S), (Unavailable("no verifier"), LOOK_EVERY_S), (ConfigError("no"), 2.0)],
    ids=["there", "nobody at the address", "nothing to give", "refused"],
)
def test_only_a_coordinator_that_does_not_answer_is_looked_for_more_often(error, pause_s, scripted) -> None:
    async def scenario() -> float:
        cloud = Cloud(scripted())
        await looks(cloud, error)
        await cloud.close()
        return cloud._pause_s

    assert asyncio.run(scenario()) == pause_s


def test_a_refused_connection_is_put_plainly_and_other_words_stay() -> None:
    grpc = "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Connection refused"
    assert _plain(grpc).startswith("nothing listens there")
    assert _plain("Deadline Exceeded") == "Deadline Exceeded"

"""Edges that can reach the coordinator only: texts through the relay are the same, also when verifiers die."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from fleets import Fleet, fleet

from outrider.coordinator.coordinator_server import CoordinatorServer
from outrider.edge import Client, EdgeConfig
from outrider.proto.cluster_status import RelayStatus
from outrider.proto.types import LeaseRequest

PROMPT = "def main(argv):\n"


def relayed(fleet: Fleet) -> RelayStatus:
    service = fleet.coordinator.service
    assert service is not None
    assert service.relay_metrics is not None
    return service.relay_metrics.status()


async def directly(relaying: Fleet, cache: Path) -> tuple[int, ...]:
    """The tokens of the text by the same verifiers, without the relay."""
    coordinator = CoordinatorServer(replace(relaying.config, relay=False))
    async with Client(EdgeConfig(coordinator=await coordinator.start(), cache=cache, drafter="none")) as client:
        tokens = (await client.complete(PROMPT, max_tokens=120)).ids
    await coordinator.stop(0)
    return tokens


async def test_a_relayed_text_equals_the_direct_one_also_when_its_verifier_dies(tmp_path: Path) -> None:
    async with (
        fleet("a", "b", relay=True, poll_s=0.2) as relaying,
        relaying.client(tmp_path, drafter="ngram") as client,
    ):
        wanted = await directly(relaying, tmp_path)
        service = relaying.coordinator.service
        assert service is not None
        lease = await service.open_lease(LeaseRequest(model="", session="s1", inquiry=True))
        assert (lease.relayed, lease.address) == (True, "")
        whole = await client.complete(PROMPT, max_tokens=120)
        assert whole.ids == wanted
        assert relayed(relaying).streams_total == 1
        moved = relayed(relaying).downlink_bytes
        assert 0 < moved < whole.statistics.downlink_bytes, "frames are counted without gRPC's prefix"

        texts = [asyncio.create_task(client.complete(PROMPT, max_tokens=120)) for _ in range(2)]
        while relayed(relaying).downlink_bytes < moved + 200:  # noqa: ASYNC110 - counted elsewhere
            await asyncio.sleep(0.005)
        busy = next(name for name, one in relaying.verifiers.items() if one.status().sessions)
        await relaying.verifiers[busy].stop(0)
        done = await asyncio.gather(*texts)
        assert [text.ids for text in done] == [wanted, wanted]
        assert sum(text.statistics.resumes for text in done) >= 1
        assert relayed(relaying).broken >= 1


async def test_cancelled_texts_free_their_sessions_behind_the_relay(tmp_path: Path) -> None:
    async with fleet("a", relay=True, poll_s=0.2) as relaying, relaying.client(tmp_path, drafter="ngram") as client:
        for _ in range(3):
            text = client.generate(PROMPT, max_tokens=500)
            await anext(text)
            await text.aclose()
        while relaying.verifiers["a"].status().sessions or relayed(relaying).streams:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.02)
        assert relayed(relaying).streams_total == 3

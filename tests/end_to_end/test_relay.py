"""Edges that can reach the coordinator only: texts through the relay are the same, also when verifiers die."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.verifier_config import VerifierConfig
from outrider.coordinator.coordinator_config import CoordinatorConfig, StaticVerifier
from outrider.coordinator.coordinator_server import CoordinatorServer
from outrider.edge import Client, EdgeConfig
from outrider.proto.types import LeaseRequest, RelayStatus

SECRET = b"a secret of the two of them"
PROMPT = "def main(argv):\n"


@dataclass(frozen=True)
class Fleet:
    """A coordinator with its verifiers, by name."""

    config: CoordinatorConfig
    coordinator: CoordinatorServer
    address: str
    verifiers: dict[str, VerifierServer]

    @property
    def relayed(self) -> RelayStatus:
        service = self.coordinator.service
        assert service is not None
        assert service.relay_metrics is not None
        return service.relay_metrics.status()


@asynccontextmanager
async def fleet(tokenizer_json: str, *names: str, **options: Any) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        verifiers, fixed = {}, []
        for name in names:
            verifiers[name] = VerifierServer(VerifierConfig(threads=1, name=name), lease_secret=SECRET)
            stack.push_async_callback(verifiers[name].stop, 0)
            fixed.append(StaticVerifier(name, await verifiers[name].start(), "reference", tokenizer_json))
        config = CoordinatorConfig(
            lease_secret=SECRET, listen="127.0.0.1:0", verifiers=tuple(fixed), poll_s=0.2, **options
        )
        coordinator = CoordinatorServer(config)
        stack.push_async_callback(coordinator.stop, 0)
        yield Fleet(config, coordinator, await coordinator.start(), verifiers)


def edge(fleet: Fleet, cache: Path, **fields: Any) -> Client:
    return Client(EdgeConfig(**{"coordinator": fleet.address, "cache": cache, "drafter": "ngram"} | fields))


async def directly(relaying: Fleet, cache: Path) -> tuple[int, ...]:
    """The tokens of the text by the same verifiers, without the relay."""
    coordinator = CoordinatorServer(replace(relaying.config, relay=False))
    async with Client(EdgeConfig(coordinator=await coordinator.start(), cache=cache, drafter="none")) as client:
        tokens = (await client.complete(PROMPT, max_tokens=120)).ids
    await coordinator.stop(0)
    return tokens


async def test_a_relayed_text_equals_the_direct_one_also_when_its_verifier_dies(
    tokenizer_file: Path, tmp_path: Path
) -> None:
    tokenizer_json = tokenizer_file.read_text()

    async with fleet(tokenizer_json, "a", "b", relay=True) as relaying, edge(relaying, tmp_path) as client:
        wanted = await directly(relaying, tmp_path)
        service = relaying.coordinator.service
        assert service is not None
        lease = await service.open_lease(LeaseRequest(model="", session="s1", inquiry=True))
        assert (lease.relayed, lease.address) == (True, "")
        whole = await client.complete(PROMPT, max_tokens=120)
        assert whole.ids == wanted
        assert relaying.relayed.streams_total == 1
        moved = relaying.relayed.downlink_bytes
        assert 0 < moved < whole.statistics.downlink_bytes, "frames are counted without gRPC's prefix"

        texts = [asyncio.create_task(client.complete(PROMPT, max_tokens=120)) for _ in range(2)]
        while relaying.relayed.downlink_bytes < moved + 200:  # noqa: ASYNC110 - counted elsewhere
            await asyncio.sleep(0.005)
        busy = next(name for name, one in relaying.verifiers.items() if one.status().sessions)
        await relaying.verifiers[busy].stop(0)
        done = await asyncio.gather(*texts)
        assert [text.ids for text in done] == [wanted, wanted]
        assert sum(text.statistics.resumes for text in done) >= 1
        assert relaying.relayed.broken >= 1


def test_cancelled_texts_free_their_sessions_behind_the_relay(tokenizer_file: Path, tmp_path: Path) -> None:
    tokenizer_json = tokenizer_file.read_text()

    async def main() -> None:
        async with fleet(tokenizer_json, "a", relay=True) as relaying, edge(relaying, tmp_path) as client:
            for _ in range(3):
                text = client.generate(PROMPT, max_tokens=500)
                await anext(text)
                await text.aclose()
            while relaying.verifiers["a"].status().sessions or relaying.relayed.streams:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.02)
            assert relaying.relayed.streams_total == 3

    asyncio.run(asyncio.wait_for(main(), 60))

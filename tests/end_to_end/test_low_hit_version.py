"""A version that hits less, from the trainer's actor through the coordinator to an edge that drafts with it."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

import pytest

from outrider.cloud.learning.trainer_settings import TrainerSettings
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.local.local_cluster import local_cluster
from outrider.drafters import find_package
from outrider.drafters.packages import load_package
from outrider.edge import Client, EdgeConfig
from outrider.edge.link.control_client import CoordinatorClient
from outrider.proto.cluster_status import VersionStatus
from outrider.proto.drafter_format import MANIFEST
from outrider.proto.types import Sampling

pytestmark = [pytest.mark.ray, pytest.mark.soak]
TEXTS = 60
WAIT_S = 600.0  # for the trainer, which yields to whatever else runs on the machine: 15 s where nothing does


@pytest.mark.usefixtures("all_drafts_pay")
def test_a_version_that_hits_less_is_not_published_and_where_planted_is_retired(tmp_path: Path, prompts) -> None:
    """The rate of learning is so high that two steps spoil every matrix, though none so much that it is refused."""
    import ray

    settings = TrainerSettings(
        folder=tmp_path / "learned",
        rank=2,
        rate=0.1,  # .2 has made an adapter of .51 of its matrix's norm, and above .5 it is refused
        warm_up_steps=1,
        positions=96,
        texts=2,
        cpu_share=1.0,
        min_keys=1,
        publish_every=2,
    )
    asked = [prompt.text for prompt in prompts(10)]
    embedded, published = find_package("general").version, tmp_path / "learned" / "drafters" / "general"

    async def main() -> None:
        async with local_cluster(
            VerifierConfig(threads=1, learn=True), trainer=settings, coordinator={"poll_s": 0.05, "votes_a_day": 1000}
        ) as cluster:
            where = {"coordinator": cluster.coordinator, "cache": tmp_path / "cache"}
            control = CoordinatorClient(cluster.coordinator)

            async def text(client: Client, number: int) -> tuple[int, ...]:
                sampling = Sampling(max_tokens=24, temperature=number % 2, seed=number)
                return tuple((await client.complete(asked[number % len(asked)], sampling)).ids)

            async def trained() -> dict:
                return await asyncio.to_thread(ray.get, cluster.trainer.info.remote())

            async def versions() -> dict[str, VersionStatus]:
                return {each.version: each for each in (await control.status()).versions if each.drafter == "general"}

            async with Client(EdgeConfig(**where, drafter="none")) as alone:
                expected = [await text(alone, number) for number in range(4)]

            async with Client(EdgeConfig(**where, drafter="general", share_texts=True)) as client:
                made: Path | None = None
                end, number = time.monotonic() + WAIT_S, 0
                while (info := await trained())["counts"].get("candidates dropped", 0) < 1 or made is None:
                    assert time.monotonic() < end, info
                    assert info["counts"].get("versions", 0) == 0
                    assert info["counts"].get("versions refused", 0) == 0, "its numbers are in order"
                    await text(client, number)
                    number += 1
                    for manifest in (tmp_path / "learned" / "candidates").glob(f"[0-9]*/{MANIFEST}"):
                        made = made or Path(shutil.copytree(manifest.parent, tmp_path / "made"))
                assert not list(published.glob("*")), "by its own hits it is not published"
                bad = load_package(made)
                assert (bad.name, bad.parent, set(await versions())) == ("general", embedded, {embedded})

                published.mkdir(parents=True, exist_ok=True)
                shutil.copytree(made, published / ".1")
                (published / ".1").rename(published / str(bad.sequence))
                while bad.version not in await versions():  # noqa: ASYNC110 - the catalogue is polled
                    await asyncio.sleep(0.05)
                assert client.ready is not None
                states = set[str]()
                for texts in range(1, TEXTS + 1):
                    await text(client, number + texts)
                    states.add((await versions())[bad.version].state)
                    if "retired" in states:
                        break
                said = (await versions())[bad.version]
                assert states == {"current", "retired"}, said
                assert said.why.startswith("hits -")
                assert (await versions())[embedded].state == "current"
                while bad.version in dict(client.ready.shelf.offered).values():  # noqa: ASYNC110 - a stream tells the edge
                    await asyncio.sleep(0.05)
                assert [await text(client, number) for number in range(4)] == expected
                assert (await trained())["counts"].get("versions", 0) == 0
            await control.close()

    asyncio.run(asyncio.wait_for(main(), 2 * WAIT_S))

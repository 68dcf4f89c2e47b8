"""The main job on a local Ray: coordinator, verifier actors, an edge with a downloaded drafter, and what dies of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.local.local_cluster import LocalCluster, local_cluster
from outrider.edge import Client, EdgeConfig, Sampling
from outrider.edge.link.control_client import CoordinatorClient

pytestmark = pytest.mark.ray

SAMPLED = Sampling(max_tokens=64, temperature=1.0, seed=11)


async def decode_through_kills(cluster: LocalCluster, client: Client, prompt: str) -> tuple[Any, int]:
    """The tokens of one text during which every verifier is killed, one after the other, and its resumes."""
    import ray

    got: list[int] = []
    living = list(cluster.actors.values())
    async for event in client.generate(prompt, SAMPLED):
        got += getattr(event, "ids", ())
        if living and len(got) > 15 * (len(cluster.actors) - len(living) + 1):
            ray.kill(living.pop(), no_restart=False)
        statistics = getattr(event, "statistics", None)
    assert not living
    return tuple(got), statistics.resumes


def failing_actor() -> type:
    """Made in a function, so that Ray sends the class itself: workers cannot import this file."""
    from outrider.cloud.serving.verifier_actor import VerifierActor

    class FailingActor(VerifierActor):
        def break_target(self) -> None:
            self._server._backend.target.forward = lambda batch: 1 // 0  # type: ignore[assignment, method-assign]

    return FailingActor


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """The event loop of the cluster's coordinator and of the tests."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def cluster(loop: asyncio.Runner) -> Iterator[LocalCluster]:
    """One cluster for all tests: it takes many seconds to start. Its verifiers can be told to fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.cloud.serving.verifier_actor.VerifierActor", failing_actor())
        running = local_cluster(VerifierConfig(threads=1), verifiers=2)
        yield loop.run(running.__aenter__())
        loop.run(running.__aexit__(None, None, None))


def test_the_text_survives_the_death_of_its_verifier_and_ray_brings_that_back(cluster, loop, tmp_path, prompts) -> None:
    async def main() -> None:
        prompt = prompts(1)[0].text
        config = {"coordinator": cluster.coordinator, "cache": tmp_path}
        async with Client(EdgeConfig(drafter="none", **config)) as plain:
            expected = await plain.complete(prompt, SAMPLED)
        async with Client(EdgeConfig(drafter="general", **config)) as client:
            assert client.drafter_name == "general"
            assert (tmp_path / "drafters" / "general").is_dir()  # downloaded from the coordinator, hash-checked
            undisturbed = await client.complete(prompt, SAMPLED)
            restarts = await restarts_of(cluster)
            got, resumes = await decode_through_kills(cluster, client, prompt)
        assert undisturbed.ids == expected.ids
        assert got == expected.ids
        assert resumes >= 1
        await all_ready_again(cluster, restarts + 2)

    loop.run(main())


def test_a_verifier_that_always_fails_loses_no_text_and_ray_starts_another(cluster, loop, tmp_path, prompts) -> None:
    async def main() -> None:
        import ray

        asked = [prompt.text for prompt in prompts(2)]
        restarts = await restarts_of(cluster)
        async with Client(EdgeConfig(drafter="none", coordinator=cluster.coordinator, cache=tmp_path)) as client:
            expected = [(await client.complete(prompt, SAMPLED)).ids for prompt in asked]
            ray.get(next(iter(cluster.actors.values())).break_target.remote())
            texts = await asyncio.gather(*(client.complete(prompt, SAMPLED) for prompt in asked))
        assert [text.ids for text in texts] == expected
        assert sum(text.statistics.resumes for text in texts) > 0
        await all_ready_again(cluster, restarts + 1)

    loop.run(main())


async def restarts_of(cluster: LocalCluster) -> int:
    control = CoordinatorClient(cluster.coordinator)
    verifiers = (await control.status()).verifiers
    await control.close()
    return sum(verifier.restarts for verifier in verifiers)


async def all_ready_again(cluster: LocalCluster, restarts: int) -> None:
    control = CoordinatorClient(cluster.coordinator)
    for _ in range(600):
        verifiers = (await control.status()).verifiers
        if all(v.state == "ready" for v in verifiers) and sum(v.restarts for v in verifiers) >= restarts:
            await control.close()
            return
        await asyncio.sleep(0.5)
    raise AssertionError(f"verifiers did not come back: {verifiers}")

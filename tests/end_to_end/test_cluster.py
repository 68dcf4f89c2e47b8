"""The main job on a local Ray: coordinator, verifiers, an edge with a downloaded drafter, a trainer, and what dies."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fleets import run_by

from outrider.cloud.learning.lesson_record import LessonRecord
from outrider.cloud.learning.trainer_actor import TrainerLink, start_trainer_actor
from outrider.cloud.learning.trainer_settings import TrainerSettings
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.local.local_cluster import LocalCluster, local_cluster
from outrider.edge import Client, EdgeConfig, Sampling
from outrider.edge.link.control_client import CoordinatorClient
from outrider.proto.errors import ConfigError, Unavailable
from outrider.proto.salts import salted

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
            self._server._engine.backend.target.forward = lambda batch: 1 // 0  # type: ignore[assignment, method-assign]

    return FailingActor


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """The event loop of the cluster's coordinator and of the tests."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def learning(tmp_path_factory: pytest.TempPathFactory) -> TrainerSettings:
    sizes = {"rank": 2, "positions": 96, "texts": 2, "checkpoint_every": 1, "publish_every": 1, "min_keys": 1}
    return TrainerSettings(folder=tmp_path_factory.mktemp("learned"), cpu_share=1.0, **sizes)


@pytest.fixture(scope="module")
def cluster(loop: asyncio.Runner, learning: TrainerSettings) -> Iterator[LocalCluster]:
    """One cluster for all tests: it takes many seconds to start. Its verifiers can be told to fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.cloud.serving.verifier_actor.VerifierActor", failing_actor())
        running = local_cluster(VerifierConfig(threads=1, learn=True), verifiers=2, trainer=learning)
        yield loop.run(running.__aenter__())
        loop.run(running.__aexit__(None, None, None))


@run_by("loop")
async def test_the_text_survives_the_death_of_its_verifier_and_ray_brings_that_back(
    cluster, loop, tmp_path, prompts
) -> None:
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


@run_by("loop")
async def test_a_verifier_that_always_fails_loses_no_text_and_ray_starts_another(
    cluster, loop, tmp_path, prompts
) -> None:
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


# === a trainer ==================================================================================================


def a_text(seed: int, key: str = "key", length: int = 48) -> bytes:
    """Every second token follows from the one before."""
    random = np.random.default_rng(seed)
    tokens = random.integers(100, 120, size=4 + length).astype(np.uint32)
    top = np.tile(np.arange(100, 164, dtype=np.uint32), (length, 1))
    return LessonRecord(
        model="reference",
        session_salt=salted(b"", f"session-{seed}"),
        key_salt=salted(b"", key),
        prompt_class=0,
        sampling=Sampling(seed=seed),
        at_s=time.time(),
        start=0,
        first_generated=4,
        tokens=tokens,
        positions=np.arange(4, 4 + length, dtype=np.uint32),
        top_ids=top,
        top_logp=np.full((length, 64), np.log(0.99 / 64), np.float16),
        rest_logp=np.full(length, np.log(0.01), np.float32),
        weights=np.ones(length, np.float32),
    ).encode()


async def info_of(cluster: LocalCluster) -> dict[str, Any]:
    import ray

    return await asyncio.to_thread(ray.get, cluster.trainer.info.remote(), timeout=60)


def test_a_trainer_is_fed_with_bytes_dies_and_goes_on_from_its_checkpoint(cluster, loop, learning) -> None:
    import ray

    link = TrainerLink("reference")
    with pytest.raises(Unavailable, match="outrider trainer"):
        TrainerLink("another").push((b"",))
    with pytest.raises(ConfigError, match="reference"):
        start_trainer_actor("reference", learning)
    assert link.push(tuple(a_text(seed) for seed in range(6))).result(120) == 6

    def info_with(steps: int, pid: int = 0) -> dict[str, Any]:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            try:
                info = loop.run(info_of(cluster))
            except ray.exceptions.RayError:
                info = {"steps": -1, "pid": pid}
            if info["steps"] >= steps and info["pid"] != pid:
                return info
            time.sleep(0.1)
        raise AssertionError(info)

    before = info_with(steps=1)
    ray.kill(cluster.trainer, no_restart=False)
    after = info_with(steps=before["steps"], pid=before["pid"])
    assert after["waiting"] == 0  # records are in memory alone
    end = time.monotonic() + 60
    while True:
        try:
            assert link.push((a_text(10, key="other"), b"garbage")).result(60) == 2
            break
        except ray.exceptions.RayError:  # the link has noticed the death, and finds the other
            assert time.monotonic() < end
            time.sleep(0.2)
    assert link.forget(salted(b"", "other")).result(60) == 48
    assert loop.run(info_of(cluster))["counts"]["records refused"] == 1


@run_by("loop")
async def test_texts_are_the_same_while_a_trainer_learns_from_them_and_after_it_died(
    cluster, loop, tmp_path, prompts
) -> None:
    import ray

    asked = [prompt.text for prompt in prompts(2)]

    async def texts(*, share: bool) -> list[tuple[int, ...]]:
        where = {"coordinator": cluster.coordinator, "cache": tmp_path}
        async with Client(EdgeConfig(drafter="general", share_texts=share, **where)) as client:
            sampling = replace(SAMPLED, max_tokens=48)
            return [(await client.complete(prompt, sampling)).ids for prompt in asked]

    begun = await info_of(cluster)
    expected = await texts(share=False)
    assert (await info_of(cluster))["counts"].get("records", 0) == begun["counts"].get("records", 0), "nobody agreed"
    end = time.monotonic() + 90
    while (learned := await info_of(cluster))["steps"] <= begun["steps"]:
        assert time.monotonic() < end
        assert await texts(share=True) == expected
    assert learned["counts"]["candidates"] >= 1
    assert learned["verifiers"] == 2, "whose load it looks at"
    assert 0 <= learned["load"] <= 1
    control = CoordinatorClient(cluster.coordinator)
    while not ((trainers := (await control.status()).trainers) and trainers[0].steps):
        assert time.monotonic() < end
        await asyncio.sleep(0.1)
    await control.close()
    (shown,) = trainers
    assert (shown.model, shown.drafter, shown.max_cpu_share) == ("reference", "general", 1.0)
    assert shown.state in ("training", "waiting for idle time", "nothing to learn from")
    ray.kill(cluster.trainer, no_restart=True)
    assert await texts(share=True) == expected

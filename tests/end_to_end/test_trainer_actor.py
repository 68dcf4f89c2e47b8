"""A trainer in Ray: found by its name, fed with bytes, and back after its death with what it had learned."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from outrider.cloud.learning.lesson_record import LessonRecord
from outrider.cloud.learning.trainer_actor import TrainerLink, start_trainer_actor
from outrider.cloud.learning.trainer_settings import TrainerSettings
from outrider.proto.errors import ConfigError, Unavailable
from outrider.proto.salts import salted
from outrider.proto.types import Sampling

pytestmark = pytest.mark.ray


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


@pytest.fixture
def cluster() -> Iterator[None]:
    import ray

    from outrider.deploy.local.local_cluster import _start_local_ray

    _start_local_ray()
    yield
    ray.shutdown()


def test_a_trainer_in_ray_learns_dies_and_goes_on_from_its_checkpoint(cluster, tmp_path: Path) -> None:
    import ray

    link = TrainerLink("reference")
    with pytest.raises(Unavailable, match="outrider trainer"):
        link.push((b"",))
    settings = TrainerSettings(
        folder=tmp_path, rank=2, positions=96, texts=2, checkpoint_every=1, cpu_share=1.0, min_keys=99
    )
    actor = start_trainer_actor("reference", settings, ray_options={"num_cpus": 0.01, "memory": 0})
    with pytest.raises(ConfigError, match="reference"):
        start_trainer_actor("reference", settings)
    assert link.push(tuple(a_text(seed) for seed in range(6))).result(120) == 6

    def info_with(steps: int, pid: int = 0) -> dict:
        end = time.monotonic() + 120
        while time.monotonic() < end:
            try:
                info = ray.get(actor.info.remote(), timeout=60)
            except ray.exceptions.RayError:
                info = {"steps": -1, "pid": pid}
            if info["steps"] >= steps and info["pid"] != pid:
                return info
            time.sleep(0.1)
        raise AssertionError(info)

    before = info_with(steps=1)
    ray.kill(actor, no_restart=False)
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
    assert ray.get(actor.info.remote())["counts"]["records refused"] == 1
    ray.kill(actor)


async def test_texts_are_the_same_while_a_trainer_learns_from_them_and_after_it_died(tmp_path: Path, prompts) -> None:
    from outrider.cloud.verifier_config import VerifierConfig
    from outrider.deploy.local.local_cluster import local_cluster
    from outrider.edge import Client, EdgeConfig
    from outrider.edge.link.control_client import CoordinatorClient

    settings = TrainerSettings(
        folder=tmp_path / "learned", rank=2, positions=96, texts=2, cpu_share=1.0, min_keys=1, publish_every=1
    )

    import ray

    asked = [prompt.text for prompt in prompts(2)]

    async def texts(*, share: bool) -> list[tuple[int, ...]]:
        config = EdgeConfig(
            coordinator=cluster.coordinator, cache=tmp_path / "cache", drafter="general", share_texts=share
        )
        async with Client(config) as client:
            sampling = Sampling(max_tokens=48, temperature=1.0, seed=5)
            return [tuple((await client.complete(prompt, sampling)).ids) for prompt in asked]

    async def info() -> dict:
        return await asyncio.to_thread(ray.get, cluster.trainer.info.remote())

    async with local_cluster(VerifierConfig(threads=1, learn=True), trainer=settings) as cluster:
        expected = await texts(share=False)
        assert (await info())["counts"].get("records", 0) == 0  # nobody agreed
        end = time.monotonic() + 90
        while (await info())["steps"] < 1:
            assert time.monotonic() < end
            assert await texts(share=True) == expected
        learning = await info()
        assert learning["counts"]["candidates"] >= 1
        assert learning["verifiers"] == 1, "whose load it looks at"
        assert 0 <= learning["load"] <= 1
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

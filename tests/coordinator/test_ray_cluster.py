"""Verifiers as actors of one local Ray: found, missed, found again after a restart, replaced, drained."""

from __future__ import annotations

import asyncio
import runpy
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from fake_cluster import TOKENIZER_JSON, TOKENIZER_SHA256

from outrider.cloud.learning import trainer_actor as trainer
from outrider.cloud.serving import verifier_actor
from outrider.cloud.verifier_config import VerifierConfig
from outrider.coordinator import ray_cluster
from outrider.coordinator.cluster import VerifierInfo, VerifierState
from outrider.coordinator.ray_cluster import RayCluster
from outrider.deploy.local.local_cluster import _start_local_ray
from outrider.proto.cluster_status import TrainerStatus
from outrider.proto.errors import ConfigError, NotFound, Unavailable
from outrider.proto.types import LeaseRequest

pytestmark = pytest.mark.ray
Coordinating = Callable[..., AbstractAsyncContextManager[Any]]


def fake_actor() -> type:
    """Return a class that Ray sends to workers, which cannot import this file."""

    class FakeVerifier:
        def __init__(
            self, config: Any, lease_secret: bytes = b"", ray_options: Any = None, *, loads_until: str = "/"
        ) -> None:
            import os
            import time

            while not os.path.exists(loads_until):
                time.sleep(0.02)
            self._config = config
            self._pid = os.getpid()
            self._state = "ready"
            self._acknowledged = False
            self._node = ""
            self._texts = {"alice": {"s1": 2.0, "s2": 1.0}, "bob": {"s3": 0.5}}

        async def info(self) -> dict[str, Any]:
            return {
                "name": self._config.name,
                "address": f"127.0.0.1:{1024 + self._pid % 60_000}",
                "model": "tiny",
                "tokenizer_sha256": TOKENIZER_SHA256,
                "state": self._state,
                "sessions": 3,
                "max_sessions": 8,
                "step_s": 0.05,
                "kv_pages_free": 9,
                "incarnation": str(self._pid),
                "texts_of_keys": self._texts,
            }

        async def send_away(self, sessions: frozenset[str]) -> None:
            for texts in self._texts.values():
                for session in sessions & texts.keys():
                    del texts[session]

        async def cpu_s(self) -> tuple[str, float]:
            import ray

            return self._node or ray.get_runtime_context().get_node_id(), 0.0

        async def pretend_to_be_on(self, node: str) -> None:
            self._node = node

        async def tokenizer_json(self) -> str:
            return TOKENIZER_JSON

        async def chat_template_json(self) -> str:
            return ""

        async def drain(self, grace_s: float) -> int:
            self._state = "draining"
            return 3

        async def acknowledge_drain(self) -> None:
            self._acknowledged = True

        async def acknowledged(self) -> bool:
            return self._acknowledged

    return FakeVerifier


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    _start_local_ray()
    yield
    ray.shutdown()


@pytest.fixture
def start(local_ray: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Start a fake verifier through the real `start_verifier_actor`."""
    monkeypatch.setattr(verifier_actor, "VerifierActor", fake_actor())
    handles = []

    def one(name: str) -> Any:
        handles.append(verifier_actor.start_verifier_actor(name, VerifierConfig(), ray_options={"num_cpus": 0}))
        return handles[-1]

    yield one
    for handle in handles:
        ray.kill(handle, no_restart=True)
    while ray.util.list_named_actors(all_namespaces=True):
        time.sleep(0.02)


async def until(cluster: RayCluster, holds: Callable[[VerifierInfo], bool]) -> VerifierInfo:
    while True:
        for info in await cluster.refresh():
            if holds(info):
                return info
        await asyncio.sleep(0.05)


def is_ready(info: VerifierInfo) -> bool:
    return info.state is VerifierState.READY


def test_both_sides_agree_on_where_verifiers_and_trainers_are_found() -> None:
    assert (ray_cluster.NAMESPACE, ray_cluster.ACTOR_PREFIX) == (verifier_actor.NAMESPACE, verifier_actor.ACTOR_PREFIX)
    assert (ray_cluster.NAMESPACE, ray_cluster.TRAINER_PREFIX) == (trainer.NAMESPACE, trainer.TRAINER_PREFIX)


def test_trainers_are_told_keys_and_retired_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[frozenset[Any]] = []
    listens = SimpleNamespace(allow=SimpleNamespace(remote=told.append), retire=SimpleNamespace(remote=told.append))
    handles = {"outrider-trainer-deaf": object(), "outrider-trainer-tiny": listens}
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray_cluster, "_named", lambda *_: ("deaf", "gone", "tiny"))

    def get_actor(name: str, namespace: str) -> Any:
        if name not in handles:
            raise ValueError(namespace)
        return handles[name]

    monkeypatch.setattr(ray, "get_actor", get_actor)
    asyncio.run(RayCluster().allow_learning(frozenset({b"salt"})))
    asyncio.run(RayCluster().retire_versions(frozenset()))
    asyncio.run(RayCluster().retire_versions(frozenset({("general", "8")})))
    assert told == [{b"salt"}, {("general", "8")}], "nothing is no news"


class Answers:
    """A trainer's handle, whose answers arrive when a test says so; Ray is asked through `wait` and `get`."""

    def __init__(self) -> None:
        self.asked: list[object] = []
        self.answers: dict[object, Any] = {}
        self.info = SimpleNamespace(remote=self._ask)

    def _ask(self) -> object:
        self.asked.append(object())
        return self.asked[-1]

    def answer(self, said: Any) -> None:
        self.answers[self.asked[-1]] = said


def test_trainers_say_what_they_do_and_delay_no_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Answers()
    models = ["tiny"]

    def wait(refs: list[object], num_returns: int, timeout: float) -> tuple[list[object], list[object]]:
        assert (num_returns, timeout) == (len(refs), 0)
        return [ref for ref in refs if ref in trainer.answers], []

    def get(ref: object, timeout: float | None = None) -> Any:
        if isinstance(said := trainer.answers[ref], Exception):
            raise said
        return said

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(ray, "get_actor", lambda name, namespace: trainer)
    monkeypatch.setattr(
        ray_cluster, "_named", lambda prefix: tuple(models) if prefix == ray_cluster.TRAINER_PREFIX else ()
    )
    cluster = RayCluster()

    def poll() -> TrainerStatus:
        asyncio.run(cluster.refresh())
        (status,) = cluster.trainers
        return status

    assert poll() == poll() == TrainerStatus("tiny", "loading")
    assert len(trainer.asked) == 1, "it is not asked again while it loads"
    trainer.answer({"state": "training", "steps": 7, "drafter": "general", "model": "other", "pid": 12, "counts": {}})
    working = TrainerStatus("tiny", "training", "general", steps=7)
    assert poll() == poll() == working
    assert len(trainer.asked) == 2
    for failure in (ray.exceptions.RayError("it died"), {"steps": "seven"}):
        trainer.answer(failure)
        assert poll() == replace(working, state="down"), "its sums stay, so that none of them seems to grow again"
    trainer.answer({"state": "nothing to learn from", "steps": 8})
    assert poll() == replace(working, state="nothing to learn from", steps=8)
    models.clear()
    asyncio.run(cluster.refresh())
    assert cluster.trainers == ()


async def test_actors_are_found_by_prefix_and_say_what_they_serve(start: Callable[[str], Any]) -> None:
    start("a")
    other = ray.remote(fake_actor()).options(name="unrelated", namespace="outrider", num_cpus=0).remote(None)
    cluster = RayCluster()
    info = await until(cluster, is_ready)
    assert [v.name for v in await cluster.refresh()] == ["a"]
    assert (info.model, info.sessions, info.max_sessions, info.restarts) == ("tiny", 3, 8, 0)
    assert await cluster.tokenizer_json("a") == TOKENIZER_JSON
    with pytest.raises(NotFound):
        await cluster.tokenizer_json("zzz")
    ray.kill(other)


async def test_an_actor_that_ray_has_given_up_is_replaced_by_respawn(start: Callable[[str], Any]) -> None:
    handle = start("a")
    cluster = RayCluster(respawn=start)
    await until(cluster, is_ready)
    ray.kill(handle, no_restart=True)
    after = await until(cluster, lambda info: is_ready(info) and info.restarts == 1)
    assert after.name == "a"


async def test_without_respawn_an_actor_that_ray_has_given_up_stays_down(start: Callable[[str], Any]) -> None:
    handle = start("a")
    cluster = RayCluster()
    await until(cluster, is_ready)
    ray.kill(handle, no_restart=True)
    await until(cluster, lambda info: info.state is VerifierState.DOWN)
    with pytest.raises(NotFound):
        await cluster.drain("a")


async def test_a_drain_reaches_the_actor_which_is_then_forgotten_when_it_ends(start: Callable[[str], Any]) -> None:
    handle = start("a")
    cluster = RayCluster(respawn=lambda name: pytest.fail("it was taken away on purpose"))
    await until(cluster, is_ready)
    assert await cluster.drain("a") == 3
    assert (await cluster.refresh())[0].state is VerifierState.DRAINING
    ray.kill(handle, no_restart=True)
    while await cluster.refresh():  # noqa: ASYNC110 - the loop is what polls
        await asyncio.sleep(0.05)


async def test_texts_of_keys_are_listed_and_those_beyond_a_limit_are_sent_away(start: Callable[[str], Any]) -> None:
    start("a")
    cluster = RayCluster()
    info = await until(cluster, lambda info: info.texts_of_keys)
    assert info.texts_of_keys == {"alice": {"s1": 2.0, "s2": 1.0}, "bob": {"s3": 0.5}}
    await cluster.send_away({"a": frozenset({"s2", "s3"}), "nobody": frozenset({"s1"})})
    info = await until(cluster, lambda info: "s2" not in info.texts_of_keys.get("alice", {}))
    assert info.texts_of_keys == {"alice": {"s1": 2.0}, "bob": {}}
    await cluster.close()


def test_a_pod_drains_the_verifier_of_its_own_node_by_ray_alone(start: Callable[[str], Any], root: Path) -> None:
    drain_here = runpy.run_path(str(root / "deploy" / "docker" / "drain_here.py"))["main"]
    here, elsewhere = start("here"), start("elsewhere")
    ray.get(elsewhere.pretend_to_be_on.remote("another node"), timeout=60)
    assert drain_here() == 0
    states = [ray.get(handle.info.remote(), timeout=60)["state"] for handle in (here, elsewhere)]
    assert states == ["draining", "ready"]


async def test_an_actor_that_drains_hears_that_the_cluster_knows_of_it(start: Callable[[str], Any]) -> None:
    handle = start("a")
    cluster = RayCluster()
    await until(cluster, is_ready)
    assert not await handle.acknowledged.remote()
    await handle.drain.remote(0.0)
    while not await handle.acknowledged.remote():
        await cluster.refresh()


async def test_an_actor_that_still_loads_is_down_and_stalls_neither_loop_nor_poll(
    local_ray: None, tmp_path: Path
) -> None:
    loaded = tmp_path / "loaded"
    options = {"name": "outrider-verifier-slow", "namespace": "outrider", "num_cpus": 0}
    slow = ray.remote(fake_actor()).options(**options).remote(VerifierConfig(name="slow"), loads_until=str(loaded))
    cluster = RayCluster(info_timeout_s=1.0)
    polling = asyncio.create_task(cluster.refresh())
    turns = 0
    while not polling.done():
        await asyncio.sleep(0.01)
        turns += 1
    assert (await polling)[0].state is VerifierState.DOWN
    assert turns > 5, "a loop that waited for Ray would have stood for that second"
    with pytest.raises(Unavailable):
        await cluster.tokenizer_json("slow")
    loaded.touch()
    assert (await until(cluster, is_ready)).restarts == 0
    ray.kill(slow)


def test_a_name_that_is_taken_is_a_config_error(start: Callable[[str], Any]) -> None:
    start("a")
    with pytest.raises(ConfigError) as refusal:
        start("a")
    assert refusal.value.field == "name"


async def test_leases_follow_a_restarted_actor_to_its_new_address(
    start: Callable[[str], Any], coordinating: Coordinating
) -> None:
    handle = start("a")
    async with coordinating(ray_address="auto") as call:
        service = call.server.service
        await call.until(lambda: service.verifiers and is_ready(service.verifiers[0]))
        first = await call("OpenLease", LeaseRequest(model="tiny", session="s"))
        ray.kill(handle, no_restart=False)
        await call.until(lambda: service.verifiers[0].restarts == 1)
        second = await call("OpenLease", LeaseRequest(model="tiny", session="s", avoid=("a",)))
        assert (first.verifier, second.verifier) == ("a", "a")
        assert second.address != first.address
        assert second.tokenizer is not None

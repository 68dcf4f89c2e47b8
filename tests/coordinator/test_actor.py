"""The verifier's actor, used without Ray around a scripted server: it serves from `__init__`, on its own loop."""

from __future__ import annotations

import asyncio
import sys
import threading
from types import ModuleType
from typing import Any

import pytest

from outrider.cloud.actor import VerifierActor, start_verifier_actor
from outrider.cloud.config import VerifierConfig
from outrider.coordinator.cluster import VerifierInfo
from outrider.proto.errors import ConfigError
from outrider.proto.types import VerifierStatus


class ScriptedServer:
    """What `VerifierServer` looks like from the actor."""

    tokenizer_json = "{}"
    tokenizer_sha256 = "a" * 64
    max_sessions = 8

    def __init__(self, config: Any, lease_secret: bytes = b"") -> None:
        self.config = config
        self.lease_secret = lease_secret
        self.threads: set[str] = set()

    async def start(self) -> str:
        self._note_thread()
        if self.config.model == "broken":
            raise ConfigError("cannot be loaded", field="target")
        return "127.0.0.1:4321"

    def status(self) -> VerifierStatus:
        self._note_thread()
        return VerifierStatus(self.config.name, "", "tiny", "ready", sessions=2, step_s=0.1, kv_pages_free=5)

    async def drain(self, grace_s: float) -> int:
        self._note_thread()
        return 2

    async def stop(self) -> None:
        self._note_thread()

    def _note_thread(self) -> None:
        self.threads.add(threading.current_thread().name)


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("outrider.cloud.server")
    module.VerifierServer = ScriptedServer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "outrider.cloud.server", module)


def test_it_serves_once_built_and_says_all_that_the_coordinator_reads() -> None:
    actor = VerifierActor(VerifierConfig(name="v"), b"secret")

    async def scenario() -> None:
        info = VerifierInfo.from_report(await actor.info())
        assert (info.name, info.address, info.model, info.state) == ("v", "127.0.0.1:4321", "tiny", "ready")
        assert (info.sessions, info.max_sessions, info.step_s, info.kv_pages_free) == (2, 8, 0.1, 5)
        assert await actor.tokenizer_json() == "{}"
        assert await actor.drain(1.0) == 2
        await actor.stop()

    asyncio.run(scenario())
    assert actor._server.lease_secret == b"secret"  # type: ignore[attr-defined]


def test_everything_of_the_server_runs_on_the_one_thread_that_is_its_own() -> None:
    actor = VerifierActor(VerifierConfig())

    async def scenario() -> None:
        await asyncio.gather(*(actor.info() for _ in range(5)), actor.drain(1.0))
        await actor.stop()

    asyncio.run(scenario())
    assert actor._server.threads == {"outrider-verifier"}  # type: ignore[attr-defined]
    assert not actor._thread.is_alive()


def test_each_life_is_another_incarnation() -> None:
    async def incarnation() -> str:
        actor = VerifierActor(VerifierConfig())
        info = await actor.info()
        await actor.stop()
        return str(info["incarnation"])

    assert asyncio.run(incarnation()) != asyncio.run(incarnation())


def test_a_server_that_cannot_start_fails_the_actor_with_its_own_error_and_leaves_no_thread() -> None:
    with pytest.raises(ConfigError) as failure:
        VerifierActor(VerifierConfig(model="broken"))
    assert failure.value.field == "target"
    assert not [thread for thread in threading.enumerate() if thread.name == "outrider-verifier"]


def test_outside_a_ray_cluster_starting_an_actor_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"ray\.init"):
        start_verifier_actor("v", VerifierConfig())

"""The verifier's actor without Ray, around a scripted server: it serves from `__init__`, on its own loop."""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from types import ModuleType
from typing import Any

import pytest

from outrider.cloud.serving.verifier_actor import VerifierActor, start_verifier_actor
from outrider.cloud.verifier_config import VerifierConfig
from outrider.coordinator.cluster import VerifierInfo
from outrider.proto.cluster_status import VerifierStatus
from outrider.proto.errors import ConfigError

Build = Callable[..., VerifierActor]


class ScriptedServer:
    """A `VerifierServer` as the actor uses it."""

    tokenizer_json = "{}"

    def __init__(
        self, config: Any, lease_secret: bytes, on_failure: Callable[[], None], sink: None, engine: None
    ) -> None:
        self.config = config
        self.lease_secret = lease_secret
        self.on_failure = on_failure
        self.threads: set[str] = set()
        self.drained: list[float] = []
        self.stopped = False
        self.sent_away: frozenset[str] = frozenset()
        self.incarnation = uuid.uuid4().hex

    async def start(self) -> str:
        self._note_thread()
        if self.config.model == "broken":
            raise ConfigError("cannot be loaded", field="target")
        return "127.0.0.1:4321"

    def report(self) -> dict[str, Any]:
        self._note_thread()
        status = VerifierStatus(
            name=self.config.name,
            address="127.0.0.1:4321",
            model="tiny",
            state="draining" if self.drained else "ready",
            sessions=2,
            step_s=0.1,
            kv_pages_free=5,
            release="1.2.3",
            max_sessions=8,
            kv_pages=9,
        )
        texts = {"lists_texts": True, "texts_of_keys": {"alice": {"s1": 0.5}}}
        return asdict(status) | texts | {"tokenizer_sha256": "a" * 64, "incarnation": self.incarnation}

    def send_away(self, sessions: frozenset[str]) -> None:
        self.sent_away |= sessions

    async def drain(self, grace_s: float) -> int:
        self._note_thread()
        self.drained.append(grace_s)
        return 2

    async def stop(self) -> None:
        self._note_thread()
        self.stopped = True

    def _note_thread(self) -> None:
        self.threads.add(threading.current_thread().name)


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("outrider.cloud.serving.verifier_server")
    module.VerifierServer = ScriptedServer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "outrider.cloud.serving.verifier_server", module)


@pytest.fixture
def build() -> Iterator[Callable[..., VerifierActor]]:
    """Build actors; afterwards stop them, and restore the handler of SIGTERM."""
    before = signal.getsignal(signal.SIGTERM)
    built: list[VerifierActor] = []

    def one(*arguments: Any, **config: Any) -> VerifierActor:
        built.append(VerifierActor(VerifierConfig(**config), *arguments))
        return built[-1]

    yield one
    for actor in built:
        actor.stop()
    signal.signal(signal.SIGTERM, before)


def test_it_serves_once_built_and_says_all_that_the_coordinator_reads(build: Build) -> None:
    actor = build(b"secret", name="v")
    info = VerifierInfo.from_report(actor.info())
    assert (info.name, info.address, info.model, info.state) == ("v", "127.0.0.1:4321", "tiny", "ready")
    assert (info.sessions, info.max_sessions, info.step_s, info.kv_pages_free) == (2, 8, 0.1, 5)
    assert (info.release, info.kv_pages) == ("1.2.3", 9)
    assert info.texts_of_keys == {"alice": {"s1": 0.5}}
    assert actor.tokenizer_json() == "{}"
    actor.send_away(frozenset({"s1"}))
    assert actor._server.sent_away == {"s1"}  # type: ignore[attr-defined]
    assert actor.drain(1.0) == 2
    assert actor._server.lease_secret == b"secret"  # type: ignore[attr-defined]


def test_a_target_of_its_own_needs_nothing_of_another_server(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("outrider.cloud.probes", "aiohttp"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "outrider.cloud.serving.server_loading", raising=False)
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert build(name="v").info()["name"] == "v"
    with pytest.raises(ConfigError, match=r"needs the extra \[server\].*aiohttp") as caught:
        build(name="w", engine="probes", target_url="http://127.0.0.1:9")
    assert caught.value.field == "engine"


def test_it_says_with_what_another_one_like_it_is_started(build: Build) -> None:
    config, secret, options = build(b"secret", {"num_gpus": 1}, name="v", max_sessions=3).recipe()
    assert (config.max_sessions, secret, options) == (3, b"secret", {"num_gpus": 1})


def test_everything_of_the_server_runs_on_the_one_thread_that_is_its_own(build: Build) -> None:
    actor = build()
    with ThreadPoolExecutor(6) as callers:
        wait([*(callers.submit(actor.info) for _ in range(5)), callers.submit(actor.drain, 1.0)])
    assert actor._server.threads == {"outrider-verifier"}  # type: ignore[attr-defined]


def test_no_method_is_a_coroutine_else_ray_runs_them_one_at_a_time() -> None:
    assert inspect.getmembers(VerifierActor, inspect.iscoroutinefunction) == []
    assert inspect.getmembers(VerifierActor, inspect.isasyncgenfunction) == []


def test_each_life_is_another_incarnation(build: Build) -> None:
    assert build().info()["incarnation"] != build().info()["incarnation"]


def test_it_leaves_once_a_coordinator_acknowledges_the_drain_and_not_before(build: Build) -> None:
    actor = build()
    with ThreadPoolExecutor(1) as caller:
        leaving = caller.submit(actor.leave, 0.0)
        while actor.info()["state"] != "draining":
            assert not leaving.done()
        with pytest.raises(TimeoutError):  # the answer may not have arrived, or not have been read
            leaving.result(timeout=0.3)
        actor.acknowledge_drain()
        assert leaving.result(timeout=20) == 2, "the sessions that have not moved"


def test_sigterm_drains_first_and_then_does_what_it_did_before(build: Build) -> None:
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    actor = build(drain_grace_s=0.5)
    os.kill(os.getpid(), signal.SIGTERM)
    assert ended.wait(30)
    assert actor._server.drained == [0.5]  # type: ignore[attr-defined]


def test_on_a_node_that_is_drained_it_does_as_on_sigterm(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, draining = threading.Event(), threading.Event()
    monkeypatch.setattr("outrider.cloud.serving.verifier_actor._runs_in_ray", lambda: True)
    monkeypatch.setattr("outrider.cloud.serving.verifier_actor._node_is_draining", draining.is_set)
    monkeypatch.setattr("outrider.cloud.serving.verifier_actor.WATCH_NODE_S", 0.01)
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    actor = build(drain_grace_s=0.5)
    assert not ended.wait(0.2)
    draining.set()
    assert ended.wait(30)
    assert actor._server.drained == [0.5]  # type: ignore[attr-defined]


def test_a_verifier_that_has_failed_ends_its_process_once_its_streams_are_ended(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: Future[bool] = Future()
    server: Any = None
    monkeypatch.setattr("outrider.cloud.serving.verifier_actor.end_process", lambda: ended.set_result(server.stopped))
    server = build()._server
    server.on_failure()
    assert ended.result(timeout=30), "the streams went first"


def test_a_verifier_whose_event_loop_stands_still_ends_its_process_all_the_same(
    build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended, released = threading.Event(), threading.Event()
    monkeypatch.setattr("outrider.cloud.serving.verifier_actor.FAILED_WITHIN_S", 0.1)
    monkeypatch.setattr("outrider.cloud.serving.verifier_actor.end_process", ended.set)
    actor = build()
    actor._loop.call_soon_threadsafe(released.wait)
    try:
        actor._server.on_failure()  # type: ignore[attr-defined]
        assert ended.wait(30)
    finally:
        released.set()


def test_the_process_of_a_failed_verifier_ends_with_a_status_that_says_so() -> None:
    program = (
        "import atexit, time; from outrider.cloud.serving.verifier_actor import end_process\n"
        "atexit.register(time.sleep, 600)"
    )
    ended = subprocess.run([sys.executable, "-c", f"{program}; end_process()"], timeout=60, check=False)
    assert ended.returncode == 1


def test_a_server_that_cannot_start_fails_the_actor_with_its_error_and_no_thread() -> None:
    with pytest.raises(ConfigError) as failure:
        VerifierActor(VerifierConfig(model="broken"))
    assert failure.value.field == "target"
    assert not [thread for thread in threading.enumerate() if thread.name == "outrider-verifier"]


def test_outside_a_ray_cluster_starting_an_actor_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"ray\.init"):
        start_verifier_actor("v", VerifierConfig())

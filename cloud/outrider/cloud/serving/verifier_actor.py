"""A verifier as a named Ray actor that serves again by itself whenever Ray restarts it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.cores import limit_spinning
from outrider.proto.plumbing.extras import lacking
from outrider.proto.plumbing.logs import configure
from outrider.proto.plumbing.loop_watch import end_process

if TYPE_CHECKING:
    from outrider.cloud.serving.probe_engine import ProbeEngine
    from outrider.cloud.serving.verifier_server import VerifierServer
    from outrider.cloud.verifier_config import VerifierConfig

# The coordinator finds verifiers by these two, and has its own copy: neither side imports the other.
NAMESPACE = "outrider"
ACTOR_PREFIX = "outrider-verifier-"
CONCURRENT_CALLS = 8
# A coordinator that knows of a drain does not replace the verifier. It looks every second, but waits for other
# verifiers too, and its first answer may be from before the drain. Without a coordinator nobody acknowledges.
ACKNOWLEDGED_WITHIN_S = 30.0
FORGOTTEN_WITHIN_S = 60.0
WATCH_NODE_S = 1.0  # between looks whether Ray drains the node
FAILED_WITHIN_S = 5.0  # for the streams of a failed verifier to end

Result = TypeVar("Result")


class VerifierActor:
    """An actor with one `VerifierServer`, on an event loop in a thread of its own.

    On a restart Ray runs `__init__` again and nothing else, so serving begins there; it returns when the server
    listens. All methods block: Ray then builds the actor in the main thread of its process, the only one that can
    catch SIGTERM, and calls the methods in threads of its own. With one coroutine among them, even a private one, Ray
    would run all on one event loop, where a method that waits holds up the others. The class works without Ray.

    SIGTERM (`ray stop`) and a node that Ray drains before it is taken away make the verifier drain: sessions are sent
    elsewhere within `config.drain_grace_s`, then the process ends. Ray starts it again where it can, and also where the
    process ends because steps fail whatever they are for.

    Raises:
        OutriderError: the server cannot be started; Ray then gives the actor up, and its callers see the error.
    """

    def __init__(
        self, config: VerifierConfig, lease_secret: bytes = b"", ray_options: Mapping[str, Any] | None = None
    ) -> None:
        if config.log_level:
            configure(config.log_level, config.log_format)
        limit_spinning()
        self._config = config
        self._lease_secret = lease_secret
        self._ray_options = dict(ray_options or {})
        self._acknowledged = threading.Event()
        self._stopped = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider-verifier", daemon=True)
        self._thread.start()
        try:
            self._server = self._submit(_serve(config, lease_secret, self._on_failure)).result()
        except BaseException:
            self._end_loop()
            raise
        if threading.current_thread() is threading.main_thread():
            self._on_second_sigterm = signal.signal(signal.SIGTERM, self._on_sigterm)
        if _runs_in_ray():
            threading.Thread(target=self._watch_node, name="outrider-node", daemon=True).start()

    def info(self) -> dict[str, Any]:
        """Return what the coordinator places sessions by; `incarnation` changes with every restart."""
        return self._submit(_report(self._server)).result()

    def cpu_s(self) -> tuple[str, float]:
        """Return the id of this node, and the processor time of this process in seconds; a trainer asks."""
        import ray

        return ray.get_runtime_context().get_node_id(), time.process_time()

    def recipe(self) -> tuple[VerifierConfig, bytes, dict[str, Any]]:
        """Return what starts another actor like this one: its config, the lease secret, and Ray's options."""
        return self._config, self._lease_secret, self._ray_options

    def tokenizer_json(self) -> str:
        return self._server.tokenizer_json

    def chat_template_json(self) -> str:
        return self._server.chat_template_json

    def forget_lessons(self, api_key: str) -> int:
        return self._server.forget_lessons(api_key).result(FORGOTTEN_WITHIN_S)

    def set_pace(self, min_step_s: float) -> None:
        self._server.set_pace(min_step_s)

    def drain(self, grace_s: float) -> int:
        return self._submit(self._server.drain(grace_s)).result()

    def send_away(self, sessions: frozenset[str]) -> None:
        self._server.send_away(sessions)

    def acknowledge_drain(self) -> None:
        """Note that a coordinator knows of the drain and will not replace this verifier."""
        self._acknowledged.set()

    def leave(self, grace_s: float) -> int:
        """Drain, wait for a coordinator to acknowledge it, and return how many sessions stayed.

        The actor can be killed then. An answer that reports the drain is no proof: it may arrive after the actor's end.
        """
        self.drain(grace_s)
        self._acknowledged.wait(ACKNOWLEDGED_WITHIN_S)
        return int(self.info()["sessions"])

    def stop(self) -> None:
        self._stopped.set()
        self._submit(self._server.stop()).result()
        self._end_loop()

    def _on_sigterm(self, _: int, __: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, self._on_second_sigterm)  # Ray's handler, which ends the process
        threading.Thread(target=self._drain_and_end, name="outrider-drain", daemon=True).start()

    def _watch_node(self) -> None:
        """Leave a node that is being drained: Ray then starts this actor again on another."""
        while not self._stopped.wait(WATCH_NODE_S):
            if _node_is_draining():
                os.kill(os.getpid(), signal.SIGTERM)
                return

    def _drain_and_end(self) -> None:
        try:
            self.drain(self._config.drain_grace_s)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def _on_failure(self) -> None:
        threading.Thread(target=self._end_failed, name="outrider-failure", daemon=True).start()

    def _end_failed(self) -> None:
        """End the process, once its sessions know: Ray starts another."""
        try:
            with suppress(TimeoutError):  # the event loop itself may stand still
                self._submit(self._server.stop()).result(FAILED_WITHIN_S)
        finally:
            end_process()

    def _submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _runs_in_ray() -> bool:
    """Return whether this process is a worker of Ray, or has joined a cluster; import nothing."""
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _node_is_draining() -> bool:
    """Return whether Ray drains this node: after SIGTERM to `ray start`, a preemption, or `ray drain-node`."""
    import ray
    import ray._private.state

    # Ray's own Serve and Train ask this; there is no public call.
    return ray.get_runtime_context().get_node_id() in ray._private.state.state.get_draining_nodes()


async def other_engine(config: VerifierConfig) -> ProbeEngine | None:
    """Return the engine of a server that is not ours; None: a verifier of `config` has a target of its own.

    Raises:
        ConfigError: what such an engine needs is not installed; else what `load_probe_engine` raises.
    """
    from outrider.cloud.verifier_config import PROBES

    if config.engine != PROBES:
        return None
    try:
        from outrider.cloud.serving.server_loading import load_probe_engine
    except ImportError as error:
        raise ConfigError(lacking("server", error.name or ""), field="engine") from error
    return await load_probe_engine(config)


async def _serve(config: VerifierConfig, lease_secret: bytes, on_failure: Callable[[], None]) -> VerifierServer:
    from outrider.cloud.serving.verifier_server import VerifierServer

    sink = None
    if config.learn:
        from outrider.cloud.learning.trainer_actor import TrainerLink

        sink = TrainerLink(config.model_id)
    server = VerifierServer(config, lease_secret, on_failure, sink, await other_engine(config))
    await server.start()
    return server


async def _report(server: VerifierServer) -> dict[str, Any]:
    return server.report()


def start_verifier_actor(
    name: str,
    config: VerifierConfig,
    *,
    lease_secret: bytes = b"",
    ray_options: Mapping[str, Any] | None = None,
) -> Any:
    """Start the verifier `name` as an actor in the Ray cluster that this process has joined.

    It returns at once; the target loads meanwhile, and `ray.get(handle.info.remote())` waits for it. Ray restarts the
    actor whenever its process dies. Keep the handle: without `lifetime="detached"` in `ray_options` the actor ends
    with its last handle, and with this process.

    Args:
        name: replaces `config.name`; leases and the coordinator's lists use it.
        config: settings of the verifier.
        lease_secret: shared with the coordinator; empty: sessions need no lease.
        ray_options: arguments of `ActorClass.options`, such as num_cpus, num_gpus, resources, lifetime.

    Returns:
        The actor's handle (`ray.actor.ActorHandle`).

    Raises:
        ConfigError: Ray is not installed, this process is in no Ray cluster, or the name is taken.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError(lacking("cloud", "ray"), field="ray") from error
    if not ray.is_initialized():
        raise ConfigError("this process is in no Ray cluster; call ray.init first", field="ray")
    options = {
        "num_cpus": 1,
        "max_restarts": -1,
        # A call repeated after a crash would drain, or count, twice; the coordinator asks again by itself.
        "max_task_retries": 0,
        "max_concurrency": CONCURRENT_CALLS,
        "get_if_exists": False,
        **(ray_options or {}),
        "name": ACTOR_PREFIX + name,
        "namespace": NAMESPACE,
    }
    try:
        actor = ray.remote(VerifierActor).options(**options)
        return actor.remote(replace(config, name=name), lease_secret, dict(ray_options or {}))
    except ValueError as error:
        raise ConfigError(f"{name!r} cannot be started: {error}", field="name") from error

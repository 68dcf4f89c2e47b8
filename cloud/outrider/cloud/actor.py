"""A verifier as a named Ray actor that serves again by itself whenever Ray restarts it."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from outrider.proto.errors import ConfigError

if TYPE_CHECKING:
    from outrider.cloud.config import VerifierConfig
    from outrider.cloud.server import VerifierServer

# The coordinator finds verifiers by these two; it has its own copy, since neither side imports the other.
NAMESPACE = "outrider"
ACTOR_PREFIX = "outrider-verifier-"
CONCURRENT_CALLS = 8

Result = TypeVar("Result")


class VerifierActor:
    """Owns one `VerifierServer`, on an event loop in a thread of its own.

    On a restart Ray runs `__init__` again and nothing else, so serving begins here; it returns when the server
    listens. The thread keeps the server off the loop on which Ray calls the methods below: neither can stall the
    other. Usable without Ray.

    Args:
        config: of the server.
        lease_secret: shared with the coordinator; empty: sessions need no lease.

    Raises:
        OutriderError: as `VerifierServer.start`. Ray then gives the actor up, and its callers see the error.
    """

    def __init__(self, config: VerifierConfig, lease_secret: bytes = b"") -> None:
        self._incarnation = uuid.uuid4().hex
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider-verifier", daemon=True)
        self._thread.start()
        try:
            self._server, self._address = self._submit(_serve(config, lease_secret)).result()
        except BaseException:
            self._end_loop()
            raise

    async def info(self) -> dict[str, Any]:
        """Return what the coordinator places by. `incarnation` is another one after every restart."""
        return await asyncio.wrap_future(self._submit(self._info()))

    async def tokenizer_json(self) -> str:
        """Return the text of the target's `tokenizer.json`."""
        return self._server.tokenizer_json

    async def drain(self, grace_s: float) -> int:
        """Take no more sessions, ask those that run to move within `grace_s` seconds; how many there were."""
        return await asyncio.wrap_future(self._submit(self._server.drain(grace_s)))

    async def stop(self) -> None:
        """Stop serving; the actor stays, to be killed."""
        await asyncio.wrap_future(self._submit(self._server.stop()))
        await asyncio.to_thread(self._end_loop)

    async def _info(self) -> dict[str, Any]:
        status = self._server.status()
        return {
            "name": status.name,
            "address": self._address,
            "model": status.model,
            "tokenizer_sha256": self._server.tokenizer_sha256,
            "state": status.state,
            "sessions": status.sessions,
            "max_sessions": self._server.max_sessions,
            "step_s": status.step_s,
            "kv_pages_free": status.kv_pages_free,
            "incarnation": self._incarnation,
        }

    def _submit(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _serve(config: VerifierConfig, lease_secret: bytes) -> tuple[VerifierServer, str]:
    from outrider.cloud.server import VerifierServer  # brings torch, which whoever only starts actors does not need

    server = VerifierServer(config, lease_secret)
    return server, await server.start()


def start_verifier_actor(
    name: str,
    config: VerifierConfig,
    *,
    lease_secret: bytes = b"",
    ray_options: Mapping[str, Any] | None = None,
) -> Any:
    """Start the verifier `name` as an actor in the Ray cluster that this process has joined.

    Returns at once; the target loads meanwhile, and `ray.get(handle.info.remote())` waits for it. Ray restarts the
    actor whenever its process dies. Keep the handle: without `lifetime="detached"` in `ray_options` the actor ends
    with its last handle, and with this process.

    Args:
        name: replaces `config.name`; leases and the coordinator's lists go by it.
        config: of the server.
        lease_secret: shared with the coordinator; empty: sessions need no lease.
        ray_options: of `ActorClass.options`, such as num_cpus, num_gpus, resources, lifetime.

    Returns:
        The actor's handle (`ray.actor.ActorHandle`).

    Raises:
        ConfigError: Ray is not installed, this process is in no Ray cluster, or the name is taken.
    """
    try:
        import ray
    except ImportError as error:
        raise ConfigError("needs Ray; pip install 'outrider[cloud]'", field="ray") from error
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
        return ray.remote(VerifierActor).options(**options).remote(replace(config, name=name), lease_secret)
    except ValueError as error:
        raise ConfigError(f"{name!r} cannot be started: {error}", field="name") from error

"""A whole cluster on this machine: Ray, verifier actors and a coordinator."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.cloud.learning.trainer_settings import TrainerSettings
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.link.shape import LinkShape
from outrider.deploy.process.progress import stage
from outrider.deploy.process.termination import WATCH
from outrider.drafters.packages import FAMILY, find_folder
from outrider.proto.address import split_address
from outrider.proto.errors import ConfigError, OutriderError, Unavailable
from outrider.proto.plumbing.cores import computing_cores
from outrider.proto.plumbing.serving import GrpcServerSettings

LOAD_TIMEOUT_S = 600.0
STARTS = 3  # tries to start Ray, each within the 30 s that it gives itself
SECRET_BYTES = 32

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocalCluster:
    """A running cluster.

    Attributes:
        coordinator: address of the coordinator.
        metrics_addresses: addresses of metrics, by name of verifier and `coordinator`; empty: not served.
        actors: handles of the verifier actors by name.
        trainer: handle of the trainer's actor; None: there is none.
        near: switches the emulated link and the target's minimum step time off, and returns the coordinator's address.
    """

    coordinator: str
    metrics_addresses: dict[str, str]
    actors: dict[str, Any]
    trainer: Any = None
    near: Callable[[], Awaitable[str]] | None = None


@asynccontextmanager
async def local_cluster(
    verifier: VerifierConfig,
    *,
    verifiers: int = 1,
    coordinator: Mapping[str, Any] | None = None,
    trainer: TrainerSettings | None = None,
    link: LinkShape | None = None,
) -> AsyncIterator[LocalCluster]:
    """Start a local Ray cluster with `verifiers` actors of one target and a coordinator; end them all on leaving.

    A process in a Ray job, or with RAY_ADDRESS set, joins that cluster instead of starting one. The verifiers
    listen on loopback, so they stay on this node.

    Args:
        verifier: settings of each verifier; the name is a prefix, threads default to a share of all cores but one.
        verifiers: number of actors.
        coordinator: fields of `CoordinatorConfig`; drafters are added to the embedded family.
        trainer: settings of a trainer, whose versions are offered to edges; None: there is none.
        link: emulated link between edges and all that they reach here; None: there is none.

    Raises:
        ConfigError: an option is wrong, a port is taken, or the joined cluster has verifiers already.
        Unavailable: the cluster does not answer, or does not start.
        OutriderError: a verifier cannot load its target.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from outrider.cloud.serving.verifier_actor import start_verifier_actor
    from outrider.coordinator.coordinator_config import CoordinatorConfig
    from outrider.coordinator.coordinator_server import CoordinatorServer
    from outrider.coordinator.ray_cluster import RayCluster
    from outrider.deploy.link.link_process import LinkProcess
    from outrider.deploy.local.far_fleet import FarFleet

    secret = secrets.token_bytes(SECRET_BYTES)
    asked = {"listen": "127.0.0.1:0", **(coordinator or {})}
    drafters = catalogue_folders(asked.pop("drafters", ()), trainer)
    if trainer is not None:
        trainer = replace(trainer, folder=drafters[-1].parent)
    coordinator_config = CoordinatorConfig(lease_secret=secret, drafters=drafters, **asked)
    check_ports(coordinator_config)
    verifier = replace(verifier, threads=verifier.threads or computing_cores(verifiers))
    with stage("starting Ray"):
        _join_or_start_ray()  # before any gRPC server or channel: Ray forks
    async with AsyncExitStack() as ending:
        ending.push_async_callback(_end_ray)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)

        def start(name: str) -> Any:
            # The actors share one machine, so Ray's accounting of CPUs must not keep any of them from starting.
            options = {
                "num_cpus": 0.01,
                "num_gpus": int(verifier.device.startswith("cuda")),
                "scheduling_strategy": here,
            }
            return start_verifier_actor(name, verifier, lease_secret=secret, ray_options=options)

        learning = None
        if trainer is not None:
            with stage(f"loading the trainer of {trainer.drafter}"):
                learning = await asyncio.to_thread(_start_trainer, verifier.model_id, trainer, here)
        actors = {name: start(name) for name in (f"{verifier.name}-{i}" for i in range(verifiers))}
        with stage(f"loading the target {verifier.target}" + (f" {verifiers} times" if verifiers > 1 else "")):
            infos = {name: await asyncio.to_thread(wait_until_loaded, name, actor) for name, actor in actors.items()}
        if trainer is not None:
            from outrider.cloud.learning.learner import check_reads_tokens

            check_reads_tokens(trainer, (info["tokenizer_sha256"] for info in infos.values()))
        # What is relayed passes the link in front of the coordinator.
        shape = link or None
        far = FarFleet(shape, start) if shape is not None and not coordinator_config.relay else None
        listen = coordinator_config.listen
        if shape is not None:
            coordinator_config = replace(coordinator_config, listen="127.0.0.1:0")
        server = CoordinatorServer(coordinator_config, far or RayCluster(respawn=start))
        ending.push_async_callback(server.stop)
        address = own_address = await server.start()
        if shape is not None:
            address = (await ending.enter_async_context(LinkProcess(own_address, shape, listen=listen))).address

        async def near() -> str:
            if far is not None:
                far.near = True
            await asyncio.to_thread(ray.get, [actor.set_pace.remote(0.0) for actor in actors.values()])
            assert server.service is not None  # noqa: S101 - it runs
            await server.service.refresh()
            return own_address

        metrics = {"coordinator": server.metrics_address}
        metrics |= {name: info["metrics_address"] for name, info in infos.items()}
        yield LocalCluster(address, metrics, actors, learning, near)


async def _end_ray() -> None:
    import ray

    if not WATCH.number:  # or this process ends at once, and what it has started with it
        await asyncio.to_thread(ray.shutdown)


def catalogue_folders(more: Sequence[Path], trainer: TrainerSettings | None) -> tuple[Path, ...]:
    """Return the folders of drafters that a cluster offers: the embedded ones, `more`, and those of a trainer.

    A trainer has its versions and, unless that is embedded, the drafter that it began with. Without the latter no edge
    could draft with what is to be improved, and the first version would be current at once.

    Raises:
        NotFound: there is no drafter to train on.
    """
    folders = (FAMILY, *more)
    if trainer is None:
        return folders
    from outrider.cloud.learning.learner import drafters_folder

    parent = find_folder(trainer.drafter).resolve()
    own = () if parent.parent == FAMILY else (parent,)
    return (*folders, *own, drafters_folder(trainer))


def _start_trainer(model: str, trainer: TrainerSettings, here: Any) -> Any:
    """Start the trainer on this node, wait until it has loaded, and return its handle, with which it ends."""
    from outrider.cloud.learning.trainer_actor import start_trainer_actor

    options = {"num_cpus": 0.01, "memory": 0, "lifetime": None, "scheduling_strategy": here}
    actor = start_trainer_actor(model, trainer, ray_options=options)
    wait_until_loaded(f"trainer of {model}", actor)
    return actor


def _join_or_start_ray() -> None:
    """Join the Ray cluster that RAY_ADDRESS names, as in a Ray job; without it start a local one."""
    from outrider.coordinator.ray_cluster import connect_ray, verifier_names

    address = os.environ.get("RAY_ADDRESS", "")
    if not address or address == "local" or "://" in address:  # a URL is for clients of the job server
        _start_local_ray()
        return
    connect_ray(address)
    if there := verifier_names():
        raise ConfigError(
            f"the cluster has verifiers already ({', '.join(there)}); use `outrider coordinator --ray-address auto`",
            field="ray",
        )


def _start_local_ray() -> None:
    """Start a Ray cluster for this process alone, without dashboard, on loopback, which asks for a token."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # silences a warning on machines without GPU
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    _ask_for_token()
    import ray

    from outrider.coordinator.ray_cluster import NAMESPACE, ray_on_loopback

    for left in reversed(range(STARTS)):
        try:
            with ray_on_loopback():
                ray.init(
                    address="local",
                    namespace=NAMESPACE,
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                    _node_ip_address="127.0.0.1",
                )
            return
        except Exception as error:  # Ray has no type of its own for a part that takes over 30 s on a busy machine
            in_time = "timed out" not in str(error).lower()
            if in_time or not left:
                late = "" if in_time else " in time"
                message = f"a local Ray cluster does not start{late}: {error}"
                raise Unavailable(message, field="ray", code="OUT-502") from error
            ray.shutdown()
            log.warning("a local Ray cluster did not start in time; trying again")


def _ask_for_token() -> None:
    """Have Ray ask for a token whatever its version does by default; an operator's own choice stands."""
    if "RAY_AUTH_MODE" in os.environ:
        return
    os.environ["RAY_AUTH_MODE"] = "token"
    if "ray" in sys.modules:  # it has read its settings at import, and would start servers that refuse it
        from ray._raylet import Config  # type: ignore[attr-defined]  # compiled; Ray itself does the same

        Config.initialize("")


def wait_until_loaded(name: str, actor: Any) -> dict[str, Any]:
    """Wait until the actor serves and return its info, or raise the error that prevents it."""
    import ray

    try:
        info: dict[str, Any] = ray.get(actor.info.remote(), timeout=LOAD_TIMEOUT_S)
        return info
    except ray.exceptions.RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, OutriderError):
            raise cause from None
        raise Unavailable(f"{name} does not start: {str(error).strip().splitlines()[-1]}") from error


def check_ports(config: GrpcServerSettings) -> None:
    """Refuse addresses that are taken or not of this machine, before minutes go into what is to be served there."""
    for name in ("listen", "metrics_listen"):
        check_port(getattr(config, name), name)


def check_port(address: str, field: str) -> None:
    """Refuse an address `host:port` that is taken or not of this machine, unless it is empty; raises `ConfigError`."""
    if not address:
        return
    host, port = split_address(address, field)
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        message = f"there is no host {host!r} to listen on: {error.strerror}"
        raise ConfigError(message, field=field, code="OUT-109") from error
    with socket.socket(family, kind, protocol) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: closed connections hold no port
        try:
            tried.bind(place)
            tried.listen(1)  # an address that may be reused is refused here at the latest
        except OSError as error:
            message = f"cannot listen on {address}: {error.strerror}; give another"
            if error.errno == errno.EADDRINUSE:
                message = (
                    f"port {port} of {host} is taken; stop what listens there, or give another port (0: a free one)"
                )
            raise ConfigError(message, field=field, code="OUT-109") from error

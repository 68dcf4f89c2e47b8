"""The coordinator's gRPC server: bytes to `ControlService` and back, and the tasks that keep its view fresh."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from outrider.coordinator.catalogue import Catalogue
from outrider.coordinator.cluster import Cluster, StaticCluster
from outrider.coordinator.config import CoordinatorConfig, split_address
from outrider.coordinator.service import ControlService
from outrider.proto import codec
from outrider.proto.channel import SERVER_OPTIONS
from outrider.proto.errors import ConfigError, Internal, OutriderError, to_status

logger = logging.getLogger(__name__)

Request = TypeVar("Request")
Reply = TypeVar("Reply")


class CoordinatorServer:
    """One coordinator. Build it anywhere, start and stop it in one event loop.

    Args:
        config: checked already.
        cluster: the verifiers; None builds what the config names. Ray is joined before the gRPC server exists.
    """

    def __init__(self, config: CoordinatorConfig, cluster: Cluster | None = None) -> None:
        self._config = config
        self._cluster = cluster
        self._server: grpc.aio.Server | None = None
        self._health = health.aio.HealthServicer()
        self._tasks: list[asyncio.Task[None]] = []
        self.service: ControlService | None = None

    async def start(self) -> str:
        """Look at the fleet once, listen, and return the bound host:port.

        Raises:
            ConfigError: the address cannot be bound, or the extra for Ray is missing.
            Unavailable: the Ray cluster of the config does not answer.
        """
        cluster = self._cluster = self._cluster or cluster_from_config(self._config)
        catalogue = Catalogue(self._config.drafters)
        self.service = service = ControlService(self._config, cluster, catalogue)
        await catalogue.refresh()
        await service.refresh()
        self._server = self._build(service)
        address = self._bind(self._server)
        await self._server.start()
        await self._health.set(codec.CONTROL_SERVICE, health_pb2.HealthCheckResponse.SERVING)
        for work in (service.refresh, catalogue.refresh, service.save):
            self._tasks.append(asyncio.create_task(_repeat(work, self._config.poll_s), name=work.__qualname__))
        logger.info("coordinator listens on %s", address)
        return address

    async def wait(self) -> None:
        """Until the server was stopped."""
        if self._server is not None:
            await self._server.wait_for_termination()

    async def stop(self, grace_s: float = 1.0) -> None:
        """Take no more calls, let running ones end for `grace_s`, then cut them. Sessions at verifiers go on."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        if self.service is not None:
            self.service.catalogue.close()
        if self._server is not None:
            await self._health.enter_graceful_shutdown()
            await self._server.stop(grace_s)
        if self.service is not None:
            await self.service.save()
        if self._cluster is not None:
            await self._cluster.close()

    def _build(self, service: ControlService) -> grpc.aio.Server:
        limits = {
            "grpc.max_receive_message_length": self._config.max_request_bytes,
            "grpc.max_send_message_length": self._config.max_reply_bytes,
        }
        server = grpc.aio.server(options=list((dict(SERVER_OPTIONS) | limits).items()))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        handlers = grpc.method_handlers_generic_handler(codec.CONTROL_SERVICE, control_handlers(service))
        server.add_generic_rpc_handlers((handlers,))
        return server

    def _bind(self, server: grpc.aio.Server) -> str:
        host, _ = split_address(self._config.listen, "listen")
        try:
            port = server.add_insecure_port(self._config.listen)
        except RuntimeError as error:
            raise ConfigError(f"{self._config.listen!r} cannot be bound; is the port taken?", field="listen") from error
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def cluster_from_config(config: CoordinatorConfig) -> Cluster:
    """Build the fleet that `config` names.

    Raises:
        ConfigError: Ray is wanted but not installed.
        Unavailable: no Ray answers there.
    """
    if not config.ray_address:
        return StaticCluster(config.verifiers)
    try:
        from outrider.coordinator.ray_cluster import RayCluster
    except ImportError as error:
        raise ConfigError(
            f"needs Ray ({error}); pip install 'outrider[coordinator]', or list fixed verifiers", field="ray_address"
        ) from error
    return RayCluster.connect(config.ray_address, drain_grace_s=config.drain_grace_s)


def control_handlers(service: ControlService) -> dict[str, grpc.RpcMethodHandler]:
    """Make the methods of `Control`. Bytes stay bytes up to here, so that malformed ones get an answer that says so."""

    async def fetch(request: tuple[str, int]) -> AsyncIterator[bytes]:
        async with aclosing(_generator(service.fetch(*request))) as chunks:
            async for chunk in chunks:
                yield chunk

    return {
        "OpenLease": _unary(codec.decode_lease_request, service.open_lease, codec.encode_lease),
        "ListDrafters": _unary(codec.decode_drafter_query, service.list_drafters, codec.encode_drafters),
        "FetchFile": _stream(codec.decode_fetch, fetch, codec.encode_chunk),
        "ReportSession": _unary(codec.decode_report, service.report, codec.encode_nothing),
        "WatchDrafters": _stream(codec.decode_drafter_query, service.watch, codec.encode_drafters),
        "Status": _unary(codec.decode_nothing, lambda _: service.status(), codec.encode_status),
        "Drain": _unary(codec.decode_drain, service.drain, codec.encode_drained),
    }


def _unary(
    decode: Callable[[bytes], Request], act: Callable[[Request], Awaitable[Reply]], encode: Callable[[Reply], bytes]
) -> grpc.RpcMethodHandler:
    async def handle(data: bytes, context: grpc.aio.ServicerContext) -> bytes:
        try:
            return encode(await act(decode(data)))
        except Exception as error:  # a call's top: whatever went wrong, the edge gets an answer
            failure = _as_outrider(error)
        await context.abort(*to_status(failure))
        raise failure  # not reached: abort raises

    return grpc.unary_unary_rpc_method_handler(handle)


def _stream(
    decode: Callable[[bytes], Request], act: Callable[[Request], AsyncIterator[Reply]], encode: Callable[[Reply], bytes]
) -> grpc.RpcMethodHandler:
    async def handle(data: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        try:
            async with aclosing(_generator(act(decode(data)))) as items:
                async for item in items:
                    yield encode(item)
            return
        except Exception as error:  # as above
            failure = _as_outrider(error)
        await context.abort(*to_status(failure))

    return grpc.unary_stream_rpc_method_handler(handle)


def _generator(items: AsyncIterator[Reply]) -> Any:
    """Return the same, known to have `aclose`: a cut call must close its file at once."""
    return items


def _as_outrider(error: Exception) -> OutriderError:
    if isinstance(error, OutriderError):
        return error
    logger.error("a call failed", exc_info=error)
    return Internal("the coordinator failed on this request; its log says why")


async def _repeat(work: Callable[[], Awaitable[object]], every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        try:
            await work()
        except Exception:  # a task's top: one bad look must not end all later ones
            logger.exception("%s failed and will be tried again", getattr(work, "__qualname__", work))

"""The coordinator's gRPC server, and the tasks that keep its view of the fleet fresh."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.coordinator.catalogue import Catalogue
from outrider.coordinator.cluster import Cluster, StaticCluster
from outrider.coordinator.coordinator_config import CoordinatorConfig
from outrider.coordinator.coordinator_metrics import CoordinatorMetrics
from outrider.coordinator.lease_admission import Caller, CallerAdmission
from outrider.coordinator.relay import StreamRelay
from outrider.coordinator.service import ControlService
from outrider.proto import codec
from outrider.proto.address import join_address, split_address
from outrider.proto.channel import MAX_MESSAGE_BYTES, SERVER_OPTIONS
from outrider.proto.cluster_status import ClusterStatus, encode_status
from outrider.proto.errors import ConfigError, Internal, OutriderError, ResourceExhausted
from outrider.proto.plumbing.connections import (
    BoundedHealth,
    ConnectionWatch,
    connection_options,
    discount,
    network_of_peer,
)
from outrider.proto.plumbing.extras import lacking
from outrider.proto.plumbing.metrics import MetricsServer
from outrider.proto.plumbing.tls import bind
from outrider.proto.rpc_errors import to_status
from outrider.proto.streams import write_answers

logger = logging.getLogger(__name__)

# A stream that is not read holds a chunk of 256 KiB and gRPC's buffers, about 0.9 MB; a fetch also an open file.
MAX_FETCHES, MAX_FETCHES_OF_PEER = 64, 16
MAX_WATCHES, MAX_WATCHES_OF_PEER = 16_384, 1024  # every edge has one
UNREAD_S = 30.0
MAX_REQUEST_BYTES = 1 << 20
RETRY_S = 1.0
MAX_CALLS = 20_480  # of all kinds, so that there is always room for those without a limit of their own
MAX_STREAMS_OF_CONNECTION = 2048  # a client waits with more

Request = TypeVar("Request")
Reply = TypeVar("Reply")


class CoordinatorServer:
    """A coordinator of a cluster, or of the one that the settings name; start and stop it in one event loop."""

    def __init__(self, config: CoordinatorConfig, cluster: Cluster | None = None) -> None:
        self._config = config
        self._cluster = cluster
        self._server: grpc.aio.Server | None = None
        self._health = BoundedHealth()
        self._tasks: list[asyncio.Task[None]] = []
        self._metrics_server: MetricsServer | None = None
        self._relay: StreamRelay | None = None
        self._connections = ConnectionWatch(config.connections_per_address)
        self.service: ControlService | None = None

    async def start(self) -> str:
        """Ask the fleet once, listen, and return the bound host:port; raises `ConfigError` or `Unavailable`."""
        metrics = CoordinatorMetrics()
        if self._config.metrics_listen:  # a thread of its own, before Ray and gRPC
            self._metrics_server = MetricsServer(metrics.registry, self._config.metrics_listen)
        cluster = self._cluster = self._cluster or cluster_from_config(self._config)
        catalogue = Catalogue(self._config.drafters)
        self.service = service = ControlService(self._config, cluster, catalogue, metrics=metrics)
        await service.scan_drafters()
        if self._config.drafters and not catalogue.manifests:
            logger.warning("no drafters to offer; install the distribution outrider-models, or give --drafters")
        await service.refresh()
        self._server = self._build(service)
        address = self._bind(self._server)
        await self._server.start()
        for name in (codec.CONTROL_SERVICE, *([codec.DECODING_SERVICE] if self._relay is not None else [])):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        for work in (service.refresh, service.scan_drafters, service.save):
            self._tasks.append(asyncio.create_task(_repeat(work, self._config.poll_s), name=work.__qualname__))
        logger.info("coordinator listens on %s", address)
        return address

    async def stop(self, grace_s: float = 1.0) -> None:
        """Take no more calls and cut running ones after `grace_s` seconds; sessions at verifiers go on."""
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._connections.stop()
        if self.service is not None:
            self.service.catalogue.close()
        if self._server is not None:
            await self._health.enter_graceful_shutdown()
            await self._server.stop(grace_s)
        if self._relay is not None:
            await self._relay.close()
        if self.service is not None:
            await self.service.save()
        if self._cluster is not None:
            await self._cluster.close()
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server.stop)

    @property
    def metrics_address(self) -> str:
        """Address of the metrics for Prometheus, host:port; empty: they are not served."""
        return self._metrics_server.address if self._metrics_server is not None else ""

    def _build(self, service: ControlService) -> grpc.aio.Server:
        config, relay = self._config, service.relay_metrics
        limits = {
            # Relayed frames may be longer than control requests, whose length `_Entry` checks.
            "grpc.max_receive_message_length": MAX_REQUEST_BYTES if relay is None else MAX_MESSAGE_BYTES,
            "grpc.max_send_message_length": MAX_MESSAGE_BYTES,
            "grpc.max_concurrent_streams": MAX_STREAMS_OF_CONNECTION,
            **dict(connection_options()),
        }
        calls = MAX_CALLS + (config.relay_streams if relay is not None else 0)
        options = list((dict(SERVER_OPTIONS) | limits).items())
        server = grpc.aio.server(options=options, maximum_concurrent_rpcs=calls, interceptors=(self._connections,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        methods = control_handlers(service, apart=config.connections_per_address != 0)
        # Each has a line of its own: gRPC accepts one call of a line in a turn of the event loop, however long that is.
        server.add_registered_method_handlers(codec.CONTROL_SERVICE, methods)
        if relay is not None:
            self._relay = StreamRelay(
                config.lease_secret,
                lambda: service.verifiers,
                relay,
                tls=config.verifier_tls,
                max_streams=config.relay_streams,
            )
            handlers = grpc.method_handlers_generic_handler(codec.DECODING_SERVICE, self._relay.handlers())
            server.add_generic_rpc_handlers((handlers,))
        return server

    def _bind(self, server: grpc.aio.Server) -> str:
        host, _ = split_address(self._config.listen, "listen")
        port = bind(server, self._config.listen, self._config.tls)
        self._connections.begin(port)
        return join_address(host, port)


def cluster_from_config(config: CoordinatorConfig) -> Cluster:
    """Build the fleet that `config` names; raises `ConfigError` or `Unavailable`."""
    if not config.ray_address:
        return StaticCluster(config.verifiers, secret=config.lease_secret, tls=config.verifier_tls)
    try:
        from outrider.coordinator.ray_cluster import RayCluster, connect_ray
    except ImportError as error:
        raise ConfigError(
            f"{lacking('coordinator', error.name or 'ray')}, or list fixed verifiers", field="ray_address"
        ) from error
    connect_ray(config.ray_address)
    return RayCluster()


def control_handlers(service: ControlService, *, apart: bool) -> dict[str, grpc.RpcMethodHandler]:
    """Return the methods of `Control`, which decode bytes themselves, so that malformed ones get an answer.

    The caller is checked before its request, and a request of more than `MAX_REQUEST_BYTES` is not read. `apart` says
    that addresses tell edges apart, so that each has a share alone.
    """
    entry = _Entry(service.admission, service.metrics)
    of_peer = (MAX_FETCHES_OF_PEER, MAX_WATCHES_OF_PEER) if apart else (MAX_FETCHES, MAX_WATCHES)
    fetches = StreamLimits("fetches of files", MAX_FETCHES, of_peer[0], UNREAD_S)
    watches = StreamLimits("watches of drafters", MAX_WATCHES, of_peer[1], UNREAD_S)

    async def status(_: None, caller: Caller) -> ClusterStatus:
        service.admission.check_status(caller)
        return await service.status()

    async def drain(name: str, caller: Caller) -> int:
        service.admission.check_drain(caller)
        return await service.drain(name)

    return {
        "OpenLease": entry.unary(codec.decode_lease_request, service.open_lease, codec.encode_lease),
        "ListDrafters": entry.unary(
            codec.decode_drafter_query, lambda sha256, _: service.list_drafters(sha256), codec.encode_drafters
        ),
        "FetchFile": entry.stream(
            codec.decode_fetch, lambda file, _: service.fetch(*file), codec.encode_chunk, fetches
        ),
        "ReportSession": entry.unary(codec.decode_report, service.report, codec.encode_nothing),
        "WatchDrafters": entry.stream(codec.decode_drafter_query, service.watch, codec.encode_drafters, watches),
        "Status": entry.unary(codec.decode_nothing, status, encode_status),
        "Drain": entry.unary(codec.decode_drain, drain, codec.encode_drained),
    }


class StreamLimits:
    """The running streams of one kind.

    Args:
        kind: what they are, for errors.
        most: streams that may work at once.
        most_of_peer: streams that one address, or IPv6 network of 64 bits, may have, working or not.
        unread_s: time for which an answer may stay unread; then the stream works no more, and goes with its client.
    """

    def __init__(self, kind: str, most: int, most_of_peer: int, unread_s: float) -> None:
        self.unread_s = unread_s
        self._kind = kind
        self._most = most
        self._most_of_peer = most_of_peer
        self.working = 0
        self._by_network: Counter[str] = Counter()

    @contextmanager
    def of_peer(self, peer: str) -> Iterator[None]:
        """Count a stream of `peer`, in gRPC's notation; raises `ResourceExhausted` where it has too many."""
        network = network_of_peer(peer)
        if self._by_network[network] >= self._most_of_peer:
            raise self._refusal(f"your address has {self._most_of_peer}")
        self._by_network[network] += 1
        try:
            yield
        finally:
            discount(self._by_network, network)

    @contextmanager
    def work(self) -> Iterator[None]:
        """Count a stream that works; raises `ResourceExhausted` where there are too many."""
        if self.working >= self._most:
            raise self._refusal(f"the coordinator has {self._most}")
        self.working += 1
        try:
            yield
        finally:
            self.working -= 1

    def _refusal(self, who: str) -> ResourceExhausted:
        message = f"{who} {self._kind} under way, which is the limit; try again"
        return ResourceExhausted(message, retry_after_s=RETRY_S, code="OUT-305")


class _Entry:
    """Checks the caller and the length of a call, and decodes it."""

    def __init__(self, admission: CallerAdmission, metrics: CoordinatorMetrics) -> None:
        self._admission = admission
        self._metrics = metrics

    def unary(
        self,
        decode: Callable[[bytes], Request],
        act: Callable[[Request, Caller], Awaitable[Reply]],
        encode: Callable[[Reply], bytes],
    ) -> grpc.RpcMethodHandler:
        async def handle(data: bytes, context: grpc.aio.ServicerContext) -> bytes:
            try:
                caller = self._admit(data, context)
                return encode(await act(decode(data), caller))
            except Exception as error:  # the top of a call: the edge gets an answer to any failure
                failure = self._failure(error)
            await context.abort(*to_status(failure))
            raise failure  # not reached: abort raises

        return grpc.unary_unary_rpc_method_handler(handle)

    def stream(
        self,
        decode: Callable[[bytes], Request],
        act: Callable[[Request, Caller], AsyncGenerator[Reply, None]],
        encode: Callable[[Reply], bytes],
        limits: StreamLimits,
    ) -> grpc.RpcMethodHandler:
        async def answers(data: bytes, context: grpc.aio.ServicerContext) -> AsyncGenerator[bytes, None]:
            try:
                caller = self._admit(data, context)
                with limits.work():
                    async with aclosing(act(decode(data), caller)) as items:
                        async for item in items:
                            yield encode(item)
                return
            except Exception as error:  # as above
                failure = self._failure(error)
            await context.abort(*to_status(failure))

        written = write_answers(answers, limits.unread_s)

        async def handle(data: bytes, context: grpc.aio.ServicerContext) -> None:
            try:
                with limits.of_peer(context.peer()):
                    await written(data, context)
                    return
            except ResourceExhausted as error:
                failure = self._failure(error)
            await context.abort(*to_status(failure))

        return grpc.unary_stream_rpc_method_handler(handle)

    def _failure(self, error: Exception) -> OutriderError:
        failure = error
        if not isinstance(failure, OutriderError):
            logger.error("a call failed", exc_info=error)
            failure = Internal("the coordinator failed on this request; its log says why")
        self._metrics.refuse_call(failure)
        return failure

    def _admit(self, data: bytes, context: Any) -> Caller:
        caller = self._admission.identify(context.invocation_metadata() or (), context.peer())
        if len(data) > MAX_REQUEST_BYTES:
            raise ResourceExhausted(f"is {len(data)} bytes long; at most {MAX_REQUEST_BYTES} are taken", field="frame")
        return caller


async def _repeat(work: Callable[[], Awaitable[object]], every_s: float) -> None:
    while True:
        await asyncio.sleep(every_s)
        try:
            await work()
        except Exception:  # the top of a task: one failure must not end it
            logger.exception("%s failed and will be tried again", getattr(work, "__qualname__", work))

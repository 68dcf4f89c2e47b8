"""The verifier's gRPC server: its parts, their life in one process, and its reports to coordinators."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from outrider.cloud.models.family_index import chat_template_json
from outrider.cloud.serving.decode_streams import DecodeStreams
from outrider.cloud.serving.engine_health import VerifierHealth
from outrider.cloud.serving.service_goals import least_gap_s
from outrider.cloud.serving.steps import StepTiming
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto.address import is_local_address
from outrider.proto.channel import REPORT_METHOD, SERVER_OPTIONS
from outrider.proto.cluster_status import VerifierStatus
from outrider.proto.errors import ConfigError, InvalidArgument, OutriderError
from outrider.proto.lease import check_coordinator
from outrider.proto.plumbing.connections import BoundedHealth, ConnectionWatch, connection_options, token_in
from outrider.proto.plumbing.logs import about
from outrider.proto.plumbing.metrics import MetricsServer
from outrider.proto.plumbing.tls import bind, name_to_expect
from outrider.proto.release import release
from outrider.proto.rpc_errors import to_status

if TYPE_CHECKING:
    from outrider.cloud.learning.lessons import LessonSink
    from outrider.cloud.serving.engine import Engine
    from outrider.cloud.serving.probe_engine import ProbeEngine

SWITCH_S = 0.0005  # by default, a frame that comes while the engine's thread runs Python waits 5 ms
# A client waits with more. A relay has a stream for each session, two more for each that come back, and spare ones.
MAX_STREAMS_OF_CONNECTION = 1024

log = logging.getLogger(__name__)


class VerifierServer:
    """A target, its engine and their server, in this process."""

    def __init__(
        self,
        config: VerifierConfig,
        lease_secret: bytes = b"",
        on_failure: Callable[[], None] = lambda: None,
        sink: LessonSink | None = None,
        engine: Engine | ProbeEngine | None = None,
    ) -> None:
        """Serve `engine`, or else load the target of `config` and check it.

        `lease_secret` is shared with the coordinator; empty: no lease is asked for (loopback only). `on_failure` is
        called once, in the event loop, when steps fail whatever they are for, or from a thread beside it, where the
        loop stands still: the process should end. `sink` takes lessons, if `config.learn` is set.

        Raises:
            NotFound, ModelRefused: the target or a projection cannot be loaded.
            ConfigError: it listens beyond loopback without a lease secret, is to learn without a sink, or does not know
                the host at which edges reach it.
        """
        if not (lease_secret or is_local_address(config.listen, "listen")):
            raise ConfigError("must be given where the verifier listens beyond loopback", field="lease_secret")
        if config.learn and sink is None:
            message = "needs a trainer, which runs in a Ray cluster; start the verifier there, with --ray-address"
            raise ConfigError(message, field="learn")
        self._host = config.host  # before weights are read
        self._config = config
        self._secret = lease_secret
        if engine is None:
            from outrider.cloud.serving.backends import load_engine  # imports torch

            engine = load_engine(config, self._engine_failed, sink, lease_secret)
        self._engine = engine
        target = engine.backend.facts
        self.tokenizer_json = target.tokenizer_json
        self.tokenizer_sha256 = target.tokenizer_sha256
        self.rules = engine.rules
        self._loop: asyncio.AbstractEventLoop | None = None
        self.incarnation = uuid.uuid4().hex
        self._server: grpc.aio.Server | None = None
        self._connections = ConnectionWatch(config.connections_per_address)
        self._health_service = BoundedHealth()
        self._health = VerifierHealth(
            self._engine.heart, self._engine.metrics, self._health_service, self.rules.name, on_failure
        )
        self._address = ""
        self._metrics_server: MetricsServer | None = None
        self._streams = DecodeStreams(config, self.rules, lease_secret, self.incarnation, self._engine, self._health)

    async def start(self) -> str:
        """Begin to serve, and return the address as host:port."""
        self._loop = asyncio.get_running_loop()
        if self._config.metrics_listen:  # a thread of its own, before gRPC's
            self._engine.metrics.watch(self._engine.sessions)
            self._metrics_server = MetricsServer(self._engine.metrics.registry, self._config.metrics_listen)
        # A limit of calls in all would hold for health checks, too. A relay's streams share one connection.
        streams = max(MAX_STREAMS_OF_CONNECTION, 4 * self._config.max_sessions)
        options = [*SERVER_OPTIONS, *connection_options(), ("grpc.max_concurrent_streams", streams)]
        self._server = grpc.aio.server(options=options, interceptors=(self._connections,))
        self._server.add_generic_rpc_handlers((self._streams.service(),))
        service, method = REPORT_METHOD.strip("/").split("/")
        handlers = {method: grpc.unary_unary_rpc_method_handler(self._report_to)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health_service, self._server)
        port = bind(self._server, self._config.listen, self._config.tls)
        self._connections.begin(port)
        self._address = f"{self._host}:{port}"
        sys.setswitchinterval(SWITCH_S)
        self._engine.start()
        await self._server.start()
        await self._health.begin()
        line = "verifier %s serves %s on %s"
        log.info(line, self.rules.name, self.rules.model, self._address, extra=about(verifier=self.rules.name))
        return self._address

    async def drain(self, grace_s: float = 10.0) -> int:
        """Send every session elsewhere, wait for them to go, and return how many there were."""
        await self._health.close()
        sessions = self._engine.sessions.num_running
        self._engine.post_drain()
        until = time.monotonic() + grace_s
        while self._engine.sessions.num_running and time.monotonic() < until:  # noqa: ASYNC110 - counted in another thread
            await asyncio.sleep(0.02)
        return sessions

    async def stop(self, grace_s: float = 1.0) -> None:
        """End the server, then the engine; one that has hung holds this up for ever."""
        self._health.stop()
        self._connections.stop()
        if self._server is not None:
            await self._server.stop(grace_s)
            await asyncio.to_thread(self._engine.stop)
        await asyncio.to_thread(self._engine.backend.close)
        self._streams.close()
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server.stop)
        await asyncio.to_thread(self._streams.export_spans)

    @property
    def chat_template_json(self) -> str:
        """The target's chat template, as `models.family_index.chat_template_json` writes it; empty: it has none."""
        facts = self._engine.backend.facts
        return facts.chat_template_json if facts.server else chat_template_json(self._config.target)

    @property
    def metrics_address(self) -> str:
        """Address of the metrics for Prometheus, host:port; empty: none are served."""
        return self._metrics_server.address if self._metrics_server is not None else ""

    def take_step_timings(self) -> list[StepTiming]:
        """Return the times of the steps since the last call, oldest first; the newest few thousand are kept."""
        timings = self._engine.timings
        return [timings.popleft() for _ in range(len(timings))]

    def set_pace(self, min_step_s: float) -> None:
        """Replace `min_step_s` of the settings from the next step on."""
        self._engine.set_pace(min_step_s)

    def forget_lessons(self, api_key: str) -> Future[int]:
        """Drop all lessons of an API key, here and at the trainer; the answer is how many positions that had."""
        return self._engine.lessons.forget(api_key)

    def status(self) -> VerifierStatus:
        counts = self._engine.metrics.counts
        return VerifierStatus(
            name=self.rules.name,
            address=self._address,
            model=self.rules.model,
            state=self._health.state(self._engine.sessions),
            sessions=self._engine.sessions.num_running,
            step_s=self._engine.step_s.value,
            kv_pages_free=self._engine.backend.capacity.free_pages,
            release=release(),
            max_sessions=self._config.max_sessions,
            kv_pages=self._engine.backend.capacity.pages,
            guarantee=self.rules.guarantee.name.lower(),
            precision=self.rules.precision,
            context_length=self.rules.context_length,
            server=self._engine.backend.facts.server,
            drafter_here=self._engine.metrics.drafter_here,
            committed_tokens=counts.committed_tokens,
            drafted_here=counts.drafted_here,
            verified_here=counts.verified_here,
            accepted_here=counts.accepted_here,
            drafting_here_s=counts.drafting_here_s,
            gap_s=least_gap_s(self._engine.sessions.running(), self._engine.batching.cost),
        )

    @property
    def texts_of_keys(self) -> dict[str, dict[str, float]]:
        """Seconds for which each text has gone on, by API key and session."""
        return self._engine.sessions.texts_of_keys(time.monotonic())

    def send_away(self, sessions: frozenset[str]) -> None:
        """End the texts of these sessions here; a coordinator decides whether they go on."""
        self._engine.post_send_away(sessions)

    def report(self) -> dict[str, Any]:
        """Return what a coordinator that asks places sessions by; `incarnation` changes with every start.

        Call it in the server's event loop.
        """
        self._streams.lease_ends.asked()
        admitted = dict(self._engine.sessions.admitted)  # before the texts are listed, so that none is missing in both
        tls = self._config.tls
        return asdict(self.status()) | {
            "tokenizer_sha256": self.tokenizer_sha256,
            "metrics_address": self.metrics_address,
            "tls": tls is not None,
            "tls_name": "" if tls is None else name_to_expect(tls.cert, self._host),
            "incarnation": self.incarnation,
            "admitted": admitted,
            "texts_of_keys": self.texts_of_keys,
        }

    async def _report_to(self, data: bytes, context: Any) -> bytes:
        """Report to a coordinator that knows this address alone, and proves that it has the lease secret, if any.

        Its request is a JSON object, whose `send_away` lists texts that are to end here, as `Admission.send_away` names
        them. A coordinator in the same Ray cluster asks the actor instead.
        """
        try:
            if self._secret:
                token = token_in(context.invocation_metadata() or ())
                check_coordinator(token, self._secret, verifier=self.rules.name, now_s=time.time())
            if texts := _to_send_away(data):
                self.send_away(texts)
        except OutriderError as error:
            await context.abort(*to_status(error))
        return json.dumps(self.report()).encode()

    def _engine_failed(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            asyncio.run_coroutine_threadsafe(self._health.fail(), self._loop)


def _to_send_away(data: bytes) -> frozenset[str]:
    try:
        request = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("is not JSON", field="report_request") from error
    texts = request.get("send_away", []) if isinstance(request, Mapping) else None
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InvalidArgument("must be a list of texts", field="report_request.send_away")
    return frozenset(texts)

"""The daemon: one event loop for HTTP, for gRPC to the cloud, and for the watch over both."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import uuid
from collections.abc import Coroutine, Iterator
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from outrider.edge.client import Client
from outrider.edge.daemon import DaemonConfig
from outrider.edge.daemon.api_access import Auth, Limiter
from outrider.edge.daemon.app import Api
from outrider.edge.daemon.body_reading import IgnoreUnknown
from outrider.edge.daemon.cloud import Cloud
from outrider.edge.daemon.daemon_metrics import HttpMetrics
from outrider.edge.daemon.generation import Service
from outrider.edge.daemon.http_errors import ApiError, json_bytes
from outrider.edge.edge_metrics import EdgeMetrics
from outrider.proto.address import join_address, split_address
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.access import Keys
from outrider.proto.plumbing.files import Watched
from outrider.proto.plumbing.tls import ServerTls

BACKLOG = 1024
IDLE_S = 75  # between two requests of a connection
END_WITHIN_S = 3
TLS_LOOK_EVERY_S = 2.0
MAX_HEADER_BYTES = 64 << 10
HEAD_WITHIN_S = 60.0
REFUSED_STAYS_S = 2.0  # cut off at once while it writes, a client would never see why
NO_REQUEST = ApiError(
    400, f"this is no HTTP/1.1 request, or its head has more than {MAX_HEADER_BYTES} bytes", code="invalid_http"
)
TOO_SLOW = ApiError(408, f"the head of the request did not come within {HEAD_WITHIN_S:g} s", code="request_timeout")


class Daemon:
    """Serves one client's cloud over HTTP.

    Args:
        config: the daemon's settings.
        client: not prepared; the daemon closes it.

    Raises:
        ConfigError: keys or certificates cannot be read.
    """

    def __init__(self, config: DaemonConfig, client: Client) -> None:
        self._config = config
        self._client = client
        self._tls = LiveTls(config.tls) if config.tls else None
        metrics = EdgeMetrics()
        http_metrics = HttpMetrics(metrics.registry)
        self.cloud = Cloud(client, config.tool_format)
        keys = Keys.from_file(config.api_keys) if config.api_keys else None
        self.limiter = Limiter(config.max_requests, http_metrics, keys)
        unknown = None if config.strict else IgnoreUnknown()
        service = Service(
            self.cloud, metrics, http_metrics, self.limiter, config.request_timeout_s, unknown_fields=unknown
        )
        self._host, self._port = split_address(config.listen, "listen")
        self._app = Api(service, Auth(self._host, keys, config.allow_host, config.allow_origin)).application()
        self._http: _Http | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> str:
        """Begin to serve, cloud or not, and return the URL; raise `ConfigError` where the address cannot be bound."""
        listener = _bound(self._host, self._port)
        self._http = _Http(self._app, self._tls)
        serving = self._spawn(self._http.serve(sockets=[listener]), "http")
        self._spawn(self.cloud.watch(), "cloud")
        if self._tls is not None:
            self._spawn(self._tls.watch(), "tls")
        while not self._http.started and not serving.done():  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)
        if serving.done():
            serving.result()
        host, port = listener.getsockname()[:2]
        return f"{'https' if self._tls else 'http'}://{join_address(host, port)}"

    def reload(self) -> None:
        """Read certificates that have changed at once; they and API keys are also read again without this."""
        if self._tls is not None:
            self._tls.reload()

    async def stop(self) -> None:
        """Refuse new texts, give those that run the grace time to end, then cut them and close everything."""
        await self.limiter.drain(self._config.grace_s)
        http, *watching = self._tasks
        if self._http is not None:
            self._http.should_exit = True
            await http
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await self.cloud.close()
        await self._client.close()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"outrider-{name}")
        self._tasks.append(task)
        return task


class _Http(uvicorn.Server):
    """Uvicorn, which leaves signals to whoever runs the process."""

    def __init__(self, app: ASGIApp, tls: LiveTls | None) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http=HttpProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=IDLE_S,
                timeout_graceful_shutdown=END_WITHIN_S,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
                ssl_context_factory=None if tls is None else lambda *_: tls.context,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = "the port is taken" if error.errno == errno.EADDRINUSE else error.strerror
        address = join_address(host, port)
        message = f"cannot listen on {address}: {reason}; give another --listen"
        raise ConfigError(message, field="listen", code="OUT-109") from error
    listener.setblocking(False)
    # Accepted sockets inherit it. asyncio would set it only where it sees a socket made for TCP by name, and without it
    # what follows the head of an answer waits for the client's acknowledgement, 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


class HttpProtocol(H11Protocol):
    """Uvicorn's protocol of one connection, with a limit on the time for a request's head, and OpenAI's errors."""

    _head_timer: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)
            self._watch_head()

    def on_response_complete(self) -> None:
        """Begin to wait for the head of another request; until its first byte, Uvicorn watches the time."""
        super().on_response_complete()
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_head()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - Uvicorn's words are replaced
        """Refuse what cannot be parsed."""
        self._refuse(NO_REQUEST)

    def _watch_head(self) -> None:
        if self.conn.their_state is not h11.IDLE or self.timeout_keep_alive_task is not None:
            self._forget_head()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_WITHIN_S, self._refuse, TOO_SLOW)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: ApiError) -> None:
        """Answer, if no other answer has begun, and close."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
        if self.transport.is_closing():
            return
        self._refused = True
        self._forget_head()
        if self.cycle is not None:  # its body is what is wrong: so the application shall see its client as gone
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = json_bytes(error.body())
        headers: list[Any] = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            (b"x-request-id", uuid.uuid4().hex.encode()),
        ]
        answer = h11.Response(status_code=error.status, headers=headers, reason=STATUS_PHRASES[error.status])
        for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.loop.call_later(REFUSED_STAYS_S, self.transport.close)
        if self.transport.can_write_eof():
            with contextlib.suppress(OSError):  # the client may be gone already
                self.transport.write_eof()


class LiveTls:
    """An SSL context for new connections, with the certificate that the files hold now.

    Authorities of client certificates are added when the files change, and taken away only by a restart: OpenSSL cannot
    forget. Files that are wrong change nothing.

    Raises:
        ConfigError: a file is unreadable, not PEM, encrypted, or the key is not the certificate's.
    """

    def __init__(self, files: ServerTls) -> None:
        self._files = files
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        if files.client_ca is not None:
            self.context.verify_mode = ssl.CERT_REQUIRED
        self._watched = Watched("certificates", files.files, self._load)

    async def watch(self) -> None:
        while True:
            await asyncio.sleep(TLS_LOOK_EVERY_S)
            self.reload()

    def reload(self) -> None:
        """Read the files again if they have changed."""
        self._watched.if_changed()

    def _load(self) -> None:
        for context in (
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER),
            self.context,
        ):  # a half-written pair stops at the first
            self._load_into(context)

    def _load_into(self, context: ssl.SSLContext) -> None:
        cert, key, client_ca = self._files.cert, self._files.key, self._files.client_ca
        try:
            context.load_cert_chain(cert.expanduser(), key.expanduser(), password=_no_password)
        except (OSError, ssl.SSLError, ValueError) as error:
            message = f"cannot use {cert} and {key}: {_plain(error)}"
            raise ConfigError(message, field="tls_cert", code="OUT-105") from error
        if client_ca is None:
            return
        try:
            context.load_verify_locations(client_ca.expanduser())
        except (OSError, ssl.SSLError) as error:
            message = f"cannot use {client_ca}: {_plain(error)}"
            raise ConfigError(message, field="tls_client_ca", code="OUT-105") from error


def _no_password() -> str:
    raise ValueError("the key is encrypted; take its password off")


def _plain(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)

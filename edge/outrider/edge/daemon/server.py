"""The daemon: one event loop for HTTP, for gRPC to the cloud, and for the watch over both."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import Coroutine, Iterator
from typing import Any

import uvicorn

from outrider.edge.client import Client
from outrider.edge.daemon.app import Api
from outrider.edge.daemon.cloud import Cloud
from outrider.edge.daemon.config import DaemonConfig
from outrider.edge.daemon.framing import MOST_HEADER_BYTES, HttpProtocol
from outrider.edge.daemon.gate import Gate
from outrider.edge.daemon.guard import Doors
from outrider.edge.daemon.metrics import HttpMetrics
from outrider.edge.daemon.tls import LiveTls
from outrider.edge.metrics import EdgeMetrics
from outrider.proto.address import join_address
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.access import Keys

BACKLOG = 1024
IDLE_S = 75  # that a connection is kept open for another request
END_WITHIN_S = 3

log = logging.getLogger(__name__)


class Daemon:
    """Serves one client's cloud over HTTP.

    Args:
        config: of the daemon.
        client: not prepared; the daemon closes it.

    Raises:
        ConfigError: keys or certificates cannot be read.
    """

    def __init__(self, config: DaemonConfig, client: Client) -> None:
        self._config = config
        self._client = client
        self._tls = LiveTls(config.tls) if config.tls else None
        keys = Keys.from_file(config.api_keys) if config.api_keys else None
        metrics = EdgeMetrics()
        figures = HttpMetrics(metrics.registry)
        self.cloud = Cloud(client)
        self.gate = Gate(config.max_requests, figures)
        self.metrics = metrics
        api = Api(self.cloud, metrics, figures, self.gate, config.request_timeout_s)
        self._app = api.application(Doors(config.host, keys))
        self._http: _Http | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> str:
        """Begin to serve, cloud or not; the URL.

        Raises:
            ConfigError: the address cannot be bound.
        """
        listener = _bound(self._config.host, self._config.port)
        self._http = _Http(_http_config(self._app, self._tls))
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
        """Read certificates anew; API keys are by themselves."""
        if self._tls is not None:
            self._tls.reload()

    async def stop(self) -> None:
        """Refuse new texts, let those that run end for the grace time, cut them, close everything."""
        await self.gate.drain(self._config.grace_s)
        http, *watching = self._tasks
        if self._http is not None:
            self._http.should_exit = True
            await http
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await self._client.close()

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=f"outrider-{name}")
        self._tasks.append(task)
        return task


class _Http(uvicorn.Server):
    """Uvicorn, which leaves signals to whoever runs the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do not."""
        yield


def _http_config(app: Any, tls: LiveTls | None) -> uvicorn.Config:
    return uvicorn.Config(
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
        h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        ssl_context_factory=None if tls is None else lambda *_: tls.context,
    )


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        why = "the port is taken" if error.errno == errno.EADDRINUSE else error.strerror
        address = join_address(host, port)
        raise ConfigError(f"cannot listen on {address}: {why}; give another --listen", field="listen") from error
    listener.setblocking(False)
    return listener

"""Metrics for Prometheus: the buckets that parts share, the text of a scrape, and a small server for it.

A metric that vLLM has too has its name, with `outrider:` in place of `vllm:`, so that its dashboards can be adapted.
"""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import ThreadingWSGIServer, choose_encoder
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.registry import Collector

from outrider.proto.address import join_address, split_address
from outrider.proto.errors import ConfigError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse

SECONDS = (
    *(0.0002, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0),
)
TOKENS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0, 128.0, 256.0, 512.0)

FIELD = "metrics_listen"
CLIENT_TIMEOUT_S = 10.0
MAX_CLIENTS = 32


def exposition(registry: CollectorRegistry, accept: str = "") -> tuple[bytes, str]:
    """Return body and content type of a scrape: OpenMetrics if the Accept header asks for it, else Prometheus text."""
    encode, content_type = choose_encoder(accept)
    if content_type.startswith("application/openmetrics-text"):
        # prometheus_client 0.26 would turn the colon of every sample's name into an underscore. All names are plain, so
        # that leaving UTF-8 alone is right for every Accept header.
        encode = partial(encode, escaping=ALLOWUTF8)  # type: ignore[call-arg]
    return encode(_WithoutCreated(registry)), content_type


class _WithoutCreated(Collector):
    """A registry without the times at which its series began, which the library omits for a whole process or not."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class MetricsServer:
    """Serves a registry over HTTP until `stop`, for processes without another HTTP server.

    It runs in a thread of its own and is started before gRPC and Ray. `start_http_server` of prometheus_client would
    answer every path, mangle names (see `exposition`), and wait for a silent client for ever.

    Attributes:
        address: host:port, with the port that is bound.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(self, registry: CollectorRegistry, listen: str) -> None:
        def answer(request: dict[str, Any], start: StartResponse) -> list[bytes]:
            if request["REQUEST_METHOD"] not in ("GET", "HEAD") or request["PATH_INFO"] not in ("/", "/metrics"):
                start("404 Not Found", [("Content-Type", "text/plain")])
                return [b"GET /metrics\n"]
            body, content_type = exposition(registry, request.get("HTTP_ACCEPT", ""))
            start("200 OK", [("Content-Type", content_type), ("Content-Length", str(len(body)))])
            return [body] if request["REQUEST_METHOD"] == "GET" else []

        host, port = split_address(listen, FIELD)
        server_class = _Server6 if ":" in host else _Server
        try:
            self._server = make_server(host, port, answer, server_class, _Handler)
        except OSError as error:
            raise ConfigError(f"{listen!r} cannot be bound: {error.strerror}", field=FIELD, code="OUT-109") from error
        self.address = join_address(host, self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="outrider-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingWSGIServer):
    """A server of `MAX_CLIENTS` connections, which shuts the oldest one of whoever has most to take another."""

    def __init__(self, *arguments: Any) -> None:
        self._clients: dict[Any, str] = {}  # addresses of sockets, oldest first
        self._changed = threading.Condition()
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._changed:
            if len(self._clients) >= MAX_CLIENTS:
                counts = Counter(self._clients.values())
                with suppress(OSError):  # it has just been closed at the other end
                    max(self._clients, key=lambda each: counts[self._clients[each]]).shutdown(socket.SHUT_RDWR)
                self._changed.wait_for(lambda: len(self._clients) < MAX_CLIENTS)
            self._clients[request] = client_address[0]
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        super().shutdown_request(request)
        with self._changed:
            self._clients.pop(request, None)
            self._changed.notify()


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_TIMEOUT_S

    def log_message(self, *_: Any) -> None:
        """Log nothing: a scrape comes every few seconds."""

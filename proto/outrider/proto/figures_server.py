"""A small HTTP server for Prometheus, for processes that have no other: verifiers and coordinators.

It runs in a thread of its own and is started before gRPC and Ray. It is in plain text and knows no login, so it
listens on loopback unless told plainly; it shows figures, never a session, a prompt or a text.
"""

from __future__ import annotations

import socket
import threading
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from outrider.proto.address import join_address, split_address
from outrider.proto.errors import ConfigError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse

    from prometheus_client import CollectorRegistry

FIELD = "metrics_listen"
SLOWEST_S = 10.0


class FiguresServer:
    """Serves a registry on `listen` until `stop`.

    Raises:
        ConfigError: the address cannot be bound.
    """

    def __init__(self, registry: CollectorRegistry, listen: str) -> None:
        from outrider.proto.figures import exposition

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
            raise ConfigError(f"{listen!r} cannot be bound: {error.strerror}", field=FIELD) from error
        self.address = join_address(host, self._server.server_port)
        self._thread = threading.Thread(target=self._server.serve_forever, name="outrider-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = SLOWEST_S

    def log_message(self, *_: Any) -> None:
        """Scrapes are not worth a line."""

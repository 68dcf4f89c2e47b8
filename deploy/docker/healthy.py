#!/usr/bin/env python
"""Check a server of this container past any proxy, for HEALTHCHECK and for probes that Kubernetes cannot make itself.

outrider-healthy http://127.0.0.1:8080/health
outrider-healthy 127.0.0.1:50050
outrider-healthy 127.0.0.1:50050 --ca /etc/outrider/tls/ca.crt --server-name outrider-coordinator

For an address, this calls the standard gRPC health service, with --ca over TLS, which Kubernetes's own gRPC probe does
not speak. The exit status is 0 if the server is healthy, else 1 with a line that says why.
"""

from __future__ import annotations

import argparse
import http.client
import sys
import urllib.error
import urllib.request
from pathlib import Path

TIMEOUT_S = 4.0
HEALTH_METHOD = "/grpc.health.v1.Health/Check"
SERVING = b"\x08\x01"  # HealthCheckResponse(status=SERVING); [edge] has no grpcio-health-checking to read it


def main() -> int:
    """Check once, and return the exit status."""
    options = build_parser().parse_args()
    trouble = _http_trouble(options.server) if "://" in options.server else _grpc_trouble(options)
    if trouble:
        print(f"{options.server}: {trouble}", file=sys.stderr)  # noqa: T201 - a command
    return 1 if trouble else 0


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(description="Check whether a server of this container is healthy.")
    parser.add_argument("server", help="URL, or HOST:PORT of a gRPC server")
    parser.add_argument("--ca", type=Path, default=None, help="PEM file of the authority; turns on TLS")
    parser.add_argument("--server-name", default="", help="name in the server's certificate")
    parser.add_argument("--cert", type=Path, default=None, help="client certificate, if the server asks for one")
    parser.add_argument("--key", type=Path, default=None, help="private key of --cert")
    return parser


def _http_trouble(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        return "is neither http:// nor https://"
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=TIMEOUT_S):
            return ""
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        return str(error)


def _grpc_trouble(options: argparse.Namespace) -> str:
    import grpc

    settings: list[tuple[str, int | str]] = [("grpc.enable_http_proxy", 0)]
    if options.server_name:
        settings.append(("grpc.ssl_target_name_override", options.server_name))
    if options.ca is None:
        channel = grpc.insecure_channel(options.server, options=settings)
    else:
        cert, key = (path.read_bytes() if path else None for path in (options.cert, options.key))
        credentials = grpc.ssl_channel_credentials(options.ca.read_bytes(), key, cert)
        channel = grpc.secure_channel(options.server, credentials, options=settings)
    with channel:
        try:
            answer = channel.unary_unary(HEALTH_METHOD)(b"", timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return "" if answer == SERVING else "is not serving"


if __name__ == "__main__":
    sys.exit(main())

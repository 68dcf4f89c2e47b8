"""Settings that servers share: where they listen, under which certificate, and where their metrics are."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.proto.address import is_loopback, split_address, without_http
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.tls import ServerTls
from outrider.proto.settings import Settings, at_least, option

ADDRESS = "HOST:PORT"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListeningSettings(Settings):
    """Address at which a server listens.

    Attributes:
        tls: certificate and key; None: plain text.
    """

    listen: str = option(
        "127.0.0.1:0", "address to listen on; port 0 takes a free one", metavar=ADDRESS, parse=without_http
    )
    insecure_listen: bool = option(
        False, "allow an address beyond loopback without TLS, readable by everybody on the network"
    )
    tls: ServerTls | None = None

    def check_together(self) -> None:
        host, _ = split_address(self.listen, "listen")
        if not (self.insecure_listen or self.tls is not None or is_loopback(host)):
            message = (
                f"{self.listen!r} is not a loopback address, and other machines would reach it in plain text; give a "
                "certificate (--tls-cert and --tls-key; `outrider certs` makes them), set insecure_listen where the "
                "network is trusted, or listen on 127.0.0.1"
            )
            raise ConfigError(message, field="listen", code="OUT-106")


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcServerSettings(ListeningSettings):
    """Addresses at which a gRPC server and, on a port of their own, its metrics listen, and limits of its clients."""

    connections_per_address: int | None = option(
        None,
        "connections that one address, or IPv6 network of 64 bits, may have; not set: an eighth of all that the server "
        "takes; 0: no limit, for clients that all come through one proxy or NAT",
        check=at_least(0),
    )
    metrics_listen: str = option(
        "",
        "address to serve /metrics for Prometheus on, without TLS; empty: none",
        metavar=ADDRESS,
        group="metrics",
        parse=without_http,
    )
    insecure_metrics: bool = option(False, "allow metrics beyond loopback, without TLS and login", group="metrics")

    def check_together(self) -> None:
        ListeningSettings.check_together(self)
        if not self.metrics_listen:
            return
        host, _ = split_address(self.metrics_listen, "metrics_listen")
        if not (self.insecure_metrics or is_loopback(host)):
            raise ConfigError(
                f"{self.metrics_listen!r} is reachable from other machines, in plain text and without login; "
                "listen on 127.0.0.1, or set insecure_metrics to accept that",
                field="metrics_listen",
            )

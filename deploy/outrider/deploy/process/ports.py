"""Whether a server will be able to listen, known before minutes go into what it is to serve."""

from __future__ import annotations

import errno
import socket

from outrider.proto.address import split_address
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.serving import GrpcServerSettings


def check_ports(config: GrpcServerSettings) -> None:
    """Refuse addresses that are taken or not of this machine; raises `ConfigError`."""
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
        raise ConfigError(f"there is no host {host!r} to listen on: {error.strerror}", field=field) from error
    with socket.socket(family, kind, protocol) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: closed connections hold no port
        try:
            tried.bind(place)
            tried.listen(1)  # an address that may be reused is refused here at the latest
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                message = (
                    f"port {port} of {host} is taken; stop what listens there, or give another port (0: a free one)"
                )
                raise ConfigError(message, field=field) from error
            raise ConfigError(f"cannot listen on {address}: {error.strerror}; give another", field=field) from error

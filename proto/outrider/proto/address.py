"""Addresses as `host:port` or `[v6]:port`, and whether they leave this machine."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from outrider.proto.errors import ConfigError


def without_http(address: str) -> str:
    """Return an address without `http://` and a slash at its end, with which people copy it from elsewhere."""
    return address.removeprefix("http://").removesuffix("/")


def address_of_server(address: str, field: str, *, has_tls: bool) -> str:
    """Return the `host:port` of a server, which may be written as a URL; raises `ConfigError`."""
    plain = without_http(address)
    if not plain.startswith("https://"):
        return plain
    if not has_tls:
        raise ConfigError(
            f"{address!r} is for TLS, which is not set up; give the authority's certificate with --tls-ca "
            "(--cloud-tls-ca of `outrider edge`), `public` for a public one",
            field=field,
        )
    return plain.removeprefix("https://")


def http_url(text: str) -> str:
    """Return the address of an HTTP server, the root of its API, without a /v1 at its end; raises `ValueError`."""
    parts = urlsplit(text)  # of some texts it raises a ValueError itself, as `port` does
    if "@" in parts.netloc:
        raise ValueError("holds credentials; put the key into a file")
    known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    if not known or parts.query or parts.fragment:
        raise ValueError(f"{text!r} is not http://HOST:PORT")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def split_address(address: str, field: str) -> tuple[str, int]:
    """Split `host:port` or `[v6]:port`; raise `ConfigError` about `field` where it is neither."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 1 << 16):
        raise ConfigError(f"{address!r} is not host:port", field=field)
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """Return `host:port`, or `[host]:port` for IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether `host` can only be reached from this machine; names are not resolved, since they may change."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def is_local_address(address: str, field: str) -> bool:
    """Return whether `host:port` can only be reached from this machine; raise `ConfigError` about `field`."""
    return is_loopback(split_address(address, field)[0])


def is_local_peer(peer: str) -> bool:
    """Return whether a gRPC peer (`ipv4:127.0.0.1:5`, `ipv6:%5B::1%5D:5`, `unix:`) is on this machine."""
    return peer.startswith("unix:") or is_loopback(host_of_peer(peer))


def host_of_peer(peer: str) -> str:
    """Return the address of a gRPC peer, without its port."""
    kind, _, rest = peer.partition(":")
    if kind == "unix":
        return peer
    host = rest.replace("%5B", "[").replace("%5D", "]").rpartition(":")[0].strip("[]")
    return host.removeprefix("::ffff:")

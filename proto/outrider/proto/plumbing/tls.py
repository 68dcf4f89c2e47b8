"""TLS: the PEM files of each end, their checks, and gRPC credentials that follow them when they change.

The files are read when a server starts or a channel is made, never when a config is built: a Ray actor's config, for
one, travels to another machine first.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import logging
import re
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from outrider.proto.address import is_loopback
from outrider.proto.error_codes import coded
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.files import Watched
from outrider.proto.settings import REQUIRED, option

if TYPE_CHECKING:
    import grpc
    from cryptography import x509

logger = logging.getLogger(__name__)

GROUP = "TLS (`outrider certs` makes certificates for tests)"
PUBLIC = Path("public")  # in place of a file: the authorities that gRPC ships
SOON = dt.timedelta(days=7)


@dataclass(frozen=True, slots=True)
class ServerTls:
    """The PEM files of a server."""

    cert: Path = option(
        REQUIRED, "server certificate, followed by the chain to its authority", flag="tls-cert", group=GROUP
    )
    key: Path = option(REQUIRED, "private key of the server certificate, not encrypted", flag="tls-key", group=GROUP)
    client_ca: Path | None = option(
        None,
        "certificates of authorities; only clients with their certificates are accepted",
        flag="tls-client-ca",
        group=GROUP,
    )

    @classmethod
    def from_options(cls, cert: Path | None, key: Path | None, client_ca: Path | None) -> Self | None:
        """Make them from options; None where all are left out. Raises `ConfigError`."""
        if cert is None and key is None and client_ca is None:
            return None
        if cert is None or key is None:
            missing, there = ("tls_cert", "tls_key") if key is not None else ("tls_key", "tls_cert or tls_client_ca")
            raise ConfigError(f"must be given too where {there} is; `outrider certs` makes both", field=missing)
        return cls(cert, key, client_ca)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.cert, self.key, self.client_ca) if path is not None)


@dataclass(frozen=True, slots=True)
class ClientTls:
    """Files and names that a client needs to speak TLS.

    Attributes:
        ca: authorities that it trusts; `PUBLIC`: those that gRPC ships.
        cert: certificate of the client, for servers that require one.
        key: private key of that certificate.
        server_name: name that the server's certificate must have; empty: the host that it connects to.
    """

    ca: Path
    cert: Path | None = None
    key: Path | None = None
    server_name: str = ""

    @classmethod
    def from_options(cls, ca: Path | None, cert: Path | None, key: Path | None, server_name: str = "") -> Self | None:
        """Make it from options; None where all are left out. Raises `ConfigError`."""
        if ca is None:
            if cert is not None or key is not None or server_name:
                raise ConfigError(
                    "must be given for TLS: the file of the authority, or `public` for public ones", field="tls_ca"
                )
            return None
        if (cert is None) != (key is None):
            missing, there = ("tls_cert", "tls_key") if cert is None else ("tls_key", "tls_cert")
            raise ConfigError(f"must be given too where {there} is", field=missing)
        return cls(ca, cert, key, server_name)

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(path for path in (self.ca, self.cert, self.key) if path is not None and path != PUBLIC)


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Return credentials that check the files before every handshake, so that a new certificate needs no restart.

    Raises:
        ConfigError: a file is unreadable, not PEM, expired, or the key is not the certificate's.
    """
    import grpc

    watched = Watched("certificates", tls.files, lambda: _server_configuration(tls))
    return grpc.dynamic_ssl_server_credentials(
        watched.value, watched.if_changed, require_client_authentication=tls.client_ca is not None
    )


class ClientCredentials:
    """The credentials of a client, made again when its files change.

    Raises:
        ConfigError: a file is unreadable, not PEM, expired, or the key is not the certificate's.
    """

    def __init__(self, tls: ClientTls) -> None:
        self.tls = tls
        self._watched = Watched("certificates", tls.files, lambda: _channel_credentials(tls))

    def current(self) -> grpc.ChannelCredentials:
        """Return the credentials, the same object until the files change."""
        self._watched.if_changed()
        return self._watched.value


def bind(server: Any, listen: str, tls: ServerTls | None) -> int:
    """Let the gRPC `server` listen on `listen`, in plain text where `tls` is None; return the port.

    Raises:
        ConfigError: the address cannot be bound, or a file of `tls` is wrong.
    """
    credentials = None if tls is None else server_credentials(tls)
    try:
        if credentials is None:
            return int(server.add_insecure_port(listen))
        return int(server.add_secure_port(listen, credentials))
    except RuntimeError as error:
        raise ConfigError(f"{listen!r} cannot be bound; is the port taken?", field="listen", code="OUT-109") from error


def open_channel(
    address: str, options: list[tuple[str, int]], credentials: grpc.ChannelCredentials | None, server_name: str = ""
) -> grpc.aio.Channel:
    """Return an asynchronous channel to `address`, in plain text without `credentials`.

    The server's certificate must have the name `server_name`; empty: the host of `address`. A proxy of the environment
    (`http_proxy`) takes no part in what stays on this machine.
    """
    import grpc

    return _opened(grpc.aio, address, options, credentials, server_name)


def open_blocking_channel(
    address: str, options: list[tuple[str, int]], credentials: grpc.ChannelCredentials | None, server_name: str = ""
) -> grpc.Channel:
    """Return what `open_channel` does, for threads."""
    import grpc

    return _opened(grpc, address, options, credentials, server_name)


def _opened(library: Any, address: str, options: list[tuple[str, Any]], credentials: Any, server_name: str) -> Any:
    if is_loopback(address.rpartition(":")[0].strip("[]")):
        options = [*options, ("grpc.enable_http_proxy", 0)]
    if credentials is None:
        return library.insecure_channel(address, options=options)
    if server_name:
        options = [*options, ("grpc.ssl_target_name_override", server_name)]
    return library.secure_channel(address, credentials, options=options)


def name_to_expect(cert: Path, host: str) -> str:
    """Return the name that clients should expect in the certificate `cert` of a server at `host`; empty: `host`.

    Verifiers come and go on hosts that were unknown when the certificate was made; it then has one name for all.
    """
    names = certificate_names(_certificates(cert, "tls_cert")[1][0])
    if host in names or f"*.{host.partition('.')[2]}" in names:
        return ""
    return next((name for name in names if not name.startswith("*") and not _is_ip(name)), "")


_TROUBLE = (
    ("Hostname Verification Check", "OUT-104", "the server's certificate is for another name; give --tls-server-name"),
    ("CERTIFICATE_HAS_EXPIRED", "OUT-104", "the server's certificate has expired; its operator must renew it"),
    ("CERTIFICATE_EXPIRED", "OUT-104", "the certificate has expired; renew it"),
    ("CERTIFICATE_VERIFY_FAILED", "OUT-104", "the server's certificate is by an authority that is not in --tls-ca"),
    ("WRONG_VERSION_NUMBER", "OUT-103", "the server does not speak TLS; is it the right port?"),
    ("CERTIFICATE_REQUIRED", "OUT-104", "the server asks for a client certificate; give --tls-cert and --tls-key"),
    ("UNKNOWN_CA", "OUT-104", "the server does not know the authority of the certificate in --tls-cert"),
    ("handshake failed", "OUT-103", "TLS could not be agreed on"),
    (
        "failed to connect.*Socket closed",  # a server that closes later has simply gone
        "OUT-103",
        "the server hung up; it may want TLS (--tls-ca), or a client certificate of an authority that it trusts "
        "(--tls-cert, --tls-key)",
    ),
)


def explain(details: str) -> str:
    """Return what is wrong with a connection and its remedy, from gRPC's `details`; empty: it is not about TLS."""
    for sign, code, sentence in _TROUBLE:
        if re.search(sign, details):
            return coded(code, f"{sentence}; `outrider doctor` looks closer")
    return ""


def _server_configuration(tls: ServerTls) -> grpc.ServerCertificateConfiguration:
    import grpc

    chain, key = _identity(tls.cert, tls.key)
    roots = None if tls.client_ca is None else _authorities(tls.client_ca, "tls_client_ca")
    return grpc.ssl_server_certificate_configuration([(key, chain)], roots)


def _channel_credentials(tls: ClientTls) -> grpc.ChannelCredentials:
    import grpc

    roots = None if tls.ca == PUBLIC else _authorities(tls.ca, "tls_ca")
    if tls.cert is None or tls.key is None:
        return grpc.ssl_channel_credentials(roots)
    chain, key = _identity(tls.cert, tls.key)
    return grpc.ssl_channel_credentials(roots, key, chain)


def _authorities(path: Path, field: str) -> bytes:
    data, certificates = _certificates(path, field)
    for certificate in certificates:
        _check_dates(certificate, path, field)
    return data


def _identity(cert: Path, key: Path) -> tuple[bytes, bytes]:
    chain, certificates = _certificates(cert, "tls_cert")
    _check_dates(certificates[0], cert, "tls_cert")
    data = _bytes(key, "tls_key")
    if _public_key(data, key) != certificates[0].public_key():
        message = f"{key} is not the key of the certificate in {cert}; give the pair"
        raise ConfigError(message, field="tls_key", code="OUT-105")
    with suppress(OSError):  # the file is being replaced
        if key.expanduser().stat().st_mode & stat.S_IROTH:
            logger.warning("anybody on this machine may read the private key %s; chmod 600 it", key)
    return chain, data


def _public_key(data: bytes, path: Path) -> object:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        return load_pem_private_key(data, None).public_key()
    except TypeError as error:
        message = f"{path} is encrypted; `openssl pkey -in {path.name} -out FILE` takes the password off"
        raise ConfigError(message, field="tls_key", code="OUT-105") from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} holds no private key in PEM", field="tls_key", code="OUT-105") from error


def _certificates(path: Path, field: str) -> tuple[bytes, list[x509.Certificate]]:
    try:
        from cryptography import x509
    except ImportError as error:
        raise ConfigError("TLS needs the package cryptography; pip install cryptography", field=field) from error
    data = _bytes(path, field)
    try:
        return data, x509.load_pem_x509_certificates(data)
    except ValueError as error:
        message = f"{path} holds no certificate in PEM (-----BEGIN CERTIFICATE-----)"
        raise ConfigError(message, field=field, code="OUT-105") from error


def _check_dates(certificate: x509.Certificate, path: Path, field: str) -> None:
    now = dt.datetime.now(dt.UTC)
    begins, ends = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > ends:
        message = f"the certificate in {path} expired on {ends:%Y-%m-%d %H:%M} UTC; renew it"
        raise ConfigError(message, field=field, code="OUT-105")
    if now < begins:
        message = f"the certificate in {path} is only valid from {begins:%Y-%m-%d %H:%M} UTC; is the clock right?"
        raise ConfigError(message, field=field, code="OUT-105")
    if now > ends - SOON:
        logger.warning("the certificate in %s expires on %s UTC", path, f"{ends:%Y-%m-%d %H:%M}")


def certificate_names(certificate: x509.Certificate) -> list[str]:
    """Return the DNS names and addresses that the certificate is for."""
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _bytes(path: Path, field: str) -> bytes:
    try:
        return path.expanduser().read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}", field=field, code="OUT-105") from error

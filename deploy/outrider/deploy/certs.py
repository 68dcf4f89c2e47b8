"""`outrider certs` and `outrider key`: an authority with certificates for tests and closed networks, and API keys."""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import shlex
import socket
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID

from outrider.deploy.arguments import Given
from outrider.deploy.commands.operating import CertsSettings, NewKeySettings
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.access import Key, Keys, new_secret, secret_sha256

LOCAL = ("localhost", "127.0.0.1", "::1")
AUTHORITY_DAYS = 3650
CLOCKS_DIFFER = dt.timedelta(minutes=10)
USAGES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


class Issued(NamedTuple):
    """Files of an authority, a server and a client, each certificate before its key."""

    ca: Path
    ca_key: Path
    server_cert: Path
    server_key: Path
    client_cert: Path
    client_key: Path

    @classmethod
    def in_folder(cls, folder: Path) -> Issued:
        """Return the usual names of the files in `folder`."""
        names = ("ca.pem", "ca.key", "server.pem", "server.key", "client.pem", "client.key")
        return cls(*(folder / name for name in names))


def certs(given: Given) -> int:
    """Run `outrider certs`."""
    options = given(CertsSettings)
    hosts = tuple(dict.fromkeys([*options.host, *LOCAL, *([] if options.host else [socket.gethostname()])]))
    issued = issue(options.folder.expanduser(), hosts, days=options.days)
    ca, ca_key, server_cert, server_key, client_cert, client_key = (shlex.quote(str(path)) for path in issued)
    print(f"made an authority, a server's certificate for {', '.join(hosts)} and a client's")
    print("coordinator and verifiers (--tls-client-ca only if every client shows a certificate):")
    print(f"  --tls-cert {server_cert} --tls-key {server_key} --tls-client-ca {ca}")
    print("a coordinator of verifiers that speak TLS:")
    print(f"  --verifier-tls-ca {ca}")
    print("edges, and outrider status:")
    print(f"  --tls-ca {ca} --tls-cert {client_cert} --tls-key {client_key}")
    print(f"keep {ca_key} off every server: it signs certificates that all of them trust")
    return 0


def key(given: Given) -> int:
    """Run `outrider key`."""
    options = given(NewKeySettings)
    if options.forget:
        from outrider.deploy.local.fleet import forget  # imports Ray

        return forget(options.name, options.ray_address)
    secret = new_secret()
    made = Key(
        name=options.name,
        sha256=secret_sha256(secret),
        max_sessions=options.max_sessions,
        tokens_per_minute=options.tokens_per_minute,
        admin=options.admin,
        learning=options.learning,
        service=options.service,
    )
    if options.append is not None:
        _append(options.append.expanduser(), made)
        print(f"{made.name} is in {options.append}; servers that use the file accept the key from now on")
    print(f"the secret, shown only now; give it to {made.name} as OUTRIDER_API_KEY or in a file for --api-key-file:")
    print(f"  {secret}")
    if options.append is None:
        print("the table to append to the file of --api-keys:")
        print(made.toml(), end="")
    return 0


def issue(folder: Path, hosts: tuple[str, ...], *, days: int = 90, client: str = "edge") -> Issued:
    """Make an authority, a server's certificate for `hosts` and one for a client, in `folder`.

    The server's certificate is valid for a client too, since a coordinator shows it to the verifiers. The authority
    lasts ten years, the certificates last `days`. Keys are ECDSA on P-256, in files that only their owner can read.

    Raises:
        ConfigError: a host is no name, or a file is there already.
    """
    issued = Issued.in_folder(folder)
    there = [path for path in issued if path.exists()]
    if there:
        raise ConfigError(f"{there[0]} is there already; remove it, or name another folder", field="folder")
    authority = _Authority()
    made = (
        (authority.certificate, authority.key),
        authority.issue("outrider server", hosts, days),
        authority.issue(client, (), days),
    )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for (certificate, private), cert_path, key_path in zip(made, issued[::2], issued[1::2], strict=True):
            pem = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
            _write(key_path, pem, 0o600)
            _write(cert_path, certificate.public_bytes(Encoding.PEM), 0o644)
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}", field="folder") from error
    return issued


class _Authority:
    """Signs certificates."""

    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        usage = x509.KeyUsage(**dict.fromkeys(USAGES, False) | {"key_cert_sign": True, "crl_sign": True})
        name = _name("outrider test authority")
        builder = (
            _builder(name, name, self.key, AUTHORITY_DAYS)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
        )
        self.certificate = builder.sign(self.key, SHA256())

    def issue(self, name: str, hosts: tuple[str, ...], days: int) -> tuple[x509.Certificate, EllipticCurvePrivateKey]:
        """Return a certificate for a server at `hosts`, or for a client if there are none, and its key."""
        private = ec.generate_private_key(ec.SECP256R1())
        purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
        authority_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = (
            _builder(_name(name), self.certificate.subject, private, days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(authority_id, critical=False)
        )
        if hosts:
            builder = builder.add_extension(x509.SubjectAlternativeName([_san(host) for host in hosts]), critical=False)
        return builder.sign(self.key, SHA256()), private


def _builder(
    subject: x509.Name, issuer: x509.Name, private: EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCKS_DIFFER)
        .not_valid_after(now + dt.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(private.public_key()), critical=False)
    )


def _name(common_name: str) -> x509.Name:
    try:
        return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, common_name)])
    except ValueError as error:
        raise ConfigError(f"{common_name!r} must be 1 to 64 characters", field="client") from error


def _san(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not host or ":" in host or "/" in host:
        raise ConfigError(f"{host!r} is no host name or IP address; leave out port and scheme", field="host")
    try:
        return x509.DNSName(host)
    except ValueError as error:
        raise ConfigError(f"{host!r} is no host name: {error}", field="host") from error


def _write(path: Path, content: bytes, mode: int) -> None:
    """Write a new file with its mode from the first moment; raises `OSError` if it exists."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)


def _append(path: Path, made: Key) -> None:
    """Append a key to a keys file; make the file if it does not exist."""
    if path.exists() and path.stat().st_size and made.name in Keys.from_file(path).names:
        raise ConfigError(f"{path} has a key of that name already; choose another", field="name")
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "a") as file:
            file.write(("\n" if file.tell() else "") + made.toml())
    except OSError as error:
        raise ConfigError(f"cannot write to {path}: {error.strerror}", field="append") from error

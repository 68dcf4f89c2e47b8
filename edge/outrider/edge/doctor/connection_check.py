"""Checks of the way to a server: its name, its port, its certificate, and the health of its service."""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
import socket
import ssl
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.edge.doctor.finding import Finding, failed, failed_by, ok, skipped, warning
from outrider.edge.link.security import Security
from outrider.proto.address import is_loopback, split_address
from outrider.proto.channel import CLIENT_OPTIONS
from outrider.proto.errors import OutriderError
from outrider.proto.plumbing.tls import (
    PUBLIC,
    ClientCredentials,
    ClientTls,
    certificate_names,
    explain,
    open_channel,
)
from outrider.proto.rpc_errors import from_rpc_error

TIMEOUT_S = 5.0  # of a server that does not answer, or is full
HANDSHAKES = 3
SOON = dt.timedelta(days=14)
FIRST_BYTES_S = 2.0  # a gRPC server speaks first; one that wants a client's certificate says so then
HTTP2 = "h2"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server under examination.

    Attributes:
        role: `coordinator` or `verifier`.
        address: host:port.
        option: option that names it, here or at the other end.
        service: gRPC service whose health is of interest.
        security: TLS files, and the key for coordinators.
        tls_name: name that its certificate must have; empty: its host; None: it speaks plain text.
    """

    role: str
    address: str
    option: str
    service: str
    security: Security
    tls_name: str | None

    @property
    def place(self) -> tuple[str, int]:
        """Host, and TCP port."""
        return split_address(self.address, self.role)

    @property
    def host(self) -> str:
        """Name or IP address."""
        return self.place[0]

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """GRPC metadata of calls to it; only a coordinator is shown the key."""
        return self.security.metadata if self.role == "coordinator" else ()

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[grpc.aio.Channel]:
        """Open a connection of its own; raises `ConfigError` where the TLS files are no good."""
        tls = self.security.tls if self.tls_name is not None else None
        credentials = ClientCredentials(tls).current() if tls is not None else None
        async with open_channel(self.address, CLIENT_OPTIONS, credentials, self.tls_name or "") as opened:
            yield opened


async def resolve_name(at: Endpoint) -> Finding:
    """Look up the addresses of its host."""
    with suppress(ValueError):
        ipaddress.ip_address(at.host)
        return ok(f"{at.host} is an address, there is nothing to look up")
    began = time.monotonic()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            found = await asyncio.get_running_loop().getaddrinfo(*at.place, type=socket.SOCK_STREAM)
    except OSError as error:  # gaierror and TimeoutError among them
        return failed(
            f"the name {at.host!r} is not known here: {_reason(error)}",
            f"check the spelling in {at.option}; `getent hosts {at.host}` asks the same resolver",
        )
    seconds = time.monotonic() - began
    addresses = sorted({str(entry[4][0]) for entry in found})
    return ok(f"{at.host} is {', '.join(addresses)}", addresses=", ".join(addresses), seconds=seconds)


async def connect_port(at: Endpoint) -> Finding:
    """Time a TCP handshake, the median of a few."""
    seconds: list[float] = []
    try:
        for _ in range(HANDSHAKES):
            began = time.monotonic()
            async with asyncio.timeout(TIMEOUT_S):
                _, writer = await asyncio.open_connection(*at.place)
            seconds.append(time.monotonic() - began)
            writer.close()
    except ConnectionRefusedError:
        return failed(
            f"nothing listens on {at.address}",
            f"start `outrider {at.role} --listen …`, or mend the port in {at.option}; a server that listens on "
            "127.0.0.1 is reached from its own machine only",
        )
    except OSError as error:  # TimeoutError among them
        return failed(
            f"{at.address} cannot be reached: {_reason(error)}",
            f"a firewall or a wrong address; see `outrider {at.role} --listen` over there and {at.option} here",
        )
    median_s = statistics.median(seconds)
    return ok(f"connected in {1000 * median_s:.1f} ms", connect_s=median_s)


def _reason(error: OSError) -> str:
    return error.strerror or f"no answer within {TIMEOUT_S:g} s"


async def inspect_tls(at: Endpoint) -> Finding:
    """Check the handshake, and the certificate's names, issuer and dates."""
    try:
        if at.security.tls is None or at.tls_name is None:
            return await asyncio.to_thread(_check_plain, at)
        return await asyncio.to_thread(_check_tls, at, at.security.tls)
    except OSError as error:
        return failed(f"the connection broke: {error}", f"see whether `outrider {at.role}` still runs over there")


def _check_plain(at: Endpoint) -> Finding:
    try:
        _fetch_certificate(at)
    except (ssl.SSLError, ConnectionError, TimeoutError):
        if is_loopback(at.host):
            return skipped("plain text, which stays on this machine")
        return warning(
            f"everything to {at.address} goes in plain text",
            f"make certificates with `outrider certs`, give them to `outrider {at.role} --tls-cert --tls-key`, "
            "and --tls-ca here",
        )
    return failed(f"{at.address} speaks TLS, and this edge does not", "give --tls-ca FILE, or `--tls-ca public`")


def _check_tls(at: Endpoint, tls: ClientTls) -> Finding:
    try:
        ClientCredentials(tls)  # says precisely which file is no good, and why
        shown = x509.load_der_x509_certificate(_fetch_certificate(at))
    except OutriderError as error:
        return failed_by(error)
    except ssl.SSLError as error:
        return failed(
            f"{at.address} does not speak TLS ({error.reason or error})",
            f"start `outrider {at.role}` with --tls-cert and --tls-key, or leave out --tls-ca",
        )
    return _check_dates(at, shown) or _check_handshake(at, tls, shown)


def _fetch_certificate(at: Endpoint) -> bytes:
    """Return the server's certificate in DER, trusted or not; raises `SSLError` where it speaks no TLS."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with socket.create_connection(at.place, TIMEOUT_S) as plain, context.wrap_socket(plain) as secure:
        return secure.getpeercert(binary_form=True) or b""


def _check_dates(at: Endpoint, shown: x509.Certificate) -> Finding | None:
    now = dt.datetime.now(dt.UTC)
    begins, ends = shown.not_valid_before_utc, shown.not_valid_after_utc
    clock = f"this machine's clock says {now:%Y-%m-%d %H:%M} UTC"
    if now > ends:
        return failed(
            f"the certificate expired on {ends:%Y-%m-%d %H:%M} UTC; {clock}",
            f"renew it (`outrider certs`) and give it to `outrider {at.role} --tls-cert`, which needs no restart; "
            "if the clock is wrong, `timedatectl` sets it",
            expires_in_days=_days(ends - now),
        )
    if now < begins:
        return failed(
            f"the certificate is only valid from {begins:%Y-%m-%d %H:%M} UTC; {clock}",
            "the clock here or where the certificate was made is wrong: `timedatectl` shows and sets it",
            valid_in_days=_days(begins - now),
        )
    return None


def _check_handshake(at: Endpoint, tls: ClientTls, shown: x509.Certificate) -> Finding:
    try:
        protocol = _shake_hands(at, tls)
    except ssl.SSLCertVerificationError as error:
        return _explain_distrust(at, shown, error)
    except (ssl.SSLError, ConnectionError) as error:
        return failed(
            f"the server ends the handshake: {getattr(error, 'reason', None) or error}",
            "it wants a certificate of this edge by an authority that it trusts: give --tls-cert and --tls-key",
        )
    if protocol != HTTP2:
        return failed(
            f"TLS is agreed on but not HTTP/2 (ALPN says {protocol})",
            f"a proxy on the way to the {at.role} speaks HTTP/1 only; let {at.option} go past it",
        )
    left = shown.not_valid_after_utc - dt.datetime.now(dt.UTC)
    names, issuer = ", ".join(certificate_names(shown)), _issuer(shown)
    words = f"certificate for {names} by {issuer}, {_days(left):.0f} days left"
    if left < SOON:
        return warning(words, f"renew it in time: `outrider certs`, for `outrider {at.role} --tls-cert`")
    return ok(words, names=names, issuer=issuer, expires_in_days=_days(left))


def _shake_hands(at: Endpoint, tls: ClientTls) -> str | None:
    """Shake hands as gRPC would and return the protocol agreed on; raises `SSLError`."""
    context = ssl.create_default_context(cafile=None if tls.ca == PUBLIC else str(tls.ca.expanduser()))
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # gRPC is not as strict
    context.set_alpn_protocols([HTTP2])
    if tls.cert is not None and tls.key is not None:
        context.load_cert_chain(tls.cert.expanduser(), tls.key.expanduser())
    with (
        socket.create_connection(at.place, TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=at.tls_name or at.host) as secure,
    ):
        secure.settimeout(FIRST_BYTES_S)
        try:
            if not secure.recv(1):
                raise ConnectionResetError("it hung up")
        except TimeoutError:
            pass
        return secure.selected_alpn_protocol()


def _explain_distrust(at: Endpoint, shown: x509.Certificate, error: ssl.SSLCertVerificationError) -> Finding:
    names = ", ".join(certificate_names(shown)) or "no name"
    if "mismatch" in error.verify_message or "doesn't match" in str(error):
        return failed(
            f"the certificate is for {names}, not for {at.tls_name or at.host}",
            f"reach it by such a name in {at.option}, or give --tls-server-name",
        )
    return failed(
        f"the certificate for {names} is by {_issuer(shown)}, whom --tls-ca does not vouch for: {error.verify_message}",
        f"give --tls-ca the authority's file that the operator of the {at.role} gave out",
    )


def _issuer(certificate: x509.Certificate) -> str:
    return certificate.issuer.rfc4514_string() or "an authority without a name"


def _days(span: dt.timedelta) -> float:
    return span / dt.timedelta(days=1)


async def check_health(at: Endpoint) -> Finding:
    """Ask for the health of its service."""
    try:
        async with at.channel() as channel:
            began = time.monotonic()
            reply = await ask_health(channel, at.service, at.metadata)
            seconds = time.monotonic() - began
    except OutriderError as error:
        return failed_by(error)
    except grpc.aio.AioRpcError as error:
        return _explain_refusal(at, error)
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
        return failed(
            f"the {at.role} says that it takes no calls: {status}",
            f"it starts, drains or stops; look again, or start another `outrider {at.role}`",
        )
    return ok(f"the {at.role} serves; first answer after {1000 * seconds:.1f} ms", first_answer_s=seconds)


async def ask_health(channel: grpc.aio.Channel, service: str, metadata: tuple[tuple[str, str], ...]) -> Any:
    """Return what the health service says about `service`; raises `AioRpcError`."""
    stub: Any = health_pb2_grpc.HealthStub(channel)
    request = health_pb2.HealthCheckRequest(service=service)
    return await stub.Check(request, timeout=TIMEOUT_S, metadata=metadata)


def _explain_refusal(at: Endpoint, error: grpc.aio.AioRpcError) -> Finding:
    code = error.code()
    if code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED):
        other = "--verifier" if at.role == "coordinator" else "--coordinator"
        return failed(
            f"something else than a {at.role} answers at {at.address}",
            f"check the port in {at.option}, or give {other} if that is what listens there",
        )
    translated = from_rpc_error(error)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        reason = explain(translated.message).removesuffix("; `outrider doctor` looks closer") or translated.message
        return failed(
            f"no gRPC at {at.address}: {reason}",
            f"is that port a {at.role}'s, and are the --tls-… options those that its operator gave out?",
        )
    return failed_by(translated)

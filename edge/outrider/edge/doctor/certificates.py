"""TLS: whether the server's certificate is the right one, by a known authority, and valid by this machine's clock."""

from __future__ import annotations

import asyncio
import datetime as dt
import socket
import ssl
from typing import TYPE_CHECKING

from outrider.edge.doctor.endpoint import Endpoint
from outrider.edge.doctor.finding import Finding, failed, ok, skipped, warning
from outrider.edge.doctor.remedies import failed_by
from outrider.edge.doctor.visit import PATIENT_S
from outrider.proto.address import is_loopback
from outrider.proto.errors import OutriderError
from outrider.proto.plumbing.tls import PUBLIC, ClientCredentials, ClientTls, certificate_names

if TYPE_CHECKING:
    from cryptography import x509

SOON = dt.timedelta(days=14)
FIRST_BYTES_S = 2.0  # a gRPC server speaks first; one that wants a client's certificate says so then
HTTP2 = "h2"


async def inspect(at: Endpoint) -> Finding:
    """The handshake, the certificate's names, issuer and dates."""
    try:
        if at.security.tls is None or at.tls_name is None:
            return await asyncio.to_thread(_without, at)
        return await asyncio.to_thread(_with, at, at.security.tls)
    except OSError as error:  # of the connection; TLS's own errors are met below
        return failed(f"the connection broke: {error}", f"see whether `outrider {at.role}` still runs over there")


def _without(at: Endpoint) -> Finding:
    try:
        _shown(at)
    except (ssl.SSLError, ConnectionError, TimeoutError):
        if is_loopback(at.host):
            return skipped("plain text, which stays on this machine")
        return warning(
            f"everything to {at.address} goes in plain text",
            f"make certificates with `outrider certs`, give them to `outrider {at.role} --tls-cert --tls-key`, "
            "and --tls-ca here",
        )
    return failed(f"{at.address} speaks TLS, and this edge does not", "give --tls-ca FILE, or `--tls-ca public`")


def _with(at: Endpoint, tls: ClientTls) -> Finding:
    try:
        from cryptography import x509

        ClientCredentials(tls)  # says precisely which file is no good, and why
        shown = x509.load_der_x509_certificate(_shown(at))
    except ImportError:
        return failed("certificates cannot be read without the package cryptography", "`pip install cryptography`")
    except OutriderError as error:
        return failed_by(error)
    except ssl.SSLError as error:
        return failed(
            f"{at.address} does not speak TLS ({error.reason or error})",
            f"start `outrider {at.role}` with --tls-cert and --tls-key, or leave out --tls-ca",
        )
    return _dates(at, shown) or _handshake(at, tls, shown)


def _shown(at: Endpoint) -> bytes:
    """The certificate that the server shows, in DER, believed or not; raises `SSLError` where it speaks no TLS."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with socket.create_connection((at.host, at.port), PATIENT_S) as plain, context.wrap_socket(plain) as secure:
        return secure.getpeercert(binary_form=True) or b""


def _dates(at: Endpoint, shown: x509.Certificate) -> Finding | None:
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


def _handshake(at: Endpoint, tls: ClientTls, shown: x509.Certificate) -> Finding:
    try:
        protocol = _verified(at, tls)
    except ssl.SSLCertVerificationError as error:
        return _distrusted(at, shown, error)
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
    words = f"certificate for {', '.join(certificate_names(shown))} by {_issuer(shown)}, {_days(left):.0f} days left"
    if left < SOON:
        return warning(words, f"renew it in time: `outrider certs`, for `outrider {at.role} --tls-cert`")
    return ok(words, names=", ".join(certificate_names(shown)), issuer=_issuer(shown), expires_in_days=_days(left))


def _verified(at: Endpoint, tls: ClientTls) -> str | None:
    """Shake hands as gRPC would; the protocol agreed on. Raises `SSLError`."""
    context = ssl.create_default_context(cafile=None if tls.ca == PUBLIC else str(tls.ca.expanduser()))
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # gRPC is not as strict
    context.set_alpn_protocols([HTTP2])
    if tls.cert is not None and tls.key is not None:
        context.load_cert_chain(tls.cert.expanduser(), tls.key.expanduser())
    with (
        socket.create_connection((at.host, at.port), PATIENT_S) as plain,
        context.wrap_socket(plain, server_hostname=at.expected_name) as secure,
    ):
        secure.settimeout(FIRST_BYTES_S)
        try:
            if not secure.recv(1):
                raise ConnectionResetError("it hung up")
        except TimeoutError:
            pass
        return secure.selected_alpn_protocol()


def _distrusted(at: Endpoint, shown: x509.Certificate, error: ssl.SSLCertVerificationError) -> Finding:
    names = ", ".join(certificate_names(shown)) or "no name"
    if "mismatch" in error.verify_message or "doesn't match" in str(error):
        return failed(
            f"the certificate is for {names}, not for {at.expected_name}",
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

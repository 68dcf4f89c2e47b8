"""TLS of the daemon's listener: certificates that follow their files, clients that must show one."""

from __future__ import annotations

import http.client
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from self_signed import certify

from outrider.edge.daemon import DaemonConfig
from outrider.edge.daemon.http_server import LiveTls
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.tls import ServerTls


def seen_serial(port: int, trusted: Path, own: tuple[Path, Path] | None = None) -> int:
    """The serial number of the certificate that the daemon shows; its answer must be right too."""
    context = ssl.create_default_context(cafile=str(trusted))
    if own is not None:
        context.load_cert_chain(*own)
    connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=20)
    connection.request("GET", "/version")
    assert connection.getresponse().status == 200
    shown = connection.sock.getpeercert(binary_form=True)
    connection.close()
    return x509.load_der_x509_certificate(shown).serial_number


def test_a_replaced_certificate_is_shown_to_new_connections_and_a_broken_one_is_not(start, scripted, tmp_path) -> None:
    cert, key = certify(tmp_path, "server", 1)
    client = scripted()
    client.away = ConfigError("not looked for")
    with start(client, tls=ServerTls(cert, key)) as live:
        assert live.url.startswith("https://")
        assert seen_serial(live.port, cert) == 1
        certify(tmp_path, "server", 2)
        live.run(_reload(live.daemon))
        assert seen_serial(live.port, cert) == 2
        whole = cert.read_bytes()
        cert.write_text("rubbish")
        live.run(_reload(live.daemon))
        cert.write_bytes(whole)
        assert seen_serial(live.port, cert) == 2


def test_clients_must_show_a_certificate_where_an_authority_is_given(start, scripted, tmp_path) -> None:
    cert, key = certify(tmp_path, "server", 1)
    own = certify(tmp_path, "client", 3)
    client = scripted()
    client.away = ConfigError("not looked for")
    with start(client, tls=ServerTls(cert, key, own[0])) as live:
        assert seen_serial(live.port, cert, own) == 1
        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            seen_serial(live.port, cert)


def test_files_that_are_no_pair_are_refused_by_name(tmp_path) -> None:
    cert, key = certify(tmp_path, "one", 1)
    _, other = certify(tmp_path, "two", 2)
    for files in (ServerTls(cert, other), ServerTls(tmp_path / "none.pem", key), ServerTls(cert, cert)):
        with pytest.raises(ConfigError) as caught:
            LiveTls(files)
        assert caught.value.field == "tls_cert"
    with pytest.raises(ConfigError) as caught:
        LiveTls(ServerTls(cert, key, key))
    assert caught.value.field == "tls_client_ca"


def test_with_tls_it_may_listen_beyond_loopback(tmp_path) -> None:
    assert DaemonConfig(listen="0.0.0.0:1", tls=ServerTls(tmp_path, tmp_path)).listen == "0.0.0.0:1"


async def _reload(daemon) -> None:
    daemon.reload()

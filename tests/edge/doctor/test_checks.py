"""Each check of the doctor alone, on servers that are well and on others that are not."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from outrider.edge import examination
from outrider.edge.examination import Endpoint, Finding, Outcome, failed_by
from outrider.edge.link.security import Security
from outrider.proto import errors
from outrider.proto.plumbing.tls import ClientTls


def at(address: str, tls: ClientTls | None = None, service: str = "", role: str = "coordinator") -> Endpoint:
    name = tls.server_name if tls is not None else None
    return Endpoint(role, address, f"--{role}", service, Security(tls), name)


def test_a_warning_or_failure_without_a_remedy_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="it broke"):
        Finding(Outcome.FAILED, "it broke")


def test_every_error_has_a_remedy_that_names_an_option_or_a_command() -> None:
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.OutriderError)
    ]
    assert len(kinds) > 10
    for kind in kinds:
        remedy = failed_by(kind("went wrong")).remedy
        assert "--" in remedy or "`outrider" in remedy or "`pip" in remedy, kind


def test_the_time_to_retry_is_part_of_the_remedy() -> None:
    finding = failed_by(errors.ResourceExhausted("32 sessions run", retry_after_s=2.0))
    assert finding.outcome is Outcome.FAILED
    assert "retry in 2 s" in finding.remedy


# --- the way ---


async def test_ports_take_connections_or_not(small_server) -> None:
    async with small_server() as address:
        assert (await examination.connect_port(at(address))).outcome is Outcome.OK
    unknown = await examination.connect_port(at("no-such-host.invalid:1"))
    assert unknown.outcome is Outcome.FAILED
    assert "no-such-host.invalid" in unknown.message
    assert "--coordinator" in unknown.remedy
    bad = await examination.connect_port(at("127.0.0.1:1"))
    assert bad.outcome is Outcome.FAILED
    assert "nothing listens" in bad.message
    assert "outrider coordinator" in bad.remedy


async def test_a_service_serves_drains_or_is_another(small_server) -> None:
    async with small_server() as address:
        assert (await examination.time_answers(at(address))).outcome is Outcome.OK
        other = await examination.time_answers(at(address, service="another.service" * 10))
        assert other.outcome is Outcome.FAILED
        assert "--verifier" in other.remedy
    async with small_server(status=health_pb2.HealthCheckResponse.NOT_SERVING) as address:
        draining = await examination.time_answers(at(address))
    assert draining.outcome is Outcome.FAILED
    assert "NOT_SERVING" in draining.message


async def test_a_server_without_grpc_is_named() -> None:
    async def say_html(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(say_html, "127.0.0.1", 0) as server:
        found = await examination.time_answers(at(f"127.0.0.1:{server.sockets[0].getsockname()[1]}"))
    assert found.outcome is Outcome.FAILED
    assert "no gRPC" in found.message


# --- TLS ---


def credentials(cert: Path, key: Path, client_ca: Path | None = None) -> grpc.ServerCredentials:
    """Credentials with any certificate, also one that a server of ours would refuse to start with."""
    pair = [(key.read_bytes(), cert.read_bytes())]
    if client_ca is None:
        return grpc.ssl_server_credentials(pair)
    return grpc.ssl_server_credentials(pair, client_ca.read_bytes(), require_client_auth=True)


def inspected(small_server, shown: grpc.ServerCredentials | None, tls: ClientTls | None) -> Finding:
    async def main() -> Finding:
        async with small_server(credentials=shown) as address:
            return await examination.inspect_tls(at(address, tls))

    return asyncio.run(main())


def test_a_good_certificate_is_shown_with_names_issuer_and_days(small_server, authority, tmp_path) -> None:
    ours = authority("ours")
    found = inspected(small_server, credentials(*ours.sign(tmp_path)), ClientTls(ours.file))
    assert found.outcome is Outcome.OK, found
    assert re.search(r"for localhost.* by CN=ours, (299|300) days left", found.message)


@pytest.mark.parametrize("days", [(-20, -1), (1, 20)], ids=["expired", "not yet valid"])
def test_a_certificate_outside_its_dates_fails_beside_what_the_clock_says(
    small_server, authority, tmp_path, days
) -> None:
    ours = authority("ours")
    found = inspected(small_server, credentials(*ours.sign(tmp_path, days=days)), ClientTls(ours.file))
    assert found.outcome is Outcome.FAILED
    assert "is valid from" in found.message
    assert "this machine's clock says" in found.message
    assert "timedatectl" in found.remedy


def test_a_certificate_that_soon_expires_is_a_warning(small_server, authority, tmp_path) -> None:
    ours = authority("ours")
    found = inspected(small_server, credentials(*ours.sign(tmp_path, days=(-1, 3))), ClientTls(ours.file))
    assert found.outcome is Outcome.WARNING
    assert "outrider certs" in found.remedy


def test_an_unknown_authority_and_a_wrong_name_are_distinguished(small_server, authority, tmp_path) -> None:
    ours, theirs = authority("ours"), authority("theirs")
    found = inspected(small_server, credentials(*ours.sign(tmp_path)), ClientTls(theirs.file))
    assert found.outcome is Outcome.FAILED
    assert "does not vouch" in found.message
    assert "--tls-ca" in found.remedy
    elsewhere = credentials(*ours.sign(tmp_path, names=("elsewhere.test",)))
    found = inspected(small_server, elsewhere, ClientTls(ours.file))
    assert found.outcome is Outcome.FAILED
    assert "elsewhere.test" in found.message
    assert "--tls-server-name" in found.remedy
    found = inspected(small_server, elsewhere, ClientTls(ours.file, server_name="elsewhere.test"))
    assert found.outcome is Outcome.OK


def test_a_server_that_wants_a_clients_certificate_gets_it_or_says_so(small_server, authority, tmp_path) -> None:
    ours = authority("ours")
    cert, key = ours.sign(tmp_path)
    mutual = credentials(cert, key, ours.file)
    found = inspected(small_server, mutual, ClientTls(ours.file))
    assert found.outcome is Outcome.FAILED
    assert "--tls-cert" in found.remedy
    assert inspected(small_server, mutual, ClientTls(ours.file, cert, key)).outcome is Outcome.OK


def test_tls_on_one_side_only_fails_and_plain_text_on_loopback_is_skipped(small_server, authority, tmp_path) -> None:
    ours = authority("ours")
    found = inspected(small_server, None, ClientTls(ours.file))
    assert found.outcome is Outcome.FAILED
    assert "does not speak TLS" in found.message
    found = inspected(small_server, credentials(*ours.sign(tmp_path)), None)
    assert found.outcome is Outcome.FAILED
    assert "--tls-ca" in found.remedy
    assert inspected(small_server, None, None).outcome is Outcome.SKIPPED


def test_a_file_that_holds_no_certificate_is_named(small_server, tmp_path) -> None:
    rubbish = tmp_path / "rubbish.pem"
    rubbish.write_text("rubbish")
    with pytest.raises(errors.ConfigError, match=r"rubbish\.pem"):
        inspected(small_server, None, ClientTls(rubbish))


# --- the link ---


def test_a_long_way_is_a_warning_with_its_length(small_server, monkeypatch) -> None:
    monkeypatch.setattr(examination, "CALLS", 3)

    async def measured(delay_s: float) -> Finding:
        async with small_server(delay_s=delay_s) as address:
            return await examination.time_answers(at(address))

    assert asyncio.run(measured(0.0)).outcome is not Outcome.FAILED
    long = asyncio.run(measured(0.3))
    assert long.outcome is Outcome.WARNING
    assert "so long that drafts gain little" in long.message
    assert "outrider bench --rtt 3" in long.remedy

"""Certificates: checks before they are used, changes while a server runs, and the errors of failed handshakes.

Everything goes over real gRPC on loopback.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from outrider.deploy.certs import Issued, issue
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.tls import (
    PUBLIC,
    ClientCredentials,
    ClientTls,
    ServerTls,
    bind,
    explain,
    name_to_expect,
    open_blocking_channel,
    open_channel,
    server_credentials,
)

HOSTS = ("localhost", "127.0.0.1")
OPTIONS = [("grpc.use_local_subchannel_pool", 1)]


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    return issue(tmp_path_factory.mktemp("ours"), HOSTS)


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    return issue(tmp_path_factory.mktemp("theirs"), HOSTS)


def serving(issued: Issued) -> ServerTls:
    return ServerTls(issued.server_cert, issued.server_key)


def mutual(issued: Issued) -> ServerTls:
    return replace(serving(issued), client_ca=issued.ca)


def with_own(issued: Issued) -> ClientTls:
    return ClientTls(issued.ca, issued.client_cert, issued.client_key)


@asynccontextmanager
async def server(tls: ServerTls | None) -> AsyncIterator[str]:
    """Answers with the common name of the client's certificate."""

    async def answer(_: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return (context.auth_context().get("x509_common_name") or [b"nobody"])[0]

    handlers = {"Who": grpc.unary_unary_rpc_method_handler(answer)}
    running = grpc.aio.server()
    running.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = bind(running, "127.0.0.1:0", tls)
    await running.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await running.stop(0)


async def ask(address: str, credentials: grpc.ChannelCredentials | None, name: str = "") -> str:
    """The answer, or the details of the failure."""
    async with open_channel(address, OPTIONS, credentials, name) as channel:
        try:
            return (await channel.unary_unary("/test/Who")(b"", timeout=10)).decode()
        except grpc.aio.AioRpcError as error:
            return f"failed: {error.code().name} {error.details()}"


async def asked(tls: ServerTls | None, client: ClientTls | None) -> str:
    async with server(tls) as address:
        credentials = ClientCredentials(client).current() if client is not None else None
        return await ask(address, credentials, client.server_name if client is not None else "")


# --- handshakes ---


async def test_a_client_that_trusts_the_authority_is_served_and_need_not_say_who_it_is(issued):
    assert await asked(serving(issued), ClientTls(issued.ca)) == "nobody"


async def test_a_proxy_of_the_environment_takes_no_part_on_this_machine(monkeypatch):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name)
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    async with server(None) as address:
        with open_blocking_channel(address, OPTIONS, None) as channel:
            call = channel.unary_unary("/test/Who")
            assert await asyncio.to_thread(call, b"", timeout=10) == b"nobody"
        assert await ask(address, None) == "nobody"


async def test_under_mutual_tls_the_server_knows_its_client(issued):
    assert await asked(mutual(issued), with_own(issued)) == "edge"


async def test_a_blocking_channel_speaks_tls_too(issued):
    async with server(serving(issued)) as address:

        def call() -> bytes:
            credentials = ClientCredentials(ClientTls(issued.ca)).current()
            with open_blocking_channel(address, OPTIONS, credentials) as channel:
                return channel.unary_unary("/test/Who")(b"", timeout=10)

        assert await asyncio.to_thread(call) == b"nobody"


REFUSED: dict[str, tuple[Callable[[Issued], ServerTls | None], Callable[[Issued, Issued], ClientTls | None], str]] = {
    "no certificate of its own": (mutual, lambda ours, _: ClientTls(ours.ca), "--tls-cert"),
    "one of another authority": (mutual, lambda ours, theirs: replace(with_own(theirs), ca=ours.ca), "--tls-cert"),
    "another authority": (serving, lambda _, theirs: ClientTls(theirs.ca), "--tls-ca"),
    "public authorities": (serving, lambda *_: ClientTls(PUBLIC), "--tls-ca"),
    "another name": (serving, lambda ours, _: ClientTls(ours.ca, server_name="elsewhere"), "--tls-server-name"),
    "plain text": (serving, lambda *_: None, "--tls-ca"),
    "a server of plain text": (lambda _: None, lambda ours, _: ClientTls(ours.ca), "does not speak TLS"),
}


@pytest.mark.parametrize("wrong", REFUSED)
async def test_what_does_not_fit_is_refused_and_the_option_named(issued, strangers, wrong):
    tls, client, option = REFUSED[wrong]
    said = await asked(tls(issued), client(issued, strangers))
    assert said.startswith("failed")
    assert option in explain(said)


async def test_the_name_in_a_certificate_may_be_given(issued):
    assert await asked(serving(issued), ClientTls(issued.ca, server_name="localhost")) == "nobody"


@pytest.mark.parametrize("details", ["Connection refused", "", "Deadline Exceeded", "Socket closed"])
def test_other_trouble_is_not_explained_as_tls(details):
    assert explain(details) == ""


def test_every_explanation_leads_to_the_doctor(issued):
    assert "outrider doctor" in explain("Tls handshake failed (TSI_PROTOCOL_FAILURE): something new")


# --- replaced certificates ---


def replaced(old: Path, new: Path) -> None:
    """Replace a file as tools that renew certificates do: written beside it, then moved."""
    beside = old.with_suffix(".new")
    beside.write_bytes(new.read_bytes())
    beside.replace(old)


async def test_a_replaced_certificate_is_served_to_new_connections_and_old_ones_go_on(tmp_path, issued, strangers):
    mine = issue(tmp_path, HOSTS)
    trusting_old, trusting_new = (ClientCredentials(ClientTls(one.ca)).current() for one in (issued, strangers))
    for ours, theirs in ((mine.server_cert, issued.server_cert), (mine.server_key, issued.server_key)):
        replaced(ours, theirs)

    async with server(serving(mine)) as address, open_channel(address, OPTIONS, trusting_old) as before:
        assert await before.unary_unary("/test/Who")(b"", timeout=10) == b"nobody"
        assert (await ask(address, trusting_new)).startswith("failed")
        replaced(mine.server_cert, strangers.server_cert)
        assert await ask(address, trusting_old) == "nobody", "a certificate without its key is not served"
        replaced(mine.server_key, strangers.server_key)
        assert await ask(address, trusting_new) == "nobody"
        assert (await ask(address, trusting_old)).startswith("failed")
        assert await before.unary_unary("/test/Who")(b"", timeout=10) == b"nobody"


async def test_a_broken_replacement_leaves_the_old_certificate_and_is_logged_once(tmp_path, caplog):
    mine = issue(tmp_path, HOSTS)
    trusting = ClientCredentials(ClientTls(mine.ca)).current()

    async with server(serving(mine)) as address:
        await asyncio.to_thread(mine.server_cert.write_text, "nonsense")
        for _ in range(3):
            assert await ask(address, trusting) == "nobody"
    assert caplog.text.count("stay as they were") == 1


def test_a_client_makes_new_credentials_only_when_its_files_change(tmp_path, issued):
    path = tmp_path / "ca.pem"
    path.write_bytes(issued.ca.read_bytes())
    credentials = ClientCredentials(ClientTls(path))
    first = credentials.current()
    assert credentials.current() is first
    later = path.stat().st_mtime + 5
    os.utime(path, (later, later))
    assert credentials.current() is not first


# --- files that are no good ---


def refusal(tls: ServerTls | ClientTls) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        server_credentials(tls) if isinstance(tls, ServerTls) else ClientCredentials(tls)
    return caught.value


def dated(folder: Path, begins: dt.timedelta, ends: dt.timedelta) -> ServerTls:
    """A certificate that is valid from `begins` to `ends`, counted from now."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), dt.datetime.now(dt.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "dated")])
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now + begins)
        .not_valid_after(now + ends)
        .sign(key, hashes.SHA256())
    )
    tls = ServerTls(folder / "dated.pem", folder / "dated.key")
    tls.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    tls.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    tls.key.chmod(0o600)
    return tls


DAY = dt.timedelta(days=1)


def test_an_expired_certificate_is_refused_with_its_date(tmp_path):
    error = refusal(dated(tmp_path, -3 * DAY, -DAY))
    assert error.field == "tls_cert"
    assert "dated.pem expired on " in str(error)
    assert "renew" in str(error)


def test_one_that_is_not_valid_yet_points_at_the_clock(tmp_path):
    assert "clock" in str(refusal(dated(tmp_path, DAY, 3 * DAY)))


def test_one_that_expires_soon_is_warned_of(tmp_path, caplog):
    server_credentials(dated(tmp_path, -DAY, DAY))
    assert "dated.pem expires on" in caplog.text


def test_an_expired_authority_is_refused_at_the_client(tmp_path):
    assert refusal(ClientTls(dated(tmp_path, -3 * DAY, -DAY).cert)).field == "tls_ca"


def test_a_key_of_another_certificate_is_refused_and_both_files_are_named(issued):
    error = refusal(ServerTls(issued.server_cert, issued.client_key))
    assert error.field == "tls_key"
    assert "client.key is not the key" in str(error)
    assert "server.pem" in str(error)


def test_an_encrypted_key_is_refused_with_the_command_that_decrypts_it(tmp_path, issued):
    from cryptography.hazmat.primitives import serialization

    loaded = serialization.load_pem_private_key(issued.server_key.read_bytes(), None)
    locked = tmp_path / "locked.key"
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    locked.write_bytes(loaded.private_bytes(*form, serialization.BestAvailableEncryption(b"password")))
    assert "openssl pkey" in str(refusal(ServerTls(issued.server_cert, locked)))


@pytest.mark.parametrize(
    ("make", "field", "words"),
    [
        (lambda i, x: ServerTls(x, i.server_key), "tls_cert", "no certificate in PEM"),
        (lambda i, x: ServerTls(i.server_cert, x), "tls_key", "no private key in PEM"),
        (lambda i, x: ServerTls(i.server_cert, i.server_key, x), "tls_client_ca", "no certificate in PEM"),
        (lambda i, x: ClientTls(x), "tls_ca", "no certificate in PEM"),
        (lambda i, x: ServerTls(i.server_key, i.server_key), "tls_cert", "no certificate in PEM"),
        (lambda i, x: ServerTls(x.with_name("none"), i.server_key), "tls_cert", "No such file"),
        (lambda i, x: ClientTls(x.parent), "tls_ca", "directory"),
    ],
)
def test_what_is_not_pem_or_not_there_is_refused_by_option_and_file(tmp_path, issued, make, field, words):
    nonsense = tmp_path / "nonsense"
    nonsense.write_bytes(b"\x00nonsense")
    error = refusal(make(issued, nonsense))
    assert error.field == field
    assert words in str(error)


def test_a_private_key_that_anybody_may_read_is_warned_of(tmp_path, caplog):
    tls = dated(tmp_path, -DAY, 30 * DAY)
    server_credentials(tls)
    assert not caplog.text
    tls.key.chmod(0o644)
    server_credentials(tls)
    assert "chmod 600" in caplog.text


SERVER: dict[str, Path | None] = {"cert": None, "key": None, "client_ca": None}
CLIENT: dict[str, Path | str | None] = {"ca": None, "cert": None, "key": None}


@pytest.mark.parametrize(
    ("kind", "given", "missing"),
    [
        (ServerTls, SERVER | {"cert": Path("c")}, "tls_key"),
        (ServerTls, SERVER | {"key": Path("k")}, "tls_cert"),
        (ServerTls, SERVER | {"client_ca": Path("a")}, "tls_key"),
        (ServerTls, SERVER | {"key": Path("k"), "client_ca": Path("a")}, "tls_cert"),
        (ClientTls, CLIENT | {"cert": Path("c")}, "tls_ca"),
        (ClientTls, CLIENT | {"server_name": "x"}, "tls_ca"),
        (ClientTls, CLIENT | {"ca": PUBLIC, "cert": Path("c")}, "tls_key"),
        (ClientTls, CLIENT | {"ca": PUBLIC, "key": Path("c")}, "tls_cert"),
    ],
)
def test_half_of_the_options_name_the_other_half(kind, given, missing):
    with pytest.raises(ConfigError) as caught:
        kind.from_options(**given)
    assert caught.value.field == missing


def test_without_options_there_is_no_tls():
    assert ServerTls.from_options(**SERVER) is ClientTls.from_options(**CLIENT) is None


# --- names ---


def test_a_host_in_the_certificate_needs_no_other_name_and_any_other_gets_the_first(tmp_path):
    made = issue(tmp_path, ("10.0.0.7", "verifier.example", "*.pods.example", "127.0.0.1"))
    for host in ("verifier.example", "127.0.0.1", "a.pods.example"):
        assert name_to_expect(made.server_cert, host) == ""
    for host in ("10.1.2.3", "a.b.pods.example", "elsewhere"):
        assert name_to_expect(made.server_cert, host) == "verifier.example"
    assert name_to_expect(made.client_cert, "elsewhere") == ""

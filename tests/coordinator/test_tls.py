"""The coordinator under TLS: its own port, the verifiers that it probes and relays to, and its clients."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from fake_cluster import TOKENIZER_JSON, ScriptedCluster, add_report, ready, write_package

from outrider.coordinator.cluster import StaticCluster, VerifierInfo, VerifierState
from outrider.coordinator.coordinator_config import CoordinatorConfig, StaticVerifier
from outrider.deploy.certs import Issued, issue
from outrider.edge.link.control_client import CoordinatorClient, file_fetcher
from outrider.edge.link.link import Channels
from outrider.edge.link.routes import CoordinatorRoute
from outrider.edge.link.security import Security
from outrider.proto import codec
from outrider.proto.errors import ConfigError, Unavailable
from outrider.proto.plumbing.tls import ClientTls, ServerTls, bind
from outrider.proto.session import EdgeStatistics
from outrider.proto.types import Cancel, LeaseRequest, Opened

SECRET = b"0123456789abcdef"
HOSTS = ("verifier.example", "localhost", "127.0.0.1")
OPENED = Opened(committed=0, credit=8, max_tokens=4, verifier="a", context_length=64, vocab_size=10)
Coordinating = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    return issue(tmp_path_factory.mktemp("certs"), HOSTS)


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    return issue(tmp_path_factory.mktemp("strangers"), HOSTS)


def serving(issued: Issued) -> ServerTls:
    return ServerTls(issued.server_cert, issued.server_key, issued.ca)


def secured(issued: Issued, **fields: Any) -> Security:
    return Security(ClientTls(**{"ca": issued.ca, "cert": issued.client_cert, "key": issued.client_key} | fields))


@asynccontextmanager
async def verifier(tls: ServerTls | None) -> AsyncIterator[str]:
    """A verifier that is ready, and answers every frame with the same Opened."""

    async def decode(_: Any, context: Any) -> None:
        while await context.read() is not grpc.aio.EOF:
            await context.write(codec.encode_cloud_frame(OPENED))

    server = grpc.aio.server()
    add_report(server, "a")
    handlers = {"Decode": grpc.stream_stream_rpc_method_handler(decode)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(codec.DECODING_SERVICE, handlers),))
    port = bind(server, "127.0.0.1:0", tls)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


# --- its own port ---


async def test_a_client_with_a_certificate_is_served_control_and_files(
    coordinating: Coordinating, issued: Issued, drafters: Path
) -> None:
    write_package(drafters / "a", files={"model.onnx": b"weights"})
    async with coordinating(ScriptedCluster(ready("a")), tls=serving(issued), drafters=(drafters,)) as call:
        client = CoordinatorClient(call.address, security=secured(issued))
        assert (await client.status()).leases_granted == 0
        (manifest,) = await client.list_drafters()
        fetch = file_fetcher(call.address, security=client.security)
        assert b"weights" in await asyncio.to_thread(lambda: [b"".join(fetch(f, 0)) for f in manifest.files])
        await client.close()


async def test_clients_that_do_not_fit_are_refused_and_told_the_option_and_the_doctor(
    coordinating: Coordinating, issued: Issued, strangers: Issued
) -> None:
    cases = {
        "--tls-cert": secured(issued, cert=None, key=None),
        "--tls-ca": Security(),
        "authority that is not in --tls-ca": secured(issued, ca=strangers.ca),
        "--tls-server-name": secured(issued, server_name="elsewhere.example"),
    }
    async with coordinating(ScriptedCluster(ready("a")), tls=serving(issued)) as call:
        for words, security in cases.items():
            client = CoordinatorClient(call.address, security=security)
            with pytest.raises(Unavailable) as refusal:
                await client.status()
            assert words in str(refusal.value)
            assert "outrider doctor" in str(refusal.value)
            assert call.address in str(refusal.value)
            await client.close()


async def test_a_client_whose_certificates_are_replaced_connects_with_the_new_ones(
    coordinating: Coordinating, issued: Issued, strangers: Issued, tmp_path: Path
) -> None:
    mine = issue(tmp_path, HOSTS)

    def become(other: Issued) -> None:
        for ours, theirs in zip(mine, other, strict=True):
            beside = ours.with_suffix(".new")
            beside.write_bytes(theirs.read_bytes())
            beside.replace(ours)

    become(strangers)
    async with coordinating(ScriptedCluster(ready("a")), tls=serving(issued)) as call:
        client = CoordinatorClient(call.address, security=secured(mine))
        with pytest.raises(Unavailable):
            await client.status()
        await asyncio.to_thread(become, issued)
        await client.status()
        await client.close()


async def test_a_bad_certificate_keeps_the_coordinator_from_starting(
    coordinating: Coordinating, issued: Issued
) -> None:
    with pytest.raises(ConfigError) as refusal:
        async with coordinating(ScriptedCluster(ready("a")), tls=ServerTls(issued.server_cert, issued.client_key)):
            pass
    assert refusal.value.field == "tls_key"


def test_with_a_certificate_it_may_listen_anywhere_else_the_refusal_names_remedies(issued: Issued) -> None:
    CoordinatorConfig(lease_secret=SECRET, listen="0.0.0.0:1", tls=serving(issued))
    with pytest.raises(ConfigError, match=r"outrider certs.*insecure_listen.*127\.0\.0\.1"):
        CoordinatorConfig(lease_secret=SECRET, listen="0.0.0.0:1")


@pytest.mark.parametrize("secured_port", [True, False])
async def test_random_bytes_on_the_port_itself_leave_it_serving(
    coordinating: Coordinating, issued: Issued, secured_port: bool
) -> None:
    random_ = random.Random(5)
    # Each as long as gRPC waits for before it looks: a TLS record's head, an HTTP/2 preface, and nonsense.
    heads = (b"", b"\x16\x03\x01\x02\x00\x01", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n")
    async with coordinating(ScriptedCluster(ready("a")), **{"tls": serving(issued)} if secured_port else {}) as call:
        host, _, port = call.address.partition(":")
        for i in range(60):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(heads[i % len(heads)] + random_.randbytes(random_.randrange(400)))
            if i % 3:
                writer.write_eof()
                with suppress(ConnectionError, TimeoutError):
                    await asyncio.wait_for(reader.read(), 0.05)
            writer.transport.abort()
        client = CoordinatorClient(call.address, security=secured(issued) if secured_port else Security())
        assert (await client.status()).leases_granted == 0
        await client.close()


# --- verifiers that speak TLS ---


def fixed(address: str, **fields: Any) -> StaticVerifier:
    return StaticVerifier("a", address, "tiny", TOKENIZER_JSON, **{"tls": True} | fields)


def towards(issued: Issued) -> ClientTls:
    """Return the settings by which a coordinator connects to verifiers with its own certificate."""
    return ClientTls(issued.ca, issued.server_cert, issued.server_key)


async def test_a_fixed_verifier_under_mutual_tls_is_found_ready_and_leases_say_so(issued: Issued) -> None:
    async with verifier(serving(issued)) as address:
        cluster = StaticCluster((fixed(address, tls_name="verifier.example"),), secret=SECRET, tls=towards(issued))
        (info,) = await cluster.refresh()
        assert (info.state, info.tls, info.tls_name) == (VerifierState.READY, True, "verifier.example")
        await cluster.close()


async def test_an_unreachable_fixed_verifier_is_down_and_the_log_says_why_once(
    issued: Issued, strangers: Issued, caplog: pytest.LogCaptureFixture
) -> None:
    async with verifier(serving(issued)) as address:
        cluster = StaticCluster((fixed(address),), secret=SECRET, tls=towards(strangers))
        for _ in range(3):
            assert (await cluster.refresh())[0].state is VerifierState.DOWN
        await cluster.close()
    assert caplog.text.count("cannot be reached: the server's certificate is by an authority") == 1


def test_a_fixed_verifier_that_speaks_tls_needs_the_file_of_its_authority() -> None:
    with pytest.raises(ConfigError) as refusal:
        CoordinatorConfig(lease_secret=SECRET, verifiers=(fixed("127.0.0.1:1"),))
    assert refusal.value.field == "verifier_tls"


async def test_leases_tell_edges_whether_a_verifier_speaks_tls_and_its_name(coordinating: Coordinating) -> None:
    cluster = ScriptedCluster(ready("a", tls=True, tls_name="verifier.example"), ready("b", sessions=3))
    async with coordinating(cluster) as call:
        for avoid, said in (((), (True, "verifier.example")), (("a",), (False, ""))):
            given = await call("OpenLease", LeaseRequest(model="tiny", session="s", avoid=avoid))
            assert (given.tls, given.tls_name) == said


def test_what_a_verifier_reports_of_tls_is_read_and_older_ones_speak_plain_text() -> None:
    report = {"name": "a", "address": "10.0.0.7:1", "model": "m", "tokenizer_sha256": "x", "state": "ready"}
    report |= {"sessions": 0, "max_sessions": 1, "step_s": 0, "kv_pages_free": 0}
    assert not VerifierInfo.from_report(report).tls
    reported = VerifierInfo.from_report(report | {"tls": True, "tls_name": "verifier.example"})
    assert (reported.tls, reported.tls_name) == (True, "verifier.example")


async def test_the_relay_speaks_tls_both_ways_and_the_edge_knows_only_the_coordinator(
    coordinating: Coordinating, issued: Issued
) -> None:
    cluster = ScriptedCluster()
    options = {"tls": serving(issued), "verifier_tls": towards(issued), "relay": True}
    async with coordinating(cluster, **options) as call, verifier(serving(issued)) as address:
        cluster.verifiers["a"] = ready("a", address=address, tls=True, tls_name="verifier.example")
        await call.until(lambda: call.server.service.verifiers)
        client = CoordinatorClient(call.address, security=secured(issued, server_name="localhost"))
        lease = await CoordinatorRoute(client, "tiny", "").lease(LeaseRequest("tiny", "s1"))
        assert (lease.address, lease.tls, lease.tls_name) == (call.address, True, "localhost")
        channels = Channels(client.security)
        stream = channels.open_stream(lease, EdgeStatistics())
        stream.send(Cancel("only a frame"))
        assert await anext(stream.frames()) == OPENED
        await channels.close_stream(stream)
        await channels.close()
        await client.close()


async def test_a_relay_without_certificates_for_its_verifiers_says_so_in_its_log(
    coordinating: Coordinating, issued: Issued, caplog: pytest.LogCaptureFixture
) -> None:
    async with coordinating(ScriptedCluster(ready("a", tls=True)), relay=True) as call:
        lease = await call("OpenLease", LeaseRequest(model="tiny", session="s1"))
        channels = Channels()
        stream = channels.open_stream(replace(lease, address=call.address, tls=False), EdgeStatistics())
        stream.send(Cancel("only a frame"))
        with pytest.raises(Unavailable):
            await anext(stream.frames())
        channels.retire(call.address, stream.connection)
        await channels.close_stream(stream)
    assert "--verifier-tls-ca" in caplog.text


# --- what an edge refuses ---


def test_an_edge_under_tls_sends_no_text_to_a_plain_remote_verifier_unless_allowed(issued: Issued) -> None:
    strict = secured(issued)
    with pytest.raises(ConfigError, match="--plaintext") as refusal:
        strict.check_verifier("10.0.0.7:1", None)
    assert refusal.value.field == "plaintext"
    strict.check_verifier("127.0.0.1:1", None)
    strict.check_verifier("10.0.0.7:1", "")
    replace(strict, plaintext=True).check_verifier("10.0.0.7:1", None)


def test_an_edge_without_tls_is_told_what_a_verifier_under_tls_needs() -> None:
    with pytest.raises(ConfigError, match="speaks TLS") as refusal:
        Security().check_verifier("10.0.0.7:1", "")
    assert refusal.value.field == "tls_ca"

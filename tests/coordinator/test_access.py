"""Access to a coordinator over gRPC on loopback: API keys, their limits, and drains from other machines."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from fake_cluster import ScriptedCluster, ready, write_package

from outrider.coordinator.lease_admission import MAX_LEASED_OF_KEY, Caller, CallerAdmission
from outrider.edge.link.control_client import CoordinatorClient, file_fetcher
from outrider.edge.link.security import Security
from outrider.proto import codec
from outrider.proto.address import is_local_peer
from outrider.proto.errors import ConfigError, PermissionDenied, ResourceExhausted, Unauthenticated
from outrider.proto.lease import verify_lease
from outrider.proto.plumbing.access import Key, Keys, secret_sha256
from outrider.proto.rpc_errors import from_rpc_error
from outrider.proto.testing import write_keys
from outrider.proto.types import LeaseRequest, ServiceGoal, SessionReport

SECRET = b"0123456789abcdef"
REPORT = {"model": "tiny", "verifier": "a"}
METHODS = {
    "OpenLease": codec.encode_lease_request(LeaseRequest(model="tiny", session="s")),
    "ListDrafters": codec.encode_drafter_query(""),
    "ReportSession": codec.encode_report(SessionReport(session="s", **REPORT)),
    "Status": b"",
    "Drain": codec.encode_drain("a"),
}
Coordinating = Callable[..., AbstractAsyncContextManager[Any]]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return write_keys(
        tmp_path / "keys.toml",
        Key("alice", secret_sha256("alices"), max_sessions=2, tokens_per_minute=600),
        Key("bob", secret_sha256("bobs")),
        Key("root", secret_sha256("roots"), admin=True),
    )


def as_client(call: Any, secret: str) -> CoordinatorClient:
    return CoordinatorClient(call.address, security=Security(api_key=secret))


def ask(session: str, **fields: Any) -> LeaseRequest:
    return LeaseRequest(model="tiny", session=session, **fields)


# --- keys ---


async def test_without_a_known_key_nothing_is_answered_and_the_error_says_how_to_give_one(
    coordinating: Coordinating, keys: Path
) -> None:
    async with coordinating(ScriptedCluster(ready("a")), api_keys=keys) as call:
        for method, secret in itertools.product(METHODS, (None, "", "wrong", "alices ")):
            metadata = () if secret is None else (("authorization", f"Bearer {secret}x"),)
            unary = call.channel.unary_unary(f"/{codec.CONTROL_SERVICE}/{method}")
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await unary(METHODS[method], metadata=metadata, timeout=10)
            error = from_rpc_error(refusal.value)
            assert isinstance(error, Unauthenticated)
            assert error.field == "api_key"
            assert "--api-key-file" in str(error) or "operator" in str(error)
            with pytest.raises(Unauthenticated):  # nothing of a request is read before its key
                await call.raw(method, b"\xff\xff\xff")


async def test_any_key_opens_leases_and_only_an_admins_sees_the_status_and_drains(
    coordinating: Coordinating, keys: Path, drafters: Path
) -> None:
    write_package(drafters / "a", files={"model.onnx": b"weights"})
    async with coordinating(ScriptedCluster(ready("a")), api_keys=keys, drafters=(drafters,)) as call:
        bob, root = as_client(call, "bobs"), as_client(call, "roots")
        assert (await bob.open_lease(ask("s1"))).verifier == "a"
        await bob.report(SessionReport(session="s1", **REPORT))
        (manifest,) = await bob.list_drafters()
        assert await anext(bob.watch_drafters()) == (manifest,)
        fetch = file_fetcher(call.address, security=bob.security)
        assert b"weights" in await asyncio.to_thread(lambda: [b"".join(fetch(f, 0)) for f in manifest.files])
        with pytest.raises(Unauthenticated):
            await asyncio.to_thread(lambda: list(file_fetcher(call.address)(manifest.files[0], 0)))
        for refused in (bob.status, lambda: bob.drain("a")):
            with pytest.raises(PermissionDenied, match="admin = true"):
                await refused()
        assert (await root.status()).leases_granted == 1
        assert await root.drain("a") == 0
        await bob.close()
        await root.close()


async def test_a_broken_keys_file_keeps_the_coordinator_from_starting(coordinating: Coordinating, keys: Path) -> None:
    keys.write_text("[keys.alice]\nsha = 1")

    with pytest.raises(ConfigError) as refusal:
        async with coordinating(ScriptedCluster(ready("a")), api_keys=keys):
            pass
    assert refusal.value.field == "keys.alice.sha"


# --- limits ---


async def test_sessions_of_a_key_are_counted_from_lease_to_report(coordinating: Coordinating, keys: Path) -> None:
    async with coordinating(ScriptedCluster(ready("a", max_sessions=100)), api_keys=keys) as call:
        alice, bob = as_client(call, "alices"), as_client(call, "bobs")
        for session in ("s1", "s2", "s2", "s1"):  # the same session again is a resume
            await alice.open_lease(ask(session))
        with pytest.raises(ResourceExhausted, match="2 sessions") as refusal:
            await alice.open_lease(ask("s3"))
        assert refusal.value.retry_after_s > 0
        for i in range(5):
            await bob.open_lease(ask(f"b{i}"))
        await bob.report(SessionReport(session="s1", **REPORT))  # not bob's to end
        with pytest.raises(ResourceExhausted):
            await alice.open_lease(ask("s3"))
        await alice.report(SessionReport(session="s1", **REPORT))
        await alice.open_lease(ask("s3"))
        assert call.server.service.admission.running() == {"alice": 2}
        await alice.close()
        await bob.close()


async def test_an_inquiry_is_no_session_and_brings_no_token(coordinating: Coordinating, keys: Path) -> None:
    async with coordinating(ScriptedCluster(ready("a")), api_keys=keys) as call:
        alice, root = as_client(call, "alices"), as_client(call, "roots")
        for i in range(5):
            lease = await alice.open_lease(ask(f"s{i}", inquiry=True))
            assert (lease.token, lease.verifier, lease.model) == (b"", "a", "tiny")
        assert call.server.service.admission.running() == {}
        assert (await root.status()).leases_granted == 0
        await alice.close()
        await root.close()


async def test_reported_tokens_that_exceed_the_minute_delay_the_next_lease(
    coordinating: Coordinating, keys: Path
) -> None:
    async with coordinating(ScriptedCluster(ready("a")), api_keys=keys) as call:
        alice = as_client(call, "alices")
        await alice.open_lease(ask("s1"))
        await alice.report(SessionReport(session="s1", committed_tokens=1200, **REPORT))
        with pytest.raises(ResourceExhausted, match="600 tokens a minute") as refusal:
            await alice.open_lease(ask("s2"))
        assert 50 < refusal.value.retry_after_s <= 60.1
        await alice.close()


async def test_the_lease_of_a_limited_key_tells_the_verifier_whose_it_is_and_its_limits(
    coordinating: Coordinating, keys: Path
) -> None:
    async with coordinating(ScriptedCluster(ready("a")), api_keys=keys) as call:
        for secret, said in (("alices", ("alice", 600, 2)), ("bobs", ("bob", 0, 0))):
            client = as_client(call, secret)
            token = (await client.open_lease(ask("s1"))).token
            claim = verify_lease(token, SECRET, verifier="a", model="tiny", session="s1", now_s=time.time())
            assert (claim.key, claim.tokens_per_minute, claim.max_sessions) == said
            await client.close()


async def test_a_lease_says_what_is_asked_for_and_whether_it_is_likely_to_be_kept(
    coordinating: Coordinating, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    batch, gap, short = ServiceGoal(batch=True), ServiceGoal(gap_s=0.1), ServiceGoal(gap_s=0.02)
    path = write_keys(tmp_path / "keys.toml", Key("alice", secret_sha256("alices"), service=batch))
    async with coordinating(ScriptedCluster(ready("a", gap_s=0.05)), api_keys=path) as call:
        alice = as_client(call, "alices")
        leases = [await alice.open_lease(ask(f"s{i}", service=goal)) for i, goal in enumerate((None, gap, short))]
        assert [(lease.service, lease.service_unkept) for lease in leases] == [
            (batch, False),
            (gap, False),
            (short, True),
        ]
        unkept = call.server.service.metrics.registry.get_sample_value(
            "outrider:coordinator_leases_unkept_total", {"model_name": "tiny"}
        )
        assert unkept == 1
        [said] = [record.getMessage() for record in caplog.records if "is expected to keep" in record.getMessage()]
        assert '{"gap_ms": 20}' in said
        await alice.close()


async def test_a_session_that_no_verifier_took_gives_its_slot_back_and_counts_nowhere(
    coordinating: Coordinating, keys: Path
) -> None:
    async with coordinating(ScriptedCluster(ready("a")), api_keys=keys) as call:
        alice, root = as_client(call, "alices"), as_client(call, "roots")
        for i in range(4):
            await alice.open_lease(ask(f"s{i}"))
            await alice.report(SessionReport(session=f"s{i}", model="tiny", verifier=""))
        assert call.server.service.admission.running() == {}
        assert (await root.status()).recent == ()
        await alice.close()
        await root.close()


def test_a_session_that_may_not_resume_for_want_of_tokens_keeps_its_slot() -> None:
    now_s = 0.0
    admission = CallerAdmission(None, clock=lambda: now_s)
    alice = Caller(Key("alice", "a" * 64, max_sessions=1, tokens_per_minute=60))
    admission.grant(alice, "s1", 600.0, "a")
    admission.settle(alice, SessionReport(session="s0", committed_tokens=100, **REPORT))
    with pytest.raises(ResourceExhausted, match="60 tokens a minute"):
        admission.grant(alice, "s1", 600.0, "a")
    assert admission.running() == {"alice": 1}
    now_s = 50.0
    admission.grant(alice, "s1", 600.0, "a")
    with pytest.raises(ResourceExhausted, match="1 sessions running"):
        admission.grant(alice, "s2", 600.0, "a")


def test_a_session_that_is_never_reported_is_over_when_its_lease_expires() -> None:
    now_s = 0.0
    admission = CallerAdmission(None, clock=lambda: now_s)
    alice = Caller(Key("alice", "a" * 64, max_sessions=1))
    admission.grant(alice, "s1", 10.0, "a")
    now_s = 9.0
    with pytest.raises(ResourceExhausted):
        admission.grant(alice, "s2", 10.0, "a")
    admission.grant(alice, "s1", 10.0, "a")  # resumed: its lease is a new one
    now_s = 18.0
    with pytest.raises(ResourceExhausted):
        admission.grant(alice, "s2", 10.0, "a")
    now_s = 19.5
    admission.grant(alice, "s2", 10.0, "a")
    assert admission.running() == {"alice": 1}


# --- reports ---


async def test_a_report_counts_only_for_a_session_that_its_own_key_has_leased(
    coordinating: Coordinating, keys: Path
) -> None:
    async with coordinating(ScriptedCluster(ready("a")), api_keys=keys) as call:
        alice, bob, root = (as_client(call, secret) for secret in ("alices", "bobs", "roots"))
        await alice.open_lease(ask("s1"))
        for client, session in ((alice, "invented"), (bob, "s1")):
            await client.report(SessionReport(session=session, **REPORT))
        assert (await root.status()).recent == ()
        await alice.report(SessionReport(session="s1", **REPORT))
        assert [report.session for report in (await root.status()).recent] == ["s1"]
        for client in (alice, bob, root):
            await client.close()


def test_the_reports_of_one_key_are_bounded_and_push_out_those_of_no_other() -> None:
    admission = CallerAdmission(None)
    alice, mallory = (Caller(Key(name, "a" * 64)) for name in ("alice", "mallory"))
    admission.grant(alice, "s1", 600.0, "a")
    for number in range(MAX_LEASED_OF_KEY + 1):
        admission.grant(mallory, f"m{number}", 600.0, "a")
    assert not admission.had_lease(mallory, "m0")
    assert admission.had_lease(mallory, "m1")
    assert admission.had_lease(alice, "s1")


def test_keys_vote_as_one_only_where_another_could_be_outvoted(keys: Path) -> None:
    alice = Caller(Key("alice", secret_sha256("alices")))
    assert CallerAdmission(Keys.from_file(keys)).votes_as(alice) == "alice"
    alone = Keys((alice.key, Key("root", "b" * 64, admin=True)))  # type: ignore[arg-type]
    assert CallerAdmission(alone).votes_as(alice) == ""
    assert CallerAdmission(None).votes_as(Caller()) == ""


# --- drains ---


@pytest.mark.parametrize(
    "peer", ["ipv4:127.0.0.1:5", "ipv6:[::1]:5", "ipv6:%5B::1%5D:5", "unix:/x", "ipv4:127.9.9.9:1"]
)
def test_a_peer_on_this_machine_is_known(peer: str) -> None:
    assert is_local_peer(peer)


@pytest.mark.parametrize("peer", ["ipv4:10.0.0.7:5", "ipv6:[2001:db8::1]:5", "ipv4:127.evil:5", "", "vsock:1:2"])
def test_a_remote_peer_may_not_drain_without_a_key(peer: str) -> None:
    closed = CallerAdmission(None)
    with pytest.raises(PermissionDenied, match="--api-keys"):
        closed.check_drain(closed.identify((), peer))
    closed.check_status(closed.identify((), peer))


def test_an_admin_may_drain_from_anywhere(keys: Path) -> None:
    admission = CallerAdmission(Keys.from_file(keys))
    caller = admission.identify((("authorization", "Bearer roots"),), "ipv4:10.0.0.7:5")
    admission.check_drain(caller)


# --- the client's side ---


@pytest.mark.parametrize("address", ["10.0.0.7:50050", "coordinator.example:443"])
def test_a_key_is_not_sent_over_a_network_in_plain_text_unless_told_so(address: str) -> None:
    with pytest.raises(ConfigError, match="--plaintext") as refusal:
        CoordinatorClient(address, security=Security(api_key="alices"))
    assert refusal.value.field == "api_key"
    CoordinatorClient(address, security=Security(api_key="alices", plaintext=True))
    CoordinatorClient(address, security=Security())
    CoordinatorClient("localhost:1", security=Security(api_key="alices"))


def test_a_key_that_cannot_be_one_is_refused_and_no_key_is_ever_shown() -> None:
    with pytest.raises(ConfigError) as refusal:
        Security(api_key="two words")
    assert "two words" not in str(refusal.value)
    assert "alices" not in repr(Security(api_key="alices"))

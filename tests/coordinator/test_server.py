"""The control plane end to end, over gRPC on loopback: leases, drafters, files, reports, drains and refusals."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import grpc
import pytest
from command_processes import free_port
from fake_cluster import TOKENIZER_JSON, TOKENIZER_SHA256, ScriptedCluster, add_report, ready, write_package
from grpc_health.v1 import health_pb2

from outrider.coordinator import coordinator_server, service
from outrider.coordinator.cluster import VerifierState
from outrider.coordinator.coordinator_config import CoordinatorConfig, StaticVerifier
from outrider.coordinator.coordinator_server import CoordinatorServer, StreamLimits
from outrider.coordinator.queue import INQUIRIES_PER_S, LOOK_EVERY_S, RETRY_WHEN_FULL_S
from outrider.proto import codec
from outrider.proto.errors import (
    ConfigError,
    Internal,
    InvalidArgument,
    LeaseExpired,
    NotFound,
    OutriderError,
    ResourceExhausted,
    TokenizerMismatch,
    Unauthenticated,
    Unavailable,
    UnsupportedProtocol,
)
from outrider.proto.lease import verify_lease
from outrider.proto.release import release
from outrider.proto.types import DrafterHits, LeaseRequest, SessionReport

SECRET = b"0123456789abcdef"
HEALTH = "/grpc.health.v1.Health/Check"
Coordinating = Callable[..., AbstractAsyncContextManager[Any]]


def ask(**fields: Any) -> LeaseRequest:
    return LeaseRequest(**{"model": "tiny", "session": "s1", **fields})


# --- leases ---


async def test_a_lease_names_verifier_model_tokenizer_and_fitting_drafters(
    coordinating: Coordinating, drafters: Path
) -> None:
    write_package(drafters / "other", name="aaa", target="big")
    write_package(drafters / "own", name="zzz", target="tiny")
    write_package(drafters / "alien", name="alien", target="big", tokenizer_sha256="b" * 64)
    write_package(drafters / "by-text", name="abc", target="tiny", tokenizer_sha256="b" * 64)
    async with coordinating(
        ScriptedCluster(ready("a", address="127.0.0.1:7", step_s=0.03, context_length=4096)), drafters=(drafters,)
    ) as call:
        lease = await call("OpenLease", ask())
        assert (lease.verifier, lease.address, lease.model) == ("a", "127.0.0.1:7", "tiny")
        assert (lease.expires_in_s, lease.tokenizer_sha256) == (600.0, TOKENIZER_SHA256)
        assert [m.name for m in lease.drafters] == ["zzz", "aaa", "abc"], "own first; by text only for this target"
        assert lease.prior.drafters == ()
        assert lease.context_length == 4096


async def test_the_token_of_a_lease_verifies_for_its_session_only_and_until_it_expires(
    coordinating: Coordinating,
) -> None:
    async with coordinating(ScriptedCluster(ready("a")), lease_seconds=50) as call:
        token = (await call("OpenLease", ask())).token
        use = {"verifier": "a", "model": "tiny", "session": "s1", "now_s": time.time()}
        assert verify_lease(token, SECRET, **use).session == "s1"
        for wrong in ({"session": "s2"}, {"verifier": "b"}, {"model": "big"}):
            with pytest.raises(Unauthenticated):
                verify_lease(token, SECRET, **use | wrong)
        with pytest.raises(Unauthenticated):
            verify_lease(token, b"another secret of enough bytes", **use)
        with pytest.raises(LeaseExpired):
            verify_lease(token, SECRET, **use | {"now_s": time.time() + 61})


async def test_an_empty_model_and_tokenizer_get_what_there_is(coordinating: Coordinating) -> None:
    async with coordinating(ScriptedCluster(ready("a"))) as call:
        lease = await call("OpenLease", ask(model=""))
        assert (lease.model, lease.tokenizer_sha256) == ("tiny", TOKENIZER_SHA256)
        content = b"".join([chunk async for chunk in call.stream("FetchFile", lease.tokenizer.sha256, 0)])
        assert content.decode() == TOKENIZER_JSON


@pytest.mark.parametrize(
    ("verifier", "request_", "kind", "field"),
    [
        (ready("a"), ask(model="huge"), NotFound, "lease_request.model"),
        (ready("a"), ask(tokenizer_sha256="f" * 64), TokenizerMismatch, "lease_request.tokenizer_sha256"),
        (ready("a"), ask(tokenizer_sha256="xyz"), InvalidArgument, "lease_request.tokenizer_sha256"),
        (ready("a"), ask(session="no spaces"), InvalidArgument, "lease_request.session"),
        (ready("a"), ask(model="m" * 100_000), InvalidArgument, "lease_request.model"),
        (ready("a"), ask(protocol_version=99), UnsupportedProtocol, "lease_request.protocol_version"),
        (ready("a", sessions=4), ask(), ResourceExhausted, ""),
        (ready("a", state=VerifierState.DOWN), ask(), Unavailable, ""),
        (ready("a", state=VerifierState.DRAINING), ask(), Unavailable, ""),
    ],
)
async def test_a_refused_lease_arrives_as_the_right_error_with_field_or_retry_time(
    coordinating: Coordinating, verifier: Any, request_: LeaseRequest, kind: type[OutriderError], field: str
) -> None:
    async with coordinating(ScriptedCluster(verifier)) as call:
        with pytest.raises(kind) as refusal:
            await call("OpenLease", request_)
        assert type(refusal.value) is kind
        assert refusal.value.field == field
        assert (refusal.value.retry_after_s > 0) == (field == "")
        assert (await call("Status", None)).leases_granted == 0


async def test_a_refusal_from_a_stale_view_is_checked_against_the_fleet_first(coordinating: Coordinating) -> None:
    cluster = ScriptedCluster(ready("a", state=VerifierState.DOWN))
    async with coordinating(cluster, poll_s=60.0) as call:
        await asyncio.sleep(0.15)
        cluster.verifiers["a"] = ready("a")
        assert (await call("OpenLease", ask())).verifier == "a"


async def test_leases_are_still_given_while_the_cluster_cannot_be_asked(coordinating: Coordinating) -> None:
    cluster = ScriptedCluster(ready("a"))
    async with coordinating(cluster) as call:
        cluster.reachable = False
        before = cluster.refreshes
        await call.until(lambda: cluster.refreshes >= before + 2)
        assert (await call("OpenLease", ask())).verifier == "a"


async def test_a_lease_does_not_wait_behind_calls_of_another_method(coordinating: Coordinating) -> None:
    async with coordinating(ScriptedCluster(ready("a"))) as call:
        loop, done, ended = asyncio.get_running_loop(), list[str](), asyncio.Event()

        async def answered(method: str, *request: Any) -> None:
            await call(method, *request)
            done.append(method)

        def long_turn() -> None:
            time.sleep(0.002)
            if not ended.is_set():
                loop.call_soon(long_turn)

        long_turn()
        calls = [("ListDrafters", "")] * 100 + [("OpenLease", ask())]
        await asyncio.gather(*(asyncio.create_task(answered(*each)) for each in calls))
        ended.set()
        assert done.index("OpenLease") < 50


# --- drafters and files ---


async def test_drafters_are_listed_all_or_by_tokenizer(coordinating: Coordinating, drafters: Path) -> None:
    write_package(drafters / "a", name="a")
    write_package(drafters / "b", name="b", tokenizer_sha256="b" * 64)
    async with coordinating(ScriptedCluster(), drafters=(drafters,)) as call:
        assert [m.name for m in await call("ListDrafters", "")] == ["a", "b"]
        assert [m.name for m in await call("ListDrafters", TOKENIZER_SHA256)] == ["a"]
        with pytest.raises(InvalidArgument):
            await call("ListDrafters", "nonsense")


async def test_folders_without_any_drafter_are_said_with_the_remedy(
    coordinating: Coordinating, drafters: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with coordinating(ScriptedCluster(), drafters=(drafters,)):
        assert "no drafters to offer; install the distribution outrider-models" in caplog.text
    caplog.clear()
    write_package(drafters / "a", name="a")
    async with coordinating(ScriptedCluster(), drafters=(drafters,)):
        assert "no drafters" not in caplog.text


async def test_a_file_comes_in_bounded_chunks_whole_or_from_an_offset_and_has_its_hash(
    coordinating: Coordinating, drafters: Path
) -> None:
    weights = bytes(range(256)) * 2500  # 640,000 bytes: three chunks
    write_package(drafters / "a", files={"model.onnx": weights})
    async with coordinating(ScriptedCluster(), drafters=(drafters,)) as call:
        (manifest,) = await call("ListDrafters", "")
        by_name = {file.name: file for file in manifest.files}
        sha256 = by_name["model.onnx"].sha256
        chunks = [chunk async for chunk in call.stream("FetchFile", sha256, 0)]
        assert [len(chunk) for chunk in chunks] == [262144, 262144, 115712]
        assert hashlib.sha256(b"".join(chunks)).hexdigest() == sha256
        rest = b"".join([chunk async for chunk in call.stream("FetchFile", sha256, 500_000)])
        assert rest == weights[500_000:]
        assert [chunk async for chunk in call.stream("FetchFile", sha256, len(weights))] == []
        raw = b"".join([chunk async for chunk in call.stream("FetchFile", by_name["manifest.json"].sha256, 0)])
        assert raw == (drafters / "a" / "manifest.json").read_bytes()


async def test_a_client_that_goes_while_a_chunk_waits_for_room_leaves_no_traceback(
    coordinating: Coordinating, drafters: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_package(drafters / "a", files={"model.onnx": bytes(8 << 20)})
    async with coordinating(ScriptedCluster(), drafters=(drafters,)) as call:
        (manifest,) = await call("ListDrafters", "")
        sha256 = next(file.sha256 for file in manifest.files if file.name == "model.onnx")
        fetching = call.channel.unary_stream(f"/{codec.CONTROL_SERVICE}/FetchFile")(codec.encode_fetch(sha256, 0))
        await fetching.read()
        await asyncio.sleep(0.3)  # long enough to fill all buffers
        fetching.cancel()
        time.sleep(0.05)  # noqa: ASYNC251 - gRPC hears of the failed write and of the client's end meanwhile
        await call("Status", None)
    assert [record for record in caplog.records if record.exc_info] == []


class Fetches:
    """Fetches of a file of 8 MiB under limits of 3 at work and 4 of an address."""

    def __init__(self, drafters: Path, monkeypatch: pytest.MonkeyPatch, unread_s: float) -> None:
        monkeypatch.setattr(coordinator_server, "MAX_FETCHES", 3)
        monkeypatch.setattr(coordinator_server, "MAX_FETCHES_OF_PEER", 4)
        monkeypatch.setattr(coordinator_server, "UNREAD_S", unread_s)
        self._limits: list[StreamLimits] = []
        monkeypatch.setattr(coordinator_server, "StreamLimits", self._limit)
        write_package(drafters / "a", files={"model.onnx": bytes(8 << 20)})

    def _limit(self, *fields: Any) -> StreamLimits:
        self._limits.append(StreamLimits(*fields))
        return self._limits[-1]

    def counts(self) -> tuple[int, int]:
        """Return the fetches at work and those of all addresses."""
        return self._limits[0].working, sum(self._limits[0]._by_network.values())

    @staticmethod
    async def sha256(call: Any) -> str:
        (manifest,) = await call("ListDrafters", "")
        return next(file.sha256 for file in manifest.files if file.name == "model.onnx")

    @staticmethod
    def unread(call: Any, sha256: str) -> Any:
        return call.channel.unary_stream(f"/{codec.CONTROL_SERVICE}/FetchFile")(codec.encode_fetch(sha256, 0))


async def test_fetches_at_work_have_a_limit(
    coordinating: Coordinating, drafters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches = Fetches(drafters, monkeypatch, unread_s=600.0)
    async with coordinating(ScriptedCluster(), drafters=(drafters,)) as call:
        sha256 = await fetches.sha256(call)
        unread = [fetches.unread(call, sha256) for _ in range(3)]
        await call.until(lambda: fetches.counts() == (3, 3))
        with pytest.raises(ResourceExhausted, match="the coordinator has 3 fetches") as refusal:
            _ = [chunk async for chunk in call.stream("FetchFile", sha256, 0)]
        assert refusal.value.retry_after_s > 0
        for each in unread:
            each.cancel()
        await call.until(lambda: fetches.counts() == (0, 0))


async def test_unread_fetches_hold_no_file_and_leave_others_theirs(
    coordinating: Coordinating, drafters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches = Fetches(drafters, monkeypatch, unread_s=2.0)
    async with coordinating(ScriptedCluster(), drafters=(drafters,)) as call:
        sha256 = await fetches.sha256(call)
        before = open_files()
        unread = [fetches.unread(call, sha256) for _ in range(3)]
        await call.until(lambda: fetches.counts() == (0, 3))  # they stay unread
        assert open_files() == before
        whole = [chunk async for chunk in call.stream("FetchFile", sha256, 0)]  # the fourth of this address
        assert sum(map(len, whole)) == 8 << 20
        await call.until(lambda: fetches.counts() == (0, 3))  # a client sees the end before it is counted
        unread.append(fetches.unread(call, sha256))
        await call.until(lambda: fetches.counts()[1] == 4)
        with pytest.raises(ResourceExhausted, match="your address has 4 fetches"):
            _ = [chunk async for chunk in call.stream("FetchFile", sha256, 0)]
        with pytest.raises(grpc.aio.AioRpcError) as late:  # read in the end, it does not pass for the whole file
            _ = [chunk async for chunk in unread[0]]
        assert (late.value.code(), "unread" in (late.value.details() or "")) == (grpc.StatusCode.UNAVAILABLE, True)
        for each in unread:
            each.cancel()
        await call.until(lambda: fetches.counts() == (0, 0))


def open_files() -> int:
    """Return the number of files of drafters that this process has open."""
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    return sum(str(os.path.realpath(link)).endswith("model.onnx") for link in links)


async def test_watches_of_one_address_have_a_limit(coordinating: Coordinating, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_server, "MAX_WATCHES_OF_PEER", 2)
    async with coordinating(ScriptedCluster()) as call:
        watches = [call.stream("WatchDrafters", "") for _ in range(2)]
        for watch in watches:
            assert await anext(watch) == ()
        with pytest.raises(ResourceExhausted, match="your address has 2 watches of drafters"):
            await anext(call.stream("WatchDrafters", ""))
        for watch in watches:
            await watch.aclose()


async def test_edges_behind_one_proxy_all_watch(coordinating: Coordinating, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator_server, "MAX_WATCHES_OF_PEER", 2)
    async with coordinating(ScriptedCluster(), connections_per_address=0) as call:
        watches = [call.stream("WatchDrafters", "") for _ in range(4)]
        for watch in watches:
            assert await anext(watch) == ()
        for watch in watches:
            await watch.aclose()


async def test_an_inquiry_is_told_when_to_look_again_and_a_text_is_not(coordinating: Coordinating) -> None:
    async with coordinating(ScriptedCluster(ready("a"), ready("b", sessions=4))) as call:
        told = [(await call("OpenLease", ask(inquiry=True))).ask_again_s for _ in range(4 * round(INQUIRIES_PER_S))]
        assert told[0] == 0.0, "it keeps its own pace"
        assert LOOK_EVERY_S < told[-1] < LOOK_EVERY_S + 4.0, "the last comes after all before it"
        assert (await call("OpenLease", ask())).ask_again_s == 0.0


async def test_an_inquiry_that_is_refused_is_told_too(coordinating: Coordinating) -> None:
    async with coordinating(ScriptedCluster(ready("a", sessions=4))) as call:
        call.server.service._pace._taken_s = time.monotonic() + 50.0
        with pytest.raises(ResourceExhausted) as looked:
            await call("OpenLease", ask(inquiry=True))
        assert 40.0 < looked.value.retry_after_s < 60.0
        with pytest.raises(ResourceExhausted) as text:
            await call("OpenLease", ask())
        assert text.value.retry_after_s <= RETRY_WHEN_FULL_S


@pytest.mark.parametrize(
    ("sha256", "offset", "kind", "field"),
    [
        ("../../../etc/passwd", 0, InvalidArgument, "fetch.sha256"),
        ("A" * 64, 0, InvalidArgument, "fetch.sha256"),
        ("0" * 64, 0, NotFound, "fetch.sha256"),
        (hashlib.sha256(b"weights").hexdigest(), 1 << 60, InvalidArgument, "fetch.offset"),
    ],
)
async def test_a_fetch_of_anything_else_is_refused(
    coordinating: Coordinating, drafters: Path, sha256: str, offset: int, kind: type[OutriderError], field: str
) -> None:
    write_package(drafters / "a", files={"model.onnx": b"weights"})
    async with coordinating(ScriptedCluster(), drafters=(drafters,)) as call:
        with pytest.raises(kind) as refusal:
            _ = [chunk async for chunk in call.stream("FetchFile", sha256, offset)]
        assert refusal.value.field == field


async def test_a_watch_shows_the_drafters_at_once_and_each_new_version_and_its_withdrawal(
    coordinating: Coordinating, drafters: Path
) -> None:
    write_package(drafters / "1", version="1")
    async with coordinating(ScriptedCluster(), drafters=(drafters,)) as call:
        updates = call.stream("WatchDrafters", TOKENIZER_SHA256)
        assert [m.version for m in await anext(updates)] == ["1"]
        write_package(drafters / ".2", version="2").rename(drafters / "2")
        assert [(m.version, m.share) for m in await anext(updates)] == [("2", 0), ("1", 1)], (
            "few edges: all compare both"
        )
        (drafters / "2").rename(drafters / ".2")
        assert [m.version for m in await anext(updates)] == ["1"]


async def test_many_watches_are_told_one_after_the_other_and_each_of_the_newest(
    coordinating: Coordinating, drafters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "TELL_EVERY_S", 0.03)
    async with coordinating(ScriptedCluster(), drafters=(drafters,)) as call:
        watches = [call.stream("WatchDrafters", "") for _ in range(40)]
        for watch in watches:
            assert await anext(watch) == ()
        told: list[float] = []

        async def until_both(watch: Any) -> None:
            while len(await anext(watch)) < 2:
                pass
            told.append(time.monotonic())

        write_package(drafters / "a", name="aaa")
        waiting = [asyncio.create_task(until_both(watch)) for watch in watches]
        await call.until(lambda: call.server.service.catalogue.manifests)
        write_package(drafters / "b", name="bbb")
        await asyncio.wait_for(asyncio.gather(*waiting), 60)
        assert max(told) - min(told) > 0.3, "whoever wants a lease comes between"


async def test_a_watch_of_one_tokenizer_is_not_woken_by_another(coordinating: Coordinating, drafters: Path) -> None:
    async with coordinating(ScriptedCluster(), drafters=(drafters,)) as call:
        updates = call.stream("WatchDrafters", TOKENIZER_SHA256)
        assert await anext(updates) == ()
        write_package(drafters / "alien", name="alien", target="big", tokenizer_sha256="b" * 64)
        await call.until(lambda: call.server.service.catalogue.fits("b" * 64))
        write_package(drafters / "own", name="own")
        assert [m.name for m in await anext(updates)] == ["own"], "the update between would have been empty"


async def test_stopping_ends_a_watch_with_unavailable_and_without_waiting_for_it(coordinating: Coordinating) -> None:
    async with coordinating(ScriptedCluster()) as call:
        updates = call.stream("WatchDrafters", "")
        await anext(updates)
        began_s = time.monotonic()
        await call.server.stop(60.0)
        assert time.monotonic() - began_s < 30
        with pytest.raises(Unavailable):
            await anext(updates)


# --- reports, status, drain ---


async def test_of_two_coordinators_only_the_one_that_leased_a_session_counts_it(
    coordinating: Coordinating,
) -> None:
    async with coordinating(ScriptedCluster(ready("a"))) as one, coordinating(ScriptedCluster(ready("a"))) as other:
        token = (await one("OpenLease", ask())).token
        assert verify_lease(token, SECRET, verifier="a", model="tiny", session="s1", now_s=time.time())
        for call in (other, one, other):
            await call("ReportSession", SessionReport(session="s1", model="tiny", verifier="a"))
        assert [len((await call("Status", None)).recent) for call in (one, other)] == [1, 0]
        assert (await other("OpenLease", ask())).verifier == "a", "its edge goes on there"


async def test_what_the_fleet_learned_survives_a_restart_of_the_coordinator(
    coordinating: Coordinating, tmp_path: Path
) -> None:
    async with coordinating(ScriptedCluster(ready("a")), state=tmp_path / "state.json") as call:
        await call("OpenLease", ask())
        heard = (DrafterHits("tiny-drafter", "1", 8, 10),)
        await call("ReportSession", SessionReport(session="s1", model="tiny", verifier="a", drafter_hits=heard))
    async with coordinating(ScriptedCluster(ready("a")), state=tmp_path / "state.json") as call:
        assert (await call("OpenLease", ask())).prior.drafters[0].acceptance == pytest.approx(0.8)


async def test_the_status_shows_no_address_of_a_verifier_that_is_down(coordinating: Coordinating) -> None:
    async with coordinating(ScriptedCluster(ready("a"), ready("b", state=VerifierState.DOWN))) as call:
        verifiers = (status := await call("Status", None)).verifiers
        assert [(v.name, v.state, v.address) for v in verifiers] == [("a", "ready", "127.0.0.1:1"), ("b", "down", "")]
        assert status.release == (await call("OpenLease", ask())).release == release()


async def test_a_drained_verifier_gets_no_more_leases_and_its_sessions_are_counted(coordinating: Coordinating) -> None:
    cluster = ScriptedCluster(ready("a", sessions=2), ready("b", sessions=3))
    async with coordinating(cluster) as call:
        assert (await call("OpenLease", ask())).verifier == "a"
        assert await call("Drain", "a") == 2
        assert cluster.drained == ["a"]
        assert (await call("OpenLease", ask())).verifier == "b"
        assert (await call("Status", None)).verifiers[0].state == "draining"


async def test_no_lease_lands_on_a_verifier_while_its_drain_is_under_way(coordinating: Coordinating) -> None:
    begun, goes_on = asyncio.Event(), asyncio.Event()

    class SlowDrain(ScriptedCluster):
        async def drain(self, name: str) -> int:
            begun.set()
            await goes_on.wait()
            return await super().drain(name)

    async with coordinating(SlowDrain(ready("a"))) as call:
        draining = asyncio.create_task(call("Drain", "a"))
        await begun.wait()
        with pytest.raises(Unavailable):
            await call("OpenLease", ask())
        goes_on.set()
        await draining


async def test_draining_an_unknown_verifier_is_not_found_and_lists_those_there_are(coordinating: Coordinating) -> None:
    async with coordinating(ScriptedCluster(ready("a"))) as call:
        with pytest.raises(NotFound, match="there is a") as refusal:
            await call("Drain", "zzz")
        assert refusal.value.field == "drain.verifier"


# --- the server itself ---


async def test_a_defect_is_internal_and_logged_and_the_edge_sees_no_trace_of_it(
    coordinating: Coordinating, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(ScriptedCluster):
        async def drain(self, name: str) -> int:
            raise ZeroDivisionError("private detail")

    with caplog.at_level(logging.ERROR):
        async with coordinating(Broken(ready("a"))) as call:
            with pytest.raises(Internal) as failure:
                await call("Drain", "a")
            assert "private" not in str(failure.value)
            assert (await call("OpenLease", ask())).verifier == "a", "the server lives on"
    assert "private detail" in caplog.text


async def test_an_oversized_request_is_refused_and_the_server_lives_on(coordinating: Coordinating) -> None:
    async with coordinating(ScriptedCluster(ready("a"))) as call:
        with pytest.raises(ResourceExhausted):
            await call("OpenLease", ask(model="m" * 2_000_000))
        assert (await call("OpenLease", ask())).verifier == "a"


async def test_the_standard_health_service_answers(coordinating: Coordinating) -> None:
    async with coordinating(ScriptedCluster()) as call:
        for service in ("", codec.CONTROL_SERVICE):
            request = health_pb2.HealthCheckRequest(service=service).SerializeToString()
            reply = health_pb2.HealthCheckResponse.FromString(await call.channel.unary_unary(HEALTH)(request))
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_port_that_is_taken_is_a_config_error(coordinating: Coordinating) -> None:
    async with coordinating(ScriptedCluster()) as call:
        second = CoordinatorServer(CoordinatorConfig(lease_secret=SECRET, listen=call.address), ScriptedCluster())
        with pytest.raises(ConfigError, match="cannot be bound"):
            await second.start()
        await second.stop(0)


async def test_a_failing_poll_is_logged_and_tried_again(
    coordinating: Coordinating, caplog: pytest.LogCaptureFixture
) -> None:
    class Flaky(ScriptedCluster):
        async def refresh(self) -> Any:
            if self.refreshes == 1:
                self.refreshes += 1
                raise ZeroDivisionError("once")
            return await super().refresh()

    cluster = Flaky(ready("a"))
    async with coordinating(cluster) as call:
        await call.until(lambda: cluster.refreshes >= 4)
    assert "will be tried again" in caplog.text


# --- verifiers at fixed addresses ---


async def test_a_static_verifier_is_what_it_reports_and_its_return_is_a_restart(coordinating: Coordinating) -> None:
    async with coordinating(ScriptedCluster()) as call:
        address = f"127.0.0.1:{free_port()}"

        async def reporting() -> grpc.aio.Server:
            made = grpc.aio.server()
            add_report(made, "v")
            made.add_insecure_port(address)
            await made.start()
            return made

        stand_in = await reporting()
        verifier = StaticVerifier("v", address, "tiny", TOKENIZER_JSON)
        config = CoordinatorConfig(lease_secret=SECRET, listen="127.0.0.1:0", poll_s=0.1, verifiers=(verifier,))
        server = CoordinatorServer(config)
        await server.start()
        service = server.service
        assert service is not None
        lease = await service.open_lease(ask())
        assert (lease.verifier, lease.address, lease.tokenizer is not None) == ("v", address, True)
        assert await service.drain("v") == 0
        assert service.verifiers[0].state is VerifierState.DRAINING
        await stand_in.stop(0)
        await call.until(lambda: service.verifiers[0].state is VerifierState.DOWN)
        with pytest.raises(Unavailable):
            await service.open_lease(ask())
        again = await reporting()
        await call.until(lambda: service.verifiers[0].state is VerifierState.READY)
        assert service.verifiers[0].restarts == 1
        await server.stop(0)
        await again.stop(0)


async def test_a_coordinator_without_verifiers_starts_and_says_unavailable(coordinating: Coordinating) -> None:
    async with coordinating() as call:
        with pytest.raises(Unavailable):
            await call("OpenLease", ask())

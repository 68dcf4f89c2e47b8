"""Versions that belong to one API key: its edges get them, and to all others they are not there."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.coordinator.statistics import FleetStatistics
from outrider.coordinator.testing import ScriptedCluster, ready, write_package
from outrider.coordinator.versions import VersionState, own_line
from outrider.edge.control import CoordinatorClient, file_fetcher
from outrider.edge.security import Security
from outrider.proto.errors import InvalidArgument, NotFound, OutriderError, Unauthenticated
from outrider.proto.plumbing.access import Key, secret_sha256
from outrider.proto.salts import key_salt
from outrider.proto.types import DrafterHits, DrafterManifest, LeaseRequest, RemoteFile, SessionReport

SECRET = b"0123456789abcdef"  # of the coordinator in conftest.py
ALICE, BOB = (key_salt(SECRET, name).hex() for name in ("alice", "bob"))
GRAPH = b"the graph that all have"
Serve = Callable[..., None]


def write_keys(path: Path, **learning: bool) -> Path:
    tables = [Key(name, secret_sha256(f"{name}s"), learning=may) for name, may in learning.items()]
    path.write_text("\n".join(key.toml() for key in [*tables, Key("root", secret_sha256("roots"), admin=True)]))
    path.chmod(0o600)
    return path


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return write_keys(tmp_path / "keys.toml", alice=True, bob=True, carol=False)


@pytest.fixture
def fleet(drafters: Path, keys: Path) -> dict[str, Any]:
    """Options of a coordinator whose drafter has a version for all and one that is alice's own."""
    write_package(drafters / "public", version="1", files={"model.onnx": GRAPH})
    write_own(drafters, "own1", sequence=1)
    return {"cluster": ScriptedCluster(ready("a")), "api_keys": keys, "drafters": (drafters,)}


def write_own(drafters: Path, version: str, sequence: int, owner: str = ALICE) -> Path:
    files = {"model.onnx": GRAPH, "adapter.safetensors": f"learned from one key alone: {version}".encode()}
    return write_package(
        drafters / owner / str(sequence), version=version, files=files, sequence=sequence, parent="1", owner=owner
    )


def as_client(call: Any, name: str) -> CoordinatorClient:
    return CoordinatorClient(call.address, security=Security(api_key=f"{name}s" if name else ""))


def versions_of(offers: tuple[DrafterManifest, ...]) -> list[tuple[str, float]]:
    return [(offer.version, offer.share) for offer in offers]


async def fetched(client: CoordinatorClient, file: RemoteFile) -> bytes:
    fetch = file_fetcher(client.address, security=client.security)
    return await asyncio.to_thread(lambda: b"".join(fetch(file, 0)))


def ask(session: str = "s") -> LeaseRequest:
    return LeaseRequest(model="tiny", session=session)


def hits(**rates: float) -> tuple[DrafterHits, ...]:
    return tuple(DrafterHits("tiny-drafter", version, round(100 * rate), 100) for version, rate in rates.items())


def report(edge: str, **rates: float) -> SessionReport:
    versions = {version.removeprefix("v"): rate for version, rate in rates.items()}
    return SessionReport("s", "tiny", "a", edge=edge, drafter_hits=hits(**versions))


# --- who sees them ---


def test_the_edges_of_the_owner_get_its_version_as_an_arm_beside_the_current_one(serve: Serve, fleet) -> None:
    async def scenario(call: Any) -> None:
        alice = as_client(call, "alice")
        offers = await alice.list_drafters()
        assert versions_of(offers) == [("1", 0), ("own1", 1.0)]
        assert (await alice.open_lease(ask())).drafters == offers
        assert await anext(alice.watch_drafters()) == offers
        (adapter,) = (file for file in offers[1].files if file.name == "adapter.safetensors")
        assert b"one key alone" in await fetched(alice, adapter)
        await alice.close()

    serve(scenario, **fleet)


@pytest.mark.parametrize("name", ["bob", "carol", "root"])
def test_an_edge_of_another_key_neither_sees_nor_fetches_it_by_any_name(serve: Serve, fleet, name: str) -> None:
    async def scenario(call: Any) -> None:
        alice, other = as_client(call, "alice"), as_client(call, name)
        (_, own) = await alice.list_drafters()
        await alice.open_lease(ask())
        for _ in range(3):  # hits of a version are in no prior of others either
            await alice.report(report("edge", v1=0.5, own1=0.8))
        lease = await other.open_lease(ask())
        for offers in (await other.list_drafters(), lease.drafters, await anext(other.watch_drafters())):
            assert versions_of(offers) == [("1", 0)]
        assert [prior.drafter_version for prior in lease.prior.drafters] == ["1"]
        secrets = [file for file in own.files if file.name != "model.onnx"]
        assert len(secrets) == 2
        for file in secrets:
            with pytest.raises(NotFound, match="no file with this hash"):
                await fetched(other, file)
            assert await fetched(alice, file)
        guesses = ("own1", "1", "tiny-drafter", "tiny-drafter@own1", f"{ALICE}/1", "../1/adapter.safetensors", ALICE)
        for guess in guesses:  # by version, number, name and path
            with pytest.raises(InvalidArgument, match="64 hexadecimal"):
                await call.stream("FetchFile", guess, 0, metadata=other.security.metadata).__anext__()
        await alice.close()
        await other.close()

    serve(scenario, **fleet)


def test_without_api_keys_nobody_owns_anything(serve: Serve, fleet) -> None:
    async def scenario(call: Any) -> None:
        assert versions_of(await call("ListDrafters", "")) == [("1", 0)]

    serve(scenario, **fleet | {"api_keys": None})


def test_a_package_whose_owner_cannot_be_read_is_for_nobody(serve: Serve, fleet, drafters: Path) -> None:
    for number, owner in enumerate(("", "alice", ALICE.upper(), ALICE[:-1], 3, None)):
        write_package(drafters / "bad" / str(number), version=f"bad{number}", sequence=9, owner=owner)

    async def scenario(call: Any) -> None:
        for name in ("alice", "bob"):
            client = as_client(call, name)
            assert versions_of(await client.list_drafters()) == [("1", 0), *([("own1", 1.0)] * (name == "alice"))]
            await client.close()

    serve(scenario, **fleet)


def test_the_status_counts_them_and_says_neither_version_nor_owner(serve: Serve, fleet) -> None:
    async def scenario(call: Any) -> None:
        alice, root = as_client(call, "alice"), as_client(call, "root")
        await alice.open_lease(ask())
        await alice.report(report("", v1=0.5, own1=0.8))
        status = await root.status()
        assert (status.own_versions, status.own_keys) == (1, 1)
        assert [drafter.version for drafter in status.drafters] == ["1"]
        assert [version.version for version in status.versions] == ["1"]
        assert [cell.prior.drafter_version for cell in status.acceptance] == ["1"]
        for secret in ("own1", "alice", ALICE):
            assert secret not in str(status)
        await alice.close()
        await root.close()

    serve(scenario, **fleet)


@pytest.mark.parametrize("change", ["forbids", "gone", "rotated"])
def test_a_key_that_forbids_learning_is_gone_or_has_another_secret_loses_them(serve: Serve, fleet, change: str) -> None:
    keys, cluster = fleet["api_keys"], fleet["cluster"]

    async def scenario(call: Any) -> None:
        alice = as_client(call, "alice")
        updates = alice.watch_drafters()
        (_, own) = await anext(updates)
        await call.until(lambda: cluster.owners == {bytes.fromhex(ALICE), bytes.fromhex(BOB)})
        if change == "rotated":  # who holds the old secret is not alice any more
            text = keys.read_text().replace(secret_sha256("alices"), secret_sha256("new"))
            await asyncio.to_thread(keys.write_text, text)
            call.server.service.catalogue.wake()
        else:
            await asyncio.to_thread(write_keys, keys, bob=True, **({"alice": False} if change == "forbids" else {}))
        if change == "forbids":
            assert versions_of(await anext(updates)) == [("1", 0)], "a stream that runs is told so"
        else:
            with pytest.raises(Unauthenticated):
                await anext(updates)
        if change != "rotated":
            await call.until(lambda: cluster.owners == {bytes.fromhex(BOB)})
        with pytest.raises(OutriderError):
            await fetched(alice, own.files[0])
        await alice.close()

    serve(scenario, **fleet)


# --- which one is better ---


class Edges:
    """Edges of alice, and a coordinator's statistics."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.statistics = FleetStatistics(unix_clock=lambda: 1e9)
        self.offered = [("tiny-drafter", "1", 0)]
        self.line = own_line("tiny-drafter", ALICE)

    def publish(self, *versions: str) -> None:
        own = [(self.line, version, number + 1) for number, version in enumerate(versions)]
        self.statistics.look([*reversed(own), *self.offered])

    def text(self, owner: str = ALICE, **gains: float) -> None:
        rate = self.random.uniform(0.4, 0.6)
        rates = {name: float(np.clip(rate + gain + self.random.normal(0, 0.04), 0, 1)) for name, gain in gains.items()}
        self.statistics.add(report("edge", **rates), tenant="t", owner=owner)

    def state(self, version: str, line: str = "") -> VersionState | None:
        return self.statistics.versions.state(line or self.line, version)

    def share(self, version: str) -> float:
        return self.statistics.share(self.line, version)


def test_an_own_version_that_is_worse_is_retired_by_its_owners_texts_within_a_day() -> None:
    edges = Edges()
    edges.publish("own1")
    assert (edges.state("1"), edges.state("own1")) == (VersionState.CURRENT, VersionState.CANDIDATE)
    assert edges.share("own1") == 1.0
    for _ in range(60):
        edges.text(v1=0.0, own1=-0.12)
    assert edges.state("own1") is VersionState.RETIRED
    assert edges.share("own1") == 0
    edges.publish("own1")
    assert edges.state("own1") is VersionState.RETIRED, "it stays so"
    assert edges.state("1", "tiny-drafter") is VersionState.CURRENT, "others have it as before"


@pytest.mark.parametrize("owner", [BOB, ""])
def test_reports_of_others_decide_nothing_about_it(owner: str) -> None:
    edges = Edges()
    edges.publish("own1")
    for _ in range(100):
        edges.text(owner, v1=0.0, own1=-0.3)
    assert edges.state("own1") is VersionState.CANDIDATE
    assert all(cell.prior.drafter_version == "1" for cell in edges.statistics.acceptance.shown)


def test_one_that_was_better_goes_on_against_the_next_version_for_all() -> None:
    edges = Edges()
    edges.publish("own1")
    for _ in range(100):
        edges.text(v1=0.0, own1=0.1)
    assert (edges.state("own1"), edges.state("1")) == (VersionState.CURRENT, VersionState.FORMER)
    assert edges.state("1", "tiny-drafter") is VersionState.CURRENT, "for others nothing is proven"
    edges.offered.append(("tiny-drafter", "2", 2))
    edges.publish("own1")
    assert edges.state("2") is None, "what is on trial with others is no matter yet"
    for number in range(100):
        rate = edges.random.uniform(0.4, 0.6)
        edges.statistics.add(report(f"other-{number}", v1=rate, v2=rate + 0.2))
    assert edges.state("2", "tiny-drafter") is VersionState.CURRENT
    edges.publish("own1")
    assert (edges.state("own1"), edges.state("2")) == (VersionState.CURRENT, VersionState.CANDIDATE)
    for _ in range(100):
        edges.text(own1=0.0, v2=0.1)
    assert (edges.state("own1"), edges.state("2")) == (VersionState.FORMER, VersionState.CURRENT)
    assert edges.share("own1") == 1.0, "an arm still, so that it can come back"
    edges.publish("own1", "own3")
    for _ in range(100):
        edges.text(own1=0.0, own3=0.1, v2=0.0)
    assert edges.state("own3") is VersionState.CURRENT
    assert edges.share("own1") == 0


def test_states_survive_a_restart_and_what_was_forgotten_leaves_nothing(tmp_path: Path) -> None:
    edges = Edges()
    edges.publish("own1")
    for _ in range(60):
        edges.text(v1=0.0, own1=-0.12)
    edges.statistics.save(tmp_path / "state.json")
    assert ALICE in (tmp_path / "state.json").read_text()
    again = Edges()
    again.statistics.load(tmp_path / "state.json")
    again.publish("own1")
    assert again.state("own1") is VersionState.RETIRED
    assert again.statistics.look(again.offered), "a change, so that it is saved"
    again.statistics.save(tmp_path / "state.json")
    assert ALICE not in (tmp_path / "state.json").read_text()
    again.text(v1=0.5, own1=0.5)  # late, from an edge that still drafts with it
    assert "own1" not in str(again.statistics.acceptance.shown)


def test_trainers_are_told_what_is_retired_while_its_files_are_there(serve: Serve, fleet, drafters: Path) -> None:
    cluster = fleet["cluster"]
    write_package(drafters / "2", version="2", sequence=2, files={"model.onnx": b"another"})

    async def scenario(call: Any) -> None:
        service = call.server.service
        alice, bob, carol = clients = [as_client(call, name) for name in ("alice", "bob", "carol")]
        await service.scan_drafters()
        for client in clients:
            await client.open_lease(ask())
        assert cluster.retired == frozenset()
        for number in range(60):
            await alice.report(report("edge", v1=0.5, own1=0.2))
            for client in (bob, carol):  # one key alone decides nothing for all
                await client.report(report(f"edge-{number}", v1=0.5, v2=0.2))
        await call.until(lambda: cluster.retired == {(ALICE, "own1"), ("tiny-drafter", "2")})
        for folder in (drafters / ALICE, drafters / "2"):
            await asyncio.to_thread(shutil.rmtree, folder)
        await service.scan_drafters()
        cluster.retired = frozenset()
        seen = cluster.refreshes
        await call.until(lambda: cluster.refreshes > seen + 1)
        assert cluster.retired == frozenset()
        for client in clients:
            await client.close()

    serve(scenario, **fleet)


def test_a_version_that_is_deleted_is_taken_from_its_edges_at_the_next_scan(serve: Serve, fleet, drafters) -> None:
    async def scenario(call: Any) -> None:
        alice = as_client(call, "alice")
        updates = alice.watch_drafters()
        assert len(await anext(updates)) == 2
        await asyncio.to_thread(shutil.rmtree, drafters / ALICE)
        assert versions_of(await anext(updates)) == [("1", 0)]
        await alice.close()

    serve(scenario, **fleet)

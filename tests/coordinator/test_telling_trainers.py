"""A coordinator tells trainers at every poll which keys allow learning, and which versions are retired."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import ScriptedCluster, ready, write_package

from outrider.edge.link.control_client import CoordinatorClient
from outrider.edge.link.security import Security
from outrider.proto.errors import Unauthenticated
from outrider.proto.plumbing.access import Key, secret_sha256
from outrider.proto.salts import key_salt
from outrider.proto.testing import write_keys
from outrider.proto.types import DrafterHits, LeaseRequest, SessionReport

SECRET = b"0123456789abcdef"  # of the coordinator in conftest.py
ALICE, BOB = (key_salt(SECRET, name) for name in ("alice", "bob"))
Coordinating = Callable[..., AbstractAsyncContextManager[Any]]


def keys_file(path: Path, **learning: bool) -> Path:
    return write_keys(path, *(Key(name, secret_sha256(f"{name}s"), learning=may) for name, may in learning.items()))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return keys_file(tmp_path / "keys.toml", alice=True, bob=True, carol=False)


def as_client(call: Any, name: str) -> CoordinatorClient:
    return CoordinatorClient(call.address, security=Security(api_key=f"{name}s"))


@pytest.mark.parametrize("left", [{"alice": False, "bob": True}, {"bob": True}])
async def test_trainers_hear_which_keys_allow_learning_and_when_one_no_longer_does(
    coordinating: Coordinating, keys: Path, left
) -> None:
    cluster = ScriptedCluster(ready("a"))
    async with coordinating(cluster, api_keys=keys) as call:
        await call.until(lambda: cluster.allowed == {ALICE, BOB})
        await asyncio.to_thread(keys_file, keys, **left)
        await call.until(lambda: cluster.allowed == {BOB})


async def test_without_api_keys_there_is_nobody_to_name(coordinating: Coordinating) -> None:
    cluster = ScriptedCluster(ready("a"))
    async with coordinating(cluster) as call:
        await call.until(lambda: cluster.refreshes > 2)
        assert cluster.allowed is None


async def test_trainers_are_told_what_is_retired_while_its_files_are_there(
    coordinating: Coordinating, keys: Path, drafters: Path
) -> None:
    cluster = ScriptedCluster(ready("a"))
    write_package(drafters / "1", version="1")
    write_package(drafters / "2", version="2", sequence=2, files={"model.onnx": b"another"})
    async with coordinating(cluster, api_keys=keys, drafters=(drafters,)) as call:
        service = call.server.service
        clients = [as_client(call, name) for name in ("alice", "bob")]
        await service.scan_drafters()
        for client in clients:
            await client.open_lease(LeaseRequest(model="tiny", session="s"))
        assert cluster.retired == frozenset()
        hits = (DrafterHits("tiny-drafter", "1", 50, 100), DrafterHits("tiny-drafter", "2", 20, 100))
        for number in range(60):
            for client in clients:  # one key alone decides nothing
                await client.report(SessionReport("s", "tiny", "a", edge=f"edge-{number}", drafter_hits=hits))
        await call.until(lambda: cluster.retired == {("tiny-drafter", "2")})
        await asyncio.to_thread(shutil.rmtree, drafters / "2")
        await service.scan_drafters()
        cluster.retired = frozenset()
        seen = cluster.refreshes
        await call.until(lambda: cluster.refreshes > seen + 1)
        assert cluster.retired == frozenset()
        for client in clients:
            await client.close()


async def test_a_key_that_is_taken_away_watches_drafters_no_longer(
    coordinating: Coordinating, keys: Path, drafters: Path
) -> None:
    write_package(drafters / "1")
    async with coordinating(ScriptedCluster(ready("a")), api_keys=keys, drafters=(drafters,)) as call:
        alice = as_client(call, "alice")
        updates = alice.watch_drafters()
        assert len(await anext(updates)) == 1
        await asyncio.to_thread(keys_file, keys, bob=True)
        call.server.service.catalogue.wake()
        with pytest.raises(Unauthenticated, match="revoked"):
            await anext(updates)
        await alice.close()

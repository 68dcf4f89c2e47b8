"""A client watches its coordinator's drafters, also one that comes back, and stops when it is closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.drafters import DrafterShelf, NgramDrafter
from outrider.drafters.search import DrafterSearch
from outrider.drafters.shelf import Member, loaded_member
from outrider.edge import Client, EdgeConfig, preparation
from outrider.edge.preparation import Preparation
from outrider.proto.cluster_status import VersionStatus
from outrider.proto.drafter_format import published_name, trial_name
from outrider.proto.errors import PermissionDenied, Unavailable
from outrider.proto.tokenizer import tokenizer_hash
from outrider.proto.types import DrafterManifest, Lease

WHERE = "127.0.0.1:1"
CHANNELS = SimpleNamespace(connect=lambda *_: None)


class Coordinator:
    """Goes away and comes back; a test decides what is found by its offers."""

    security = EdgeConfig(coordinator=WHERE).security
    newest_lease = None

    def __init__(self, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, *found: Sequence[Member] | Exception) -> None:
        self.sha256 = tokenizer_hash(tokenizer.read_text(encoding="utf-8"))
        self.found = list(found)
        self.events: asyncio.Queue[Exception | None] = asyncio.Queue()
        self.watched = 0
        monkeypatch.setattr(DrafterSearch, "named", lambda *_: self._found())

    def _found(self) -> list[Member]:
        found = self.found.pop(0)
        if isinstance(found, Exception):
            raise found
        return list(found)

    async def open_lease(self, _: object) -> Lease:
        return Lease(token=b"", verifier="v", address=WHERE, expires_in_s=60.0, model="m", tokenizer_sha256=self.sha256)

    async def watch_drafters(self, sha256: str) -> AsyncIterator[tuple[DrafterManifest, ...]]:
        assert sha256 == self.sha256
        self.watched += 1
        while True:
            event = await self.events.get()
            if event is not None:
                raise event
            yield ()


def drafters(*names: str) -> list[Member]:
    return [loaded_member(NgramDrafter(name=name)) for name in names]


def prepared_by(coordinator: Coordinator, tokenizer: Path, cache: Path, drafter: str = "a", given=()) -> Preparation:
    config = EdgeConfig(coordinator=WHERE, drafter=drafter, tokenizer=tokenizer, cache=cache)
    return Preparation(config, coordinator, None, given)  # type: ignore[arg-type]


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_texts_to_come_have_what_is_offered_and_others_stay(tokenizer_file, tmp_path, monkeypatch) -> None:
    first, others = drafters("a"), drafters("b", "a")
    coordinator = Coordinator(tokenizer_file, monkeypatch, first, first, OSError("disk full"), others)
    it = prepared_by(coordinator, tokenizer_file, tmp_path)
    shelf = (await it.find(CHANNELS)).shelf  # type: ignore[arg-type]
    kept = shelf.first
    for left in (2, 1):
        coordinator.events.put_nowait(None)
        await until(lambda: len(coordinator.found) == left)  # noqa: B023
        assert shelf.drafters()[0] == (kept,), "nothing changed, or could not be had"
    coordinator.events.put_nowait(None)
    await until(lambda: shelf.names == "b,a")
    assert shelf.drafters()[0][1] is kept
    await it.close()
    assert shelf.drafters()[0] == ()


async def lose_and_watch_again(tokenizer_file, tmp_path, monkeypatch) -> None:
    """See drafters that come after a coordinator was lost."""
    monkeypatch.setattr(preparation, "WATCH_AGAIN_S", 0.001)
    coordinator = Coordinator(tokenizer_file, monkeypatch, drafters("a"), drafters("b"))
    it = prepared_by(coordinator, tokenizer_file, tmp_path)
    shelf = (await it.find(CHANNELS)).shelf  # type: ignore[arg-type]
    coordinator.events.put_nowait(Unavailable("gone"))
    coordinator.events.put_nowait(None)
    await until(lambda: shelf.names == "b")
    await it.close()


async def test_a_coordinator_that_comes_back_is_watched_again(tokenizer_file, tmp_path, monkeypatch) -> None:
    await lose_and_watch_again(tokenizer_file, tmp_path, monkeypatch)


async def test_edges_that_lost_a_coordinator_together_do_not_come_back_together(
    tokenizer_file, tmp_path, monkeypatch
) -> None:
    pauses: list[tuple[float, float]] = []
    monkeypatch.setattr(preparation.random, "uniform", lambda *spread: pauses.append(spread) or sum(spread) / 2)
    await lose_and_watch_again(tokenizer_file, tmp_path, monkeypatch)
    assert pauses == [(0.5, 1.5)]


@pytest.mark.parametrize(("drafter", "given", "watches"), [("a", (), 1), ("none", (), 0), ("a", (NgramDrafter(),), 0)])
async def test_only_who_takes_drafters_of_a_coordinator_watches(
    tokenizer_file, tmp_path, monkeypatch, drafter: str, given: tuple[NgramDrafter, ...], watches: int
) -> None:
    coordinator = Coordinator(tokenizer_file, monkeypatch, drafters("a"))
    it = prepared_by(coordinator, tokenizer_file, tmp_path, drafter, given)
    await it.load(CHANNELS)  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    assert coordinator.watched == watches
    await it.close()


# --- versions, with a coordinator that answers, one that does not, and without one ---

KNOWN = (VersionStatus("swift", "7", "retired", why="hits -0.1 against 6 in 20 texts"),)
READY = SimpleNamespace(shelf=DrafterShelf(NgramDrafter(name="a"), NgramDrafter(name=trial_name("a", "2"))))


class ToldCoordinator:
    def __init__(self, *, may: bool) -> None:
        self.may = may

    async def status(self):
        if not self.may:
            raise PermissionDenied("the key may not", field="api_key")
        return SimpleNamespace(versions=KNOWN)


async def versions_of(coordinator: ToldCoordinator | None, ready: SimpleNamespace | None) -> tuple[VersionStatus, ...]:
    client = Client(EdgeConfig(verifier="127.0.0.1:1", model="m"))
    client._coordinator, client._preparation.ready = coordinator, ready  # type: ignore[assignment]
    return await client.versions()


def test_the_coordinator_says_what_it_knows() -> None:
    assert asyncio.run(versions_of(ToldCoordinator(may=True), READY)) == KNOWN


def test_an_edge_that_may_not_ask_tells_its_own_drafters_and_previous_ones() -> None:
    own = (VersionStatus("a", NgramDrafter.version, "current"), VersionStatus("a", NgramDrafter.version, "previous"))
    for coordinator in (ToldCoordinator(may=False), None):
        assert asyncio.run(versions_of(coordinator, READY)) == own
    assert asyncio.run(versions_of(None, None)) == ()


def test_a_name_on_trial_leads_back_to_the_published_one() -> None:
    assert published_name(trial_name("a", "2")) == published_name("a") == "a"
    assert trial_name("a", "2") != trial_name("a", "3")

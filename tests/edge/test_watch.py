"""A client watches its coordinator's drafters, also one that comes back, and stops when it is closed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.drafters import NgramDrafter
from outrider.drafters.pool import DrafterPool
from outrider.edge import EdgeConfig
from outrider.edge.pool import prepared
from outrider.edge.pool.preparation import Preparation, Ready
from outrider.edge.pool.prepared import Prepared
from outrider.proto.errors import Unavailable
from outrider.proto.types import DrafterManifest

OFFER = DrafterManifest("a", "2", "a" * 64, "t", ())
WHERE = {"verifier": "127.0.0.1:1", "model": "m"}


class Watched:
    """A preparation whose coordinator goes away and comes back, and whose renewals a test decides."""

    def __init__(self, *pools: DrafterPool | Exception | None) -> None:
        self.pools = list(pools)
        self.events: asyncio.Queue[Exception | None] = asyncio.Queue()
        self.offers_change = True
        self.seen: list[tuple[DrafterManifest, ...]] = []
        self.first = DrafterPool.of(NgramDrafter(name="a"))

    async def run(self) -> Ready:
        route = SimpleNamespace(expected=lambda: None)
        return Ready(route, "m", None, "a" * 64, self.first, "none yet")  # type: ignore[arg-type]

    async def offers(self, _: str) -> AsyncIterator[tuple[DrafterManifest, ...]]:
        while True:
            event = await self.events.get()
            if event is not None:
                raise event
            yield (OFFER,)

    def renewed(self, pool: DrafterPool | None, offers: tuple[DrafterManifest, ...], _: str) -> DrafterPool | None:
        self.seen.append(offers)
        result = self.pools.pop(0)
        if isinstance(result, Exception):
            raise result
        return result


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def prepared_by(watched: Watched) -> Prepared:
    return Prepared(EdgeConfig(**WHERE), watched)  # type: ignore[arg-type]


async def test_other_drafters_take_the_place_of_the_pool_and_the_old_one_is_closed() -> None:
    new = DrafterPool.of(NgramDrafter(name="b"))
    watched = Watched(None, OSError("disk full"), new)
    it = prepared_by(watched)
    ready = await it.find(None)  # type: ignore[arg-type]
    for events in (1, 2):
        watched.events.put_nowait(None)
        await until(lambda: len(watched.seen) == events)  # noqa: B023
        assert it.ready is ready, "nothing changed, or could not be had"
    assert watched.first.first is not None
    watched.events.put_nowait(None)
    await until(lambda: it.ready is not ready)
    assert it.ready is not None
    assert (it.ready.drafters, it.ready.drafter_error) == (new, "")
    assert watched.first.first is None
    assert new.first is not None
    await it.close()
    assert new.first is None


async def test_a_coordinator_that_comes_back_is_watched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "WATCH_AGAIN_S", 0.001)
    watched = Watched(DrafterPool.of(NgramDrafter(name="b")))
    it = prepared_by(watched)
    ready = await it.find(None)  # type: ignore[arg-type]
    watched.events.put_nowait(Unavailable("gone"))
    watched.events.put_nowait(None)
    await until(lambda: it.ready is not ready)
    await it.close()


async def test_what_loads_when_the_client_is_closed_is_closed_when_it_is_there() -> None:
    late, begun, go_on = DrafterPool.of(NgramDrafter(name="b")), threading.Event(), threading.Event()
    watched = Watched()

    def slow(*_: object) -> DrafterPool:
        begun.set()
        assert go_on.wait(30)
        return late

    watched.renewed = slow  # type: ignore[method-assign]
    it = prepared_by(watched)
    await it.find(None)  # type: ignore[arg-type]
    watched.events.put_nowait(None)
    await until(begun.is_set)
    await it.close()
    assert late.first is not None
    go_on.set()
    await until(lambda: late.first is None)
    assert it.ready is not None
    assert it.ready.drafters is watched.first


@pytest.mark.parametrize(
    ("config", "drafters", "watches"),
    [
        ({"coordinator": "127.0.0.1:1"}, (), True),
        ({"coordinator": "127.0.0.1:1", "drafter": "none"}, (), False),
        ({"coordinator": "127.0.0.1:1"}, (NgramDrafter(),), False),
        ({"verifier": "127.0.0.1:1", "model": "m"}, (), False),
    ],
)
def test_only_who_takes_drafters_of_a_coordinator_watches(config, drafters, watches: bool, tmp_path: Path) -> None:
    preparation = Preparation(EdgeConfig(**config, cache=tmp_path), None, None, drafters)
    assert preparation.offers_change is watches

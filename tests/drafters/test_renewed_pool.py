"""A pool that goes on with other versions of its drafters, while texts still hold the old ones."""

from __future__ import annotations

import gc
import logging

import pytest

from outrider.drafters.pool import DrafterPool, Member
from outrider.edge.testing import GarbageDrafter
from outrider.proto.errors import ModelRefused

SIZE = 100 * 10**6


class Shelf:
    """Members of any name and version, and what was loaded."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.broken: set[str] = set()

    def __call__(self, *versions: str) -> list[Member]:
        return [self._member(*version.split("@")) for version in versions]

    def _member(self, name: str, version: str) -> Member:
        def load() -> GarbageDrafter:
            self.loads.append(f"{name}@{version}")
            if f"{name}@{version}" in self.broken:
                raise ModelRefused("its adapter is not finite")
            drafter = GarbageDrafter(10, name=name)
            drafter.version = version
            return drafter

        return Member(name, version, SIZE, load)


@pytest.fixture
def shelf():
    return Shelf()


def pool_of(members, limit_bytes=10 * SIZE):
    pool = DrafterPool(members, limit_bytes=limit_bytes)
    for index in range(len(pool)):
        pool.load(index)
    return pool


def loaded(pool):
    return [drafter and drafter.version for drafter in map(pool.loaded, range(len(pool)))]


def test_only_what_has_another_version_is_loaded(shelf):
    old = pool_of(shelf("a@1", "b@1"))
    a, b = old.loaded(0), old.loaded(1)
    del shelf.loads[:]
    new = old.renewed(shelf("a@2", "b@1"), limit_bytes=10 * SIZE)
    assert shelf.loads == ["a@2"]
    assert (new.versions, loaded(new)) == (("2", "1"), ["2", "1"])
    assert new.loaded(1) is b
    assert old.loaded(0) is a, "texts that begin meanwhile have it"
    old.close()
    assert loaded(new) == ["2", "1"]
    new.close()


def test_what_was_not_loaded_is_not_loaded_now_and_newcomers_wait(shelf):
    old = DrafterPool(shelf("a@1", "b@1"), limit_bytes=10 * SIZE)
    old.load(0)
    new = old.renewed(shelf("c@1", "b@2", "a@1"), limit_bytes=10 * SIZE)
    assert shelf.loads == ["a@1"]
    assert loaded(new) == [None, None, "1"]
    assert new.load(1).version == "2"
    old.close()
    new.close()


def test_a_version_that_cannot_be_loaded_leaves_the_old_one_in_its_place(shelf, caplog):
    old = pool_of(shelf("a@1", "b@1"))
    shelf.broken.add("a@2")
    with caplog.at_level(logging.WARNING):
        new = old.renewed(shelf("a@2", "b@2"), limit_bytes=10 * SIZE)
    assert (new.versions, loaded(new)) == (("1", "2"), ["1", "2"])
    assert "keeping version 1 of the drafter a: its adapter is not finite" in caplog.text
    old.close()
    assert new.load(0).version == "1"
    new.close()


def test_old_versions_count_for_as_long_as_texts_hold_them(shelf):
    old = pool_of(shelf("a@1", "b@1"), limit_bytes=3 * SIZE)
    held = old.loaded(0)
    new = old.renewed(shelf("a@2", "b@1", "c@1"), limit_bytes=3 * SIZE)
    old.close()
    assert new._in_memory() == 3 * SIZE
    new.want((2, 1, 0))
    new._thread.submit(lambda: None).result(30)
    assert loaded(new) == ["2", "1", None], "there is no room while a text holds the old version"
    del held
    gc.collect()
    assert new._in_memory() == 2 * SIZE
    new._look_again_at = 0.0
    new.want((2, 1, 0))
    new._thread.submit(lambda: None).result(30)
    assert loaded(new) == ["2", "1", "1"]
    new.close()

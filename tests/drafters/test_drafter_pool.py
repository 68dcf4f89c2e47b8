"""Several drafters in one process: which are loaded, when, within how much memory, and what happens to bad ones."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from outrider.drafters import DrafterCache, NgramDrafter, embedded_packages, find_package
from outrider.drafters import pool as pool_module
from outrider.drafters.onnx import OnnxDrafter
from outrider.drafters.packages import DrafterPackage, SteeringShape
from outrider.drafters.pool import LOOK_AGAIN_S, MIN_LOADED_S, DrafterPool, Member, give_back, own_bytes
from outrider.drafters.search import DrafterSearch, on_trial_here
from outrider.edge import Client, EdgeConfig
from outrider.edge.doctor import Outcome, speed
from outrider.edge.doctor.agreement import Visit
from outrider.edge.pool.preparation import Preparation, Ready
from outrider.edge.testing import GarbageDrafter, ScriptedDrafter
from outrider.edge.testing.tiny_drafter import (
    GREEDY,
    STEERING_MANIFEST,
    TOKENIZER,
    steering_graph,
    tiny_graph,
    write_package,
)
from outrider.proto.errors import (
    ConfigError,
    DataLoss,
    ModelRefused,
    NotFound,
    OutriderError,
    TokenizerMismatch,
    Unavailable,
)
from outrider.proto.plumbing.files import sha256_of
from outrider.proto.testing import word_tokenizer
from outrider.proto.tokenizer import tokenizer_hash
from outrider.proto.types import DrafterManifest, Lease, RemoteFile

MB = 10**6
SIZE = 100 * MB  # of each drafter: far more than this process takes meanwhile
WHERE = {"verifier": "127.0.0.1:1", "model": "m"}
WORD_TOKENIZER = word_tokenizer(1)
FAMILY = [name for name in embedded_packages() if find_package(name).target == "reference"]


class Clock:
    """Stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Shelf:
    """Drafters that can be loaded, and the loads that were made."""

    def __init__(self, *names: str, size: int = SIZE) -> None:
        self.loads: list[str] = []
        self.errors: dict[str, Exception] = {}
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.begun = threading.Event()
        self.members = [Member(name, "1", size, self._loader(name)) for name in names]

    def _loader(self, name: str):
        def load() -> GarbageDrafter:
            self.loads.append(name)
            self.begun.set()
            assert self.may_go_on.wait(60)
            if name in self.errors:
                raise self.errors[name]
            return GarbageDrafter(10, name=name)

        return load


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def pools():
    """Makes pools, and closes them."""
    made = []

    def make(*arguments, **options) -> DrafterPool:
        made.append(DrafterPool(*arguments, **options))
        return made[-1]

    yield make
    for pool in made:
        pool.close()


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


def loaded(pool: DrafterPool) -> list[int]:
    return [index for index in range(len(pool)) if pool.loaded(index) is not None]


def at_rest(pool: DrafterPool) -> bool:
    return not pool._at_work


def test_wanted_drafters_are_loaded_in_the_background_the_most_wanted_first(pools):
    shelf = Shelf("a", "b", "c")
    shelf.may_go_on.clear()
    pool = pools(shelf.members, limit_bytes=10 * SIZE)
    pool.want((2, 0))
    assert shelf.begun.wait(60)
    assert (loaded(pool), pool.first) == ([], None), "and nobody waits for it"
    pool.want((2, 0))
    shelf.may_go_on.set()
    until(lambda: loaded(pool) == [0, 2])
    assert shelf.loads == ["c", "a"]
    assert (pool.first, pool.loaded(2).name) == (pool.loaded(0), "c")
    assert (pool.names, pool.versions, len(pool)) == (("a", "b", "c"), ("1", "1", "1"), 3)
    assert pool.bytes[1] == SIZE
    until(lambda: at_rest(pool))
    pool.want((0, 2))
    assert shelf.loads == ["c", "a"], "once is enough"


def test_a_drafter_can_be_loaded_at_once_and_is_then_not_loaded_again(pools):
    shelf = Shelf("a", "b")
    pool = pools(shelf.members, limit_bytes=10 * SIZE)
    assert pool.load(1).name == "b"
    assert pool.load(1) is pool.loaded(1) is pool.first
    pool.want((0, 1))
    until(lambda: loaded(pool) == [0, 1])
    assert shelf.loads == ["b", "a"]


def test_two_threads_that_load_the_same_share_one(pools):
    shelf = Shelf("a")
    shelf.may_go_on.clear()
    pool = pools(shelf.members, limit_bytes=SIZE)
    pool.want((0,))
    assert shelf.begun.wait(60)
    got = []
    thread = threading.Thread(target=lambda: got.append(pool.load(0)))
    thread.start()
    shelf.may_go_on.set()
    thread.join(60)
    assert got == [pool.loaded(0)]
    assert shelf.loads == ["a"]


def test_the_limit_of_memory_holds_and_the_most_wanted_drafters_are_loaded(pools, clock):
    shelf = Shelf("a", "b", "c", "d")
    pool = pools(shelf.members, limit_bytes=2.5 * SIZE, clock=clock)
    pool.want((3, 1, 0, 2))
    until(lambda: loaded(pool) == [1, 3] and at_rest(pool))
    for _ in range(3):
        clock.now += MIN_LOADED_S
        pool.want((3, 1, 0, 2))
        until(lambda: at_rest(pool))
    assert (loaded(pool), shelf.loads) == ([1, 3], ["d", "b"]), "asking again changes nothing"


def test_the_least_recently_wanted_drafter_makes_room(pools, clock):
    shelf = Shelf("a", "b", "c")
    pool = pools(shelf.members, limit_bytes=2.5 * SIZE, clock=clock)
    for index in (0, 1, 0):
        clock.now += 1
        pool.want((index,))
        until(lambda: at_rest(pool))
    clock.now += MIN_LOADED_S
    pool.want((2,))
    until(lambda: loaded(pool) == [0, 2])
    clock.now += MIN_LOADED_S
    pool.want((1, 2))
    until(lambda: loaded(pool) == [1, 2])
    assert shelf.loads == ["a", "b", "c", "b"]


def test_a_drafter_wanted_a_moment_ago_stays_so_that_two_sessions_do_not_thrash(pools, clock):
    shelf = Shelf("a", "b")
    pool = pools(shelf.members, limit_bytes=1.5 * SIZE, clock=clock)
    pool.want((0,))
    until(lambda: loaded(pool) == [0] and at_rest(pool))
    for _ in range(20):
        clock.now += MIN_LOADED_S / 25
        pool.want((1,))
        until(lambda: at_rest(pool))
        pool.want((0,))
    assert shelf.loads == ["a"]
    clock.now += MIN_LOADED_S
    pool.want((1,))
    until(lambda: loaded(pool) == [1])


def test_nothing_is_evicted_where_that_would_not_be_enough(pools, clock):
    shelf = Shelf("a", "b")
    large = Member("large", "1", 2 * SIZE, lambda: GarbageDrafter(10))
    pool = pools([*shelf.members, large], limit_bytes=2.5 * SIZE, clock=clock)
    pool.want((0,))
    until(lambda: loaded(pool) == [0] and at_rest(pool))
    clock.now += MIN_LOADED_S
    pool.want((1,))
    until(lambda: loaded(pool) == [0, 1] and at_rest(pool))
    pool.want((2,))
    until(lambda: at_rest(pool))
    assert loaded(pool) == [0, 1], "the first could go, the second not yet"
    clock.now += MIN_LOADED_S
    pool.want((2,))
    until(lambda: loaded(pool) == [2])


def test_where_there_is_no_room_it_looks_again_only_after_a_while(pools, clock, monkeypatch):
    shelf = Shelf("a", "b")
    pool = pools(shelf.members, limit_bytes=1.5 * SIZE, clock=clock)
    pool.want((0,))
    until(lambda: loaded(pool) == [0] and at_rest(pool))
    looks = []
    monkeypatch.setattr(pool, "_work", lambda: looks.append(pool._next()))
    for _ in range(50):
        pool.want((1,))
        until(lambda: at_rest(pool))
    assert looks == [None]
    clock.now += LOOK_AGAIN_S
    pool.want((1,))
    until(lambda: len(looks) == 2)


def test_what_a_session_still_holds_counts_until_it_lets_go(pools, clock):
    shelf = Shelf("a", "b")
    pool = pools(shelf.members, limit_bytes=1.5 * SIZE, clock=clock)
    held = pool.load(0)
    clock.now += MIN_LOADED_S
    pool.want((1,))
    until(lambda: at_rest(pool))
    assert (loaded(pool), shelf.loads) == ([], ["a"]), "given up, and in memory"
    del held
    gc.collect()
    clock.now += LOOK_AGAIN_S
    pool.want((1,))
    until(lambda: loaded(pool) == [1])


def test_an_evicted_drafter_that_is_still_held_is_taken_back_without_loading(pools, clock):
    shelf = Shelf("a", "b")
    pool = pools(shelf.members, limit_bytes=1.5 * SIZE, clock=clock)
    held = pool.load(0)
    clock.now += MIN_LOADED_S
    pool.want((1,))
    until(lambda: at_rest(pool) and pool.loaded(0) is None)
    pool.want((0,))
    until(lambda: pool.loaded(0) is held)
    assert shelf.loads == ["a"]


def test_an_onnx_state_holds_its_drafter(tmp_path):
    drafter = OnnxDrafter(write_package(tmp_path, tiny_graph()))
    state = drafter.open(GREEDY)
    pool = DrafterPool([Member("tiny", "1", SIZE, lambda: None)], limit_bytes=SIZE)
    pool._loaded[0] = drafter
    del drafter
    pool._evict(0)
    gc.collect()
    assert pool._in_memory() == SIZE
    state.close()
    del state
    gc.collect()
    assert pool._in_memory() == 0
    pool.close()


def measured(monkeypatch, *sizes) -> None:
    """Make each load appear to take one of `sizes`."""
    readings = iter([reading for size in sizes for reading in (0, size)])
    monkeypatch.setattr(pool_module, "own_bytes", lambda: next(readings))


def test_measured_memory_counts_where_it_is_more_than_the_files(pools, monkeypatch):
    measured(monkeypatch, 3 * SIZE, SIZE // 2)
    pool = pools(Shelf("a", "b", "c").members, limit_bytes=10 * SIZE)
    pool.load(0)
    pool.load(1)
    assert pool.bytes == (3 * SIZE, SIZE, SIZE)


def test_where_the_system_does_not_say_the_files_count(pools, monkeypatch):
    monkeypatch.setattr(pool_module, "own_bytes", lambda: None)
    pool = pools(Shelf("a").members, limit_bytes=SIZE)
    pool.load(0)
    assert pool.bytes == (SIZE,)


def test_a_drafter_larger_than_its_files_evicts_what_is_less_wanted(pools, monkeypatch, clock):
    measured(monkeypatch, SIZE, SIZE, 2 * SIZE)
    pool = pools(Shelf("a", "b", "c").members, limit_bytes=3.5 * SIZE, clock=clock)
    pool.want((1,))
    until(lambda: loaded(pool) == [1] and at_rest(pool))
    pool.want((2, 0, 1))
    until(lambda: at_rest(pool))
    assert (loaded(pool), pool.bytes) == ([0, 2], (2 * SIZE, SIZE, SIZE))


def test_a_drafter_that_alone_exceeds_the_limit_is_left_out_and_the_remedy_named(pools, monkeypatch, caplog):
    measured(monkeypatch, 2 * SIZE, SIZE)
    large = Member("large", "1", 5 * SIZE, lambda: None)
    pool = pools([*Shelf("a", "b").members, large], limit_bytes=1.5 * SIZE)
    assert pool.errors == ("", "", "large takes 500.0 MB; raise --drafter-memory, which is 150")
    with pytest.raises(ModelRefused, match="large takes"):
        pool.load(2)
    with caplog.at_level(logging.WARNING):
        pool.want((2, 0, 1))
        until(lambda: loaded(pool) == [1])
    assert pool.errors[0] == "a takes 200.0 MB; raise --drafter-memory, which is 150"
    assert "a takes 200.0 MB" in caplog.text


def test_one_that_cannot_be_loaded_is_left_out_with_a_warning_and_not_tried_again(pools, caplog):
    shelf = Shelf("a", "b", "c")
    shelf.errors = {"a": DataLoss("model.onnx is missing"), "b": RuntimeError("a secret of the user's")}
    pool = pools(shelf.members, limit_bytes=10 * SIZE)
    with caplog.at_level(logging.WARNING):
        pool.want((0, 1, 2))
        until(lambda: loaded(pool) == [2])
    assert pool.errors == ("model.onnx is missing", "RuntimeError", "")
    assert "going on without the drafter a: model.onnx is missing" in caplog.text
    assert "secret" not in caplog.text
    until(lambda: at_rest(pool))
    pool.want((0, 1))
    assert shelf.loads == ["a", "b", "c"]


def test_what_takes_no_memory_is_never_evicted(pools, clock):
    shelf = Shelf("a", "b")
    members = [Member("ngram", "1", 0, NgramDrafter), *shelf.members]
    pool = pools(members, limit_bytes=SIZE, clock=clock)
    pool.want((0, 1))
    until(lambda: loaded(pool) == [0, 1] and at_rest(pool))
    clock.now += MIN_LOADED_S
    pool.want((2,))
    until(lambda: loaded(pool) == [0, 2])


def test_closing_while_one_is_loading_returns_at_once_and_the_load_has_no_effect(pools):
    shelf = Shelf("a", "b")
    shelf.may_go_on.clear()
    pool = pools(shelf.members, limit_bytes=10 * SIZE)
    pool.want((0, 1))
    assert shelf.begun.wait(60)
    pool.close()
    shelf.may_go_on.set()
    until(lambda: at_rest(pool))
    pool.want((1,))
    assert (loaded(pool), pool.first, shelf.loads) == ([], None, ["a"])
    with pytest.raises(Unavailable, match="closed"):
        pool.load(1)
    pool.close()


def test_a_pool_needs_names_that_differ():
    with pytest.raises(ConfigError, match="drafter: names 'a' twice"):
        DrafterPool(Shelf("a", "b", "a").members, limit_bytes=SIZE)
    with pytest.raises(ConfigError, match="use `none` for no drafter"):
        DrafterPool((), limit_bytes=SIZE)


def test_drafters_that_are_given_are_loaded_from_the_beginning():
    pool = DrafterPool.of(ScriptedDrafter((1, 2), name="one"), GarbageDrafter(5, name="two"))
    assert (loaded(pool), pool.names, pool.errors) == ([0, 1], ("one", "two"), ("", ""))
    assert (pool.steered, pool.steering) == (None, None)
    pool.want((1, 0))
    pool.close()


def test_vectors_are_requested_for_the_steered_drafter_with_the_smallest_index():
    def steered(name, rank):
        return Member(name, "1", 0, NgramDrafter, SteeringShape(rank, 8, "0123456789ab"))

    members = [Member("plain", "1", 0, NgramDrafter), steered("a", 4), steered("b", 16)]
    pool = DrafterPool(members, limit_bytes=0)
    assert (pool.steered, pool.steering) == (1, SteeringShape(4, 8, "0123456789ab"))
    pool.close()


def test_this_process_knows_its_memory_and_gives_it_back():
    before = own_bytes()
    if before is None:
        pytest.skip("needs /proc, which Linux has")
    block = np.ones(80 * MB, dtype=np.uint8)
    during = own_bytes()
    del block
    give_back()
    assert during - before > 60 * MB
    assert own_bytes() < during - 60 * MB


# --- from the option to the pool ---


def package(folder, name, tokenizer=WORD_TOKENIZER, steered=False, **changes) -> DrafterPackage:
    (folder / name).mkdir()
    graphs = (tiny_graph(steered=True), steering_graph()) if steered else (tiny_graph(),)
    return write_package(folder / name, *graphs, tokenizer=tokenizer, name=name, **changes)


def prepared(drafter: str, **config) -> Ready:
    edge = EdgeConfig(**WHERE, drafter=drafter, **config)

    async def run() -> Ready:
        return await (await Preparation(edge, None, None, ()).run()).with_drafters()

    return asyncio.run(run())


def test_a_list_of_drafters_is_a_pool_whose_first_is_loaded_and_whose_others_follow(tmp_path):
    for name in ("code", "docs"):
        package(tmp_path, name)
    ready = prepared(f"{tmp_path}/code, {tmp_path}/docs,ngram")
    assert ready.drafters.names == ("code", "docs", "ngram")
    assert ready.drafter is ready.drafters.loaded(0)
    assert ready.tokenizer_sha256 == tokenizer_hash(WORD_TOKENIZER)
    until(lambda: loaded(ready.drafters) == [0, 1, 2])
    assert ready.drafters.bytes[1] >= (tmp_path / "docs" / "model.onnx").stat().st_size
    assert ready.drafters.bytes[2] == 0
    ready.drafters.close()


def test_one_name_alone_is_one_drafter(tmp_path):
    package(tmp_path, "code")
    for drafter in (f"{tmp_path}/code", "ngram"):
        ready = prepared(drafter, tokenizer=tmp_path / "code" / "tokenizer.json")
        assert len(ready.drafters) == 1
        assert ready.drafter is ready.drafters.loaded(0)
    assert prepared("none", tokenizer=tmp_path / "code" / "tokenizer.json").drafters is None


def test_the_pool_knows_which_drafter_is_steered_before_it_is_loaded(tmp_path):
    package(tmp_path, "plain")
    package(tmp_path, "steered", steered=True)
    ready = prepared(f"{tmp_path}/plain,{tmp_path}/steered")
    assert ready.drafters.steered == 1
    assert ready.drafters.steering.projection == STEERING_MANIFEST["projection"]
    until(lambda: loaded(ready.drafters) == [0, 1])
    assert ready.drafters.loaded(1).steering == ready.drafters.steering
    ready.drafters.close()


@pytest.mark.parametrize("order", ["broken,whole,ngram", "whole,broken,ngram"])
def test_a_broken_member_is_left_out_with_a_warning(tmp_path, caplog, order):
    for name in ("whole", "broken"):
        package(tmp_path, name)
    (tmp_path / "broken" / "model.onnx").write_bytes(b"no graph")
    names = ",".join(name if name == "ngram" else f"{tmp_path}/{name}" for name in order.split(","))
    with caplog.at_level(logging.WARNING):
        ready = prepared(names)
        until(lambda: "going on without the drafter broken: model.onnx has 8 bytes" in caplog.text)
    assert ready.drafter.name == "whole"
    assert ready.drafter is ready.drafters.loaded(0)
    assert not ready.drafter_error
    until(lambda: len(loaded(ready.drafters)) == 2)
    ready.drafters.close()


def test_only_where_no_drafter_is_left_a_text_goes_on_without_and_says_why(tmp_path):
    for name in ("one", "two"):
        package(tmp_path, name)
        (tmp_path / name / "model.onnx").unlink()
    ready = prepared(f"{tmp_path}/one,{tmp_path}/two", tokenizer=tmp_path / "one" / "tokenizer.json")
    assert (ready.drafters, ready.drafter) == (None, None)
    assert "model.onnx is missing" in ready.drafter_error


def test_what_does_not_fit_into_memory_is_left_out(tmp_path):
    package(tmp_path, "code")
    ready = prepared(f"{tmp_path}/code,ngram", drafter_memory_mb=0.001)
    assert ready.drafters.names == ("ngram",)
    ready = prepared(f"{tmp_path}/code", drafter_memory_mb=0.001)
    assert ready.drafter.name == "code", "the limit is for several"


def test_unknown_names_wrong_tokenizers_and_twins_are_mistakes(tmp_path):
    for name in ("code", "twin"):
        package(tmp_path, name)
    package(tmp_path, "foreign", tokenizer=TOKENIZER)
    (tmp_path / "other").mkdir()
    package(tmp_path / "other", "code")
    with pytest.raises(NotFound, match="nobody"):
        prepared(f"{tmp_path}/code,nobody")
    for first, second in (("code", "foreign"), ("foreign", "code")):
        with pytest.raises(TokenizerMismatch, match="made for another tokenizer"):
            prepared(f"{tmp_path}/{first},{tmp_path}/{second}")
    with pytest.raises(ConfigError, match="names 'code' twice"):
        prepared(f"{tmp_path}/code,{tmp_path}/other/code")


def test_a_tokenizer_or_template_that_is_no_text_is_refused_with_its_field(tmp_path):
    package(tmp_path, "code")
    bad = tmp_path / "bad"
    bad.write_bytes(b"\xff\xfe")
    for field in ("tokenizer", "chat_template"):
        with pytest.raises(NotFound, match="cannot read") as refused:
            prepared(f"{tmp_path}/code", **{field: bad})
        assert refused.value.field == field


def test_an_offered_drafter_for_another_tokenizer_is_passed_over(tmp_path, caplog):
    (tmp_path / "tokenizer.json").write_text(WORD_TOKENIZER)
    files = (RemoteFile("manifest.json", "0" * 64, 1),)
    foreign = DrafterManifest(name="far", version="0" * 12, tokenizer_sha256="1" * 64, target="m", files=files)
    lease = Lease(
        token=b"",
        verifier="v",
        address="v:1",
        expires_in_s=60.0,
        model="m",
        tokenizer_sha256=tokenizer_hash(WORD_TOKENIZER),
        drafters=(foreign,),
    )

    async def open_lease(request) -> Lease:
        return lease

    edge = EdgeConfig(coordinator="127.0.0.1:1", tokenizer=tmp_path / "tokenizer.json", cache=tmp_path)
    coordinator = SimpleNamespace(open_lease=open_lease, security=edge.security)
    ready = asyncio.run(Preparation(edge, coordinator, None, ()).run())
    assert ready.drafter.name == "ngram"
    assert "passing over the drafter far: it is for another tokenizer" in caplog.text


def test_all_drafters_are_the_embedded_family_and_ngrams_where_the_tokenizer_fits(tmp_path):
    tokenizer = find_package("general").tokenizer_path
    ready = prepared("all", tokenizer=tokenizer)
    assert ready.drafters.names == (*FAMILY, "ngram")
    ready.drafters.close()
    (tmp_path / "tokenizer.json").write_text(WORD_TOKENIZER)
    ready = prepared("all", tokenizer=tmp_path / "tokenizer.json")
    assert ready.drafters.names == ("ngram",)


def test_by_default_all_that_fit_are_one_pool_and_none_but_the_first_is_steered(tmp_path):
    tokenizer = find_package("general").tokenizer_path
    ready = prepared("auto", tokenizer=tokenizer)
    plain = [name for name in FAMILY if find_package(name).steering is None]
    assert len(plain) < len(FAMILY)
    assert ready.drafters.names == (*plain, "ngram")
    assert ready.drafter.name == "general"
    until(lambda: loaded(ready.drafters) == list(range(len(plain) + 1)))
    ready.drafters.close()
    memory_mb = 2 * find_package("general").graph_bytes / 1e6
    few = prepared("auto", tokenizer=tokenizer, drafter_memory_mb=memory_mb)
    assert few.drafters.names == ("general",), "it alone would fill the memory for several"
    few.drafters.close()
    ready = prepared("auto", tokenizer=find_package("smol").tokenizer_path)
    assert ready.drafters.names == ("smol", "ngram"), "another target has its own"
    ready.drafters.close()
    (tmp_path / "tokenizer.json").write_text(WORD_TOKENIZER)
    ready = prepared("auto", tokenizer=tmp_path / "tokenizer.json")
    assert ready.drafters.names == ("ngram",)


def test_a_folder_without_a_manifest_does_not_hide_the_embedded_drafter_of_its_name(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    for drafter in ("all", "docs,ngram", "docs"):
        ready = prepared(drafter, tokenizer=find_package("general").tokenizer_path)
        assert "docs" in ready.drafters.names
        ready.drafters.close()


@pytest.mark.parametrize("broken", [False, True])
def test_a_doctor_looks_at_every_drafter_of_a_list(tmp_path, broken):
    for name in ("code", "docs"):
        package(tmp_path, name)
    if broken:
        (tmp_path / "docs" / "model.onnx").write_bytes(b"no graph")

    async def look():
        visit = Visit.begin(EdgeConfig(**WHERE, drafter=f"{tmp_path}/code,{tmp_path}/docs,ngram"))
        try:
            return await speed.load_drafter(visit)
        finally:
            await visit.close()

    found = asyncio.run(look())
    if broken:
        assert found.outcome is Outcome.WARNING
        assert "the others draft without docs: model.onnx has 8 bytes" in found.message
        assert "leave them out of --drafter" in found.remedy
    else:
        assert found.outcome is Outcome.OK
        assert found.message.startswith("code, docs, ngram: every file as promised")


# --- what a coordinator offers ---


@pytest.fixture
def offered(tmp_path):
    """Two drafters on a server: its offers, what was fetched from it, and a way to fetch."""
    server = tmp_path / "server"
    server.mkdir()
    packages = [package(server, name) for name in ("far", "further")]
    fetched: list[str] = []
    offers, folders = [], {}
    for one in packages:
        path = one.folder / "manifest.json"
        manifest = RemoteFile("manifest.json", sha256_of(path), path.stat().st_size)
        files = (manifest, *one.files)
        offers.append(
            DrafterManifest(
                name=one.name,
                version=one.version,
                tokenizer_sha256=one.tokenizer_sha256,
                target=one.target,
                files=files,
            )
        )
        folders |= {file.sha256: one.folder for file in files}

    def fetch(file, skip):
        fetched.append(file.name)
        yield (folders[file.sha256] / file.name).read_bytes()[skip:]

    search = DrafterSearch(tuple(offers), DrafterCache(tmp_path / "cache"), fetch, 1)
    return SimpleNamespace(search=search, fetched=fetched, offers=offers, fetch=fetch, cache=tmp_path / "cache")


def test_only_the_manifest_of_an_offered_drafter_is_fetched_until_it_is_loaded(offered):
    found = offered.search.named(("further", "far"), "")
    assert [one.name for one in found] == ["further", "far"]
    assert offered.fetched == ["manifest.json"] * 2
    assert found[0].load().name == "further"
    assert sorted(offered.fetched[2:]) == ["model.onnx", "tokenizer.json"]


def test_all_starts_with_the_coordinators_offer_and_omits_what_does_not_fit(offered):
    found = offered.search.all(tokenizer_hash(WORD_TOKENIZER))
    assert [one.name for one in found] == ["far", "further", "ngram"]
    assert [one.name for one in offered.search.all("0" * 64)] == ["ngram"]


def test_a_folder_here_does_not_hide_a_drafter_of_its_name(offered, tmp_path, monkeypatch):
    for name in ("far", "general"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    assert [one.name for one in offered.search.all(tokenizer_hash(WORD_TOKENIZER))] == [
        "far",
        "further",
        "ngram",
    ]
    assert [one.name for one in offered.search.named(("far",), "")] == ["far"]


def test_an_offer_that_is_not_what_its_manifest_says_is_left_out(offered, caplog):
    lies = (replace(offered.offers[0], target="another"), offered.offers[1])
    search = DrafterSearch(lies, DrafterCache(offered.cache), offered.fetch, 1)
    with caplog.at_level(logging.WARNING):
        assert [one.name for one in search.named(("far", "further"), "")] == ["further"]
        assert [one.name for one in search.all(tokenizer_hash(WORD_TOKENIZER))] == ["further", "ngram"]
    assert "going on without the drafter far" in caplog.text
    with pytest.raises(DataLoss):
        search.named(("far",), "")


OLD, NEW, STEERED, NEXT, FOREIGN = (digit * 12 for digit in "12345")


@pytest.fixture
def on_trial(tmp_path):
    """A current version of one drafter and others at a share of the edges; returns the search of one edge."""
    server = tmp_path / "server"
    versions = {}
    foreign = STEERING_MANIFEST | {"projection": "f" * 12}
    changes = {NEXT: {"sequence": 1}, FOREIGN: {"sequence": 1, "steering": foreign}}
    for version, steered in ((OLD, False), (NEW, False), (STEERED, True), (NEXT, True), (FOREIGN, True)):
        (server / version).mkdir(parents=True)
        changed = changes.get(version, {})
        versions[version] = package(server / version, "far", steered=steered, version=version, **changed)
    folders = {file.sha256: one.folder for one in versions.values() for file in one.files}

    def offer(version: str, share: float) -> DrafterManifest:
        one = versions[version]
        path = one.folder / "manifest.json"
        manifest = RemoteFile("manifest.json", sha256_of(path), path.stat().st_size)
        folders[manifest.sha256] = one.folder
        return DrafterManifest(one.name, version, one.tokenizer_sha256, one.target, (manifest, *one.files), share)

    def fetch(file, skip):
        yield (folders[file.sha256] / file.name).read_bytes()[skip:]

    def search(*offers: tuple[str, float], edge: str = "pi") -> DrafterSearch:
        made = tuple(offer(version, share) for version, share in offers)
        return DrafterSearch(made, DrafterCache(tmp_path / "cache"), fetch, 1, edge)

    return search


@pytest.mark.parametrize("find", [lambda s: s.named(("far",), ""), lambda s: s.all(tokenizer_hash(WORD_TOKENIZER))[:2]])
def test_a_version_on_trial_is_a_drafter_beside_the_current_with_its_own_name(on_trial, find):
    found = find(on_trial((OLD, 0.0), (NEW, 1.0)))
    assert [(one.name, one.version) for one in found] == [("far", OLD), (f"far@{NEW}", NEW)]
    assert [one.load().name for one in found] == ["far", f"far@{NEW}"]
    pool = DrafterPool(found, limit_bytes=1e9)
    assert pool.versions == (OLD, NEW)
    pool.close()


def test_a_share_of_the_edges_tries_a_version_and_another_share_the_next():
    edges = [f"edge-{number}" for number in range(2000)]

    def trying(version: str, share: float) -> set[str]:
        offer = DrafterManifest("far", version, "0" * 64, "t", (), share)
        return {edge for edge in edges if on_trial_here(offer, edge)}

    assert len(trying("2", 0.1)) == pytest.approx(200, abs=60)
    assert trying("2", 0.1) < trying("2", 0.25) < trying(NEW, 1.0) == set(edges), "a share that grows keeps its edges"
    assert len(trying("2", 0.1) & trying("3", 0.1)) < 60
    assert trying("2", 0.1) == trying("2", 0.1)


def test_an_edge_outside_the_share_and_one_without_a_name_try_nothing(on_trial):
    assert [one.name for one in on_trial((OLD, 0.0), (NEW, 1e-9)).named(("far",), "")] == ["far"]
    assert [one.name for one in on_trial((OLD, 0.0), (NEW, 1.0), edge="").named(("far",), "")] == ["far"]


def test_a_version_that_is_steered_is_not_tried_beside_one_that_is_not(on_trial):
    assert [one.name for one in on_trial((OLD, 0.0), (STEERED, 1.0)).named(("far",), "")] == ["far"]
    assert [one.name for one in on_trial((STEERED, 0.0), (NEW, 1.0)).named(("far",), "")] == ["far"]


def test_a_steered_drafter_and_the_one_before_are_unsteered_while_compared(on_trial):
    compared = on_trial((NEXT, 0.0), (STEERED, 1.0)).named(("far",), "")
    assert [one.version for one in compared] == [NEXT, STEERED]
    alone = on_trial((NEXT, 0.0)).named(("far",), "")
    for found, steered in ((compared, None), (alone, 0)):
        pool = DrafterPool(found, limit_bytes=1e9)
        assert (pool.steered, pool.steering) == (steered, None if steered is None else found[0].steering)
        pool.close()
    assert [one.version for one in on_trial((STEERED, 0.0), (FOREIGN, 1.0)).named(("far",), "")] == [STEERED]


def test_a_version_on_trial_that_cannot_be_fetched_leaves_the_current_one(on_trial, tmp_path, caplog):
    search = on_trial((OLD, 0.0), (NEW, 1.0))
    (tmp_path / "server" / NEW / "far" / "manifest.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert [one.name for one in search.named(("far",), "")] == ["far"]
    assert f"not trying version {NEW} of the drafter far" in caplog.text


# --- the edge's config, and its client ---


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"drafter": "a,,b"}, "drafter: has an empty name"),
        ({"drafter": "a,auto"}, "drafter: 'auto' stands alone"),
        ({"drafter": "all,ngram"}, "drafter: 'all' stands alone"),
        ({"drafter": "none,a"}, "drafter: 'none' stands alone"),
        ({"drafter": "a,b, a"}, "drafter: names 'a' twice"),
        ({"selector": "best"}, "selector: 'best' is none of leader"),
        ({"drafter_memory_mb": 0}, "drafter_memory_mb: 0 is not above 0"),
    ],
)
def test_a_list_of_drafters_that_makes_no_sense_is_refused(wrong, why):
    with pytest.raises(ConfigError, match=why):
        EdgeConfig(**WHERE, **wrong)


def test_the_option_names_one_drafter_or_several():
    assert EdgeConfig(**WHERE).drafters == ("auto",)
    assert EdgeConfig(**WHERE, drafter="a, b/c,ngram").drafters == ("a", "b/c", "ngram")


def test_a_client_takes_several_drafters_and_closes_their_pool(tmp_path):
    (tmp_path / "tokenizer.json").write_text(WORD_TOKENIZER)
    drafters = (GarbageDrafter(5, name="one"), GarbageDrafter(5, name="two"))

    async def names() -> tuple[str, str]:
        client = Client(EdgeConfig(**WHERE, tokenizer=tmp_path / "tokenizer.json"), drafters=drafters)
        async with client:
            open_names, pool = client.drafter_name, client.ready.drafters
            assert client.drafter is drafters[0]
        assert loaded(pool) == []
        return open_names

    assert asyncio.run(names()) == "one,two"


def test_errors_of_a_pool_are_errors_of_outrider():
    assert all(issubclass(kind, OutriderError | OSError) for kind in pool_module.BROKEN)

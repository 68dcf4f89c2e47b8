"""Drafters of one process: which are loaded, when, within how much memory, and what happens to bad ones."""

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
from scripted_drafters import GarbageDrafter, ScriptedDrafter
from tiny_drafter import GREEDY, STEERING_MANIFEST, TOKENIZER, steering_graph, tiny_graph, write_package

from outrider.drafters import DrafterCache, DrafterShelf, NgramDrafter, embedded_packages, find_package
from outrider.drafters import shelf as shelf_module
from outrider.drafters.onnx import OnnxDrafter
from outrider.drafters.packages import DrafterPackage
from outrider.drafters.search import DrafterSearch, on_trial_here
from outrider.drafters.shelf import Member, give_back, own_bytes
from outrider.edge import Client, EdgeConfig, examination
from outrider.edge.examination import Outcome
from outrider.edge.preparation import Preparation, Ready
from outrider.proto.drafter_format import SteeringShape
from outrider.proto.errors import ConfigError, DataLoss, ModelRefused, NotFound, TokenizerMismatch, Unavailable
from outrider.proto.plumbing.files import sha256_of
from outrider.proto.testing import word_tokenizer
from outrider.proto.tokenizer import tokenizer_hash
from outrider.proto.types import DrafterManifest, Lease, RemoteFile

MB = 10**6
SIZE = 100 * MB  # of each drafter: far more than this process takes meanwhile
CHANNELS = SimpleNamespace(connect=lambda *_: None)
WHERE = {"verifier": "127.0.0.1:1", "model": "m"}
WORD_TOKENIZER = word_tokenizer(1)
FAMILY = [name for name in embedded_packages() if find_package(name).target == "reference"]


class Loader:
    """Members of any name and version, and the loads that were made."""

    def __init__(self) -> None:
        self.loads: list[str] = []
        self.errors: dict[str, Exception] = {}
        self.may_go_on = threading.Event()
        self.may_go_on.set()
        self.begun = threading.Event()

    def __call__(self, *versions: str, size: int = SIZE) -> list[Member]:
        return [self._member(version, size) for version in versions]

    def _member(self, version: str, size: int) -> Member:
        name, number = version.split("@")

        def load() -> GarbageDrafter:
            self.loads.append(version)
            self.begun.set()
            assert self.may_go_on.wait(60)
            if version in self.errors:
                raise self.errors[version]
            drafter = GarbageDrafter(10, name=name)
            drafter.version = number
            return drafter

        return Member(name, number, size, load)


@pytest.fixture
def loader():
    return Loader()


@pytest.fixture
def shelf():
    it = DrafterShelf()
    yield it
    it.close()


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


def loaded(shelf: DrafterShelf) -> list[str]:
    """Load what fits, and return the versions that a text would begin with."""
    drafters, _ = shelf.drafters()
    shelf._thread.submit(lambda: None).result(60)
    drafters, _ = shelf.drafters()
    return [f"{drafter.name}@{drafter.version}" for drafter in drafters]


def test_drafters_are_loaded_once_in_the_background_the_most_wanted_first(shelf, loader):
    loader.may_go_on.clear()
    shelf.offer([*loader("c@1", "a@1"), Member("ngram", "1", 0, NgramDrafter)])
    assert loader.begun.wait(60)
    (coming,), _ = shelf.drafters()
    assert (coming.name, coming.version, shelf.offered) == ("c", "1", (("c", "1"),)), "and nobody waits for it"
    loader.may_go_on.set()
    shelf.begun.result(60)
    assert "ngram" in [drafter.name for drafter in shelf.drafters()[0]], "it needs no loading"
    assert loaded(shelf) == ["c@1", "a@1", "ngram@1"]
    assert (shelf.first.name, shelf.names, loader.loads) == ("c", "c,a,ngram", ["c@1", "a@1"])
    assert (shelf.bytes, shelf.error, shelf.load_all()) == (2 * SIZE, "", {})


def test_two_threads_that_load_the_same_share_one(shelf, loader):
    loader.may_go_on.clear()
    shelf.offer(loader("a@1"))
    assert loader.begun.wait(60)
    thread = threading.Thread(target=shelf.load_all)
    thread.start()
    loader.may_go_on.set()
    thread.join(60)
    assert (loaded(shelf), loader.loads) == (["a@1"], ["a@1"])


def test_the_first_that_fit_into_memory_are_loaded(shelf, loader):
    shelf.offer([*loader("d@1"), *loader("large@1", size=2 * SIZE), *loader("b@1", "a@1")], 2.5 * SIZE)
    assert loaded(shelf) == loaded(shelf) == ["d@1", "b@1"]
    assert loader.loads == ["d@1", "b@1"], "asking again changes nothing"


def test_only_what_has_another_version_is_loaded_before_texts_have_it(shelf, loader):
    shelf.offer(loader("a@1", "b@1"))
    loaded(shelf)
    kept = shelf.drafters()[0][1]
    del loader.loads[:]
    shelf.offer(loader("a@2", "b@1"))
    assert (loader.loads, shelf.offered) == (["a@2"], (("a", "2"), ("b", "1")))
    assert shelf.drafters()[0][1] is kept
    loader.may_go_on.clear()
    shelf.offer(loader("c@1", "b@1"))
    assert [drafter.name for drafter in shelf.drafters()[0]] == ["b"], "newcomers load in the background"
    loader.may_go_on.set()
    assert loaded(shelf) == ["c@1", "b@1"]


def test_a_version_that_cannot_be_loaded_leaves_the_old_one_in_its_place(shelf, loader, caplog):
    shelf.offer(loader("a@1", "b@1"))
    loaded(shelf)
    loader.errors["a@2"] = ModelRefused("its adapter is not finite")
    with caplog.at_level(logging.WARNING):
        shelf.offer(loader("a@2", "b@2"))
    assert loaded(shelf) == ["a@1", "b@2"]
    assert "keeping version 1 of the drafter a: its adapter is not finite" in caplog.text


def test_old_versions_count_for_as_long_as_texts_hold_them(shelf, loader):
    shelf.offer(loader("a@1", "b@1"), 3 * SIZE)
    loaded(shelf)
    held = shelf.drafters()[0][0]
    shelf.offer(loader("a@2", "b@1", "c@1"), 3 * SIZE)
    assert (shelf.bytes, loaded(shelf)) == (3 * SIZE, ["a@2", "b@1"]), "no room while a text holds the old version"
    del held
    gc.collect()
    assert loaded(shelf) == ["a@2", "b@1", "c@1"]


def test_an_onnx_state_holds_its_drafter(tmp_path, shelf):
    package = write_package(tmp_path, tiny_graph())
    shelf.offer([Member("tiny", "1", SIZE, lambda: OnnxDrafter(package))])
    shelf.begun.result(60)
    state = shelf.drafters()[0][0].open(GREEDY)
    shelf.offer([Member("ngram", "1", 0, NgramDrafter)])
    gc.collect()
    assert shelf.bytes == SIZE
    state.close()
    del state
    gc.collect()
    assert shelf.bytes == 0


def measured(monkeypatch, *sizes) -> None:
    """Make each load appear to take one of `sizes`."""
    readings = iter([reading for size in sizes for reading in (0, size)])
    monkeypatch.setattr(shelf_module, "own_bytes", lambda: next(readings))


def test_where_the_system_does_not_say_the_files_count(shelf, loader, monkeypatch):
    monkeypatch.setattr(shelf_module, "own_bytes", lambda: None)
    shelf.offer(loader("a@1"))
    loaded(shelf)
    assert shelf.bytes == SIZE


def test_a_drafter_larger_than_its_files_drops_what_is_less_wanted(shelf, loader, monkeypatch):
    measured(monkeypatch, SIZE, SIZE, 2 * SIZE)
    shelf.offer(loader("a@1", "b@1"))
    loaded(shelf)
    shelf.offer(loader("a@1", "c@1", "b@1"), 3.5 * SIZE)
    assert loaded(shelf) == ["a@1", "c@1"]
    assert loader.loads == ["a@1", "b@1", "c@1"]


def test_a_drafter_that_alone_exceeds_the_limit_is_left_out_and_the_remedy_named(shelf, loader, monkeypatch, caplog):
    measured(monkeypatch, 2 * SIZE, SIZE)
    with caplog.at_level(logging.WARNING):
        shelf.offer([*loader("large@1", size=5 * SIZE), *loader("a@1", "b@1")], 1.5 * SIZE)
        assert loaded(shelf) == ["b@1"]
    assert "a takes 200.0 MB" in caplog.text
    assert shelf.load_all() == {
        "large": "large takes 500.0 MB; raise --drafter-memory, which is 150",
        "a": "a takes 200.0 MB; raise --drafter-memory, which is 150",
    }


def test_one_that_cannot_be_loaded_is_left_out_with_a_warning_and_not_tried_again(shelf, loader, caplog):
    loader.errors = {"a@1": DataLoss("model.onnx is missing"), "b@1": RuntimeError("a secret of the user's")}
    with caplog.at_level(logging.WARNING):
        shelf.offer(loader("a@1", "b@1", "c@1"))
        assert loaded(shelf) == loaded(shelf) == ["c@1"]
    assert shelf.load_all() == {"a": "model.onnx is missing (OUT-405)", "b": "RuntimeError"}
    assert "going on without the drafter a: model.onnx is missing" in caplog.text
    assert "secret" not in caplog.text
    assert (loader.loads, shelf.names, shelf.error) == (["a@1", "b@1", "c@1"], "c", "")


def test_where_none_can_be_loaded_the_reason_is_known_until_others_are_offered(shelf, loader):
    loader.errors = {"a@1": DataLoss("model.onnx is missing")}
    shelf.offer(loader("a@1"))
    shelf.begun.result(60)
    assert (shelf.drafters(), shelf.names, shelf.error) == (((), None), "none", "model.onnx is missing (OUT-405)")
    shelf.offer(loader("a@2"))
    assert (loaded(shelf), shelf.error) == (["a@2"], "")


def test_closing_while_one_is_loading_returns_at_once_and_the_load_has_no_effect(shelf, loader):
    loader.may_go_on.clear()
    shelf.offer(loader("a@1", "b@1"))
    assert loader.begun.wait(60)
    (coming,), _ = shelf.drafters()
    shelf.close()
    shelf.begun.result(60)
    loader.may_go_on.set()
    until(lambda: not shelf._at_work)
    shelf.offer(loader("c@1"))
    assert (shelf.drafters(), shelf.first, loader.loads) == (((), None), None, ["a@1"])
    with pytest.raises(Unavailable, match="the drafter a is gone"):
        coming.open(GREEDY).read(wait=False)
    shelf.close()


def test_a_version_that_arrives_after_the_shelf_was_closed_is_dropped(shelf, loader):
    shelf.offer(loader("a@1"))
    loaded(shelf)
    loader.begun.clear()
    loader.may_go_on.clear()
    thread = threading.Thread(target=shelf.offer, args=(loader("a@2"),))
    thread.start()
    assert loader.begun.wait(60)
    shelf.close()
    loader.may_go_on.set()
    thread.join(60)
    assert (shelf.first, loader.loads) == (None, ["a@1", "a@2"])


def test_drafters_that_are_given_are_loaded_from_the_beginning():
    shelf = DrafterShelf(ScriptedDrafter((1, 2), name="one"), GarbageDrafter(5, name="two"))
    drafters, steered = shelf.drafters()
    assert ([drafter.name for drafter in drafters], steered, shelf.names) == (["one", "two"], None, "one,two")
    assert shelf.begun.done()
    shelf.close()
    with pytest.raises(ConfigError, match="drafter: names 'a' twice"):
        DrafterShelf(*(ScriptedDrafter((1,), name="a") for _ in range(2)))


def test_vectors_are_requested_for_the_most_wanted_steered_drafter(shelf):
    def steered(name, rank):
        return Member(name, "1", 0, NgramDrafter, SteeringShape(rank, 8, "0123456789ab"))

    shelf.offer([Member("plain", "1", 0, NgramDrafter), steered("a", 4), steered("b", 16)])
    assert shelf.drafters()[1] == 1


def test_a_prefix_follows_the_text_while_the_drafter_loads(shelf):
    go_on, prompt = threading.Event(), (5, 6, 7, 8) * 8

    def load() -> NgramDrafter:
        assert go_on.wait(30)
        return NgramDrafter(name="slow")

    shelf.offer([Member("slow", "1", SIZE, load)])
    (drafter,), _ = shelf.drafters()
    coming, whole = drafter.open(GREEDY), NgramDrafter(name="slow").open(GREEDY)
    coming.extend((*prompt, 1, 2))
    assert coming.propose(4) == ()
    coming.truncate(len(prompt))
    coming.extend((5, 6))
    assert coming.read(wait=False) is coming
    threading.Timer(0.01, go_on.set).start()
    state = coming.read(wait=True)
    whole.extend((*prompt, 5, 6))
    assert state.length == whole.length
    assert state.propose(4) == whole.propose(4) != ()


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


# --- from the option to the shelf ---


def package(folder, name, tokenizer=WORD_TOKENIZER, steered=False, **changes) -> DrafterPackage:
    (folder / name).mkdir()
    graphs = (tiny_graph(steered=True), steering_graph()) if steered else (tiny_graph(),)
    return write_package(folder / name, *graphs, tokenizer=tokenizer, name=name, **changes)


def prepared(drafter: str, **config) -> Ready:
    edge = EdgeConfig(**WHERE, drafter=drafter, **config)

    async def run() -> Ready:
        return await Preparation(edge, None, None, ()).load(CHANNELS)

    return asyncio.run(run())


def test_the_first_of_a_list_of_drafters_is_loaded_and_the_others_follow(tmp_path):
    for name in ("code", "docs"):
        package(tmp_path, name)
    ready = prepared(f"{tmp_path}/code, {tmp_path}/docs,ngram")
    assert ready.shelf.names == "code,docs,ngram"
    assert ready.shelf.first.name == "code"
    assert ready.tokenizer_sha256 == tokenizer_hash(WORD_TOKENIZER)
    until(lambda: len(ready.shelf.drafters()[0]) == 3)
    assert ready.shelf.bytes >= 2 * (tmp_path / "docs" / "model.onnx").stat().st_size
    ready.shelf.close()


def test_a_text_begins_steered_once_the_steered_drafter_is_loaded(tmp_path):
    package(tmp_path, "plain")
    package(tmp_path, "steered", steered=True)
    ready = prepared(f"{tmp_path}/plain,{tmp_path}/steered")
    until(lambda: ready.shelf.drafters()[1] == 1)
    assert ready.shelf.drafters()[0][1].steering.projection == STEERING_MANIFEST["projection"]
    ready.shelf.close()


@pytest.mark.parametrize("order", ["broken,whole,ngram", "whole,broken,ngram"])
def test_a_broken_member_is_left_out_with_a_warning(tmp_path, caplog, order):
    for name in ("whole", "broken"):
        package(tmp_path, name)
    (tmp_path / "broken" / "model.onnx").write_bytes(b"no graph")
    names = ",".join(name if name == "ngram" else f"{tmp_path}/{name}" for name in order.split(","))
    with caplog.at_level(logging.WARNING):
        ready = prepared(names)
        until(lambda: "going on without the drafter broken: model.onnx has 8 bytes" in caplog.text)
    assert ready.shelf.first.name == "whole"
    assert not ready.shelf.error
    until(lambda: [drafter.name for drafter in ready.shelf.drafters()[0]] == ["whole", "ngram"])
    ready.shelf.close()


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
    coordinator = SimpleNamespace(open_lease=open_lease, security=edge.security, newest_lease=None)
    ready = asyncio.run(Preparation(edge, coordinator, None, ()).find(CHANNELS))
    assert ready.shelf.first.name == "ngram"
    assert "passing over the drafter far: it is for another tokenizer" in caplog.text


def test_all_drafters_are_the_embedded_family_and_ngrams_where_the_tokenizer_fits(tmp_path):
    tokenizer = find_package("general").tokenizer_path
    ready = prepared("all", tokenizer=tokenizer)
    assert ready.shelf.names == ",".join((*FAMILY, "ngram"))
    ready.shelf.close()
    (tmp_path / "tokenizer.json").write_text(WORD_TOKENIZER)
    ready = prepared("all", tokenizer=tmp_path / "tokenizer.json")
    assert ready.shelf.names == "ngram"


def test_by_default_all_that_fit_are_taken_and_none_but_the_first_is_steered(tmp_path):
    tokenizer = find_package("general").tokenizer_path
    ready = prepared("auto", tokenizer=tokenizer)
    plain = [name for name in FAMILY if find_package(name).steering is None]
    assert len(plain) < len(FAMILY)
    assert ready.shelf.names == ",".join((*plain, "ngram"))
    assert ready.shelf.first.name == "general"
    until(lambda: len(ready.shelf.drafters()[0]) == len(plain) + 1)
    ready.shelf.close()
    memory_mb = 2 * find_package("general").graph_bytes / 1e6
    few = prepared("auto", tokenizer=tokenizer, drafter_memory_mb=memory_mb)
    assert few.shelf.names == "general", "it alone would fill the memory for several"
    few.shelf.close()
    ready = prepared("auto", tokenizer=find_package("smol").tokenizer_path)
    assert ready.shelf.names == "smol,ngram", "another target has its own"
    ready.shelf.close()
    (tmp_path / "tokenizer.json").write_text(WORD_TOKENIZER)
    ready = prepared("auto", tokenizer=tmp_path / "tokenizer.json")
    assert ready.shelf.names == "ngram"


def test_a_folder_without_a_manifest_does_not_hide_the_embedded_drafter_of_its_name(tmp_path, monkeypatch):
    (tmp_path / "docs").mkdir()
    monkeypatch.chdir(tmp_path)
    for drafter in ("all", "docs,ngram", "docs"):
        ready = prepared(drafter, tokenizer=find_package("general").tokenizer_path)
        assert "docs" in ready.shelf.names
        ready.shelf.close()


@pytest.mark.parametrize("broken", [False, True])
def test_a_doctor_looks_at_every_drafter_of_a_list(tmp_path, broken):
    for name in ("code", "docs"):
        package(tmp_path, name)
    if broken:
        (tmp_path / "docs" / "model.onnx").write_bytes(b"no graph")

    async def look():
        config = EdgeConfig(**WHERE, drafter=f"{tmp_path}/code,{tmp_path}/docs,ngram")
        visit = examination._Visit(config, lambda _: None)
        async with Client(config) as visit.drafting:
            return await visit.load_drafter()

    found = asyncio.run(look())
    if broken:
        assert found.outcome is Outcome.WARNING
        assert "the others draft without docs: model.onnx has 8 bytes" in found.message
        assert "leave them out of --drafter" in found.remedy
    else:
        assert found.outcome is Outcome.OK
        assert found.message.startswith("code, docs, ngram ")
        assert "every file as promised" in found.message


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
    general = replace(offered.offers[0], name="general")
    search = DrafterSearch((offered.offers[1], general), DrafterCache(offered.cache), offered.fetch, 1)
    assert search._order == ["general", "further"], "the drafter for any subject is the most wanted"


def test_a_folder_here_does_not_hide_a_drafter_of_its_name(offered, tmp_path, monkeypatch):
    for name in ("far", "general"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path)
    assert [one.name for one in offered.search.all(tokenizer_hash(WORD_TOKENIZER))] == ["far", "further", "ngram"]
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
    assert [one.version for one in on_trial((STEERED, 0.0), (FOREIGN, 1.0)).named(("far",), "")] == [STEERED]
    assert [one.version for one in on_trial((NEXT, 0.0), (STEERED, 1.0)).named(("far",), "")] == [NEXT, STEERED]


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


def test_a_client_takes_several_drafters_and_closes_their_shelf(tmp_path):
    (tmp_path / "tokenizer.json").write_text(WORD_TOKENIZER)
    drafters = (GarbageDrafter(5, name="one"), GarbageDrafter(5, name="two"))

    async def names() -> tuple[str, str]:
        client = Client(EdgeConfig(**WHERE, tokenizer=tmp_path / "tokenizer.json"), drafters=drafters)
        async with client:
            open_names, shelf = client.drafter_name, client.ready.shelf
            assert client.drafter is drafters[0]
        assert shelf.drafters() == ((), None)
        return open_names

    assert asyncio.run(names()) == "one,two"

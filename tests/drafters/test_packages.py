"""Drafter packages on disk and from the coordinator: a file that is not what was promised is refused by name."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from outrider.drafters import DrafterCache, embedded_packages, find_package, load_package, packages
from outrider.drafters.packages import FOR_ANY_SUBJECT
from outrider.proto.drafter_format import SteeringShape
from outrider.proto.errors import DataLoss, InvalidArgument, ModelRefused, NotFound, OutriderError, Unavailable
from outrider.proto.plumbing.files import sha256_of
from outrider.proto.tokenizer import shipped_tokenizer, tokenizer_hash
from outrider.proto.types import DrafterManifest, RemoteFile

TOKENIZER = '{"model": {"type": "WordLevel", "vocab": {"a": 0}}, "padding": null}'
STEERING = {"rank": 64, "mlp": 512, "projection": "0123456789ab"}


def write_package(folder, **changes):
    """A package whose model is no model; `changes` go into the manifest (None: the field is left out)."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {"model.onnx": b"not a graph" * 1000, "tokenizer.json": TOKENIZER.encode()}
    if changes.get("steering") is not None:
        contents["steering.onnx"] = b"no graph either"
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    manifest = {
        "format": "outrider-drafter/2",
        "name": "tiny",
        "version": "0123456789ab",
        "kind": "onnx-lm",
        "target": "target",
        "tokenizer_sha256": tokenizer_hash(TOKENIZER),
        "files": {
            name: {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
            for name, content in contents.items()
        },
        "precision": "int8",
        "vocab_size": 32,
        "context_length": 64,
        "candidates": 8,
        "parameters": 1000,
        "cache": {
            "dtype": "float32",
            "layout": "[1, kv_head, position, head_dim]",
            "layers": 2,
            "kv_heads": 1,
            "head_dim": 4,
        },
        "a_field_of_tomorrow": 1,
    } | changes
    kept = {key: value for key, value in manifest.items() if value is not None}
    (folder / "manifest.json").write_text(json.dumps(kept))
    return folder


def remote(folder, **changes):
    """The coordinator's manifest of a package."""
    files = tuple(RemoteFile(p.name, sha256_of(p), p.stat().st_size) for p in sorted(folder.iterdir()))
    fields = {
        "name": "tiny",
        "version": "0123456789ab",
        "tokenizer_sha256": tokenizer_hash(TOKENIZER),
        "target": "target",
        "files": files,
    }
    return DrafterManifest(**(fields | changes))


class Server:
    """Serves a folder in small pieces, counts the requests, and can break off."""

    def __init__(self, folder):
        self.folder = folder
        self.asked = []
        self.breaks_after = None

    def __call__(self, file, offset):
        self.asked.append((file.name, offset))
        content = (self.folder / file.name).read_bytes()[offset:]
        for sent, start in enumerate(range(0, len(content), 100)):
            if sent == self.breaks_after:
                raise Unavailable("the link is down")
            yield content[start : start + 100]


def test_a_package_loads_with_the_fields_of_its_manifest(tmp_path):
    package = load_package(write_package(tmp_path))
    assert (package.name, package.version, package.target, package.precision) == (
        "tiny",
        "0123456789ab",
        "target",
        "int8",
    )
    assert (package.vocab_size, package.context_length, package.candidates, package.parameters) == (32, 64, 8, 1000)
    assert (package.cache.layers, package.cache.kv_heads, package.cache.head_dim) == (2, 1, 4)
    assert package.model_path.read_bytes().startswith(b"not a graph")
    assert {file.name for file in package.files} == {"model.onnx", "tokenizer.json"}


@pytest.mark.parametrize("name", ["model.onnx", "tokenizer.json"])
def test_one_flipped_byte_or_a_missing_file_is_named(tmp_path, name):
    folder = write_package(tmp_path)
    content = bytearray((folder / name).read_bytes())
    content[7] ^= 1
    (folder / name).write_bytes(content)
    with pytest.raises(DataLoss, match=f"{name} has SHA-256"):
        load_package(folder)
    (folder / name).write_bytes(content[:-1])
    with pytest.raises(DataLoss, match=f"{name} has .* bytes"):
        load_package(folder)
    (folder / name).unlink()
    with pytest.raises(DataLoss, match=f"{name} is missing"):
        load_package(folder)


def test_the_tokenizer_must_have_the_canonical_hash(tmp_path):
    with pytest.raises(DataLoss, match=r"tokenizer\.json has the canonical hash"):
        load_package(write_package(tmp_path, tokenizer_sha256="0" * 64))


@pytest.mark.parametrize(
    ("changes", "error", "field"),
    [
        ({"format": "outrider-drafter/3"}, ModelRefused, "manifest.format"),
        ({"kind": "telepathy"}, ModelRefused, "manifest.kind"),
        ({"cache": {"dtype": "float16", "layout": "x"}}, ModelRefused, "manifest.cache.dtype"),
        ({"name": None}, InvalidArgument, "manifest.name"),
        ({"name": "../x"}, InvalidArgument, "manifest.name"),
        ({"version": "a/1"}, InvalidArgument, "manifest.version"),
        ({"vocab_size": "32"}, InvalidArgument, "manifest.vocab_size"),
        ({"vocab_size": True}, InvalidArgument, "manifest.vocab_size"),
        ({"context_length": 0}, InvalidArgument, "manifest.context_length"),
        ({"candidates": 33}, InvalidArgument, "manifest.candidates"),
        ({"reach": 0}, InvalidArgument, "manifest.reach"),
        ({"reach": "4"}, InvalidArgument, "manifest.reach"),
        ({"cache": 3}, InvalidArgument, "manifest.cache"),
        ({"files": []}, InvalidArgument, "manifest.files"),
        ({"files": {}}, InvalidArgument, "manifest.files"),
        ({"files": {"../evil": {"sha256": "0" * 64, "bytes": 1}}}, InvalidArgument, "manifest.files.../evil"),
        ({"files": {"model.onnx": {"sha256": "xyz", "bytes": 1}}}, InvalidArgument, "manifest.files.model.onnx"),
    ],
)
def test_a_bad_manifest_is_refused_and_the_field_named(tmp_path, changes, error, field):
    with pytest.raises(error) as raised:
        load_package(write_package(tmp_path, **changes))
    assert raised.value.field == field


def test_a_steered_package_has_the_shape_of_its_vectors(tmp_path):
    gain = {"8": 0.08, "1": 0.12, "16": 0, "64": -0.01}
    package = load_package(write_package(tmp_path, steering=STEERING | {"gain": gain}))
    assert package.steering == SteeringShape(
        rank=64, mlp=512, projection="0123456789ab", gain=((1, 0.12), (8, 0.08), (16, 0.0), (64, -0.01))
    )
    assert package.steering_path.read_bytes() == b"no graph either"
    for nothing in ({}, {"gain": {}}):
        assert load_package(write_package(tmp_path, steering=STEERING | nothing)).steering.gain == ()
    assert load_package(write_package(tmp_path)).steering is None
    (tmp_path / "steering.onnx").unlink()
    load_package(write_package(tmp_path))
    write_package(tmp_path, steering=STEERING).joinpath("steering.onnx").unlink()
    with pytest.raises(DataLoss, match=r"steering\.onnx is missing"):
        load_package(tmp_path)


@pytest.mark.parametrize(
    ("steering", "field"),
    [
        (3, "manifest.steering"),
        ([], "manifest.steering"),
        ({}, "manifest.steering.rank"),
        ({"rank": 0}, "manifest.steering.rank"),
        ({"rank": 64.0}, "manifest.steering.rank"),
        ({"mlp": -1}, "manifest.steering.mlp"),
        ({"mlp": "512"}, "manifest.steering.mlp"),
        ({"projection": "0123456789AB"}, "manifest.steering.projection"),
        ({"projection": "0123456789abc"}, "manifest.steering.projection"),
        ({"projection": 12}, "manifest.steering.projection"),
        ({"gain": [0.1]}, "manifest.steering.gain"),
        ({"gain": {"soon": 0.1}}, "manifest.steering.gain"),
        ({"gain": {"-1": 0.1}}, "manifest.steering.gain"),
        ({"gain": {"01": 0.1}}, "manifest.steering.gain"),
        ({"gain": {"1": "0.1"}}, "manifest.steering.gain.1"),
        ({"gain": {"1": True}}, "manifest.steering.gain.1"),
        ({"gain": {"1": float("nan")}}, "manifest.steering.gain.1"),
        ({"gain": {"1": float("inf")}}, "manifest.steering.gain.1"),
        ({"gain": {"1": 10**400}}, "manifest.steering.gain.1"),
    ],
    ids=str,
)
def test_bad_steering_in_a_manifest_is_refused_and_the_field_named(tmp_path, steering, field):
    whole = STEERING | steering if isinstance(steering, dict) and steering else steering
    with pytest.raises(InvalidArgument) as raised:
        load_package(write_package(tmp_path, steering=whole))
    assert raised.value.field == field


def test_a_steered_package_must_promise_its_steering_graph(tmp_path):
    folder = write_package(tmp_path)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"steering": STEERING}))
    with pytest.raises(InvalidArgument, match=r"does not list steering\.onnx"):
        load_package(folder)


def test_a_package_of_an_earlier_version_is_refused_with_what_to_do(tmp_path):
    with pytest.raises(ModelRefused, match="export the drafter again"):
        load_package(write_package(tmp_path, format="outrider-drafter/1"))


def test_a_manifest_that_is_no_json_is_refused(tmp_path):
    (write_package(tmp_path) / "manifest.json").write_text("{")
    with pytest.raises(InvalidArgument) as raised:
        load_package(tmp_path)
    assert raised.value.field == "manifest"


def test_packages_are_found_by_path_and_the_names_there_are_are_listed(tmp_path):
    folder = write_package(tmp_path / "mine")
    assert find_package(folder).name == find_package(str(folder)).name == "tiny"
    with pytest.raises(NotFound, match="nowhere") as raised:
        find_package(tmp_path / "nowhere")
    for name in embedded_packages():
        assert name in str(raised.value)
    with pytest.raises(NotFound):
        load_package(tmp_path)


@pytest.mark.parametrize("name", embedded_packages())
def test_an_embedded_package_uses_the_shipped_tokenizer(name):
    package = find_package(name)
    assert not (package.folder / "tokenizer.json").exists()
    assert package.tokenizer_path == shipped_tokenizer(package.tokenizer_sha256)
    assert "tokenizer.json" in {file.name for file in package.files}


def test_a_packages_own_tokenizer_goes_before_the_shipped_one(tmp_path):
    embedded = find_package("general")
    folder = tmp_path / "copy"
    shutil.copytree(embedded.folder, folder)
    own = folder / "tokenizer.json"
    shutil.copy(embedded.tokenizer_path, own)
    assert load_package(folder).tokenizer_path == own
    own.write_text("{}")
    with pytest.raises(DataLoss, match=r"tokenizer\.json"):
        load_package(folder)


def test_a_drafter_is_fetched_once(tmp_path):
    server, cache = Server(write_package(tmp_path / "served")), DrafterCache(tmp_path / "cache")
    package = cache.ensure(remote(server.folder), server)
    assert package.folder.is_relative_to(tmp_path / "cache")
    assert sha256_of(package.model_path) == sha256_of(server.folder / "model.onnx")
    assert sorted(server.asked) == [("manifest.json", 0), ("model.onnx", 0), ("tokenizer.json", 0)]
    assert cache.ensure(remote(server.folder), server) == package
    assert len(server.asked) == 3
    assert not list(package.folder.glob("*.part"))


def served_version(server, version, **changes):
    """The manifest of another version of the same graph and tokenizer."""
    write_package(server.folder, version=version, **changes)
    return remote(server.folder, version=version)


def test_what_another_version_has_is_linked_and_not_fetched(tmp_path):
    server, cache = Server(write_package(tmp_path / "served")), DrafterCache(tmp_path / "cache")
    first = cache.ensure(remote(server.folder), server)
    second = cache.ensure(served_version(server, "ba9876543210"), server)
    assert [name for name, _ in server.asked].count("manifest.json") == 2
    assert [name for name, _ in server.asked].count("model.onnx") == 1
    assert [name for name, _ in server.asked].count("tokenizer.json") == 1
    assert second.folder != first.folder
    assert second.model_path.samefile(first.model_path)
    assert cache.ensure_file(second.files[1], server).samefile(first.folder / second.files[1].name)
    assert not list((tmp_path / "cache").rglob("*.link"))


def test_a_spoilt_file_is_no_source_of_another_version(tmp_path):
    server, cache = Server(write_package(tmp_path / "served")), DrafterCache(tmp_path / "cache")
    first = cache.ensure(remote(server.folder), server)
    first.model_path.write_bytes(b"?" * first.graph_bytes)
    second = cache.ensure(served_version(server, "ba9876543210"), server)
    assert server.asked.count(("model.onnx", 0)) == 2
    load_package(second.folder)
    first_again = cache.ensure(served_version(server, first.version), server)
    assert server.asked.count(("model.onnx", 0)) == 2
    assert first_again.model_path.samefile(second.model_path)


def test_where_nothing_can_be_linked_it_is_copied(tmp_path, monkeypatch):
    def no_links(*_):
        raise OSError(errno.EPERM, "not permitted")

    monkeypatch.setattr(os, "link", no_links)
    cache = DrafterCache(tmp_path / "cache")
    server = Server(write_package(tmp_path / "served"))
    first = cache.ensure(remote(server.folder), server)
    second = cache.ensure(served_version(server, "ba9876543210"), server)
    assert server.asked.count(("model.onnx", 0)) == 1
    assert not second.model_path.samefile(first.model_path)


def test_what_is_in_the_wheel_is_not_fetched(tmp_path):
    embedded = find_package("general")
    manifest = RemoteFile("manifest.json", sha256_of(embedded.folder / "manifest.json"), 1)
    manifest = replace(manifest, bytes=(embedded.folder / "manifest.json").stat().st_size)
    offer = DrafterManifest(
        "general", embedded.version, embedded.tokenizer_sha256, embedded.target, (manifest, *embedded.files)
    )
    server = Server(embedded.folder)
    package = DrafterCache(tmp_path / "cache").ensure(offer, server)
    assert package.folder.is_relative_to(tmp_path)
    assert [name for name, _ in server.asked] == ["manifest.json"]


def test_a_broken_download_goes_on_where_it_stopped(tmp_path):
    server, cache = Server(write_package(tmp_path / "served")), DrafterCache(tmp_path / "cache")
    server.breaks_after = 30
    with pytest.raises(Unavailable):
        cache.ensure(remote(server.folder), server)
    assert not (tmp_path / "cache/drafters/tiny/0123456789ab/model.onnx").exists()
    server.breaks_after = None
    cache.ensure(remote(server.folder), server)
    assert ("model.onnx", 3000) in server.asked
    assert server.asked.count(("model.onnx", 0)) == 1


def test_a_spoilt_beginning_is_fetched_again_from_the_start(tmp_path):
    server, cache = Server(write_package(tmp_path / "served")), DrafterCache(tmp_path / "cache")
    server.breaks_after = 30
    with pytest.raises(Unavailable):
        cache.ensure(remote(server.folder), server)
    [partial] = (tmp_path / "cache").rglob("model.onnx.*.part")
    partial.write_bytes(b"?" * 500)
    server.breaks_after = None
    cache.ensure(remote(server.folder), server)
    assert [offset for name, offset in server.asked if name == "model.onnx"] == [0, 500, 0]


def test_a_promise_of_too_many_bytes_is_refused_before_the_first_is_fetched(tmp_path, monkeypatch):
    server, cache = Server(write_package(tmp_path / "served")), DrafterCache(tmp_path / "cache")
    with pytest.raises(ModelRefused, match="at most are fetched"):
        cache.ensure_file(RemoteFile("tokenizer.json", "0" * 64, 1 << 50), server)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100 << 20))
    with pytest.raises(Unavailable, match=r"make room, or give another folder with --cache") as caught:
        cache.ensure_file(RemoteFile("tokenizer.json", "0" * 64, 40 << 20), server)
    assert (caught.value.field, server.asked) == ("cache", [])


def test_a_cache_folder_that_cannot_be_used_is_one_sentence(tmp_path):
    server = Server(write_package(tmp_path / "served"))
    (tmp_path / "file").write_text("no folder")
    cache = DrafterCache(tmp_path / "file" / "cache")
    for use in (
        lambda: cache.ensure(remote(server.folder), server),
        lambda: cache.ensure_file(RemoteFile("a", "0" * 64, 5), server),
    ):
        with pytest.raises(Unavailable, match=r"cannot use .*cache: Not a directory; give another folder") as caught:
            use()
        assert caught.value.field == "cache"


def test_a_tampered_cache_is_fetched_again(tmp_path):
    server, cache = Server(write_package(tmp_path / "served")), DrafterCache(tmp_path / "cache")
    package = cache.ensure(remote(server.folder), server)
    spoilt = bytearray(package.model_path.read_bytes())
    spoilt[0] ^= 1
    package.model_path.write_bytes(spoilt)
    cache.ensure(remote(server.folder), server)
    assert server.asked.count(("model.onnx", 0)) == 2
    assert server.asked.count(("tokenizer.json", 0)) == 1
    load_package(package.folder)


@pytest.mark.parametrize("lie", [b"x", b"x" * 11000, b"x" * 100_000])
def test_content_that_was_not_promised_never_takes_its_name(tmp_path, lie):
    served = write_package(tmp_path / "served")
    manifest = remote(served)
    (served / "model.onnx").write_bytes(lie)
    with pytest.raises(DataLoss, match=r"model\.onnx"):
        DrafterCache(tmp_path / "cache").ensure(manifest, Server(served))
    assert not list((tmp_path / "cache").rglob("model.onnx*"))


def test_a_single_file_is_kept_under_its_hash(tmp_path):
    server, cache = Server(write_package(tmp_path / "served")), DrafterCache(tmp_path / "cache")
    file = RemoteFile("tokenizer.json", hashlib.sha256(TOKENIZER.encode()).hexdigest(), len(TOKENIZER))
    path = cache.ensure_file(file, server)
    assert path.read_text() == TOKENIZER
    assert path.is_relative_to(tmp_path / "cache")
    assert cache.ensure_file(file, server) == path
    assert server.asked == [("tokenizer.json", 0)]


def test_the_coordinator_and_the_package_must_agree_on_what_it_is(tmp_path):
    server, cache = Server(write_package(tmp_path / "served")), DrafterCache(tmp_path / "cache")
    with pytest.raises(DataLoss) as raised:
        cache.ensure(remote(server.folder, target="another"), server)
    assert raised.value.field == "target"
    files = remote(server.folder).files
    for wrong in (files[1:], (*files, files[1])):
        with pytest.raises(InvalidArgument) as refused:
            cache.ensure(remote(server.folder, files=wrong), server)
        assert refused.value.field == "drafter.files"


def test_no_name_from_outside_leads_out_of_the_cache(tmp_path):
    for name in ("../evil", "/etc/passwd", ".hidden", "a\\b", ""):
        with pytest.raises(InvalidArgument):
            RemoteFile(name, "0" * 64, 1)
    for wrong in ({"name": "../x"}, {"version": "a/b"}, {"version": ".."}):
        with pytest.raises(OutriderError):
            remote(write_package(tmp_path / "served"), **wrong)


def test_the_drafter_for_any_subject_comes_first_unless_one_is_named() -> None:
    names = embedded_packages()
    assert names[0] == FOR_ANY_SUBJECT
    assert list(names[1:]) == sorted(names[1:])


def test_where_no_model_is_embedded_an_error_names_the_distribution(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(packages, "FAMILY", tmp_path / "nowhere")
    assert embedded_packages() == ()
    with pytest.raises(NotFound, match="they come with the distribution outrider-models"):
        find_package("general")

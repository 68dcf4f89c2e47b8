"""The catalogue serves files by hash, if they match their manifests, and notices changes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import TOKENIZER_JSON, write_package

from outrider.coordinator.catalogue import Catalogue, load_package
from outrider.proto.errors import ConfigError, DataLoss, NotFound
from outrider.proto.tokenizer import tokenizer_hash


def scanned(folder: Path) -> Catalogue:
    catalogue = Catalogue((folder,))
    catalogue.rescan()
    return catalogue


def test_a_package_is_listed_with_its_manifest_among_its_files(tmp_path: Path) -> None:
    write_package(tmp_path / "d", files={"model.onnx": b"weights", "vocab.txt": b"words"})
    (manifest,) = scanned(tmp_path).manifests
    assert {file.name for file in manifest.files} == {"manifest.json", "model.onnx", "tokenizer.json", "vocab.txt"}
    assert (manifest.name, manifest.version, manifest.target) == ("tiny-drafter", "1", "tiny")


def test_a_package_whose_tokenizer_ships_with_outrider_is_served_whole(tmp_path: Path, tokenizer_file: Path) -> None:
    shipped = tokenizer_file.read_bytes()
    sha256 = tokenizer_hash(shipped.decode())
    folder = write_package(tmp_path / "d", files={"tokenizer.json": shipped}, tokenizer_sha256=sha256)
    (folder / "tokenizer.json").unlink()
    catalogue = scanned(tmp_path)
    (file,) = (file for file in catalogue.manifests[0].files if file.name == "tokenizer.json")
    with catalogue.open(file.sha256, 0) as reader:
        assert reader.read() == shipped


def test_a_package_without_a_tokenizer_that_does_not_ship_is_refused(tmp_path: Path) -> None:
    folder = write_package(tmp_path / "d", files={"tokenizer.json": TOKENIZER_JSON.encode()})
    (folder / "tokenizer.json").unlink()
    catalogue = scanned(tmp_path)
    assert not catalogue.manifests
    assert "tokenizer.json" in str(catalogue.refused[folder])


@pytest.mark.parametrize("depth", ["", "d", "d/1"])
def test_a_package_is_found_in_the_folder_itself_and_two_levels_below(tmp_path: Path, depth: str) -> None:
    write_package(tmp_path / depth)
    assert len(scanned(tmp_path).manifests) == 1


def test_a_tampered_file_refuses_its_package_with_a_log_line_and_leaves_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = write_package(tmp_path / "bad", name="bad", files={"model.onnx": b"weights"})
    write_package(tmp_path / "good", name="good")
    (bad / "model.onnx").write_bytes(b"weightz")
    with caplog.at_level(logging.WARNING):
        catalogue = scanned(tmp_path)
        catalogue.rescan()
    assert [m.name for m in catalogue.manifests] == ["good"]
    refusal = catalogue.refused[bad]
    assert isinstance(refusal, DataLoss)
    assert refusal.field == "bad/model.onnx"
    assert len([r for r in caplog.records if "bad/model.onnx" in r.getMessage()]) == 1, "said once, not every second"
    with pytest.raises(NotFound):
        catalogue.open(hashlib.sha256(b"weightz").hexdigest(), 0)


def test_a_file_of_another_length_and_a_missing_one_are_refused_by_name(tmp_path: Path) -> None:
    package = write_package(tmp_path / "d", files={"model.onnx": b"weights"})
    (package / "model.onnx").write_bytes(b"weights and more")
    with pytest.raises(DataLoss, match="16 bytes, the manifest promises 7"):
        load_package(package)
    (package / "model.onnx").unlink()
    with pytest.raises(DataLoss, match=r"d/model\.onnx"):
        load_package(package)


def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    package = write_package(tmp_path / "d")
    (package / "model.onnx").unlink()
    os.mkfifo(package / "model.onnx")
    with pytest.raises(DataLoss, match="not a plain file"):
        load_package(package)


def test_a_file_that_is_changed_after_the_check_is_not_served(tmp_path: Path) -> None:
    package = write_package(tmp_path / "d", files={"model.onnx": b"weights"})
    catalogue = scanned(tmp_path)
    time.sleep(0.02)  # beyond one tick of the file system's clock
    (package / "model.onnx").write_bytes(b"weightz")
    with pytest.raises(DataLoss, match="changed since it was checked"):
        catalogue.open(hashlib.sha256(b"weights").hexdigest(), 0)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"format": "other/1"}, "format"),
        ({"name": "../up"}, "manifest.name"),
        ({"name": 3}, "name"),
        ({"version": ""}, "manifest.version"),
        ({"tokenizer_sha256": "abc"}, "tokenizer_sha256"),
        ({"sequence": -1}, "sequence"),
        ({"sequence": "2"}, "sequence"),
        ({"parent": 7}, "parent"),
        ({"owner": "5a" * 16}, "names one API key, and drafters are for all; delete"),
        ({"owner": None}, "names one API key"),
        ({"files": {}}, "files"),
        ({"files": {"../../etc/passwd": {"sha256": "0" * 64, "bytes": 1}}}, "plain file name"),
        ({"files": {"/etc/passwd": {"sha256": "0" * 64, "bytes": 1}}}, "plain file name"),
        ({"files": {"manifest.json": {"sha256": "0" * 64, "bytes": 1}}}, "manifest itself"),
        ({"files": {"model.onnx": {"sha256": "0" * 64}}}, "files.model.onnx"),
        ({"files": {"model.onnx": {"sha256": "zz", "bytes": 1}}}, "files.model.onnx"),
    ],
)
def test_an_impossible_manifest_is_a_config_error_that_says_what(
    tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    package = write_package(tmp_path / "d")
    manifest = json.loads((package / "manifest.json").read_text()) | change
    (package / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=complaint) as refusal:
        load_package(package)
    assert refusal.value.field == "d/manifest.json"


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff\xfe", b"null", b"9" * 5000])
def test_a_manifest_that_is_no_json_object_is_a_config_error(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(raw)
    with pytest.raises(ConfigError):
        load_package(tmp_path)


def test_a_repaired_package_is_served_at_the_next_look(tmp_path: Path) -> None:
    package = write_package(tmp_path / "d", files={"model.onnx": b"weights"})
    (package / "model.onnx").unlink()
    catalogue = scanned(tmp_path)
    assert not catalogue.manifests
    (package / "model.onnx").write_bytes(b"weights")
    assert catalogue.rescan()
    assert len(catalogue.manifests) == 1


def test_only_touched_packages_are_hashed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_package(tmp_path / "a", name="a")
    write_package(tmp_path / "b", name="b")
    catalogue = scanned(tmp_path)
    loaded: list[Path] = []

    def load(folder: Path) -> Any:
        loaded.append(folder)
        return load_package(folder)

    monkeypatch.setattr("outrider.coordinator.catalogue.load_package", load)
    assert not catalogue.rescan()
    write_package(tmp_path / "b", name="b", version="2")
    assert catalogue.rescan()
    assert loaded == [tmp_path / "b"]


def test_versions_are_ordered_newest_first_by_number_not_by_letter(tmp_path: Path) -> None:
    for version in ("9", "10", "2"):
        write_package(tmp_path / version, version=version)
    assert [m.version for m in scanned(tmp_path).manifests] == ["10", "9", "2"]


def test_versions_that_are_hashes_are_ordered_by_their_sequence(tmp_path: Path) -> None:
    lineage = ["f00000000001", "c4269b3e7481", "0a1b2c3d4e5f", "9f0000000000", "12ab34cd56ef"]
    for sequence, version in enumerate(lineage):
        parent = {"parent": lineage[sequence - 1]} if sequence else {}
        write_package(tmp_path / version, version=version, sequence=sequence, **parent)
    write_package(tmp_path / "other", name="other", version="1", sequence=9)
    catalogue = scanned(tmp_path)
    assert [m.version for m in catalogue.manifests] == ["1", *reversed(lineage)]


def test_the_order_of_versions_with_one_sequence_does_not_depend_on_folders(tmp_path: Path) -> None:
    for folder, version in zip("abc", ("0a1b2c3d4e5f", "f00000000001", "9f0000000000"), strict=True):
        write_package(tmp_path / "one" / folder, version=version, sequence=3)
    for folder, version in zip("abc", ("9f0000000000", "0a1b2c3d4e5f", "f00000000001"), strict=True):
        write_package(tmp_path / "two" / folder, version=version, sequence=3)
    assert [m.version for m in scanned(tmp_path / "one").manifests] == [
        m.version for m in scanned(tmp_path / "two").manifests
    ]


def test_an_adapter_without_a_graph_takes_the_one_beside_it(tmp_path: Path) -> None:
    graph, other = {"model.onnx": b"the graph"}, {"model.onnx": b"one more!"}
    write_package(tmp_path / "a-other", name="other", files=other)
    folder = write_package(
        tmp_path / "math", name="math", version="2", files={**graph, "adapter.safetensors": b"A and B"}
    )
    (folder / "model.onnx").unlink()
    catalogue = scanned(tmp_path)
    assert [m.name for m in catalogue.manifests] == ["other"]
    assert "model.onnx" in str(catalogue.refused[folder])
    write_package(tmp_path / "general", name="general", files=graph)
    assert catalogue.rescan()
    assert [m.name for m in catalogue.manifests] == ["general", "math", "other"]
    files = {file.name: file.sha256 for file in catalogue.manifests[1].files}
    assert set(files) == {"manifest.json", "model.onnx", "tokenizer.json", "adapter.safetensors"}
    with catalogue.open(files["model.onnx"], 0) as reader:
        assert reader.read() == b"the graph"
    write_package(tmp_path / "general", name="general", version="3", files={"model.onnx": b"a new one"})
    assert catalogue.rescan()
    assert [m.name for m in catalogue.manifests] == ["general", "other"], "its graph is gone"


def test_a_plain_package_takes_nothing_from_beside_it(tmp_path: Path) -> None:
    write_package(tmp_path / "general", name="general", files={"model.onnx": b"the graph"})
    folder = write_package(tmp_path / "math", name="math", files={"model.onnx": b"the graph"})
    (folder / "model.onnx").unlink()
    assert [m.name for m in scanned(tmp_path).manifests] == ["general"]


def test_a_removed_version_is_no_longer_served(tmp_path: Path) -> None:
    package = write_package(tmp_path / "d")
    catalogue = scanned(tmp_path)
    sha256 = catalogue.manifests[0].files[0].sha256
    package.rename(tmp_path / ".withdrawn")
    assert catalogue.rescan()
    with pytest.raises(NotFound):
        catalogue.open(sha256, 0)


def test_a_second_content_under_the_same_version_is_refused(tmp_path: Path) -> None:
    write_package(tmp_path / "a", files={"model.onnx": b"one"})
    write_package(tmp_path / "b", files={"model.onnx": b"two"})
    catalogue = scanned(tmp_path)
    assert len(catalogue.manifests) == 1
    assert list(catalogue.refused) == [tmp_path / "b"]


def test_a_missing_folder_is_empty_and_may_appear_later(tmp_path: Path) -> None:
    catalogue = scanned(tmp_path / "later")
    assert not catalogue.manifests
    write_package(tmp_path / "later" / "d")
    assert catalogue.rescan()

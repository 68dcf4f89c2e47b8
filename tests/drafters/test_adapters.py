"""Adapters of drafters: merged at load they are the matrices that they say, and what does not fit is refused."""

from __future__ import annotations

import errno
import json
import shutil
from dataclasses import replace

import numpy as np
import onnx
import pytest
from tiny_drafter import GREEDY, TABLE, WEIGHT, WIDTH, some_tokens, tiny_graph, write_package

from outrider.cloud.export.quantised import BLOCK, QuantisedMatrix
from outrider.drafters import adapters, find_package, load_package
from outrider.drafters.adapters import (
    merged_graph,
    product_norm,
    read_adapter,
    read_tensors,
    weights_of,
    write_adapter_package,
    write_tensors,
)
from outrider.drafters.onnx import OnnxDrafter
from outrider.proto.drafter_format import AdapterShape, LearnedFrom
from outrider.proto.errors import DataLoss, InvalidArgument, ModelRefused
from outrider.proto.plumbing.files import sha256_of

LEARNED = LearnedFrom(36_600, 8, {"sql": 30_000, "code": 6_600})
HEAD = "model.lm_head.weight"


def low_rank(shapes, rank=8, size=0.1, seed=0):
    """Random A and B, float16 numbers, with a product of `size` of a typical matrix of unit norm a row."""
    rng = np.random.default_rng(seed)
    matrices = {}
    for name, (rows, columns) in shapes.items():
        a = (rng.standard_normal((rank, columns)) / np.sqrt(columns)).astype(np.float16)
        b = (rng.standard_normal((rows, rank)) * size).astype(np.float16)
        matrices[name] = a, b
    return matrices


def sized(weights, relative=0.1, rank=8, seed=0):
    """Random A and B whose product has `relative` of the norm of each matrix."""
    matrices = low_rank({name: w.shape for name, w in weights.items()}, rank, 1.0, seed)
    return {
        name: (a, (b * (relative * np.linalg.norm(weights[name]) / product_norm(a, b))).astype(np.float16))
        for name, (a, b) in matrices.items()
    }


@pytest.fixture
def tiny(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    write_package(folder, tiny_graph())
    return folder


def write(parent, folder, matrices, **more):
    arguments = {"sequence": 1, "learned_from": LEARNED} | more
    return load_package(write_adapter_package(parent, folder, matrices, **arguments))


def logits(drafter, tokens):
    """All logits of a prefix, [len(tokens) - 1, vocabulary], as log q of every token."""
    state = drafter.open(GREEDY)
    state.extend(tokens)
    rows = np.empty((len(tokens), drafter.package.vocab_size), dtype=np.float32)
    state._answer(0, len(tokens), np.ones(1, dtype=np.int64), logits=rows)
    state.close()
    return rows


# --- what is merged ---


def test_a_merged_session_is_the_float_model_plus_ba_quantised_again(tmp_path):
    parent = find_package("general")
    weights = weights_of(parent)
    assert list(weights)[-1] == HEAD
    assert weights[HEAD].shape == (8192, 192)
    matrices = sized(weights)
    adapted = write(parent.folder, tmp_path / "adapted", matrices)

    model = onnx.load(parent.model_path)
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    for name, (a, b) in matrices.items():
        levels = onnx.numpy_helper.to_array(tensors[f"{name}.levels"]).astype(np.float32)
        scales = onnx.numpy_helper.to_array(tensors[f"{name}.scales"])
        plain = ((levels - 128) * scales[..., None]).reshape(len(levels), -1)
        wanted = QuantisedMatrix.of(plain + b.astype(np.float32) @ a.astype(np.float32))
        for tensor in wanted.initializers(name)[:2]:
            tensors[tensor.name].CopyFrom(tensor)
    by_hand = tmp_path / "by-hand"
    shutil.copytree(parent.folder, by_hand)
    onnx.save(model, by_hand / "model.onnx")
    expected = OnnxDrafter(replace(parent, folder=by_hand))

    prompt = some_tokens(24, vocab=8192)
    got, plain_text = logits(OnnxDrafter(adapted), prompt), logits(OnnxDrafter(parent), prompt)
    np.testing.assert_array_equal(got, logits(expected, prompt))
    assert np.abs(got - plain_text).max() > 0.1, "the adapter changes what is said"


def test_only_the_blocks_that_change_are_quantised_again(tmp_path):
    parent = find_package("general")
    name, before = next(iter(weights_of(parent).items()))
    a, b = np.zeros((8, before.shape[1]), dtype=np.float16), np.zeros((before.shape[0], 8), dtype=np.float16)
    a[0, 3], b[5, 0] = 1.0, 0.01
    adapted = write(parent.folder, tmp_path / "one", {name: (a, b)})
    (tmp_path / "one" / "merged.onnx").write_bytes(merged_graph(adapted))
    model = onnx.load(tmp_path / "one" / "merged.onnx")
    levels, scales = (
        next(onnx.numpy_helper.to_array(t) for t in model.graph.initializer if t.name == f"{name}.{part}")
        for part in ("levels", "scales")
    )
    after = ((levels.astype(np.float32) - 128) * scales.reshape(*levels.shape[:2], 1)).reshape(len(levels), -1)
    changed = np.argwhere(after != before)
    assert set(changed[:, 0]) == {5}
    assert changed[:, 1].max() < BLOCK
    assert after[5, 3] == pytest.approx(before[5, 3] + 0.01, abs=float(scales[5].flat[0]))


def test_a_float32_graph_gets_w_plus_ba_itself(tiny, tmp_path):
    weights = weights_of(load_package(tiny))
    assert list(weights) == ["weight"]
    np.testing.assert_array_equal(weights["weight"], WEIGHT.T)
    matrices = sized(weights, rank=2)
    adapted = OnnxDrafter(write(tiny, tmp_path / "adapted", matrices))
    a, b = (each.astype(np.float32) for each in matrices["weight"])
    tokens = some_tokens(9)
    rows = TABLE[list(tokens)] * (np.arange(9) % 5 + 1)[:, None]
    expected = 3 * np.sin(rows.cumsum(0).astype(np.float32) @ (WEIGHT + (b @ a).T))
    np.testing.assert_allclose(logits(adapted, tokens), expected, atol=2e-3)


# --- its package ---


def test_the_package_is_the_parents_with_one_more_file(tiny, tmp_path):
    parent = load_package(tiny)
    matrices = sized(weights_of(parent), rank=2)
    adapted = write(tiny, tmp_path / "v1", matrices)
    assert {file.name for file in adapted.files} == {"model.onnx", "tokenizer.json", "adapter.safetensors"}
    assert adapted.model_path.samefile(parent.model_path)
    assert (adapted.name, adapted.parent, adapted.sequence) == (parent.name, parent.version, 1)
    assert adapted.adapter == AdapterShape(2, ("weight",))
    assert adapted.learned_from == LEARNED
    assert (parent.parent, parent.sequence, parent.adapter, parent.learned_from) == ("", 0, None, None)
    for got, wanted in zip(read_adapter(adapted)["weight"], matrices["weight"], strict=True):
        np.testing.assert_array_equal(got, wanted.astype(np.float32))


def test_the_version_covers_the_adapter(tiny, tmp_path):
    weights = weights_of(load_package(tiny))
    one = write(tiny, tmp_path / "one", sized(weights, rank=2))
    same = write(tiny, tmp_path / "same", sized(weights, rank=2), sequence=4)
    other = write(tiny, tmp_path / "other", sized(weights, rank=2, seed=1))
    assert one.version == same.version
    assert len({load_package(tiny).version, one.version, other.version}) == 3


def test_an_update_of_an_update_adds_to_the_graph_and_not_to_the_adapter(tiny, tmp_path):
    weights = weights_of(load_package(tiny))
    first = write(tiny, tmp_path / "1", sized(weights, rank=2))
    np.testing.assert_array_equal(weights_of(first)["weight"], weights["weight"])
    matrices = sized(weights, rank=3, seed=1)
    second = write(first.folder, tmp_path / "2", matrices, sequence=2)
    from_the_root = write(tiny, tmp_path / "3", matrices, sequence=2)
    assert (second.parent, second.version) == (first.version, from_the_root.version)
    tokens = some_tokens(9)
    np.testing.assert_array_equal(
        logits(OnnxDrafter(second), tokens), logits(OnnxDrafter(from_the_root), tokens), strict=True
    )


def test_a_reader_that_knows_no_adapters_drafts_with_the_parent(tiny, tmp_path):
    adapted = write(tiny, tmp_path / "v1", sized(weights_of(load_package(tiny)), rank=2))
    manifest = json.loads((adapted.folder / "manifest.json").read_text())
    older = {key: manifest[key] for key in manifest if key not in ("parent", "sequence", "learned_from", "adapter")}
    (adapted.folder / "manifest.json").write_text(json.dumps(older))
    tokens = some_tokens(9)
    np.testing.assert_array_equal(
        logits(OnnxDrafter(load_package(adapted.folder)), tokens), logits(OnnxDrafter(load_package(tiny)), tokens)
    )


def test_a_graph_that_ships_with_the_wheel_need_not_lie_in_the_folder(tmp_path):
    parent = find_package("general")
    adapted = write(parent.folder, tmp_path / "1", sized(weights_of(parent)))
    before = logits(OnnxDrafter(adapted), some_tokens(5))
    for name in ("model.onnx", "tokenizer.json"):
        (adapted.folder / name).unlink()
    assert sum(path.stat().st_size for path in adapted.folder.iterdir()) < 350_000
    again = load_package(adapted.folder)
    assert again.version == adapted.version
    np.testing.assert_array_equal(logits(OnnxDrafter(again), some_tokens(5)), before)


def test_nothing_of_a_package_that_cannot_be_written_is_left(tiny, tmp_path, monkeypatch):
    with pytest.raises(ModelRefused):
        write(tiny, tmp_path / "out" / "v1", {"weight": (np.full((2, WIDTH), np.nan), np.ones((61, 2)))})
    assert not (tmp_path / "out").exists()

    def full(path, tensors):
        assert path.parent.name.startswith("."), "a catalogue passes over hidden folders"
        raise OSError(errno.ENOSPC, "no space left on device")

    matrices = sized(weights_of(load_package(tiny)), rank=2)
    with monkeypatch.context() as patched:
        patched.setattr(adapters, "write_tensors", full)
        with pytest.raises(OSError, match="no space"):
            write(tiny, tmp_path / "out" / "v1", matrices)
    assert not list((tmp_path / "out").iterdir())
    written = write(tiny, tmp_path / "out" / "v1", sized(weights_of(load_package(tiny)), rank=2))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["v1"]
    with pytest.raises(InvalidArgument, match="is there already") as refused:
        write(tiny, written.folder, sized(weights_of(load_package(tiny)), rank=2))
    assert refused.value.field == "folder"


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("sequence", {"sequence": 0}),
        ("sequence", {"sequence": -1}),
        ("matrices", {"matrices": {}}),
        ("matrices", {"matrices": {"weight": (np.ones((2, 9)), np.ones((9, 2))), "b": (np.ones((3, 9)), None)}}),
    ],
)
def test_a_writer_names_the_argument_that_is_no_good(tiny, tmp_path, field, arguments):
    given = {"matrices": sized(weights_of(load_package(tiny)), rank=2)} | arguments
    with pytest.raises(InvalidArgument) as refused:
        write(tiny, tmp_path / "v1", given.pop("matrices"), **given)
    assert refused.value.field == field
    assert not (tmp_path / "v1").exists()


# --- refusals ---

BAD = {
    "changes a matrix that the graph does not have": lambda a, b: {"wait": (a, b)},
    r"the graph wants \[rank, 12\] and \[61, rank\]": lambda a, b: {"weight": (a[:, :-1], b)},
    r"has the shapes \[2, 12\] and \[61, 1\]": lambda a, b: {"weight": (a, b[:, :1])},
    "not finite": lambda a, b: {"weight": (a, np.where(b == b.max(), np.inf, b))},
    r"more than 0\.5 of the matrix's": lambda a, b: {"weight": (a, b * 6)},
}


@pytest.mark.parametrize("complaint", BAD)
def test_what_does_not_fit_is_refused_by_writer_and_reader(tiny, tmp_path, complaint):
    a, b = sized(weights_of(load_package(tiny)), rank=2)["weight"]
    bad = BAD[complaint](a, b)
    with pytest.raises(ModelRefused, match=complaint):
        write(tiny, tmp_path / "never", bad)
    adapted = write(tiny, tmp_path / "v1", {"weight": (a, b)})
    stored = {f"{n}.{s}": each.astype(np.float16) for n, ab in bad.items() for s, each in zip("AB", ab, strict=True)}
    with pytest.raises(ModelRefused, match=complaint):
        OnnxDrafter(tampered(adapted, stored, targets=list(bad)))


def tampered(package, tensors, **adapter):
    """The package with another adapter file, whose hash the manifest promises."""
    path = package.folder / "adapter.safetensors"
    write_tensors(path, tensors)
    manifest = json.loads((package.folder / "manifest.json").read_text())
    manifest["files"][path.name] = {"sha256": sha256_of(path), "bytes": path.stat().st_size}
    manifest["adapter"] |= adapter
    (package.folder / "manifest.json").write_text(json.dumps(manifest))
    return load_package(package.folder)


def test_the_half_of_the_norm_is_the_limit(tiny, tmp_path):
    weights = weights_of(load_package(tiny))
    write(tiny, tmp_path / "v1", sized(weights, 0.49, rank=2))
    with pytest.raises(ModelRefused, match="has the norm"):
        write(tiny, tmp_path / "v2", sized(weights, 0.51, rank=2))
    a, b = sized(weights, 0.3)["weight"]
    exact = np.linalg.norm(b.astype(np.float64) @ a.astype(np.float64))
    assert product_norm(a, b) == pytest.approx(exact, rel=1e-9)


def test_the_file_must_be_what_hash_and_manifest_say(tiny, tmp_path):
    matrices = sized(weights_of(load_package(tiny)), rank=2)
    adapted = write(tiny, tmp_path / "v1", matrices)
    a, b = matrices["weight"]
    with pytest.raises(ModelRefused, match=r"differ in 'weight\.B'"):
        OnnxDrafter(tampered(adapted, {"weight.A": a}))
    with pytest.raises(ModelRefused, match="has not the rank 4"):
        OnnxDrafter(tampered(adapted, {"weight.A": a, "weight.B": b}, rank=4))
    (adapted.folder / "adapter.safetensors").write_bytes(b"?" * 40)
    with pytest.raises(DataLoss, match=r"adapter\.safetensors"):
        load_package(adapted.folder)
    (adapted.folder / "adapter.safetensors").unlink()
    with pytest.raises(DataLoss, match=r"adapter\.safetensors is missing"):
        load_package(adapted.folder)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"parent": "v/1"}, "manifest.parent"),
        ({"sequence": -1}, "manifest.sequence"),
        ({"sequence": True}, "manifest.sequence"),
        ({"learned_from": {"positions": 1, "keys": 0}}, "manifest.learned_from.classes"),
        ({"learned_from": {"positions": -1, "keys": 0, "classes": {}}}, "manifest.learned_from.positions"),
        ({"adapter": {"rank": 0, "targets": ["weight"]}}, "manifest.adapter.rank"),
        ({"adapter": {"rank": 2, "targets": []}}, "manifest.adapter.targets"),
        ({"adapter": {"rank": 2, "targets": ["weight", "weight"]}}, "manifest.adapter.targets"),
        ({"adapter": {"rank": 2, "targets": "weight"}}, "manifest.adapter.targets"),
    ],
)
def test_a_malformed_entry_is_named(tiny, tmp_path, change, field):
    adapted = write(tiny, tmp_path / "v1", sized(weights_of(load_package(tiny)), rank=2))
    manifest = json.loads((adapted.folder / "manifest.json").read_text()) | change
    (adapted.folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InvalidArgument) as refused:
        load_package(adapted.folder)
    assert refused.value.field == field


def test_a_manifest_with_an_adapter_lists_its_file(tiny):
    manifest = json.loads((tiny / "manifest.json").read_text()) | {"adapter": {"rank": 1, "targets": ["weight"]}}
    (tiny / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InvalidArgument, match=r"adapter\.safetensors") as refused:
        load_package(tiny)
    assert refused.value.field == "manifest.files"


# --- the file ---


def test_tensors_come_back_and_safetensors_reads_them(tmp_path):
    from safetensors.numpy import load_file, save_file

    tensors = {"x.A": np.arange(6, dtype=np.float16).reshape(2, 3), "empty": np.zeros((0, 4), dtype=np.float32)}
    write_tensors(tmp_path / "t", tensors)
    save_file(tensors, tmp_path / "theirs", metadata={"format": "np"})
    for read in (read_tensors(tmp_path / "t"), load_file(tmp_path / "t"), read_tensors(tmp_path / "theirs")):
        assert set(read) == set(tensors)
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(read[name], tensor)


def header(**entry):
    encoded = json.dumps({"x": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]} | entry}).encode()
    return len(encoded).to_bytes(8, "little") + encoded + bytes(4)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 40,
        (10**6).to_bytes(8, "little") + b"{}",
        (4).to_bytes(8, "little") + b"[1]{",
        (2).to_bytes(8, "little") + b"[]",
        header(dtype="I64"),
        header(dtype=["F16"]),
        header(shape=[3]),
        header(shape=[-2]),
        header(shape=[2.0]),
        header(data_offsets=[0, 400], shape=[200]),
        header(data_offsets=[-4, 0]),
        header(data_offsets=[0]),
        header(data_offsets="04"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path, content):
    (tmp_path / "adapter").write_bytes(content)
    with pytest.raises(ModelRefused, match="adapter is no file of float16 or float32 tensors"):
        read_tensors(tmp_path / "adapter")

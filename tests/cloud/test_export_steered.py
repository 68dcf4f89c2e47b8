"""Export of steered drafters: without a vector the unsteered drafter, with a vector what torch computes."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import GPT2Config, GPT2LMHeadModel, Phi3Config, Phi3ForCausalLM, PreTrainedModel

from outrider.cloud.export import ExportMismatch, export_drafter
from outrider.cloud.export import package_writing as publishing
from outrider.cloud.export.check import logits_by_torch, open_session, run_in_chunks
from outrider.cloud.export.graph import write_graph
from outrider.cloud.export.model import load
from outrider.cloud.export.quantised import quantise
from outrider.cloud.export.steered import biases_by, load_steering, steered_by, steering_of
from outrider.cloud.target.projection import Projection, projection_id
from outrider.cloud.testing import tiny_llama
from outrider.deploy.cli import main
from outrider.proto.drafter_format import CacheShape
from outrider.proto.errors import InvalidArgument, NotFound

LAYERS, MLP, RANK, VOCABULARY, CANDIDATES = 2, 72, 8, 96, 8
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": MLP, "max_position_embeddings": 32,
    "initializer_range": 0.15, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
SHAPE = CacheShape(layers=LAYERS, kv_heads=2, head_dim=16)
NAMES = ["steering.0", "steering.1"]


def save_drafter(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[])).save(str(folder / "tokenizer.json"))
    return folder


def save_steering(folder: Path, *, layers: int = LAYERS, mlp: int = MLP, rank: int = RANK, scale: float = 1.0) -> None:
    """Steering whose biases are `scale` times about as large as the up projections of the models here."""
    generator = torch.Generator().manual_seed(5)
    matrices = {
        f"layers.{layer}.weight": 8 * scale * torch.randn(mlp, rank, generator=generator) for layer in range(layers)
    }
    save_file(matrices, folder / "steering.safetensors")
    torch.manual_seed(6)
    Projection((1, 2, 3), hidden=16, rank=rank, target="big").save(folder / "projection.safetensors")


def with_steering(folder: Path, copy: Path, scale: float) -> Path:
    shutil.copytree(folder, copy)
    save_steering(copy, scale=scale)
    return copy


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama") / "source"
    save_drafter(tiny_llama(seed=0, **SIZES, tie_word_embeddings=True), folder)
    (folder / "training.json").write_text('{"steps": 3, "steering_gain": {"8": 0.08, "1": 0.125}}')
    save_steering(folder)
    return folder


@pytest.fixture(scope="module")
def package(llama: Path) -> Path:
    """Export the llama, and keep its unsteered export beside the package."""
    kept = llama.with_name("unsteered.onnx")

    def write_and_keep_graph(model: Any, architecture: Any, candidates: int, graph: Path, *, mlp: int) -> None:
        write_graph(model, architecture, candidates, graph, mlp=mlp)
        if not mlp:
            shutil.copyfile(graph, kept)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(publishing, "write_graph", write_and_keep_graph)
        export_drafter(llama, llama.with_name("package"), name="tiny", target_id="big", candidates=CANDIDATES)
    return llama.with_name("package")


@pytest.fixture
def traced(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports of the llama find its graphs written already, which saves tracing it again."""

    def write_same_graph(model: Any, architecture: Any, candidates: int, graph: Path, *, mlp: int) -> None:
        shutil.copyfile(package / "model.onnx" if mlp else package.with_name("unsteered.onnx"), graph)

    monkeypatch.setattr(publishing, "write_graph", write_same_graph)


def fixed_text() -> np.ndarray:
    return np.random.default_rng(7).integers(0, VOCABULARY, 24)


CHUNKS = [7, 1, 1, 1, 9, 1, 4]


def steering_vectors() -> np.ndarray:
    """float32 [chunks, RANK]; the first chunk is a prompt, which is not steered."""
    chosen = 0.1 * np.random.default_rng(8).standard_normal((len(CHUNKS), RANK)).astype(np.float32)
    chosen[0] = 0
    return chosen


def biases_by_graph(package: Path) -> list[dict[str, np.ndarray]]:
    session = open_session(package / "steering.onnx")
    names = [output.name for output in session.get_outputs()]
    return [dict(zip(names, session.run(names, {"vector": vector}), strict=True)) for vector in steering_vectors()]


def steered_logits_by_torch(source: Path) -> np.ndarray:
    by_position = torch.from_numpy(steering_vectors()).repeat_interleave(torch.tensor(CHUNKS), dim=0)
    model = load(source)
    with steered_by(model, biases_by(load_steering(source), by_position)):
        return logits_by_torch(model, fixed_text())


def steered_logits_by_package(package: Path, shape: CacheShape) -> np.ndarray:
    session = open_session(package / "model.onnx")
    return run_in_chunks(session, fixed_text(), CHUNKS, shape, CANDIDATES, biases_by_graph(package))["logits"]


def test_vectors_that_change_between_chunks_give_the_logits_of_torch(package: Path, llama: Path) -> None:
    expected = steered_logits_by_torch(llama)
    np.testing.assert_allclose(steered_logits_by_package(package, SHAPE), expected, atol=1e-4 * expected.std())
    unsteered = logits_by_torch(load(llama), fixed_text())
    np.testing.assert_allclose(expected[:7], unsteered[:7], atol=1e-5)
    assert np.abs(expected[7:] - unsteered[7:]).max() > 0.5 * unsteered.std()  # the vectors had an effect


def test_biases_of_zero_give_the_bits_of_the_unsteered_export(package: Path) -> None:
    nothing = [dict.fromkeys(NAMES, np.zeros(MLP, dtype=np.float32))] * len(CHUNKS)
    found = run_in_chunks(open_session(package / "model.onnx"), fixed_text(), CHUNKS, SHAPE, CANDIDATES, nothing)
    wanted = run_in_chunks(open_session(package.with_name("unsteered.onnx")), fixed_text(), CHUNKS, SHAPE, CANDIDATES)
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in wanted.items()
    }


def operators_run(graph: Path, scratch: Path) -> Counter[str]:
    """Node types of the graph as ONNX Runtime runs it, optimised."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(scratch / "optimised.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(scratch / "optimised.onnx").graph.node)


def test_steering_costs_one_node_a_layer_and_with_eight_bit_weights_none(package: Path, tmp_path: Path) -> None:
    graphs = [package / "model.onnx", package.with_name("unsteered.onnx")]
    steered, unsteered = (operators_run(graph, tmp_path) for graph in graphs)
    assert steered - unsteered == Counter({"Add": LAYERS})
    assert not unsteered - steered
    quantised = [Path(shutil.copyfile(graph, tmp_path / str(index))) for index, graph in enumerate(graphs)]
    for graph in quantised:
        quantise(graph)
    steered, unsteered = (operators_run(graph, tmp_path) for graph in quantised)
    assert unsteered["MatMulNBits"] == 5 * LAYERS + 1
    assert steered == unsteered


@pytest.mark.usefixtures("traced")
def test_a_folder_without_steering_gives_a_package_that_knows_nothing_of_it(package, llama, tmp_path) -> None:
    bare, out = tmp_path / "bare", tmp_path / "out"
    shutil.copytree(llama, bare, ignore=shutil.ignore_patterns("steering.*", "projection.*"))
    manifest = export_drafter(bare, out, name="tiny", target_id="big", candidates=CANDIDATES)
    assert {path.name for path in out.iterdir()} == {"model.onnx", "tokenizer.json", "manifest.json"}
    assert (out / "model.onnx").read_bytes() == package.with_name("unsteered.onnx").read_bytes()
    assert b"steering" not in (out / "model.onnx").read_bytes()
    assert "steering" not in manifest
    assert "steered" not in manifest["check"]
    assert not [name for name in manifest["inputs"] if "steering" in name]
    assert manifest["version"] == manifest["files"]["model.onnx"]["sha256"][:12]


def test_the_manifest_describes_both_graphs_and_names_the_projection(package: Path, llama: Path) -> None:
    manifest = json.loads((package / "manifest.json").read_text())
    assert {path.name for path in package.iterdir()} == {*manifest["files"], "manifest.json"}
    assert set(manifest["files"]) == {"model.onnx", "steering.onnx", "tokenizer.json"}
    for name, file in manifest["files"].items():
        content = (package / name).read_bytes()
        assert (file["sha256"], file["bytes"]) == (hashlib.sha256(content).hexdigest(), len(content))
    assert manifest["steering"] == {
        "rank": RANK,
        "mlp": MLP,
        "projection": projection_id(llama / "projection.safetensors"),
        "gain": {"1": 0.125, "8": 0.08},
    }
    assert list(manifest["steering"]["gain"]) == ["1", "8"]
    assert manifest["training"] == {"steps": 3}
    assert manifest["check"]["steered"]["agreement_beyond_ties"] == 1.0
    session = open_session(package / "model.onnx")
    assert [value.name for value in session.get_inputs()] == list(manifest["inputs"])
    biases = [(value.name, value.type, value.shape) for value in session.get_inputs()[-LAYERS:]]
    assert biases == [(name, "tensor(float)", [MLP]) for name in NAMES]
    steering = open_session(package / "steering.onnx")
    assert [(value.name, value.type, value.shape) for value in steering.get_inputs()] == [
        ("vector", "tensor(float)", [RANK])
    ]
    assert [(value.name, value.type, value.shape) for value in steering.get_outputs()] == biases


@pytest.mark.usefixtures("traced")
def test_another_u_or_another_projection_is_another_version(package: Path, llama: Path, tmp_path: Path) -> None:
    weaker = with_steering(llama, tmp_path / "weaker", scale=0.5)
    reprojected = tmp_path / "reprojected"
    shutil.copytree(llama, reprojected)
    Projection((1, 2, 3), hidden=16, rank=RANK, target="big").save(reprojected / "projection.safetensors")
    manifests = [
        export_drafter(source, tmp_path / "out", name="tiny", target_id="big", candidates=CANDIDATES)
        for source in (llama, weaker, reprojected)
    ]
    assert manifests[0]["version"] == json.loads((package / "manifest.json").read_text())["version"]
    assert len({manifest["version"] for manifest in manifests}) == 3
    assert len({manifest["files"]["model.onnx"]["sha256"] for manifest in manifests}) == 1


@pytest.mark.usefixtures("traced")
def test_the_command_says_which_projection_the_verifier_needs(llama, tmp_path, capsys) -> None:
    options = f"--name tiny --precision int8 --candidates {CANDIDATES} --target big"
    assert main(["export", str(llama), str(tmp_path / "out"), *options.split()]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert f"--steering {llama / 'projection.safetensors'}" in said
    assert projection_id(llama / "projection.safetensors") in said


def swap_layers(graph: onnx.GraphProto) -> None:
    swapped = dict(zip(NAMES, reversed(NAMES), strict=True))
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = swapped.get(name, name)


def steered_sum(graph: onnx.GraphProto) -> tuple[onnx.NodeProto, str]:
    """The first Add of a bias, and the product that it is added to."""
    node = next(node for node in graph.node if node.op_type == "Add" and set(node.input) & set(NAMES))
    return node, next(name for name in node.input if name not in NAMES)


def add_after_the_gate(graph: onnx.GraphProto) -> None:
    add, product = steered_sum(graph)
    gated = next(node for node in graph.node if add.output[0] in node.input)
    bias = next(name for name in add.input if name in NAMES)
    late = onnx.helper.make_node("Add", ["gated", bias], [gated.output[0]])
    gated.input[list(gated.input).index(add.output[0])] = product
    gated.output[0] = "gated"
    nodes = [node for node in graph.node if node.output[0] != add.output[0]]
    nodes.insert(1 + [node.output[0] for node in nodes].index("gated"), late)
    del graph.node[:]
    graph.node.extend(nodes)


def ignore_a_bias(graph: onnx.GraphProto) -> None:
    add, product = steered_sum(graph)
    add.CopyFrom(onnx.helper.make_node("Identity", [product], list(add.output)))


def nudge_a_weight(graph: onnx.GraphProto) -> None:
    """Change a weight by less than the comparison with torch can see."""
    tensor = next(tensor for tensor in graph.initializer if list(tensor.dims) == [64, MLP])
    values = onnx.numpy_helper.to_array(tensor).copy()
    values[3, 3] *= 1 + 1e-6
    tensor.CopyFrom(onnx.numpy_helper.from_array(values, tensor.name))


def change_u(graph: onnx.GraphProto) -> None:
    values = onnx.numpy_helper.to_array(graph.initializer[1]).copy()
    values[2, 5] += 0.01 * np.abs(values).max()
    graph.initializer[1].CopyFrom(onnx.numpy_helper.from_array(values, graph.initializer[1].name))


def swap_outputs(graph: onnx.GraphProto) -> None:
    for node, name in zip(graph.node, reversed(NAMES), strict=True):
        node.output[0] = name


Corruption = Callable[[onnx.GraphProto], None]


def corrupting(write: Callable[..., None], corrupt: Corruption) -> Callable[..., None]:
    """`write`, whose last argument is the file, followed by the damage where the graph is one that steers."""

    def write_corrupted(*arguments: object, **options: int) -> None:
        write(*arguments, **options)
        if not options.get("mlp", 1):
            return
        graph = arguments[-1]
        assert isinstance(graph, Path)
        model = onnx.load(graph)
        corrupt(model.graph)
        onnx.save(model, graph)

    return write_corrupted


@pytest.mark.parametrize(
    ("written_by", "corrupt", "precision", "complaint"),
    [
        ("write_graph", swap_layers, "float32", "with random biases"),
        ("write_graph", swap_layers, "int8", "with random biases"),
        ("write_graph", add_after_the_gate, "float32", "with random biases"),
        ("write_graph", add_after_the_gate, "int8", "with random biases"),
        ("write_graph", ignore_a_bias, "float32", "with random biases"),
        ("write_graph", nudge_a_weight, "float32", "with steering biases of zero"),
        ("write_steering_graph", change_u, "float32", "does not give U c"),
        ("write_steering_graph", change_u, "int8", "does not give U c"),
        ("write_steering_graph", swap_outputs, "float32", "does not give U c"),
    ],
)
@pytest.mark.usefixtures("traced")
def test_graphs_that_steer_otherwise_are_refused_and_leave_nothing(
    llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    written_by: str,
    corrupt: Corruption,
    precision: str,
    complaint: str,
) -> None:
    monkeypatch.setattr(publishing, written_by, corrupting(getattr(publishing, written_by), corrupt))
    with pytest.raises(ExportMismatch, match=complaint):
        export_drafter(
            llama, tmp_path / "out", name="tiny", target_id="big", precision=precision, candidates=CANDIDATES
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("traced")
def test_wrong_wiring_shows_while_u_is_still_zero(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    untrained = with_steering(llama, tmp_path / "untrained", scale=0.0)
    out = tmp_path / "out"
    export_drafter(untrained, out, name="tiny", target_id="big", candidates=CANDIDATES)
    shutil.rmtree(out)
    monkeypatch.setattr(publishing, "write_graph", corrupting(publishing.write_graph, swap_layers))
    with pytest.raises(ExportMismatch):
        export_drafter(untrained, out, name="tiny", target_id="big", candidates=CANDIDATES)
    assert not out.exists()


def save_tensors(**tensors: torch.Tensor) -> Callable[[Path], None]:
    return lambda folder: save_file(
        {name.replace("_", "."): tensor for name, tensor in tensors.items()}, folder / "steering.safetensors"
    )


WHOLE = torch.zeros(MLP, RANK)
BROKEN = WHOLE.clone().index_put((torch.tensor(1), torch.tensor(2)), torch.tensor(torch.nan))


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda it: (it / "projection.safetensors").unlink(), r"steering\.safetensors but no projection\.safetensors"),
        (lambda it: (it / "steering.safetensors").unlink(), r"projection\.safetensors but no steering\.safetensors"),
        (
            lambda it: Projection((1, 2, 3), hidden=16, rank=RANK + 1).save(it / "projection.safetensors"),
            "takes 8 numbers .* makes 9",
        ),
        (lambda it: save_steering(it, mlp=MLP + 1), "2 layers 73 wide, the model has 2 layers 72 wide"),
        (lambda it: save_steering(it, layers=LAYERS + 1), "3 layers 72 wide, the model has 2 layers 72 wide"),
        (save_tensors(layers_1_weight=WHOLE), r"has layers\.1\.weight where layers\.0\.weight"),
        (
            save_tensors(layers_0_weight=WHOLE, layers_1_weight=torch.zeros(MLP)),
            r"layers\.1\.weight has the shape \[72\]",
        ),
        (
            save_tensors(layers_0_weight=BROKEN, layers_1_weight=BROKEN.clone()),
            r"layers\.0\.weight has numbers that are not finite",
        ),
        (lambda it: (it / "steering.safetensors").write_bytes(b"no tensors"), "no safetensors file"),
        (
            lambda it: (it / "training.json").write_text('{"steering_gain": {"young": 0.1}}'),
            "steering_gain must be like",
        ),
    ],
)
def test_steering_that_does_not_fit_is_refused(llama, tmp_path, spoil, complaint) -> None:
    source = tmp_path / "source"
    shutil.copytree(llama, source)
    spoil(source)
    with pytest.raises(InvalidArgument, match=complaint) as refused:
        export_drafter(source, tmp_path / "out", name="tiny", target_id="big", candidates=CANDIDATES)
    assert refused.value.field == "source_folder"
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def fused() -> PreTrainedModel:
    return Phi3ForCausalLM(Phi3Config(**SIZES))


def ungated() -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_embd=64, n_layer=LAYERS, n_head=4, n_inner=MLP, n_positions=64)
    )


@pytest.mark.parametrize(("make", "found"), [(fused, "has a gate_up_proj"), (ungated, "has none")])
def test_a_model_without_a_gated_up_projection_of_its_own_is_refused(tmp_path, make, found) -> None:
    source = save_drafter(make(), tmp_path / "source")
    save_steering(source)
    with pytest.raises(InvalidArgument, match=found) as refused:
        export_drafter(source, tmp_path / "out", name="tiny", target_id="big", candidates=CANDIDATES)
    assert refused.value.field == "source_folder"


def test_in_torch_a_bias_of_zero_changes_no_bit_and_nothing_stays_behind(llama: Path) -> None:
    model = load(llama)
    plain = logits_by_torch(model, fixed_text())
    with steered_by(model, [torch.zeros(MLP)] * LAYERS):
        assert logits_by_torch(model, fixed_text()).tobytes() == plain.tobytes()
    with steered_by(model, [torch.ones(MLP)] * LAYERS):
        assert logits_by_torch(model, fixed_text()).tobytes() != plain.tobytes()
    assert logits_by_torch(model, fixed_text()).tobytes() == plain.tobytes()
    with pytest.raises(RuntimeError, match="size"), steered_by(model, [torch.ones(MLP + 1)] * LAYERS):
        logits_by_torch(model, fixed_text())
    assert logits_by_torch(model, fixed_text()).tobytes() == plain.tobytes()
    with pytest.raises(ValueError, match="shorter"), steered_by(model, [torch.ones(MLP)]):
        pass
    assert logits_by_torch(model, fixed_text()).tobytes() == plain.tobytes()


def test_a_folder_without_steering_says_so(tmp_path: Path) -> None:
    assert steering_of(tmp_path) is None
    with pytest.raises(NotFound, match="train steer"):
        load_steering(tmp_path)

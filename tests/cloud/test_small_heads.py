"""Small output heads: they begin as a part of the whole head, train, steer, and export as what torch computes."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from random_models import BYTE_LLAMA, save_with_byte_tokenizer, teacher_of
from safetensors.torch import load_file, save_file

from outrider.cloud.export import export_drafter
from outrider.cloud.export import package_writing as publishing
from outrider.cloud.export.check import open_session, run_in_chunks
from outrider.cloud.export.model import load
from outrider.cloud.export.parent import load_parent
from outrider.cloud.export.quantised import quantise
from outrider.cloud.export.steered import STEERING_FILE, biases_by, load_steering, steered_by
from outrider.cloud.learning.adapted import AdaptedDrafter
from outrider.cloud.models.family_index import load_causal_lm
from outrider.cloud.models.heads import MISSING_NATS, SmallHead, reduce_vocabulary
from outrider.cloud.testing import tiny_llama
from outrider.cloud.training.drafter_training import most_frequent, train_drafter
from outrider.cloud.training.steer import train_steering
from outrider.cloud.training.training_settings import DrafterShape, DrafterTraining, SteerTraining
from outrider.drafters import find_package
from outrider.drafters.adapters import write_adapter_package
from outrider.drafters.onnx import OnnxDrafter
from outrider.drafters.proposals import ProposalRule
from outrider.proto.drafter_format import CacheShape, LearnedFrom
from outrider.proto.errors import InvalidArgument, ModelRefused
from outrider.proto.noise import gumbel
from outrider.proto.types import Sampling, token_ids

VOCAB, HIDDEN = BYTE_LLAMA["vocab_size"], BYTE_LLAMA["hidden_size"]
KEPT = torch.arange(0, VOCAB, 3)


def tied_llama() -> Any:
    return tiny_llama(seed=0, **BYTE_LLAMA, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_llama(seed=4, **BYTE_LLAMA | {"num_hidden_layers": 3}, tie_word_embeddings=True)
    return save_with_byte_tokenizer(model, tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def teacher(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    texts = (f"line {i} of {i * i} lines; " * 3 for i in range(200))
    return teacher_of(target, tmp_path_factory.mktemp("teacher"), texts)


@pytest.fixture
def config(target: Path, teacher: Path, tmp_path: Path) -> DrafterTraining:
    return DrafterTraining(
        target=str(target),
        teacher=teacher,
        output=tmp_path / "out",
        shape=DrafterShape(hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp=24, context=64),
        steps=4,
        block=32,
        warm_up_steps=1,
        vocabulary=60,
    )


def test_a_small_vocabulary_has_the_whole_heads_logits_and_no_other_tokens() -> None:
    model, read = tied_llama(), KEPT[2:20][None]
    whole = model(read).logits[0].detach()
    reduce_vocabulary(model, KEPT)
    small = model(read).logits[0].detach()
    torch.testing.assert_close(small[:, KEPT], whole[:, KEPT])
    log_q, of_kept = small.log_softmax(-1), whole[:, KEPT].log_softmax(-1)
    torch.testing.assert_close(log_q[:, KEPT], of_kept, atol=1e-4, rtol=0)
    missing = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, KEPT, False)
    torch.testing.assert_close(log_q[:, missing], torch.full_like(log_q[:, missing], -MISSING_NATS), atol=1e-4, rtol=0)


def test_tokens_that_a_drafter_does_not_know_are_read_as_the_nearest_that_it_knows() -> None:
    model = tied_llama()
    whole = model.lm_head.weight.detach().clone()
    reduce_vocabulary(model, KEPT)
    unit = torch.nn.functional.normalize(whole, dim=-1)
    nearest = KEPT[(unit @ unit[KEPT].T).argmax(-1)]
    assert torch.equal(model.get_input_embeddings()(torch.arange(VOCAB)), whole[nearest])
    assert torch.equal(nearest[KEPT], KEPT)
    once, fewer = model.get_input_embeddings()(torch.arange(VOCAB)), KEPT[::2]
    reduce_vocabulary(model, fewer)
    assert torch.equal(model.get_input_embeddings()(fewer), once[fewer])
    assert model.lm_head.up.weight.shape == (len(fewer), HIDDEN)


def test_a_drafter_whose_head_is_not_its_embedding_keeps_its_vocabulary() -> None:
    with pytest.raises(InvalidArgument, match="head is not its embedding") as refused:
        reduce_vocabulary(tiny_llama(seed=0, **BYTE_LLAMA, tie_word_embeddings=False), KEPT)
    assert refused.value.field == "vocabulary"


def test_kept_tokens_are_ends_of_texts_then_the_most_read_then_the_lowest() -> None:
    tokens = np.array([7] * 9 + [5] * 3 + [4] * 6, dtype=np.uint32)
    assert most_frequent(tokens, 10, 3, {9}).tolist() == [4, 7, 9]
    assert most_frequent(tokens, 10, 6, {9}).tolist() == [0, 1, 4, 5, 7, 9]
    among = np.array([2, 3, 5, 8, 9])
    assert most_frequent(tokens, 10, 4, {9}, among=among).tolist() == [2, 3, 5, 9]


def test_a_saved_small_head_is_loaded_again_and_other_tensors_are_refused(tmp_path: Path) -> None:
    folder = save_with_byte_tokenizer(trimmed_llama(), tmp_path / "saved")
    model, saved = load_causal_lm(folder, "no model", field="start"), load_file(folder / "model.safetensors")
    assert isinstance(model.lm_head, SmallHead)
    for name, tensor in saved.items():
        assert torch.equal(model.state_dict()[name], tensor)
    save_file({n: t for n, t in saved.items() if "lm_head" not in n}, folder / "model.safetensors")
    with pytest.raises(InvalidArgument, match="other tensors"):
        load_causal_lm(folder, "no model", field="start")


def test_a_drafter_trains_with_a_small_head(config: DrafterTraining) -> None:
    whole = train_drafter(config)
    written = json.loads((whole.folder / "config.json").read_text())
    assert written["outrider_head"] == {"tokens": 60}
    begun = train_drafter(replace(config, steps=1, output=config.output.with_name("begun")))
    weights = load_file(whole.folder / "model.safetensors")
    assert not torch.equal(
        weights["lm_head.up.weight"], load_file(begun.folder / "model.safetensors")["lm_head.up.weight"]
    )


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of a drafter whose head is not its embedding."""
    folder = tmp_path_factory.mktemp("untied")
    model = tiny_llama(seed=0, **BYTE_LLAMA, tie_word_embeddings=False)
    source = save_with_byte_tokenizer(model, folder / "source")
    export_drafter(source, folder / "package", name="small", candidates=8, target_id="big")
    return folder / "package"


def error_of(graph: Path, exact: Path) -> float:
    """Mean error of a graph's logits, in standard deviations of those of the exact one."""
    tokens = np.random.default_rng(7).integers(0, VOCAB, 30)
    shape = CacheShape(layers=1, kv_heads=2, head_dim=16)
    logits, wanted = (
        run_in_chunks(open_session(file), tokens, [20, 1, 9], shape, 8)["logits"] for file in (graph, exact)
    )
    return float(np.abs(logits - wanted).mean() / wanted.std())


def test_in_eight_bits_an_embedding_that_is_no_head_shrinks_too(package: Path, tmp_path: Path) -> None:
    graph = tmp_path / "model.onnx"
    graph.write_bytes((package / "model.onnx").read_bytes())
    quantise(graph)
    tensors = onnx.load(graph).graph.initializer
    floats = [math.prod(t.dims) for t in tensors if t.data_type == onnx.TensorProto.FLOAT]
    levels = [math.prod(t.dims) for t in tensors if t.data_type == onnx.TensorProto.UINT8]
    assert levels.count(VOCAB * HIDDEN) == 2
    assert max(floats) < VOCAB * HIDDEN // 4
    assert 0 < error_of(graph, package / "model.onnx") < 0.05


@pytest.fixture(scope="module")
def trimmed_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trimmed")
    source = save_with_byte_tokenizer(trimmed_llama(), folder / "source")
    export_drafter(source, folder / "package", name="small", candidates=16, target_id="big")
    return folder / "package"


def test_an_exported_trimmed_head_proposes_and_scores_by_the_targets_tokens(trimmed_package: Path) -> None:
    model = trimmed_llama()
    manifest = json.loads((trimmed_package / "manifest.json").read_text())
    assert manifest["head"] == {"tokens": len(KEPT)}
    drafter = OnnxDrafter(find_package(trimmed_package))
    prefix = (0, 5, 9)
    logits = model(torch.tensor([prefix])).logits[0, -1].detach()
    for temperature in (0.0, 1.0):  # 8 candidates, and all 16 with noise
        sampling = Sampling(temperature=temperature, seed=3)
        state = drafter.open(ProposalRule(sampling))
        state.extend(prefix)
        (draft,) = state.propose(1)
        best = logits.topk(16).indices.numpy()
        noise = gumbel(3, len(prefix), best) if temperature else 0
        assert draft.id == best[(logits.numpy()[best] + noise).argmax()]
        assert draft.id in KEPT
    state.truncate(len(prefix))
    scores = state.score((3, 4))  # the first is kept, the second is not
    assert scores[0] == pytest.approx(float(logits.log_softmax(-1)[3]), abs=1e-3)
    assert scores[1] == pytest.approx(-MISSING_NATS, abs=1e-3)


def trimmed_llama(seed: int = 0) -> Any:
    model = tiny_llama(seed=seed, **BYTE_LLAMA, tie_word_embeddings=True)
    reduce_vocabulary(model, KEPT)
    return model


def test_learning_refuses_a_drafter_whose_head_is_not_its_embedding(package: Path) -> None:
    with pytest.raises(ModelRefused, match="head is not its embedding"):
        load_parent(find_package(package))


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """Return a model that knows every second token, its folder and its package."""
    model, folder = tied_llama(), tmp_path_factory.mktemp("half")
    reduce_vocabulary(model, torch.arange(0, VOCAB, 2))  # of fewer the exporter writes a second, transposed matrix
    source = save_with_byte_tokenizer(model, folder / "source")
    export_drafter(source, folder / "package", name="small", candidates=16, target_id="big")
    return model, source, folder / "package"


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_a_package_of_a_small_vocabulary_is_learned_from_and_its_update_drafts(half, tmp_path, precision, monkeypatch):
    model, source, made = half
    monkeypatch.setattr(publishing, "write_graph", lambda *given, **_: shutil.copyfile(made / "model.onnx", given[3]))
    options = {"name": "small", "candidates": 16, "target_id": "big", "precision": precision}
    export_drafter(source, tmp_path / "package", **options)
    package = find_package(tmp_path / "package")
    parent = load_parent(package)
    tokens = torch.from_numpy(np.random.default_rng(3).integers(0, VOCAB, (1, 40)))
    exact, close = model(tokens).logits[0].detach(), parent.model(tokens).logits[0]
    assert torch.equal(parent.model.lm_head.tokens, torch.arange(0, VOCAB, 2))
    assert float((close - exact).abs().mean()) <= (1e-4 if precision == "float32" else 0.05 * float(exact.std()))

    drafter = AdaptedDrafter(parent, rank=4)
    torch.testing.assert_close(drafter(tokens, torch.arange(40)), close.log_softmax(-1), atol=1e-4, rtol=1e-4)
    zeros, rng = drafter.matrices(), np.random.default_rng(1)
    loud = {name: (a, 0.1 * rng.normal(size=b.shape)) for name, (a, b) in zeros.items()}
    drafter.load({name: (a.astype(np.float16), b.astype(np.float16)) for name, (a, b) in loud.items()})
    learned = LearnedFrom(1, 0, {})
    write_adapter_package(package.folder, tmp_path / "update", loud, sequence=1, learned_from=learned)
    state = OnnxDrafter(find_package(tmp_path / "update")).open(ProposalRule(Sampling()))
    row = tokens[0].tolist()
    state.extend(row[:1])
    expected = drafter(tokens, torch.arange(39)).detach().numpy()[np.arange(39), row[1:]]
    np.testing.assert_allclose(state.score(row[1:]), expected, atol=1e-3 if precision == "float32" else 0.3)
    assert np.abs(expected - close.log_softmax(-1).numpy()[np.arange(39), row[1:]]).max() > 0.3


def test_a_trained_small_vocabulary_is_trained_on(config: DrafterTraining, tmp_path: Path) -> None:
    trimmed = save_with_byte_tokenizer(trimmed_llama(seed=1), tmp_path / "trimmed")
    further = replace(config, start=str(trimmed), vocabulary=None, steps=1, warm_up_steps=0)
    result = train_drafter(further)
    assert json.loads((result.folder / "config.json").read_text())["outrider_head"]["tokens"] == len(KEPT)
    before, after = (load_file(each / "model.safetensors") for each in (trimmed, result.folder))
    assert torch.equal(before["lm_head.tokens"], after["lm_head.tokens"])
    assert not torch.equal(before["lm_head.up.weight"], after["lm_head.up.weight"])


def test_more_candidates_than_a_trimmed_head_predicts_are_refused(tmp_path: Path) -> None:
    source = save_with_byte_tokenizer(trimmed_llama(), tmp_path / "source")
    with pytest.raises(InvalidArgument, match=f"the {len(KEPT)} tokens that its head predicts") as refused:
        export_drafter(source, tmp_path / "out", name="small", candidates=len(KEPT) + 1, target_id="big")
    assert refused.value.field == "candidates"


# === steered ===


RANK = 8
PROMPT = (0, 5, 9)


def test_a_small_head_is_steered_from_training_to_drafts(target: Path, teacher: Path, tmp_path: Path) -> None:
    config = SteerTraining(
        target=str(target),
        teacher=teacher,
        output=tmp_path / "out",
        drafter=save_with_byte_tokenizer(trimmed_llama(), tmp_path / "drafter"),
        rank=RANK,
        max_age=4,
        steps=2,
        block=32,
        warm_up_steps=0,
    )
    folder = train_steering(config).folder
    before, after = (load_file(each / "model.safetensors") for each in (config.drafter, folder))
    assert not torch.equal(before["lm_head.up.weight"], after["lm_head.up.weight"])
    assert json.loads((folder / "config.json").read_text())["outrider_head"]

    loud = {name: 20 * torch.randn_like(matrix) for name, matrix in load_file(folder / STEERING_FILE).items()}
    save_file(loud, folder / STEERING_FILE)  # what two steps teach is too soft to tell
    export_drafter(folder, tmp_path / "package", name="small", candidates=8, target_id="big")
    state = OnnxDrafter(find_package(tmp_path / "package")).open(ProposalRule(Sampling(temperature=0.0)))
    vector = torch.linspace(-1, 1, RANK)
    state.steer(vector.numpy(), since=len(PROMPT))
    state.extend(PROMPT)
    drafts = token_ids(state.propose(6))
    assert drafts == steered_by_torch(folder, vector, 6)
    assert drafts != steered_by_torch(folder, 0 * vector, 6)
    assert set(drafts) <= set(KEPT.tolist())


def steered_by_torch(folder: Path, vector: torch.Tensor, n: int) -> tuple[int, ...]:
    """The n likeliest tokens after `PROMPT`, one after the other, each position but the prompt's steered."""
    model, tokens = load(folder), [*PROMPT]
    while len(tokens) < len(PROMPT) + n:
        by_position = torch.zeros(len(tokens), RANK)
        by_position[len(PROMPT) :] = vector
        with torch.no_grad(), steered_by(model, biases_by(load_steering(folder), by_position)):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(PROMPT) :])

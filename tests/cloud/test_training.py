"""Training of drafters: what it refuses, that it learns, and that a resumed run is the same run."""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_models import teacher_of
from safetensors.torch import load_file
from tokenizers import normalizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
)

from outrider.cloud.export.parent import load_parent
from outrider.cloud.models.family_index import load_tokenizer, resolve_target
from outrider.cloud.testing import save_byte_tokenizer, tiny_llama
from outrider.cloud.training import run
from outrider.cloud.training.drafter_training import build_drafter, read_drafter, start_embedding, train_drafter
from outrider.cloud.training.measured_acceptance import HeldOutText, MeanAcceptance, compare_students, logits_of
from outrider.cloud.training.optimizers import Budget, cosine_fall, linear_fall, orthogonalised
from outrider.cloud.training.training_settings import DrafterShape, DrafterTraining
from outrider.cloud.training.training_texts import BlockSampler
from outrider.drafters import find_package
from outrider.proto.errors import InvalidArgument
from outrider.proto.tokenizer import tokenizer_hash

BOS, EOS = 0, 1
SHAPE = DrafterShape(hidden=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp=24, context=64)


LINES = [f"line {i} of {i * i} lines; " * 4 for i in range(40)]
PLAIN = "one two three four five six seven eight nine ten\n" * 40


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama over 258 byte-level tokens that has seen the test corpus for a second or two."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = save_byte_tokenizer(folder)
    target = tiny_llama(
        seed=0,
        vocab_size=258,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    framed = [[BOS, *tokenizer.encode(text).ids, EOS] for text in (*LINES, PLAIN)]
    stream = torch.tensor([token for document in framed for token in document])
    optimizer = torch.optim.AdamW(target.parameters(), lr=1e-2)
    for _ in range(100):
        blocks = torch.stack([stream[first : first + 48] for first in torch.randint(0, len(stream) - 48, (8,))])
        target(input_ids=blocks, labels=blocks).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    target.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def teacher(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return teacher_of(target_folder, tmp_path_factory.mktemp("teacher"), (*LINES, PLAIN))


@pytest.fixture
def config(target_folder: Path, teacher: Path, tmp_path: Path) -> DrafterTraining:
    return DrafterTraining(
        target=str(target_folder),
        teacher=teacher,
        output=tmp_path / "out",
        shape=SHAPE,
        steps=8,
        block=32,
        blocks_per_step=4,
        blocks_per_pass=2,
        positions_per_chunk=24,
        warm_up_steps=2,
    )


def load_target(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class Crash(Exception):
    pass


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one_bit_for_bit(config, monkeypatch) -> None:
    whole = train_drafter(config)
    monkeypatch.setattr(run, "SAVE_EVERY_S", 0.0)

    def crash_at_five(step: int) -> None:
        if step == 5:
            raise Crash

    broken = replace(config, output=config.output.with_name("broken"))
    with pytest.raises(Crash):
        train_drafter(broken, on_step=crash_at_five)
    assert not (broken.output / "model.safetensors").exists()
    torch.manual_seed(99)  # the resumed run must not depend on where the process's random state happens to be
    resumed = train_drafter(replace(broken, resume=True))

    weights = load_file(whole.folder / "model.safetensors")
    assert {n: t.shape for n, t in weights.items()} == {
        n: t.shape for n, t in load_file(resumed.folder / "model.safetensors").items()
    }
    for name, tensor in load_file(resumed.folder / "model.safetensors").items():
        assert torch.equal(tensor, weights[name]), name
    assert (resumed.steps, resumed.tokens_seen) == (whole.steps, whole.tokens_seen) == (8, 8 * 4 * 32)
    assert resumed.acceptance == whole.acceptance


def test_a_trained_drafter_agrees_with_its_target_far_better_than_a_fresh_one(config: DrafterTraining) -> None:
    result = train_drafter(replace(config, steps=120))
    assert result.losses[-1][1] < 0.5 * result.losses[0][1]
    untrained = train_drafter(replace(config, steps=1, output=config.output.with_name("untrained")))
    assert result.acceptance["drafter"].overlap > untrained.acceptance["drafter"].overlap + 0.2
    assert result.acceptance["drafter"].greedy > untrained.acceptance["drafter"].greedy + 0.2


def test_a_run_goes_on_from_a_drafter_that_was_trained_before(config: DrafterTraining) -> None:
    first = train_drafter(config)
    hardly = replace(
        config, output=config.output.with_name("on"), start=str(first.folder), steps=1, matrix_lr=1e-9, other_lr=1e-9
    )
    weights = load_file(first.folder / "model.safetensors")
    for name, tensor in load_file(train_drafter(hardly).folder / "model.safetensors").items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-6)
    fresh = train_drafter(replace(hardly, output=config.output.with_name("fresh"), start=None))
    assert not torch.equal(
        load_file(fresh.folder / "model.safetensors")["model.embed_tokens.weight"], weights["model.embed_tokens.weight"]
    )
    record = json.loads((hardly.output / "training.json").read_text())
    assert record["config"]["start"] == first.folder.name  # and no path of this machine


def test_a_run_goes_on_from_the_8_bit_weights_of_an_embedded_drafter(config: DrafterTraining, tmp_path: Path) -> None:
    target = tmp_path / "target"
    load_tokenizer(resolve_target("reference")).save_pretrained(target)
    shutil.copyfile(find_package("general").tokenizer_path, target / "tokenizer.json")
    tiny_llama(
        seed=0, vocab_size=8192, hidden_size=16, num_hidden_layers=1, bos_token_id=BOS, eos_token_id=EOS
    ).save_pretrained(target)
    teacher = teacher_of(target, tmp_path, LINES, tokens=500)
    hardly = replace(
        config, target=str(target), teacher=teacher, start="general", steps=1, matrix_lr=1e-9, other_lr=1e-9
    )
    trained = AutoModelForCausalLM.from_pretrained(train_drafter(hardly).folder)
    parent = load_parent(find_package("general")).model.state_dict()
    for name, tensor in trained.state_dict().items():
        torch.testing.assert_close(tensor, parent[name], rtol=0, atol=1e-6)
    assert (trained.config.bos_token_id, trained.generation_config.eos_token_id) == (BOS, EOS)
    assert json.loads((hardly.output / "training.json").read_text())["config"]["start"] == "general"
    learning = replace(hardly, output=tmp_path / "learning", matrix_lr=0.01, other_lr=0.01)
    learned = AutoModelForCausalLM.from_pretrained(train_drafter(learning).folder).state_dict()
    assert not any(torch.equal(learned[name], parent[name]) for name in parent), "everything learns"


def test_a_run_starts_from_no_drafter_of_other_tokens(config: DrafterTraining, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="holds no config") as refused:
        replace(config, start=str(tmp_path))
    assert refused.value.field == "start"
    other = build_drafter(AutoModelForCausalLM.from_pretrained(config.target), config.shape)
    other.resize_token_embeddings(other.config.vocab_size + 8)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(InvalidArgument, match="take one of this target") as refused:
        train_drafter(replace(config, start=str(tmp_path / "other")))
    assert refused.value.field == "start"
    tokenizer = save_byte_tokenizer(tmp_path / "bytes")
    same_size = build_drafter(AutoModelForCausalLM.from_pretrained(config.target), config.shape)
    same_size.save_pretrained(tmp_path / "bytes")
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.save(str(tmp_path / "bytes" / "tokenizer.json"))
    for other in ("general", str(tmp_path / "bytes")):
        with pytest.raises(InvalidArgument, match=r"has another tokenizer than the target.*; take one") as refused:
            train_drafter(replace(config, start=other))
        assert refused.value.field == "start"


def test_a_drafter_has_the_targets_tokenizer_also_where_transformers_changes_it(config: DrafterTraining) -> None:
    settings = Path(config.target) / "tokenizer_config.json"
    whole = settings.read_text()
    settings.write_text(json.dumps(json.loads(whole) | {"pad_token": "ÿ"}))
    try:
        result = train_drafter(replace(config, steps=1))
        AutoTokenizer.from_pretrained(config.target).save_pretrained(result.folder / "saved")
    finally:
        settings.write_text(whole)
    hashes = [
        tokenizer_hash((folder / "tokenizer.json").read_text()) for folder in (Path(config.target), result.folder)
    ]
    assert hashes[0] == hashes[1]
    changed = tokenizer_hash((result.folder / "saved" / "tokenizer.json").read_text())
    assert changed != hashes[0], "it changes nothing, and this test shows nothing"


def test_a_drafter_with_a_window_sees_that_number_of_tokens_its_own_included(config, tmp_path) -> None:
    target = AutoModelForCausalLM.from_pretrained(config.target)
    torch.manual_seed(0)
    build_drafter(target, replace(config.shape, window=4)).save_pretrained(tmp_path)
    drafter = read_drafter(tmp_path, target, field="start")
    tokens = torch.randint(2, 258, (1, 20))
    logits = drafter(input_ids=tokens).logits[0]
    for distance, is_seen in ((0, True), (3, True), (4, False), (9, False)):
        other = tokens.clone()
        other[0, 15 - distance] = (tokens[0, 15 - distance] + 1) % 256 + 2
        assert torch.equal(drafter(input_ids=other).logits[0, 15], logits[15]) is not is_seen


def test_a_drafter_of_another_kind_is_not_trained_on(config: DrafterTraining, tmp_path: Path) -> None:
    target = AutoModelForCausalLM.from_pretrained(config.target)
    other = GPT2Config(vocab_size=258, n_embd=8, n_layer=1, n_head=2, bos_token_id=BOS, eos_token_id=EOS)
    GPT2LMHeadModel(other).save_pretrained(tmp_path)
    with pytest.raises(InvalidArgument, match="gpt2; drafters are trained as llama or mistral") as refused:
        read_drafter(tmp_path, target, field="start")
    assert refused.value.field == "start"


def test_the_output_is_an_ordinary_model_folder_with_the_record_of_its_training(config: DrafterTraining) -> None:
    result = train_drafter(config)
    drafter = AutoModelForCausalLM.from_pretrained(result.folder)
    assert drafter.config.vocab_size == 258
    assert sum(p.numel() for p in drafter.parameters()) == result.parameters
    assert (result.folder / "tokenizer.json").exists()
    record = json.loads((result.folder / "training.json").read_text())
    assert record["tokens_seen"] == 8 * 4 * 32
    assert record["config"]["teacher"] == "says"  # and no path of this machine
    assert record["held_out_acceptance"]["drafter"]["positions"] > 0
    assert record["versions"]["torch"] == torch.__version__


def test_a_budget_in_minutes_ends_the_run(config: DrafterTraining) -> None:
    result = train_drafter(replace(config, steps=None, minutes=0.02))
    assert result.elapsed_s == pytest.approx(1.2, abs=1.0)
    assert result.steps > 2


def test_a_second_run_into_a_folder_or_a_resumption_with_other_settings_is_refused(config) -> None:
    train_drafter(config)
    with pytest.raises(InvalidArgument, match="resume") as refused:
        train_drafter(config)
    assert refused.value.field == "output"
    with pytest.raises(InvalidArgument, match="the run to resume had 0") as refused:
        train_drafter(replace(config, seed=1, resume=True))
    assert refused.value.field == "seed"


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("target", {"target": ""}),
        ("steps", {"steps": None}),
        ("steps", {"minutes": 5.0}),
        ("steps", {"steps": 0}),
        ("block", {"block": 65}),
        ("blocks_per_pass", {"blocks_per_pass": 3}),
        ("teacher", {"teacher": Path("nowhere")}),
        ("matrix_lr", {"matrix_lr": float("nan")}),
        ("threads", {"threads": -1}),
    ],
)
def test_bad_settings_name_their_field(config: DrafterTraining, field: str, bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        replace(config, **bad)
    assert refused.value.field == field
    assert field in str(refused.value)


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("kv_heads", {"heads": 3, "kv_heads": 2}),
        ("head_dim", {"head_dim": 7}),
        ("mlp", {"mlp": 0}),
        ("window", {"window": 0}),
        ("window", {"window": -1}),
    ],
)
def test_bad_shapes_name_their_field(field: str, bad: dict[str, int]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        DrafterShape(**bad)
    assert refused.value.field == field


def test_a_target_that_is_not_there_and_too_little_text_are_refused(config: DrafterTraining, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="safetensors") as refused:
        train_drafter(replace(config, target=str(tmp_path / "nowhere")))
    assert refused.value.field == "target"
    with pytest.raises(InvalidArgument, match="shorter blocks") as refused:
        BlockSampler(np.arange(63, dtype=np.uint32), 32, seed=0)
    assert refused.value.field == "block"


def test_muon_keeps_singular_vectors_and_levels_singular_values() -> None:
    torch.manual_seed(0)
    for shape in ((8, 20), (20, 8)):
        matrix = torch.randn(shape)
        update = orthogonalised(matrix)
        assert torch.linalg.svdvals(update).sub(1).abs().max() < 0.5
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        off_diagonal = u.T @ update @ v.T
        assert (off_diagonal - off_diagonal.diag().diag()).abs().max() < 1e-4


def test_the_rate_warms_up_holds_and_falls_to_zero_under_either_budget() -> None:
    steps = Budget(100, None, 4, linear_fall(0.4))
    assert [steps.rate(step, 0) for step in (0, 3, 30, 60)] == pytest.approx([0.2, 0.8, 1.0, 1.0])
    assert steps.rate(80, 0) == pytest.approx(0.5)
    assert steps.rate(100, 0) == 0
    minutes = Budget(None, 10.0, 4, linear_fall(0.4))
    assert minutes.rate(1000, 480.0) == pytest.approx(0.5)
    assert minutes.spent(1, 600.0) == 1


def test_every_token_of_an_epoch_is_read_once_and_the_order_resumes_anywhere() -> None:
    places = np.arange(100, dtype=np.uint32)
    blocks = BlockSampler(places, 10, seed=5).draw(64)
    assert (np.diff(blocks, axis=1) == 1).all()
    for epoch in range(7):
        assert len(np.unique(blocks[9 * epoch : 9 * epoch + 9])) == 90
    assert len({tuple(blocks[first : first + 9, 0]) for first in range(0, 63, 9)}) == 7, "each in an order of its own"
    again, later = BlockSampler(places, 10, seed=5), BlockSampler(places, 10, seed=5)
    again.draw(20)
    later.drawn = again.drawn
    np.testing.assert_array_equal(later.draw(44), blocks[20:])


def measured(target: Any, drafter: Any, rows: list[HeldOutText]) -> MeanAcceptance:
    return compare_students(target, {"": logits_of(drafter)}, rows, seed=0)[""]


def test_acceptance_of_the_target_by_itself_is_one_and_ignores_padding(target_folder: Path) -> None:
    target = load_target(target_folder)
    rows = [HeldOutText(np.arange(2, 20)), HeldOutText(np.arange(30, 35), first=3)]
    same = measured(target, target, rows)
    assert (same.greedy, same.sampled, same.positions) == (1.0, 1.0, 17 + 2)
    assert same.overlap == pytest.approx(1.0, abs=1e-5)
    torch.manual_seed(0)
    drafter = build_drafter(target, SHAPE).eval()
    together = measured(target, drafter, rows)
    apart = [measured(target, drafter, [row]) for row in rows]
    assert together.kl == pytest.approx(sum(a.kl * a.positions for a in apart) / 19, rel=1e-4)
    assert together.sampled >= (together.overlap / (2 - together.overlap)) - 0.3  # Daliri et al. 2024, small sample


def test_the_start_embedding_keeps_the_distances_its_width_allows() -> None:
    torch.manual_seed(0)
    low_rank = torch.randn(50, 4) @ torch.randn(4, 12)
    start = start_embedding(low_rank, torch.zeros(50, 6))
    torch.testing.assert_close(start @ start.T, low_rank @ low_rank.T, rtol=1e-3, atol=1e-3)
    wider = start_embedding(low_rank, torch.ones(50, 20))
    assert (wider[:, 12:] == 1).all()


def test_a_cosine_budget_falls_from_the_peak_to_zero_without_a_plateau() -> None:
    budget = Budget(100, None, 0, cosine_fall)
    rates = [budget.rate(step, 0.0) for step in range(101)]
    assert rates[0] == 1.0
    assert rates[50] == pytest.approx(0.5)
    assert rates[25] == pytest.approx(0.5 * (1 + 2**-0.5))
    assert rates[100] == 0.0
    assert all(later < earlier for earlier, later in itertools.pairwise(rates))

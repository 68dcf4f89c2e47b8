"""Training of steered drafters: the formula, the ages of vectors, what learns and what is written."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import teacher_of
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from outrider.cloud.export.steered import STEERING_FILE, biases_by, steered_by
from outrider.cloud.target.projection import PROJECTION_FILE, Projection, default_layers, projection_id
from outrider.cloud.testing import tiny_llama
from outrider.cloud.training import run
from outrider.cloud.training.steer import (
    AGES,
    SURVIVAL,
    SteeredDrafter,
    aged_sources,
    sources_of,
    tokens_a_round,
    train_steering,
)
from outrider.cloud.training.training_settings import SteerTraining
from outrider.proto.errors import InvalidArgument, ModelRefused, NotFound

VOCAB = 40
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 96,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def llama(hidden: int, layers: int, seed: int, spread: float = 0.02) -> LlamaForCausalLM:
    return tiny_llama(
        seed=seed,
        **SMALL,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=2 * hidden,
        initializer_range=spread,
        tie_word_embeddings=True,
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target with much to say (large weights, so that its tokens depend on all of the text), a drafter, a teacher."""
    root = tmp_path_factory.mktemp("steer")
    words = {"<bos>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": 3 + i for i in range(VOCAB - 3)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")
    llama(32, 6, 0, spread=0.25).save_pretrained(root / "target")
    llama(16, 2, 1).save_pretrained(root / "drafter")
    for name in ("target", "drafter"):
        fast.save_pretrained(root / name)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(VOCAB - 3, (60, 80), generator=generator).tolist()
    teacher = teacher_of(root / "target", root, (" ".join(f"w{w}" for w in row) for row in drawn))
    return {"target": root / "target", "drafter": root / "drafter", "teacher": teacher}


@pytest.fixture
def config(folders: dict[str, Path], tmp_path: Path) -> SteerTraining:
    return SteerTraining(
        target=str(folders["target"]),
        teacher=folders["teacher"],
        output=tmp_path / "out",
        drafter=folders["drafter"],
        model="tiny",
        rank=8,
        max_age=4,
        steps=6,
        block=32,
        positions_per_chunk=64,
        warm_up_steps=1,
    )


def steered_pair() -> SteeredDrafter:
    torch.manual_seed(3)
    return SteeredDrafter(llama(16, 2, 1), Projection((1, 2, 3), 32, 8))


def test_an_untrained_steering_changes_nothing_bit_for_bit() -> None:
    steered = steered_pair()
    tokens = torch.randint(VOCAB, (2, 10))
    taps = torch.randn(2, 10, 96)
    plain = steered.drafter.model(input_ids=tokens, use_cache=False).last_hidden_state
    assert torch.equal(steered.hidden(tokens, taps, aged_sources(tokens, 1)), plain)


def test_a_vector_is_added_to_the_up_projection_before_the_gate() -> None:
    steered = steered_pair()
    mlp = steered.drafter.model.layers[1].mlp
    with torch.no_grad():
        for weight in steered.layers:
            weight.normal_()
    vectors, stream = torch.randn(2, 5, 8), torch.randn(2, 5, 16)
    with steered_by(steered.drafter, biases_by(list(steered.layers), vectors)):
        found = mlp(stream)
    up = mlp.up_proj(stream) + vectors @ steered.layers[1].T
    torch.testing.assert_close(found, mlp.down_proj(up * mlp.act_fn(mlp.gate_proj(stream))))
    after = mlp(stream) + (vectors @ steered.layers[1].T)[..., :16]
    assert not torch.allclose(found, after, atol=1e-2)
    assert torch.equal(mlp(stream), mlp.down_proj(mlp.up_proj(stream) * mlp.act_fn(mlp.gate_proj(stream))))


def test_every_position_gets_the_vector_of_its_source_and_none_where_there_is_none() -> None:
    steered = steered_pair()
    taps = torch.randn(1, 4, 96)
    vectors = steered.vectors(taps, torch.tensor([[-1, 0, 0, 2]]))
    alone = steered.projection(taps)[0]
    assert torch.equal(vectors[0, 0], torch.zeros(8))
    torch.testing.assert_close(vectors[0, 1:], alone[[0, 0, 2]])


def test_the_projection_starts_as_the_sum_of_the_normalised_taps() -> None:
    projection = Projection((0, 1, 2), 16, 4)
    low, middle, high = torch.randn(3, 7, 16)
    total = sum(tap / tap.square().mean(-1, keepdim=True).sqrt() for tap in (low, middle, high))
    torch.testing.assert_close(projection(torch.cat([low, middle, high], dim=-1)), total @ projection.down.weight.T)


def test_no_tap_drowns_the_others_however_large_it_is() -> None:
    projection = Projection((0, 1, 2), 16, 4)
    low, middle, high = torch.randn(3, 7, 16)
    scaled = torch.cat([low, 1000 * middle, 30 * high], dim=-1)
    torch.testing.assert_close(projection(scaled), projection(torch.cat([low, middle, high], dim=-1)))


def test_the_layers_of_the_paper_are_the_default() -> None:
    assert default_layers(8) == (3, 4, 5)
    assert default_layers(36) == (3, 18, 33)
    assert default_layers(2) == (0, 1)


def test_a_projection_is_what_was_saved_and_is_named_after_its_bytes(tmp_path: Path) -> None:
    projection = Projection((1, 2), 16, 4, "tiny")
    path = tmp_path / PROJECTION_FILE
    name = projection.save(path)
    loaded = Projection.load(path)
    assert (loaded.layers, loaded.hidden, loaded.rank, loaded.target) == ((1, 2), 16, 4, "tiny")
    taps = torch.randn(3, 32)
    assert torch.equal(loaded(taps), projection(taps))
    assert name == projection_id(path)
    with torch.no_grad():
        projection.down.weight[0, 0] += 1
    assert projection.save(path) != name


def test_what_is_no_projection_is_refused(tmp_path: Path, folders: dict[str, Path]) -> None:
    with pytest.raises(NotFound, match="train steer"):
        Projection.load(tmp_path / "nothing")
    with pytest.raises(ModelRefused):
        Projection.load(folders["target"] / "model.safetensors")
    (tmp_path / "text").write_text("no tensors at all")
    with pytest.raises(ModelRefused):
        Projection.load(tmp_path / "text")


def ages(*, unsteered: float = 0.0, max_age: int = 4) -> torch.Tensor:
    """Ages [256, 64]; 0: none."""
    tokens = torch.zeros(256, 64, dtype=torch.int64)
    torch.manual_seed(0)
    sources = sources_of(tokens, max_age=max_age, unsteered=unsteered)
    return torch.where(sources >= 0, torch.arange(64) - sources, 0)


def test_vectors_are_of_an_age_as_often_as_drafts_of_that_age_are_verified() -> None:
    found = ages()[:, 20:]
    shares = torch.bincount(found.flatten(), minlength=5) / found.numel()
    verified = SURVIVAL ** torch.arange(4)
    torch.testing.assert_close(shares, torch.cat([torch.zeros(1), verified / verified.sum()]), atol=0.03, rtol=0)


def test_prompts_and_some_texts_have_no_vectors() -> None:
    found = ages(unsteered=0.25, max_age=1)
    assert set(found.unique().tolist()) == {0, 1}
    without = (found == 0).all(dim=1)
    assert 0.15 < without.float().mean() < 0.35
    prompts = (found[~without] == 0).sum(dim=1)
    assert int(prompts.min()) >= 1
    assert int(prompts.max()) <= 16
    assert ((found[~without] == 0).int().diff(dim=1) <= 0).all()


def test_drafter_steering_and_projection_all_learn(config: SteerTraining, folders: dict[str, Path]) -> None:
    result = train_steering(config)
    start, end = (load_file(each / "model.safetensors") for each in (folders["drafter"], result.folder))
    assert not any(torch.equal(end[key], start[key]) for key in start if "layers" in key and "norm" not in key)
    learnt = load_file(result.folder / STEERING_FILE)
    assert {key: tuple(value.shape) for key, value in learnt.items()} == {f"layers.{i}.weight": (32, 8) for i in (0, 1)}
    assert all(value.abs().max() > 0 for value in learnt.values())
    projection = Projection.load(result.folder / PROJECTION_FILE)
    untrained = Projection(projection.layers, 32, 8)
    assert not torch.equal(projection.mix.weight, untrained.mix.weight)
    assert not torch.equal(projection.down.weight, untrained.down.weight)
    assert result.tokens_seen == 6 * 4 * 32


class Crash(Exception):
    pass


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one_bit_for_bit(config, monkeypatch) -> None:
    whole = train_steering(config)
    monkeypatch.setattr(run, "SAVE_EVERY_S", 0.0)

    def crash_at_four(step: int) -> None:
        if step == 4:
            raise Crash

    broken = replace(config, output=config.output.with_name("broken"))
    with pytest.raises(Crash):
        train_steering(broken, on_step=crash_at_four)
    torch.manual_seed(99)
    resumed = train_steering(replace(broken, resume=True))
    for file in whole.folder.glob("*.safetensors"):
        tensors = load_file(resumed.folder / file.name)
        assert all(torch.equal(tensors[key], value) for key, value in load_file(file).items()), file
    assert resumed.acceptance == whole.acceptance


def test_a_drafter_learns_from_vectors_what_the_text_does_not_say() -> None:
    """The target's word is a secret of each sequence, known only to the residual stream of one position in four."""
    torch.manual_seed(0)
    steered = SteeredDrafter(llama(16, 2, 1), Projection((1,), 32, 8))
    optimizer = torch.optim.AdamW(steered.parameters(), lr=1e-2)
    streams = torch.randn(4, 32)

    def kl(max_age: int) -> torch.Tensor:
        tokens = torch.randint(VOCAB, (16, 8))
        secret = torch.randint(4, (16,))
        taps = streams[secret][:, None] * (torch.arange(8) % 4 == 0)[None, :, None]
        logits_by_target = torch.full((16, 8, VOCAB), -4.0)
        logits_by_target[torch.arange(16), :, secret] = 4.0
        sources = (torch.arange(8) // 4 * 4).expand(16, 8) if max_age else None
        hidden = steered.hidden(tokens, taps, sources)
        log_q, log_p = (
            each.log_softmax(-1).flatten(0, 1) for each in (steered.drafter.lm_head(hidden), logits_by_target)
        )
        return torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean")

    for _ in range(150):
        optimizer.zero_grad()
        kl(4).backward()
        optimizer.step()
    with torch.no_grad():
        assert kl(4) < 0.1
        assert kl(0) > 1.0


def test_the_record_names_the_gain_of_vectors_of_each_age(config: SteerTraining) -> None:
    result = train_steering(config)
    record = json.loads((result.folder / "training.json").read_text())
    assert set(record["steering_gain"]) == {str(age) for age in AGES}
    for age, gain in record["steering_gain"].items():
        with_vectors, without = (tokens_a_round(result.acceptance[kind].sampled) for kind in (age, "none"))
        assert gain == pytest.approx(with_vectors / without - 1, abs=1e-3)
    assert set(record["held_out_acceptance"]) == {"none", *map(str, AGES)}


def test_tokens_a_round_are_those_of_the_geometric_series() -> None:
    assert tokens_a_round(0.0) == 1
    assert tokens_a_round(0.5, drafts=2) == pytest.approx(1 + 0.5 + 0.25)
    assert tokens_a_round(1.0) == 9


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("drafter", {"drafter": Path("nowhere")}),
        ("rank", {"rank": 0}),
        ("max_age", {"max_age": 32}),
        ("unsteered", {"unsteered": 1.0}),
        ("layers", {"layers": (1, 1)}),
        ("steering_lr", {"steering_lr": float("nan")}),
        ("matrix_lr", {"matrix_lr": 0.0}),
        ("other_lr", {"other_lr": -1.0}),
    ],
)
def test_bad_settings_name_their_field(config: SteerTraining, field: str, bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as refused:
        replace(config, **bad)
    assert refused.value.field == field


def test_layers_and_drafters_that_do_not_fit_the_target_are_refused(config: SteerTraining, tmp_path: Path) -> None:
    tiny_llama(**(SMALL | {"vocab_size": 50})).save_pretrained(tmp_path / "other")
    by_text = Path(shutil.copytree(config.drafter, tmp_path / "by text"))
    (by_text / "tokenizer.json").write_text(Tokenizer(models.WordLevel({"w": 0}, unk_token="w")).to_str())
    named = ({"drafter": tmp_path / "other"}, {"drafter": by_text})
    for field, bad in (("layers", {"layers": (6,)}), *(("drafter", each) for each in named)):
        with pytest.raises(InvalidArgument) as refused:
            train_steering(replace(config, **bad))
        assert refused.value.field == field

"""Drafters with small heads that a target steers: trained, exported, and drafting what torch finds most likely."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from random_models import BYTE_LLAMA, save_with_byte_tokenizer, teacher_of
from safetensors.torch import load_file, save_file

from outrider.cloud.export import export_drafter
from outrider.cloud.export.model import load
from outrider.cloud.export.steered import STEERING_FILE, biases_by, load_steering, steered_by
from outrider.cloud.models.heads import reduce_vocabulary
from outrider.cloud.testing import tiny_llama
from outrider.cloud.training.steer import train_steering
from outrider.cloud.training.training_settings import SteerTraining
from outrider.drafters import find_package
from outrider.drafters.onnx import OnnxDrafter
from outrider.drafters.proposals import ProposalRule
from outrider.proto.types import Sampling, token_ids

RANK = 8
KEPT = torch.arange(1, 258, 2)
PROMPT = (0, 5, 9)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_llama(seed=4, **BYTE_LLAMA | {"num_hidden_layers": 3}, tie_word_embeddings=True)
    return save_with_byte_tokenizer(model, tmp_path_factory.mktemp("target"))


def test_a_small_head_is_steered_from_training_to_drafts(target: Path, tmp_path: Path) -> None:
    drafter = tiny_llama(seed=0, **BYTE_LLAMA, tie_word_embeddings=True)
    reduce_vocabulary(drafter, KEPT)
    config = SteerTraining(
        target=str(target),
        teacher=teacher_of(target, tmp_path, [f"line {i} of {i * i} lines; " * 3 for i in range(100)]),
        output=tmp_path / "out",
        drafter=save_with_byte_tokenizer(drafter, tmp_path / "drafter"),
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

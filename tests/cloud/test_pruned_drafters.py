"""Drafters that begin as another small model: its layers are pruned, and it is distilled."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import SMALL, save_random_model, teacher_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.cloud.testing import save_byte_tokenizer
from outrider.cloud.training.drafter_training import kept_layers, read_pruned, train_drafter
from outrider.cloud.training.training_settings import DrafterShape, DrafterTraining
from outrider.proto.errors import ConfigError, InvalidArgument

BYTES = 258  # tokens of the byte tokenizer
SHORT = SMALL | {"num_hidden_layers": 4, "vocab_size": BYTES}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    saved(folder, "llama")
    return folder


def saved(folder: Path, architecture: str, **config: Any) -> Any:
    folder.mkdir(exist_ok=True)
    model = save_random_model(folder, architecture, **SHORT | config)
    save_byte_tokenizer(folder)
    return model


def loaded(folder: Path) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def pruned(folder: Path, target: Path, *layers: int) -> AutoModelForCausalLM:
    return read_pruned(str(folder), loaded(target), str(target), layers=layers, context=64)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_pruned_model_is_the_model_without_the_layers_that_go(target, tmp_path, architecture) -> None:
    whole = saved(tmp_path, architecture)
    model = pruned(tmp_path, target, 2).eval()
    assert model.config.num_hidden_layers == len(model.model.layers) == 2
    assert len(getattr(model.config, "layer_types", None) or "ab") == 2
    whole.model.layers = torch.nn.ModuleList([whole.model.layers[0], whole.model.layers[3]])
    whole.config.num_hidden_layers = 2
    tokens = torch.arange(3, 12)[None]
    expected = whole(input_ids=tokens, use_cache=False).logits
    torch.testing.assert_close(model(input_ids=tokens, use_cache=False).logits, expected)


def test_a_count_keeps_the_first_layers_and_the_last_and_a_list_what_it_names() -> None:
    assert kept_layers((3,), 28) == [0, 1, 27]
    assert kept_layers((1,), 28) == [27]
    assert kept_layers((5, 0, 9), 28) == [0, 5, 9]
    for wrong in ((29,), (0, 28), (3, 3)):
        with pytest.raises(InvalidArgument, match="layers 0 to 27"):
            kept_layers(wrong, 28)


def test_a_model_with_rows_for_other_unused_tokens_gets_those_of_the_target(target: Path, tmp_path: Path) -> None:
    saved(tmp_path, "qwen3", vocab_size=BYTES + 6)
    assert pruned(tmp_path, target).get_output_embeddings().weight.shape[0] == BYTES


def test_another_tokenizer_and_logits_that_are_capped_are_refused(target: Path, tmp_path: Path) -> None:
    other, capped = tmp_path / "other", tmp_path / "capped"
    saved(other, "llama")
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(other)
    saved(capped, "gemma2", head_dim=8, final_logit_softcapping=1.0)
    for folder, reason in ((other, "another tokenizer"), (capped, "more to its logits")):
        with pytest.raises(InvalidArgument, match=reason) as refused:
            pruned(folder, target)
        assert refused.value.field == "source"


def test_a_pruned_model_is_distilled_with_a_small_head(target: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    saved(source, "qwen3", tie_word_embeddings=True)
    texts = (" ".join(f"{i * j}" for j in range(40)) for i in range(1, 60))
    config = DrafterTraining(
        target=str(target),
        source=str(source),
        keep_layers=(2,),
        teacher=teacher_of(target, tmp_path, texts),
        output=tmp_path / "out",
        shape=DrafterShape(context=64),
        steps=2,
        block=32,
        vocabulary=60,
    )
    result = train_drafter(config)
    written = json.loads((result.folder / "config.json").read_text())
    assert (written["model_type"], written["num_hidden_layers"], written["max_position_embeddings"]) == ("qwen3", 2, 64)
    assert written["outrider_head"]["tokens"] == 60
    with pytest.raises(ConfigError, match="one of the two"):
        replace(config, start="general")
    with pytest.raises(ConfigError, match="not given"):
        replace(config, source=None)

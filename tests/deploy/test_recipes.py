"""The recipes of docs/models.md run as they stand there, with small models in the place of the hub's."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from outrider.cloud.testing import save_byte_tokenizer
from outrider.deploy.cli import main
from outrider.drafters import ProposalRule, find_package
from outrider.drafters.onnx import OnnxDrafter
from outrider.proto.types import Sampling

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE |= {"original_max_position_embeddings": 256, "rope_theta": 500000.0}
# The hub's name, and what of its configuration matters here; a source may have unused rows of its vocabulary.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen/Qwen3-8B": ("qwen3", {"num_hidden_layers": 2}),
    "Qwen/Qwen3-0.6B": ("qwen3", {"num_hidden_layers": 6, "vocab_size": 264, "tie_word_embeddings": True}),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama", {"num_hidden_layers": 2, "rope_parameters": LLAMA3_ROPE}),
    "meta-llama/Llama-3.2-1B-Instruct": (
        "llama",
        {"num_hidden_layers": 5, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True},
    ),
}
# Values of a recipe's options, and what stands for them here.
SMALLER = {"--minutes": ("--steps", "2"), "--tokens": ("--tokens", "1500"), "--device": ("--device", "cpu")}
SMALLER |= {"--vocabulary": ("--vocabulary", "120"), "--rows": ("--rows", "8")}


def commands(root: Path) -> list[list[str]]:
    """The arguments of each recipe's commands, in the order of the page."""
    lines = (root / "docs" / "models.md").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    first = next(
        index for index, line in enumerate(lines) if line.startswith("outrider train teacher") and "qwen-says" in line
    )
    recipe = lines[first : lines.index("```", first)]
    return [shlex.split(line)[1:] for line in recipe]


def run_here(arguments: Sequence[str], folder: Path) -> None:
    """Run a command of the page in `folder`, with its models and smaller budgets."""
    words = [*arguments]
    for index, word in enumerate(words):
        if word in SMALLER:
            words[index : index + 2] = SMALLER[word]
    words = [str(folder / word) if word in MODELS else word for word in words]
    assert main(words) == 0, words


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models at their hub names, and a corpus."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("recipes")
    for seed, (name, (architecture, config)) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        made = AutoConfig.for_model(architecture, **SHAPE | {"vocab_size": 258} | config)
        AutoModelForCausalLM.from_config(made).save_pretrained(folder / name)
        save_byte_tokenizer(folder / name)
    lines = [json.dumps({"id": str(i), "text": f"{i} times {i} is {i * i}. " * 8}) for i in range(60)]
    (folder / "mine.jsonl").write_text("\n".join(lines))
    return folder


def test_the_recipes_train_and_export_drafters_of_the_models_that_they_name(
    root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    qwen_says, qwen, llama_says, llama, export, *more = commands(root)
    assert not more
    for write, train, name, layers in ((qwen_says, qwen, "qwen", 4), (llama_says, llama, "llama", 2)):
        run_here([*write, "--new-tokens", "64", "--threads", "1"], folder)
        run_here([*train, "--threads", "1"], folder)
        config = json.loads((folder / name / "config.json").read_text())
        assert config["num_hidden_layers"] == layers
        with safe_open(folder / name / "model.safetensors", "pt") as tensors:
            assert tensors.get_slice("lm_head.up.weight").get_shape() == [120, 64]
        words = [word.replace("qwen", name) for word in export]
        run_here([*words, "--candidates", "16"], folder)
        package = find_package(folder / "package")
        assert package.name == name
        state = OnnxDrafter(package).open(ProposalRule(Sampling(temperature=1.0, seed=1)))
        state.extend((0, 5, 9))
        assert len(state.propose(8)) == 8

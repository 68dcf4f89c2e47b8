"""Training of adapters: from a package and a corpus to a package that drafts better, and only for its subject."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.cloud.export import export_drafter
from outrider.cloud.learning.adapted import AdaptedDrafter
from outrider.cloud.learning.parent import load_parent
from outrider.cloud.testing import save_byte_tokenizer, tiny_llama
from outrider.cloud.training.adapter import PACKAGE, train_adapter
from outrider.cloud.training.settings import AdapterTraining
from outrider.drafters import ProposalRule
from outrider.drafters.adapters import read_adapter
from outrider.drafters.onnx import OnnxDrafter
from outrider.drafters.packages import load_package
from outrider.proto.errors import Cancelled, InvalidArgument
from outrider.proto.types import Sampling

SMALL = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
SMALL |= {"vocab_size": 258, "intermediate_size": 48, "max_position_embeddings": 64, "tie_word_embeddings": True}
TEXT = "".join(f"line {i} of {i * i} lines; " for i in range(400))


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, the package of a drafter that knows nothing of it, and a corpus."""
    root = tmp_path_factory.mktemp("folders")
    target = tiny_llama(seed=1, num_hidden_layers=2, initializer_range=0.2, bos_token_id=0, eos_token_id=1, **SMALL)
    drafter = tiny_llama(seed=0, num_hidden_layers=1, initializer_range=0.1, **SMALL)
    for name, model in (("target", target), ("drafter", drafter)):
        model.save_pretrained(root / name)
        save_byte_tokenizer(root / name)
    export_drafter(root / "drafter", root / "package", name="tiny", target_id="big")
    (root / "lines.txt").write_text(TEXT)
    return root


def training(folders: Path, output: Path, **changes) -> AdapterTraining:
    values = {
        "steps": 60,
        "block": 32,
        "blocks_per_step": 8,
        "blocks_per_pass": 8,
        "warm_up_steps": 2,
        "rank": 4,
        "other_lr": 0.005,
    }
    return AdapterTraining(
        target=str(folders / "target"),
        corpus=(folders / "lines.txt",),
        output=output,
        parent=str(folders / "package"),
        name="lines",
        measure_every_minutes=60.0,
        **(values | changes),
    )


def log_q(package, tokens) -> np.ndarray:
    state = OnnxDrafter(package).open(ProposalRule(Sampling()))
    state.extend(tokens[:1])
    scores: np.ndarray = state.score(tokens[1:])
    state.close()
    return scores


def test_an_adapter_drafts_nearer_to_the_target_than_its_parent(folders: Path, tmp_path: Path) -> None:
    result = train_adapter(training(folders, tmp_path / "run"))
    before = train_adapter(training(folders, tmp_path / "still", steps=1, other_lr=1e-9)).acceptance
    kl = [each["mean"].kl for each in (before, result.acceptance)]
    assert kl[1] < 0.95 * kl[0]
    parent, package = load_package(folders / "package"), load_package(tmp_path / "run" / PACKAGE)
    assert (package.name, package.parent, package.sequence) == ("lines", parent.version, 0)
    assert package.adapter is not None
    assert package.adapter.rank == 4
    assert len(package.adapter.targets) == 6
    assert package.learned_from is not None
    assert (package.learned_from.positions, package.learned_from.keys) == (result.tokens_seen, 0)
    assert package.learned_from.classes == {"corpus/lines": result.tokens_seen}
    record = json.loads((package.folder / "manifest.json").read_text())["training"]
    assert record["config"]["rank"] == 4
    assert record["held_out_acceptance"]["mean"]["kl"] == pytest.approx(kl[1], abs=1e-3)

    adapted = AdaptedDrafter(load_parent(package), rank=4)
    adapted.load(read_adapter(package))
    tokens = tuple(np.random.default_rng(0).integers(2, 258, 30).tolist())
    with torch.no_grad():
        by_torch = adapted(torch.tensor([tokens]), torch.arange(len(tokens))).numpy()
    by_onnx, by_parent = log_q(package, tokens), log_q(parent, tokens)
    expected = by_torch[np.arange(29), tokens[1:]]
    np.testing.assert_allclose(by_onnx, expected, atol=5e-3)
    assert np.abs(by_parent - expected).max() > 0.5


def test_a_resumed_run_makes_the_same_adapter(folders: Path, tmp_path: Path) -> None:
    whole = training(folders, tmp_path / "whole", steps=8)
    train_adapter(whole)
    steps = []
    with pytest.raises(Cancelled):
        train_adapter(
            training(folders, tmp_path / "broken", steps=8), on_step=steps.append, stopping=lambda: len(steps) == 3
        )
    assert not (tmp_path / "broken" / PACKAGE).exists()
    train_adapter(training(folders, tmp_path / "broken", steps=8, resume=True))
    one, other = (load_package(tmp_path / name / PACKAGE) for name in ("whole", "broken"))
    assert one.version == other.version


def test_what_cannot_be_trained_or_written_is_refused_before_it_costs_time(folders: Path, tmp_path: Path) -> None:
    (tmp_path / "run" / PACKAGE).mkdir(parents=True)
    with pytest.raises(InvalidArgument, match="is there already") as refused:
        train_adapter(training(folders, tmp_path / "run"))
    assert refused.value.field == "output"
    with pytest.raises(InvalidArgument, match="'general' has another tokenizer than the target") as refused:
        train_adapter(replace(training(folders, tmp_path / "other"), parent="general"))
    assert refused.value.field == "parent"

"""A drafter with a sliding window is asked for no more of a text than its answers depend on, and answers the same."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tokenizers import Tokenizer, models
from transformers import MistralConfig, MistralForCausalLM

from outrider.cloud.export import export_drafter
from outrider.cloud.target.projection import Projection
from outrider.drafters import ProposalRule, load_package
from outrider.drafters.onnx import OnnxDrafter, OnnxState
from outrider.proto.types import Sampling, token_ids

VOCABULARY, RANK, LAYERS, WINDOW = 64, 4, 2, 4
REACH = LAYERS * (WINDOW - 1) + 1
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "intermediate_size": 48,
    "max_position_embeddings": 400,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
RULE = ProposalRule(Sampling(temperature=1.0, seed=3))


def exported(model: MistralForCausalLM, folder: Path) -> Path:
    """A steered drafter's package."""
    model.save_pretrained(folder / "source")
    Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[])).save(str(folder / "source" / "tokenizer.json"))
    matrices = {f"layers.{layer}.weight": torch.randn(48, RANK) for layer in range(LAYERS)}
    save_file(matrices, folder / "source" / "steering.safetensors")
    Projection((1, 2, 3), hidden=16, rank=RANK, target="big").save(folder / "source" / "projection.safetensors")
    export_drafter(folder / "source", folder / "package", name="tiny", target_id="big", candidates=8)
    return folder / "package"


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> OnnxDrafter:
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW))
    return OnnxDrafter(load_package(exported(model, tmp_path_factory.mktemp("windowed"))))


def reaching(drafter: OnnxDrafter, reach: int | None) -> OnnxDrafter:
    """Return the same drafter with another reach."""
    return OnnxDrafter(dataclasses.replace(drafter.package, reach=reach))


@pytest.fixture(scope="module")
def thorough(windowed: OnnxDrafter) -> OnnxDrafter:
    return reaching(windowed, None)


def some_tokens(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCABULARY, length).tolist()


def computed(state: OnnxState, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Fills with how many tokens each run of `state` computes."""
    counts: list[int] = []
    run = state._run
    monkeypatch.setattr(state, "_run", lambda n, binding: (counts.append(n), run(n, binding))[1])
    return counts


def test_of_a_long_prompt_only_the_end_is_read(windowed: OnnxDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    assert windowed.package.reach == REACH, "as its manifest says"
    state = windowed.open(RULE)
    counts = computed(state, monkeypatch)
    state.extend(some_tokens(1, 300))
    state.propose(3)
    assert counts == [REACH, 1, 1]
    state.truncate(302)
    state.extend(some_tokens(2, 40))
    state.propose(1)
    assert counts == [REACH, 1, 1, REACH]


def test_a_drafter_without_a_window_reads_it_all(thorough: OnnxDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
    state = thorough.open(RULE)
    counts = computed(state, monkeypatch)
    state.extend(some_tokens(1, 300))
    state.propose(3)
    assert sum(counts) == 302


STEPS = st.one_of(
    st.tuples(st.just("extend"), st.integers(0, 30)),
    st.tuples(st.just("propose"), st.integers(1, 5)),
    st.tuples(st.just("truncate"), st.integers(0, 45)),
    st.tuples(st.just("score"), st.integers(1, 20)),
    st.tuples(st.just("propose_forced"), st.integers(1, 20)),
)


def outputs(drafter: OnnxDrafter, steps: list[tuple[str, int]], *, steered: bool = True) -> list[object]:
    """Return the answers of a session that begins with 20 tokens and has one vector from there on, or none, rounded."""
    state, said, since = drafter.open(RULE), [], 20
    state.extend(some_tokens(0, since))
    if steered:
        state.steer(np.array([1, -1, 2, 0.5], dtype=np.float32), since)
    for seed, (what, number) in enumerate(steps):
        if what == "extend":
            state.extend(some_tokens(seed, number))
        elif what == "propose":
            said.append(token_ids(state.propose(number)))
        elif what == "truncate":
            state.truncate(max(1, state.length - number))
        elif what == "score":
            said.append(np.round(state.score(some_tokens(seed, number)), 3).tolist())
        else:
            said.append(token_ids(state.propose_forced(some_tokens(seed, number))))
    state.close()
    return said


@settings(deadline=None, max_examples=150)
@given(steps=st.lists(STEPS, max_size=14), steered=st.booleans())
@example([("extend", 30), ("propose", 1), ("truncate", 29), ("score", 3)], True)  # back to the prompt's end
def test_it_says_what_it_says_when_it_reads_everything(
    windowed: OnnxDrafter, thorough: OnnxDrafter, steps: list[tuple[str, int]], steered: bool
) -> None:
    said = outputs(windowed, steps, steered=steered), outputs(thorough, steps, steered=steered)
    for got, wanted in zip(*said, strict=True):
        assert got == pytest.approx(wanted, abs=2e-3)


def test_that_shows_a_reach_that_is_too_short(windowed: OnnxDrafter, thorough: OnnxDrafter) -> None:
    steps = [("extend", 30), ("propose", 5), ("score", 3)]
    assert outputs(reaching(windowed, REACH - 1), steps)[1] != pytest.approx(outputs(thorough, steps)[1], abs=2e-3)

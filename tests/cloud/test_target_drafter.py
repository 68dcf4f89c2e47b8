"""A model of any architecture drafts beside the target, and a draft that is cut back leaves no trace."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.cloud.serving.own_drafter import load_own_drafter
from outrider.cloud.target.target_drafter import TargetDrafter
from outrider.cloud.target.target_loading import load_target
from outrider.cloud.target.transformers_backend import TransformersBackend
from outrider.cloud.testing import VOCAB
from outrider.drafters import ProposalRule
from outrider.proto.errors import TokenizerMismatch
from outrider.proto.testing import word_tokenizer
from outrider.proto.types import Sampling, token_ids
from research.architectures.__main__ import save
from research.architectures.small_models import small_model
from research.text_writer import TextRequest, TextWriter

FAMILIES = "llama", "qwen3_5_text", "lfm2", "falcon"
SETTINGS = {
    "greedy": Sampling(max_tokens=30, ignore_eos=True),
    "drawn": Sampling(temperature=0.8, seed=5, max_tokens=30, ignore_eos=True),
    "penalised": Sampling(temperature=1.0, seed=6, presence_penalty=1.0, max_tokens=30, ignore_eos=True),
}


@pytest.fixture(scope="module")
def drafters(tmp_path_factory):
    """Return a family's target and the same model as its drafter."""
    made: dict[str, tuple] = {}

    def of(name: str):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            save(small_model(name), folder)
            target = load_target(str(folder), kv_tokens=2048)
            model = load_target(str(folder), kv_tokens=4096, exact="off")
            made[name] = target, TargetDrafter(model, folder)
        return made[name]

    return of


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_beside_itself_proposes_every_token(name, setting, drafters) -> None:
    target, drafter = drafters(name)
    prompt, sampling = tuple(range(3, 30)), SETTINGS[setting]
    (text,) = TextWriter(target).write([TextRequest(prompt, sampling)])
    state = drafter.open(ProposalRule(sampling, prompt_length=len(prompt)))
    state.extend(prompt)
    assert token_ids(state.propose(30)) == text.tokens
    state.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_what_was_cut_back_leaves_no_trace(name, drafters) -> None:
    _, drafter = drafters(name)
    rng = random.Random(3)
    rule = ProposalRule(SETTINGS["penalised"], prompt_length=4)
    state, tokens = drafter.open(rule), list(range(3, 20))
    state.extend(tokens)
    for _ in range(12):
        state.propose(rng.randrange(6))
        kept = rng.randrange(1, len(tokens) + 1)
        more = [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 12))]
        state.truncate(kept)
        state.extend(more)
        tokens = [*tokens[:kept], *more]
        fresh = drafter.open(rule)
        fresh.extend(tokens)
        assert token_ids(state.propose(2)) == token_ids(fresh.propose(2))
        state.truncate(len(tokens))
        fresh.close()
    state.close()
    capacity = drafter.target.pool.capacity
    assert capacity.free_pages == capacity.pages


def test_scores_are_log_probabilities(drafters) -> None:
    target, drafter = drafters("qwen3_5_text")
    text = tuple(torch.randint(3, VOCAB, (20,), generator=torch.Generator().manual_seed(1)).tolist())
    state = drafter.open(ProposalRule(Sampling()))
    state.extend(text[:12])
    scores = state.score(text[12:])
    with torch.inference_mode():
        target.model.set_attn_implementation("eager")
        logits = target.model(torch.tensor([text]), use_cache=False).logits[0].log_softmax(-1)
        target.model.set_attn_implementation(target.attention)
    assert np.allclose(scores, [logits[i - 1, text[i]].item() for i in range(12, 20)], atol=1e-3)


def test_a_full_context_ends_its_proposals(drafters) -> None:
    _, drafter = drafters("lfm2")
    state = drafter.open(ProposalRule(Sampling()))
    state.extend([5] * (drafter.target.context_length - 3))
    assert len(state.propose(10)) == 3
    assert state.propose(1) == ()


def test_a_folder_of_a_model_drafts_if_its_tokenizer_is_the_targets(tmp_path: Path, drafters) -> None:
    facts = TransformersBackend(drafters("llama")[0]).facts
    save(small_model("lfm2"), tmp_path)
    own = load_own_drafter(str(tmp_path), facts)
    assert isinstance(own.drafter, TargetDrafter)
    assert own.name == f"{tmp_path.name}@{own.drafter.version}"
    assert own.position_bytes > 0
    (tmp_path / "tokenizer.json").write_text(word_tokenizer(VOCAB + 1))
    with pytest.raises(TokenizerMismatch, match="another tokenizer"):
        load_own_drafter(str(tmp_path), facts)

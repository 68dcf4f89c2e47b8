"""Targets beyond plain Llamas, and what vLLM is asked for and cannot do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.cloud.serving.backends import load_backend
from outrider.cloud.target.backend import Backend, StepRow
from outrider.cloud.target.verification import VerificationInput
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto.errors import ConfigError, ModelRefused
from outrider.proto.testing import word_tokenizer
from outrider.proto.types import DraftToken, Sampling, token_ids

VOCAB = 61
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}


def saved(folder: Path, model: Any) -> Path:
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(word_tokenizer(VOCAB), encoding="utf-8")
    return folder


def config_of(target: str | Path, **fields: Any) -> VerifierConfig:
    return VerifierConfig(target=str(target), threads=1, **{"dtype": "float32", "kv_tokens": 1024} | fields)


def text_of(backend: Backend, prompt: list[int], tokens: int) -> list[int]:
    """A text at T = 1, with drafts of which some are right by chance, each step after a rollback of a few tokens."""
    transcript, sampling = list(prompt), Sampling(temperature=1.0, seed=4)
    handle = backend.open(prompt)
    while len(transcript) < len(prompt) + tokens:
        backend.truncate(handle, max(0, min(handle.length, len(transcript) - 7)))
        block = tuple(DraftToken((len(transcript) * 7 + j) % VOCAB) for j in range(3))
        backend.reserve(handle, len(transcript) + len(block))
        verification = VerificationInput(sampling, transcript, len(prompt), block)
        rows = [StepRow(handle, tuple(transcript[handle.length :]), verification)]
        [sampled] = backend.step(rows).sampled
        assert sampled is not None
        own, drafts = token_ids(sampled.tokens), token_ids(block)
        agreed = next((j for j in range(3) if drafts[j] != own[j]), 3)
        transcript += own[: agreed + 1]
        backend.truncate(handle, min(handle.length, len(transcript) - 1))
    backend.release(handle)
    return transcript[len(prompt) :][:tokens]


def mistral() -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**SHAPE, **HEADS, sliding_window=24))


def gemma() -> Any:
    """A window in one layer, all positions in the other."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE, **HEADS, head_dim=32, sliding_window=24, layer_types=kinds))


@pytest.mark.parametrize(("made", "sharpness"), [(mistral, 25), (gemma, 4)])
def test_a_sliding_window_is_rolled_back_like_the_rest(made, sharpness, tmp_path) -> None:
    torch.manual_seed(2)
    model = made()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(sharpness)
    folder = saved(tmp_path, model)
    texts = []
    for engine in ("transformers", "vllm"):
        backend = load_backend(config_of(folder, engine=engine))
        texts.append(text_of(backend, list(range(3, 43)), 60))
        backend.close()
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 20


def test_a_state_that_cannot_be_rolled_back_is_refused(tmp_path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    shape = {name: value for name, value in SHAPE.items() if name != "max_position_embeddings"}
    folder = saved(tmp_path, MambaForCausalLM(MambaConfig(**shape, state_size=16)))
    with pytest.raises(ModelRefused, match="to roll back"):
        load_backend(config_of(folder, engine="vllm", context_length=256))


@pytest.mark.parametrize(
    ("stored", "chosen"), [(torch.float32, "bfloat16"), (torch.bfloat16, "bfloat16"), (torch.float16, "float16")]
)
def test_vllm_chooses_the_type_where_none_is_named(stored, chosen, tmp_path) -> None:
    backend = load_backend(config_of(saved(tmp_path, mistral().to(stored)), engine="vllm", dtype="auto"))
    assert backend.facts.precision == f"vllm {chosen}"
    assert len(text_of(backend, list(range(3, 43)), 20)) == 20
    backend.close()


@pytest.mark.parametrize(("field", "value"), [("quantization", "no-such-way"), ("kv_dtype", "float3")])
def test_what_vllm_does_not_know_is_refused_in_its_own_words(field, value) -> None:
    with pytest.raises(ModelRefused, match=value):
        load_backend(config_of("reference", engine="vllm", **{field: value}))


def test_a_device_that_this_build_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="computes on cpu alone, not on 'cuda:1'") as refused:
        load_backend(config_of("reference", engine="vllm", device="cuda:1"))
    assert refused.value.field == "device"

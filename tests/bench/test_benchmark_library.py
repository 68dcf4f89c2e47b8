"""The baselines of transformers: their texts and counts, in a process of their own."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch

from outrider.bench.benchmark import library
from outrider.bench.benchmark.library import LibraryProcess, LibraryText, drafter_folder_of, write_drafter
from outrider.cloud.learning.parent import load_parent
from outrider.cloud.testing import save_tiny_target
from outrider.drafters import find_package
from outrider.proto.errors import ConfigError, Internal
from outrider.proto.types import Sampling

PROMPTS = ((5, 9, 11), (40, 3, 3, 70, 8))
TOKENS = 24


def save_llama(folder: Path, seed: int, layers: int) -> Path:
    return save_tiny_target(
        folder,
        seed=seed,
        sharpness=1,
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.08,  # four times the usual, so that texts do not loop at once
        eos_token_id=None,
        pad_token_id=0,
    )


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return save_llama(tmp_path_factory.mktemp("target"), seed=7, layers=3)


@pytest.fixture(scope="module")
def drafter(tmp_path_factory) -> Path:
    return save_llama(tmp_path_factory.mktemp("drafter"), seed=8, layers=1)


def in_this_process(target: Path, assistant: Path | None = None, **sampling: float) -> list[LibraryText]:
    how = {"max_tokens": TOKENS, "temperature": 0.0, "seed": 0} | sampling
    models = library._models(str(target), str(assistant) if assistant else None, 1, "float32")
    return [library._text(*models, prompt, **how) for prompt in PROMPTS]


def greedy(folder: Path, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Decode by the plain definition: one whole forward pass a token."""
    from transformers import AutoModelForCausalLM

    model, tokens = AutoModelForCausalLM.from_pretrained(folder), list(prompt)
    with torch.inference_mode():
        for _ in range(TOKENS):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


class BrokenFirst(LibraryProcess):
    """The process of a model whose weights cannot be read, which is then given another: it takes seconds to start."""

    def __init__(self, broken: Path, target: Path) -> None:
        super().__init__(broken, Sampling(), threads=1, dtype="float32")
        self.then = LibraryProcess(
            target, Sampling(max_tokens=TOKENS), assistant_folder=target, threads=1, dtype="float32"
        )

    async def prepare(self) -> None:
        with pytest.raises(Internal, match=r"library: transformers failed: .*header"):
            await super().prepare()
        self.then.process = self.process
        await self.then.prepare()


def test_a_process_reports_a_failure_and_its_assistant_changes_no_token(target, tmp_path) -> None:
    (tmp_path / "config.json").write_text((target / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")

    async def ask() -> list[LibraryText]:
        async with BrokenFirst(tmp_path, target) as process:
            return [await process.then.text(prompt) for prompt in PROMPTS]

    texts = asyncio.run(ask())
    assert [text.tokens for text in texts] == [greedy(target, prompt) for prompt in PROMPTS]
    for text in texts:
        assert text.steps < TOKENS
        assert text.accepted == text.questioned == TOKENS - text.steps  # the drafter is the target itself
        assert len(text.arrivals) == TOKENS
        assert 0 < text.arrivals[0] <= text.arrivals[-1] <= text.seconds


def test_a_prompt_without_tokens_is_refused(target) -> None:
    process = LibraryProcess(target, Sampling(), threads=1, dtype="float32")
    with pytest.raises(ConfigError, match="prompt: holds no token"):
        asyncio.run(process.text(()))


def test_generate_takes_one_step_a_token(target) -> None:
    texts = in_this_process(target)
    assert [text.tokens for text in texts] == [greedy(target, prompt) for prompt in PROMPTS]
    for text in texts:
        assert text.steps == len(text.arrivals) == TOKENS
        assert list(text.arrivals) == sorted(text.arrivals)
        assert text.accepted == text.questioned == 0


def test_a_drafter_that_knows_nothing_changes_no_token(target, drafter) -> None:
    texts = in_this_process(target, drafter)
    assert [text.tokens for text in texts] == [text.tokens for text in in_this_process(target)]
    assert sum(text.accepted for text in texts) < sum(text.questioned for text in texts)
    for text in texts:
        assert text.accepted == TOKENS - text.steps


def test_sampling_takes_the_plain_distribution_and_the_seed(target, tmp_path) -> None:
    from transformers import AutoModelForCausalLM, GenerationConfig

    AutoModelForCausalLM.from_pretrained(target).save_pretrained(tmp_path)
    GenerationConfig(do_sample=True, top_k=1, pad_token_id=0).save_pretrained(tmp_path)  # would make it greedy
    first, again, other = (
        [text.tokens for text in in_this_process(tmp_path, temperature=1.0, seed=seed)] for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other
    assert first != [text.tokens for text in in_this_process(target)]


def test_the_end_token_of_the_generation_config_ends_a_text(target, tmp_path) -> None:
    from transformers import AutoModelForCausalLM, GenerationConfig

    whole = in_this_process(target)[0].tokens
    AutoModelForCausalLM.from_pretrained(target).save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=whole[5], pad_token_id=0).save_pretrained(tmp_path)
    for texts in (in_this_process(tmp_path), in_this_process(tmp_path, tmp_path)):
        assert texts[0].tokens == whole[: whole.index(whole[5]) + 1]
        assert len(texts[0].arrivals) == len(texts[0].tokens)


def test_drafts_are_verified_up_to_the_first_wrong_one_of_a_step() -> None:
    watch = library._Watch()
    # A prompt of 3 with 4 drafts, of which 2 are right; 4 drafts, all right; 4 drafts, and the text ends after one.
    watch.rows, watch.commits = [7, 5, 5], [3, 5, 2]
    assert watch.verified(3) == (2 + 4 + 1, 3 + 4 + 1)


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        (None, "hf_drafter: is missing; hf-assisted needs the drafter as a transformers folder"),
        ("none", "is no folder; give one with config.json"),
        ("empty", "holds no transformers model"),
        ("package", "holds an ONNX package, which transformers cannot run"),
    ],
)
def test_a_folder_without_a_transformers_drafter_is_refused(tmp_path, folder, message) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "model.onnx").write_bytes(b"")
    with pytest.raises(ConfigError) as raised:
        drafter_folder_of(folder and tmp_path / folder)
    assert raised.value.field == "hf_drafter"
    assert message in str(raised.value)


def test_a_drafter_folder_is_found(drafter) -> None:
    assert drafter_folder_of(drafter) == drafter


def test_an_embedded_drafter_is_written_for_transformers(tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    assert drafter_folder_of(write_drafter("general", tmp_path)) == tmp_path
    parent = load_parent(find_package("general")).model.state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(tmp_path).state_dict().items():
        assert torch.equal(tensor, parent[name]), name
    with pytest.raises(ConfigError, match="swift is steered, which transformers cannot do") as raised:
        write_drafter("swift", tmp_path)
    assert raised.value.field == "hf_drafter"


@pytest.mark.parametrize(
    ("sampling", "dtype", "field"), [(Sampling(top_k=5), "float32", "sampling"), (Sampling(), "float99", "dtype")]
)
def test_options_that_transformers_lacks_are_refused(target, sampling, dtype, field) -> None:
    with pytest.raises(ConfigError) as raised:
        LibraryProcess(target, sampling, threads=1, dtype=dtype)
    assert raised.value.field == field


def test_the_requests_to_the_process_survive_json(target, drafter, monkeypatch) -> None:
    process = LibraryProcess(
        target, Sampling(temperature=0.5, seed=3), assistant_folder=drafter, threads=1, dtype="float32"
    )
    asked = []

    async def ask(request: dict[str, object]) -> dict[str, object]:
        asked.append(json.loads(json.dumps(request)))
        assert asked[-1] == request
        return {"tokens": [4], "seconds": 1.0, "arrivals": [0.5], "steps": 1, "accepted": 0, "questioned": 0}

    monkeypatch.setattr(process, "ask", ask)
    asyncio.run(process.prepare())
    assert asyncio.run(process.text((5, 9), 8)) == LibraryText((4,), 1.0, (0.5,), 1, 0, 0)
    assert asked == [
        {"target": str(target), "assistant": str(drafter), "threads": 1, "dtype": "float32"},
        {"prompt": [5, 9], "max_tokens": 8, "temperature": 0.5, "seed": 3},
    ]

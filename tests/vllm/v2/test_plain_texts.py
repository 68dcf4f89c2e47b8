"""With vLLM's noise, texts through our backends are those of a plain vLLM, drafts or not.

Plain means a process of its own in which nothing of Outrider runs. vLLM's own speculation is the control: it changes
the texts of the same seeds.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.cloud.backend import Backend, StepRow
from outrider.cloud.backends import load_backend
from outrider.cloud.config import VerifierConfig
from outrider.cloud.distribution import VerificationInput
from outrider.cloud.family_index import load_tokenizer, target_folder
from outrider.deploy.prompts import held_out
from outrider.proto.types import DraftToken, Noise, Sampling, token_ids

TOKENS = 24
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 7},
    {"temperature": 1.0, "seed": 8, "top_p": 0.95},
    {"temperature": 0.8, "seed": -(2**62)},
    {"temperature": 1.0, "seed": 10, "top_k": 40},
    {"temperature": 1.0, "seed": 11, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 1.0, "seed": 12},
    {"temperature": 1.3, "seed": 13, "min_p": 0.02},
    {"temperature": 1.0, "seed": 2**63 - 1},
]
SAMPLINGS = [Sampling(noise=Noise.VLLM, **{**each, "seed": each["seed"] % (1 << 64)}) for each in SETTINGS]
Drafts = Callable[[int, int], list[int]]  # of a text after so many tokens


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(str(target_folder("reference")))
    return [tokenizer.encode(prompt.text) for prompt in held_out(2)]


def plain_texts(
    prompts: list[list[int]], settings: list[dict[str, Any]], proposed: list[list[int]] | None = None
) -> list[list[int]]:
    request = {
        "target": str(target_folder("reference")),
        "prompts": prompts,
        "settings": [{**each, "max_tokens": TOKENS} for each in settings],
        "proposed": proposed,
    }
    command = [sys.executable, str(Path(__file__).parent / "plain_vllm.py")]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    texts: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return texts


@pytest.fixture(scope="module")
def plain(prompts: list[list[int]]) -> list[list[int]]:
    return plain_texts(prompts, SETTINGS)


@pytest.fixture(scope="module", params=["vllm", "transformers"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    backend = load_backend(VerifierConfig(engine=request.param, dtype="float32", kv_tokens=8192, max_sessions=8))
    yield backend
    backend.close()


def write(
    backend: Backend, prompts: list[list[int]], samplings: list[Sampling], drafts: Drafts = lambda _text, _tokens: []
) -> tuple[list[list[int]], int]:
    """Write all texts together; return them and the number of steps."""
    transcripts = [list(prompt) for prompt in prompts]
    sequences = [backend.open(prompt) for prompt in prompts]
    steps = 0
    while going := [i for i, text in enumerate(transcripts) if len(text) < len(prompts[i]) + TOKENS]:
        rows = []
        for i in going:
            text, sequence = transcripts[i], sequences[i]
            block = tuple(map(DraftToken, drafts(i, len(text) - len(prompts[i]))))
            backend.reserve(sequence, len(text) + len(block))
            verification = VerificationInput(samplings[i], text, len(prompts[i]), block)
            rows.append(StepRow(sequence, tuple(text[sequence.length :]), verification))
        for i, sampled in zip(going, backend.step(rows).sampled, strict=True):
            assert sampled is not None
            own, text = token_ids(sampled.tokens), transcripts[i]
            block_ids = drafts(i, len(text) - len(prompts[i]))
            agreed = next((j for j, draft in enumerate(block_ids) if draft != own[j]), len(block_ids))
            text += own[: agreed + 1]
            backend.truncate(sequences[i], len(text) - 1)
        steps += 1
    for sequence in sequences:
        backend.release(sequence)
    return [text[len(prompt) :][:TOKENS] for text, prompt in zip(transcripts, prompts, strict=True)], steps


def drafting(texts: list[list[int]]) -> Drafts:
    """Return up to five drafts of the known texts, one in five wrong; the same when asked again."""

    def drafts(text: int, tokens: int) -> list[int]:
        rng = random.Random(f"{text} {tokens}")
        right = texts[text][tokens : tokens + rng.randint(0, 5)]
        return [token if rng.random() < 0.8 else rng.randrange(8192) for token in right]

    return drafts


def same(texts: list[list[int]], others: list[list[int]]) -> int:
    return sum(one == other for one, other in zip(texts, others, strict=True))


def test_texts_are_those_of_a_plain_vllm(backend, prompts, plain) -> None:
    texts, steps = write(backend, prompts, SAMPLINGS)
    assert steps == TOKENS
    assert same(texts, plain) == 8
    texts, steps = write(backend, prompts, SAMPLINGS, drafting(plain))
    assert steps < TOKENS
    assert same(texts, plain) == 8


def test_outriders_noise_writes_other_texts(backend, prompts, plain) -> None:
    ours = [replace(sampling, noise=Noise.OUTRIDER) for sampling in SAMPLINGS]
    texts, _ = write(backend, prompts, ours)
    assert same(texts, plain) == 0
    assert same(write(backend, prompts, ours, drafting(texts))[0], texts) == 8


def test_vllms_own_verification_of_right_drafts_changes_texts(prompts, plain) -> None:
    taken = [i for i, settings in enumerate(SETTINGS) if "min_p" not in settings]  # which it refuses then
    some, settings, expected = ([of_all[i] for i in taken] for of_all in (prompts, SETTINGS, plain))
    assert plain_texts(some, settings) == expected, "without drafts it repeats itself"
    assert same(plain_texts(some, settings, proposed=expected), expected) < len(taken) / 2

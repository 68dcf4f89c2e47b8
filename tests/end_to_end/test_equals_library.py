"""At T = 0 the tokens are those of `transformers` `generate` on the same float32 target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider.cloud.models.family_index import load_tokenizer, target_folder
from outrider.deploy.built_in_prompts import DOMAINS

TOKENS = 32


@pytest.fixture(scope="module")
def library() -> tuple[Any, Any]:
    folder: Path = target_folder("reference")
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), load_tokenizer(str(folder))


@pytest.mark.parametrize(
    "domain", [DOMAINS[0], *(pytest.param(domain, marks=pytest.mark.soak) for domain in DOMAINS[1:])]
)
async def test_greedy_text_equals_generate_of_transformers(serving, edge, prompts, library, domain) -> None:
    model, tokenizer = library

    def by_library(text: str) -> tuple[int, ...]:
        encoded = tokenizer(text, return_tensors="pt")
        generated = model.generate(**encoded, do_sample=False, max_new_tokens=TOKENS)
        return tuple(generated[0, encoded["input_ids"].shape[1] :].tolist())

    chosen = [prompt for prompt in prompts(2) if prompt.domain == domain]
    async with serving(dtype="float32") as address, edge(address, drafter="general") as client:
        for prompt in chosen:
            completion = await client.complete(prompt.text, max_tokens=TOKENS)
            assert completion.ids == by_library(prompt.text)

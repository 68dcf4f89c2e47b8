"""At T = 0 the tokens are those of `transformers` `generate` on the same float32 target."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from outrider.cloud.models.family_index import load_tokenizer, target_folder

TOKENS = 32


async def test_greedy_text_equals_generate_of_transformers(serving, edge, prompts) -> None:
    folder = target_folder("reference")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = load_tokenizer(str(folder))

    def by_library(text: str) -> tuple[int, ...]:
        encoded = tokenizer(text, return_tensors="pt")
        generated = model.generate(**encoded, do_sample=False, max_new_tokens=TOKENS)
        return tuple(generated[0, encoded["input_ids"].shape[1] :].tolist())

    async with serving(dtype="float32") as address, edge(address, drafter="general") as client:
        for prompt in prompts(1):  # one of each domain
            completion = await client.complete(prompt.text, max_tokens=TOKENS)
            assert completion.ids == by_library(prompt.text)

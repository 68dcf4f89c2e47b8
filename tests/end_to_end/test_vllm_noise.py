"""A verifier with `--noise vllm`: its texts follow vLLM's rule, whatever the edge drafts, and edges draft by it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from outrider.cloud.family_index import target_folder
from outrider.edge import Sampling
from outrider.edge.decoding import Decoding
from outrider.proto.types import Noise
from outrider.proto.vllm_noise import gumbel32

HOT = Sampling(max_tokens=24, temperature=1.0, seed=20260)


async def texts(client: Any, prompts: list[Any], sampling: Sampling) -> list[tuple[int, ...]]:
    return [(await client.complete(prompt.text, sampling)).ids for prompt in prompts]


def follows_vllms_rule(prompt: tuple[int, ...], text: tuple[int, ...], sampling: Sampling) -> bool:
    """Whether `text` is argmax of logits / T + noise, by transformers and the documented noise alone."""
    model = AutoModelForCausalLM.from_pretrained(target_folder("reference"), dtype=torch.float32)
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt + text]), use_cache=False).logits[0].float()
    rows = (logits / np.float32(sampling.temperature)).numpy()
    every = np.arange(rows.shape[1])
    noise = [gumbel32(sampling.seed, len(prompt) + i, every) for i in range(len(text))]
    return text == tuple(int((rows[len(prompt) + i - 1] + noise[i]).argmax()) for i in range(len(text)))


def test_texts_follow_vllms_rule_with_any_drafter_and_over_resumes(serving, edge, relay, prompts) -> None:
    async def main() -> None:
        chosen = prompts(1)[:2]
        async with serving(dtype="float32", noise=Noise.VLLM) as address, serving(dtype="float32") as ours:
            async with edge(address, drafter="none") as client:
                expected = await texts(client, chosen, HOT)
                encoded = [client.encode(prompt.text) for prompt in chosen]
            async with edge(ours, drafter="none") as client:
                plain = await texts(client, chosen, HOT)
                assert await texts(client, chosen, replace(HOT, noise=Noise.VLLM)) == expected
            assert all(text != other for text, other in zip(expected, plain, strict=True))
            for prompt, text, other in zip(encoded, expected, plain, strict=True):
                assert follows_vllms_rule(prompt, text, HOT)
                assert not follows_vllms_rule(prompt, other, HOT)
            for drafter in ("general", "ngram"):
                async with edge(address, drafter=drafter) as client:
                    assert await texts(client, chosen, HOT) == expected
            # The text begins at one verifier and goes on at another, whose own noise is Outrider's.
            async with relay(address) as first, edge(first.address, ours, drafter="general") as client:
                got: list[int] = []
                async for event in client.generate(chosen[0].text, HOT):
                    got += getattr(event, "ids", ())
                    if len(got) > 4:
                        first.cut()
                    statistics = getattr(event, "statistics", None)
                assert tuple(got) == expected[0]
                assert statistics.resumes >= 1

    asyncio.run(main())


def test_edges_draft_with_the_noise_that_the_verifier_names(serving, edge, prompts, monkeypatch) -> None:
    async def acceptance(address: str) -> float:
        async with edge(address, drafter="general") as client:
            done = [await client.complete(prompt.text, HOT, temperature=1.5) for prompt in prompts(1)]
        return sum(each.statistics.hits for each in done) / sum(each.statistics.compared for each in done)

    async def main() -> None:
        async with serving(noise=Noise.VLLM) as address:
            followed = await acceptance(address)
            monkeypatch.setattr(Decoding, "_follow_terms", lambda _, terms, noise: None)
            assert followed > await acceptance(address) + 0.1

    asyncio.run(main())

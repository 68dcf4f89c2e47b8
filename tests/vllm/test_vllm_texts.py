"""Texts through our server, on vLLM and on our own engine: the same bytes, whatever an edge asks for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from outrider.cloud.actor import VerifierActor
from outrider.cloud.config import VerifierConfig
from outrider.cloud.family_index import target_folder, tokenizer_file
from outrider.deploy.prompts import held_out
from outrider.edge import Client, EdgeConfig
from outrider.proto.types import Grammar, GrammarKind, Noise, Sampling

TOKENS = 48
PROMPTS = [prompt.text for prompt in held_out(2)]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}, "n": {"type": "integer"}},
        "required": ["name", "n"],
        "additionalProperties": False,
    }
)
PLAIN = Sampling(max_tokens=TOKENS, seed=7)
SETTINGS = {
    "greedy": PLAIN,
    "drawn": replace(PLAIN, temperature=1.0),
    "penalised": replace(PLAIN, temperature=0.8, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.4),
    "cut": replace(PLAIN, temperature=1.2, top_k=40, top_p=0.9, min_p=0.02),
    "biased": replace(PLAIN, temperature=1.0, logit_bias=((16, 2.0), (203, -5.0))),
    "restricted": replace(PLAIN, temperature=1.0, allowed_tokens=tuple(range(200, 900))),
    "grammar": replace(PLAIN, temperature=0.8, max_tokens=64, grammar=Grammar(GrammarKind.JSON_SCHEMA, SCHEMA)),
    "noise of vLLM": replace(PLAIN, temperature=1.0, noise=Noise.VLLM),
}
CHAT = ("The first thing to know about rivers is", " And the second thing is", " Finally")

TOKENIZER = tokenizer_file(target_folder("reference"))

Found = dict[str, Any]


def edge(address: str, drafter: str, **fields: Any) -> Client:
    return Client(
        EdgeConfig(verifier=address, model="reference", tokenizer=TOKENIZER, drafter=drafter, threads=1, **fields)
    )


def config_of(**fields: Any) -> VerifierConfig:
    return VerifierConfig(
        dtype="float32", threads=1, kv_tokens=8192, context_length=1024, max_sessions=16, keep_s=60.0, **fields
    )


async def found_at(address: str, drafter: str, settings: dict[str, Sampling]) -> Found:
    """Everything that a user may see."""
    async with edge(address, drafter) as client:
        found: Found = {}
        for name, sampling in settings.items():
            together = await asyncio.gather(*(client.complete(prompt, sampling) for prompt in PROMPTS))
            found[name] = [(each.ids, each.text, each.finish_reason) for each in together]
            if drafter != "none":
                assert any(not each.statistics.drafter_error for each in together)
        listed = await client.complete(PROMPTS[1], PLAIN, logprobs=True, top_logprobs=3, max_tokens=16)
        found["logprobs"] = [(each.id, [token for token, _ in each.top]) for each in listed.tokens]
        found["logprob values"] = [each.logprob for each in listed.tokens]
        async with client.conversation(replace(PLAIN, temperature=0.7, max_tokens=40)) as talk:
            found["chat"] = [(await talk.complete(text)).ids for text in CHAT]
        return found


@pytest.fixture(scope="module")
def expected() -> Found:
    """The texts of our own engine without drafts."""
    actor = VerifierActor(config_of())
    try:
        return asyncio.run(found_at(actor.info()["address"], "none", SETTINGS))
    finally:
        actor.stop()


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "tensor parallel"])
def verifier(request: pytest.FixtureRequest) -> Iterator[VerifierActor]:
    actor = VerifierActor(config_of(engine="vllm", tensor_parallel=request.param))
    yield actor
    actor.stop()


@pytest.mark.parametrize("drafter", ["none", "general", "swift"])
def test_texts_are_those_of_our_own_engine(drafter, verifier, expected) -> None:
    """With `swift`, vLLM's workers are tapped, and drafts are steered by what comes of it."""
    found = asyncio.run(found_at(verifier.info()["address"], drafter, SETTINGS))
    values, theirs = found.pop("logprob values"), expected["logprob values"]
    assert values == pytest.approx(theirs, abs=1e-3)
    assert found == {name: value for name, value in expected.items() if name != "logprob values"}


def test_drafts_are_steered_and_accepted(verifier) -> None:
    async def main() -> Any:
        async with edge(verifier.info()["address"], "swift", steering="on") as client:
            return [(await client.complete(prompt, PLAIN)).statistics for prompt in PROMPTS[:3]]

    statistics = asyncio.run(main())
    assert all(each.steered and each.vectors > 0 for each in statistics)


def test_a_text_that_begins_like_another_reads_only_the_rest(verifier) -> None:
    async def main() -> tuple[int, int, int]:
        async with edge(verifier.info()["address"], "general") as client:
            first = await client.complete(PROMPTS[4], PLAIN)
            before = (*client.encode(PROMPTS[4]), *first.ids)
            second = await client.complete((*before, *client.encode(" And then")), PLAIN, max_tokens=4)
            return len(before), second.prompt_tokens, second.statistics.cached_tokens

    before, prompt, cached = asyncio.run(main())
    assert (before - 1) // 32 * 32 <= cached < prompt

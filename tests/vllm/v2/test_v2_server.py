"""A verifier on Model Runner V2: an edge's drafts, steered ones too, change nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider.cloud.models.family_index import target_folder, tokenizer_file
from outrider.cloud.serving.verifier_actor import VerifierActor
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.built_in_prompts import held_out
from outrider.edge import Client, EdgeConfig, Grammar, GrammarKind, Sampling

PROMPTS = [prompt.text for prompt in held_out(1)]
SETTINGS = {
    "drawn": Sampling(max_tokens=16, temperature=1.0, seed=31),
    "grammar": Sampling(max_tokens=16, temperature=1.0, grammar=Grammar(GrammarKind.REGEX, "[a-c ]{9,12}")),
    "greedy, penalised": Sampling(max_tokens=16, repetition_penalty=1.3, frequency_penalty=0.5),
}


def config_of(**fields: Any) -> VerifierConfig:
    return VerifierConfig(dtype="float32", threads=1, kv_tokens=4096, context_length=512, max_sessions=8, **fields)


async def texts(address: str, drafter: str) -> tuple[dict[str, Any], int]:
    """The texts by setting, and how many drafts were accepted."""
    fields = {"model": "reference", "tokenizer": tokenizer_file(target_folder("reference")), "threads": 1}
    async with Client(EdgeConfig(verifier=address, drafter=drafter, **fields)) as client:
        found = {}
        accepted = 0
        for name, sampling in SETTINGS.items():
            done = await asyncio.gather(*(client.complete(prompt, sampling) for prompt in PROMPTS))
            found[name] = [(each.ids, each.finish_reason) for each in done]
            accepted += sum(each.statistics.accepted for each in done)
        return found, accepted


@pytest.mark.parametrize("drafter", ["none", "swift"])
def test_texts_are_those_of_our_own_engine(drafter: str) -> None:
    found = []
    for engine, with_drafter in (("transformers", "none"), ("vllm", drafter)):
        actor = VerifierActor(config_of(engine=engine))
        try:
            found.append(asyncio.run(texts(actor.info()["address"], with_drafter)))
        finally:
            actor.stop()
    (expected, _), (theirs, accepted) = found
    assert theirs == expected
    assert (accepted > 0) is (drafter != "none")

"""Texts through our server, on vLLM and on our own engine: the same bytes, whatever an edge asks for."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from outrider.cloud.models.family_index import target_folder, tokenizer_file
from outrider.cloud.serving.verifier_actor import VerifierActor
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.built_in_prompts import held_out
from outrider.deploy.link.link_process import LinkProcess
from outrider.deploy.link.shape import LinkShape
from outrider.edge import Client, EdgeConfig
from outrider.edge.decoding import Observer
from outrider.proto.types import CloudFrame, Commit, Grammar, GrammarKind, Patience, Sampling

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


async def found_at(address: str, drafter: str, settings: dict[str, Sampling], **fields: Any) -> Found:
    """Everything that a user may see, and how many drafts made beside the target were verified and accepted."""
    async with edge(address, drafter, **fields) as client:
        found: Found = {}
        here = Counter[str]()
        for name, sampling in settings.items():
            together = await asyncio.gather(*(client.complete(prompt, sampling) for prompt in PROMPTS))
            found[name] = [(each.ids, each.text, each.finish_reason) for each in together]
            here["verified"] += sum(each.statistics.verified_cloud for each in together)
            here["accepted"] += sum(each.statistics.accepted_cloud for each in together)
            if drafter != "none":
                assert any(not each.statistics.drafter_error for each in together)
        listed = await client.complete(PROMPTS[1], PLAIN, logprobs=True, top_logprobs=3, max_tokens=16)
        found["logprobs"] = [(each.id, [token for token, _ in each.top]) for each in listed.tokens]
        found["logprob values"] = [each.logprob for each in listed.tokens]
        async with client.conversation(replace(PLAIN, temperature=0.7, max_tokens=40)) as talk:
            turns = [await talk.complete(text) for text in CHAT]
            found["chat"] = [turn.ids for turn in turns]
            here["verified in the last turn"] = turns[-1].statistics.verified_cloud
        return found | {"here": here}


def same(found: Found, expected: Found) -> bool:
    """Whether users see the same; values of log probabilities may differ in their last digits."""
    told = ("logprob values", "here")
    assert found["logprob values"] == pytest.approx(expected["logprob values"], abs=1e-3)
    return {k: v for k, v in found.items() if k not in told} == {k: v for k, v in expected.items() if k not in told}


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
    actor = VerifierActor(config_of(engine="vllm", tensor_parallel=request.param, draft_here="on"))
    yield actor
    actor.stop()


@pytest.mark.parametrize("drafter", ["none", "general", "swift"])
def test_texts_are_those_of_our_own_engine(drafter, verifier, expected) -> None:
    """With `swift`, vLLM's workers are tapped, and drafts are steered by what comes of it."""
    found = asyncio.run(found_at(verifier.info()["address"], drafter, SETTINGS, drafts_here=0))
    assert same(found, expected)
    assert not found["here"].total()


@pytest.mark.parametrize("drafter", ["none", "general"])
def test_drafts_made_beside_it_change_no_text(drafter, verifier, expected) -> None:
    patience = Patience(math.inf, 3) if drafter == "none" else None
    drafts = 3 if drafter == "none" else None
    found = asyncio.run(found_at(verifier.info()["address"], drafter, SETTINGS, drafts_here=drafts, patience=patience))
    assert same(found, expected)
    if drafter == "none":
        assert all(found["here"][what] > 0 for what in ("verified", "accepted", "verified in the last turn"))


class Covered(Observer):
    """Keeps how far the verifier has said that it covers."""

    most = 0

    def received(self, frame: CloudFrame, at: float) -> None:
        if isinstance(frame, Commit):
            self.most = max(self.most, frame.covered)


def test_it_covers_a_far_edge_by_drafts_made_beside_it(verifier, expected) -> None:
    async def main() -> tuple[list[Any], int, int]:
        covered, texts = Covered(), []
        async with (
            LinkProcess(to=verifier.info()["address"], shape=LinkShape.of(rtt_ms=300)) as link,
            edge(link.address, "general") as client,
        ):
            here = 0
            for prompt in PROMPTS[:3]:
                done = await client.complete(prompt, SETTINGS["drawn"], observer=covered)
                texts.append((done.ids, done.text, done.finish_reason))
                here += done.statistics.accepted_cloud
        return texts, covered.most, here

    texts, most, here = asyncio.run(main())
    assert texts == expected["drawn"][:3]
    assert most > 0
    assert here > 0


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

"""The transcript is a pure function of target, prompt, sampling parameters and seed: whole texts, over real gRPC."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from scripted_drafters import FailingDrafter, GarbageDrafter
from transformers import AutoModelForCausalLM

from outrider.cloud.models.family_index import load_tokenizer, target_folder
from outrider.drafters import NgramDrafter
from outrider.edge import Sampling
from outrider.proto.policy import trees as trees_module
from outrider.proto.session import Drafted, EdgeSession
from outrider.proto.types import FinishReason, Grammar, GrammarKind, Patience

GREEDY = Sampling(max_tokens=20)
SAMPLED = Sampling(max_tokens=20, temperature=1.0, seed=20260)
PROCESSED = Sampling(
    max_tokens=20,
    temperature=0.9,
    seed=7,
    top_k=50,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logit_bias=((265, 1.5),),
)
ALL_SAMPLING = {"greedy": GREEDY, "sampled": SAMPLED, "processed": PROCESSED}
BOTH_WAYS = (GREEDY, SAMPLED)
EOS = 1
LONG = Patience(math.inf, 3)
HELD_ON = replace(SAMPLED, min_tokens=14, logit_bias=((EOS, 11.0),))


def drafters() -> dict[str, Any]:
    return {
        "onnx": "general",
        "n-gram": "ngram",
        "garbage": GarbageDrafter(8192, seed=3),
        "failing midway": FailingDrafter(12, NgramDrafter()),
    }


async def texts(client: Any, prompts: list[Any], sampling: Sampling) -> list[tuple[int, ...]]:
    return [(await client.complete(prompt.text, sampling)).ids for prompt in prompts]


@pytest.mark.parametrize("name", ALL_SAMPLING)
async def test_the_text_is_the_same_with_drafts_off_and_with_every_drafter(verifier, edge, prompts, name) -> None:
    of_domains = dict(zip(ALL_SAMPLING, prompts(1), strict=False))
    chosen, sampling = [of_domains[name]], ALL_SAMPLING[name]
    async with edge(verifier, drafter="none") as client:
        expected = await texts(client, chosen, sampling)
    for drafter in drafters().values():
        async with edge(verifier, drafter=drafter) as client:
            assert await texts(client, chosen, sampling) == expected
    assert all(expected)


@pytest.mark.usefixtures("all_drafts_pay")
async def test_the_text_is_the_same_for_every_window_and_patience(verifier, edge, prompts) -> None:
    prompt = prompts(1)[0]
    knobs = [(1, None), (4, Patience(0.0)), (16, Patience(0.02, 4)), (64, None), (1, Patience(math.inf, 3)), (64, LONG)]
    async with edge(verifier, drafter="none") as client:
        expected = {way: (await client.complete(prompt.text, way)).ids for way in BOTH_WAYS}
    steps = {}
    for window, patience in knobs:
        way = SAMPLED if window in (1, 16) else GREEDY
        async with edge(verifier, drafter="general", window=window, patience=patience) as client:
            completion = await client.complete(prompt.text, way)
        assert completion.ids == expected[way]
        steps[window, patience] = completion.statistics.steps
    # The knobs do something, only not to the text; how many drafts come in time, a busy machine decides.
    assert steps[64, LONG] < len(expected[GREEDY])


@pytest.mark.usefixtures("all_drafts_pay")
async def test_sixteen_interleaved_sessions_have_the_texts_that_each_has_alone(verifier, edge, prompts) -> None:
    ways = itertools.cycle(replace(way, max_tokens=12) for way in BOTH_WAYS)
    chosen = list(zip(prompts(4), ways, strict=False))
    async with edge(verifier, drafter="general") as client:
        alone = [(await client.complete(prompt.text, way)).ids for prompt, way in chosen]
        together = await asyncio.gather(*(client.complete(prompt.text, way) for prompt, way in chosen))
    assert [completion.ids for completion in together] == alone
    assert any(completion.statistics.accepted for completion in together)


async def test_a_text_held_on_by_min_tokens_is_the_same_with_drafts_and_ends_only_then(verifier, edge, prompts) -> None:
    prompt = prompts(1)[0]
    async with edge(verifier, drafter="none") as client:
        free = await client.complete(prompt.text, HELD_ON, min_tokens=0)
        expected = await client.complete(prompt.text, HELD_ON)
        ignoring = await client.complete(prompt.text, HELD_ON, ignore_eos=True)
    async with edge(verifier, drafter="general") as client:
        drafted = await client.complete(prompt.text, HELD_ON)
    assert len(free.ids) < HELD_ON.min_tokens, "it would end earlier, or this test shows nothing"
    assert drafted.ids == expected.ids
    assert EOS not in expected.ids[: HELD_ON.min_tokens] + ignoring.ids[: HELD_ON.min_tokens]
    assert HELD_ON.min_tokens < len(expected.ids) < HELD_ON.max_tokens
    assert expected.finish_reason is FinishReason.EOS


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED, HELD_ON], ids=["greedy", "sampled", "held on"])
async def test_the_text_survives_streams_cut_at_random_points(serving, edge, relay, prompts, sampling) -> None:
    """Two verifiers behind relays; every few commits all streams break, and the edge goes on at the other one."""

    chosen, dice = prompts(1)[:1], random.Random(5)
    async with serving(name="a") as first, serving(name="b") as second:
        async with edge(first, drafter="none") as client:
            expected = await texts(client, chosen, sampling)
        async with relay(first) as one, relay(second) as two:
            resumes = 0
            for drafter in ("general", "none"):
                async with edge(one.address, two.address, drafter=drafter) as client:
                    for prompt, text in zip(chosen, expected, strict=True):
                        got: list[int] = []
                        until_cut = dice.randint(1, 5)
                        async for event in client.generate(prompt.text, sampling):
                            if hasattr(event, "reason"):
                                resumes += event.statistics.resumes
                                continue
                            assert event.position == client_length(client, prompt) + len(got)
                            got += event.ids
                            until_cut -= 1
                            if until_cut == 0:
                                one.cut()
                                two.cut()
                                until_cut = dice.randint(1, 5)
                        assert tuple(got) == text
    assert resumes >= 4


def client_length(client: Any, prompt: Any) -> int:
    return len(client.encode(prompt.text))


async def test_a_session_on_a_draining_verifier_moves_and_its_text_goes_on(edge, prompts) -> None:
    from outrider.cloud.serving.verifier_server import VerifierServer
    from outrider.cloud.verifier_config import VerifierConfig

    prompt = prompts(1)[0]
    first, second = (VerifierServer(VerifierConfig(name=name, threads=1)) for name in "ab")
    addresses = [await first.start(), await second.start()]
    async with edge(addresses[1], drafter="none") as client:
        expected = await client.complete(prompt.text, SAMPLED)
    async with edge(*addresses, drafter="general") as client:
        got: list[int] = []
        drained = None
        async for event in client.generate(prompt.text, SAMPLED):
            got += getattr(event, "ids", ())
            if drained is None:
                drained = asyncio.create_task(first.drain(5.0))
            statistics = getattr(event, "statistics", None)
        assert await drained == 1
        assert statistics.resumes == 1
    assert tuple(got) == expected.ids
    await first.stop()
    await second.stop()


async def test_other_seeds_give_other_texts(verifier, edge, prompts) -> None:
    """The control of this file: equality above is no accident of a sampler that ignores its noise."""

    prompt = prompts(1)[0]
    async with edge(verifier, drafter="none") as client:
        completions = [await client.complete(prompt.text, SAMPLED, seed=seed) for seed in range(3)]
    assert len({completion.ids for completion in completions}) == 3


@pytest.mark.parametrize("exact", ["auto", "tiles"])
async def test_bfloat16_keeps_its_bytes_too(serving, edge, prompts, exact) -> None:
    chosen = list(zip(prompts(1)[2:], BOTH_WAYS, strict=True))
    async with serving(dtype="bfloat16", exact=exact) as address:
        async with edge(address, drafter="none") as client:
            expected = [(await client.complete(prompt.text, way)).ids for prompt, way in chosen]
        async with edge(address, drafter="general") as client:
            drafted = [(await client.complete(prompt.text, way)).ids for prompt, way in chosen]
            together = await asyncio.gather(*(client.complete(prompt.text, way) for prompt, way in chosen))
    assert drafted == expected
    assert [completion.ids for completion in together] == expected


# --- at T = 0, what transformers generates from the same float32 target ---

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


# --- trees: the texts are the same whether steps verify chains, trees or nothing ---

WAITS = Patience(5.0, 6)  # so that each step has drafts, and branches beside them, on a busy machine too
LETTERS = Grammar(GrammarKind.REGEX, r"[a-zA-Z ,.\n]{40,400}")


@pytest.fixture
def rows_cost_nothing(monkeypatch) -> None:
    """Verify whatever is likely enough, at any price of a row on this machine."""
    really = trees_module.best_tree

    def best_tree(*given: Any, row_share: float = 0.0, **named: Any) -> trees_module.Tree:
        return really(*given, **named)

    monkeypatch.setattr("outrider.proto.session.verifier.best_tree", best_tree)


@pytest.mark.usefixtures("all_drafts_pay", "rows_cost_nothing")
@pytest.mark.parametrize("name", [*ALL_SAMPLING, "grammar"])
async def test_the_text_is_the_same_with_trees_and_with_chains(verifier, edge, prompts, name) -> None:
    sampling = ALL_SAMPLING.get(name) or replace(ALL_SAMPLING["sampled"], grammar=LETTERS)

    chosen = prompts(1)[:2]
    async with edge(verifier, drafter="none") as client:
        expected = await texts(client, chosen, sampling)
    async with edge(verifier, drafter="general", patience=WAITS) as client:
        done = [await client.complete(prompt.text, sampling) for prompt in chosen]
    assert [each.ids for each in done] == expected
    assert sum(each.statistics.verified_beside for each in done) >= 4
    async with edge(verifier, drafter="general", chains=True, patience=WAITS) as client:
        chain = await client.complete(chosen[0].text, sampling)
    assert chain.ids == expected[0]
    assert chain.statistics.verified_beside == 0


@pytest.mark.usefixtures("all_drafts_pay", "rows_cost_nothing")
async def test_the_text_survives_cuts_while_steps_verify_trees(verifier, edge, relay, prompts) -> None:
    sampling = ALL_SAMPLING["sampled"]

    (prompt, *_) = prompts(1)
    async with edge(verifier, drafter="none") as client:
        expected = await texts(client, [prompt], sampling)
    async with relay(verifier) as link, edge(link.address, drafter="general", patience=WAITS) as client:
        got: list[int] = []
        async for event in client.generate(prompt.text, sampling):
            if hasattr(event, "reason"):
                statistics = event.statistics
                continue
            got += event.ids
            link.cut()
    assert tuple(got) == expected[0]
    assert statistics.resumes >= 2
    assert statistics.verified_beside > 0


@pytest.mark.usefixtures("all_drafts_pay", "rows_cost_nothing")
@pytest.mark.parametrize("name", ["greedy", "sampled"])
async def test_the_text_is_the_same_with_trees_in_quiet_streams(serving, edge, prompts, name) -> None:
    chosen, sampling = prompts(1)[:2], ALL_SAMPLING[name]
    async with serving(quiet_beat_s=0.02) as address:
        async with edge(address, drafter="none") as client:
            expected = await texts(client, chosen, sampling)
        async with edge(address, drafter="general", patience=WAITS, quiet_wire=True) as client:
            done = [await client.complete(prompt.text, sampling) for prompt in chosen]
    assert [each.ids for each in done] == expected
    assert sum(each.statistics.verified_beside for each in done) >= 4


@pytest.mark.usefixtures("all_drafts_pay", "rows_cost_nothing")
async def test_the_text_is_the_same_with_branches_of_a_second_drafter(verifier, edge, prompts, monkeypatch) -> None:
    read: list[int] = []
    really = EdgeSession._take_idle

    def take_idle(machine: EdgeSession, done: Drafted) -> None:
        read.append(len(done.teacher_forced.drafts))
        really(machine, done)

    monkeypatch.setattr(EdgeSession, "_take_idle", take_idle)
    chosen, sampling = prompts(1)[:2], ALL_SAMPLING["sampled"]
    async with edge(verifier, drafter="none") as client:
        expected = await texts(client, chosen, sampling)
    async with edge(verifier, drafter="general,ngram", patience=WAITS) as client:
        done = [await client.complete(prompt.text, sampling) for prompt in chosen]
    assert [each.ids for each in done] == expected
    assert sum(each.statistics.verified_beside for each in done) >= 4
    assert sum(read) > 0, "an idle drafter has read chains"

"""Texts by probes over HTTP are the rule's whatever the server does, on doubles of it that do everything on purpose."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from probe_texts import ids, write
from scoring_double import ScoringDouble
from table_server import text_of

from outrider.cloud.probes import vllm_server
from outrider.cloud.probes.canary import examine
from outrider.cloud.probes.http_door import ServerAddress
from outrider.cloud.serving.probe_engine import ProbeEngine
from outrider.cloud.target.backend import TargetFacts
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto.errors import ModelRefused
from outrider.proto.types import Sampling

HASH, VOCAB, EOS, TOKENS = "0" * 64, 40, frozenset({3}), 40
GREEDY = Sampling(max_tokens=TOKENS, ignore_eos=True)
SETTINGS = {
    "greedy": GREEDY,
    "T 1": replace(GREEDY, temperature=1.0, seed=5),
    "T 0.7, top-k, top-p": replace(GREEDY, temperature=0.7, top_k=12, top_p=0.9, seed=6),
    "penalties": replace(GREEDY, temperature=0.5, presence_penalty=1.0, frequency_penalty=-0.3, seed=9),
}
DOUBLES = {
    "V1, rows": {},
    "V1, prompts": {"scale_out": False},
    "V1, rows of what was cached cannot be told": {"tells_cached": False},
    "V2": {"runner": "V2"},
    "V2, cached tokens not told": {"runner": "V2", "tells_cached": False},
    "V2, data-parallel": {"runner": "V2", "ranks": 3},
}


@asynccontextmanager
async def engine_of(double: ScoringDouble) -> AsyncIterator[ProbeEngine]:
    """An engine of a double, whose first prices make probes cheap."""
    server = await examine(ServerAddress(double.url), "", lambda root: VOCAB)
    facts = TargetFacts("", HASH, VOCAB, 900, EOS, 0, 0, None)
    config = VerifierConfig(engine="probes", target_url=double.url, target_model="made-up", draft_here="off")
    engine = ProbeEngine(server, facts, config)
    await engine.measure()
    engine.start()
    try:
        yield engine
    finally:
        await asyncio.to_thread(engine.stop)


async def texts(
    engine: ProbeEngine, double: ScoringDouble, sampling: Sampling, count: int, error: float = 0.2, salt: int = 0
) -> tuple[list[list[int]], list[list[int]]]:
    """Texts of prompts that begin alike, at once, with drafts of which some are wrong; and what they should be."""
    drawn = random.Random(salt)
    prompts = [(5, 6, 7, *range(8, 8 + number)) for number in range(count)]
    wanted = [ids(text_of(prompt, sampling, EOS, logp=double.logp)) for prompt in prompts]

    def draft(text: list[int], at: int) -> list[int]:
        return [token if drawn.random() > error else (token + 1) % VOCAB for token in text[at : at + 12]]

    written = await asyncio.gather(
        *(
            write(engine, prompt, sampling, lambda at, text=text: draft(text, at), resumes=True)
            for prompt, text in zip(prompts, wanted, strict=True)
        )
    )
    return [ids(text) for text, _ in written], wanted


async def misbehave(double: ScoringDouble, seed: int) -> None:
    """Do everything to whoever asks, now and then."""
    drawn = random.Random(seed)
    while True:
        await asyncio.sleep(drawn.uniform(0.0, 0.03))
        match drawn.choice(("drop", "fail", "nan", "preempt", "spoil", "break", "slow")):
            case "drop":
                double.drop = 1
            case "fail":
                double.fail.append(drawn.choice((500, 502, 503)))
            case "break":
                double.break_after = drawn.choice((-1, -1, 0, 3))
            case "slow":
                double.step_s = drawn.choice((0.0, 0.0, 0.01))
            case fault:
                setattr(double, fault, 1)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", DOUBLES)
async def test_texts_are_the_rules_through_every_fault_of_a_server(kind: str, settings: str) -> None:
    async with ScoringDouble(vocab=VOCAB, max_logprobs=-1, **DOUBLES[kind]) as double, engine_of(double) as engine:  # type: ignore[arg-type]
        plain, wanted = await texts(engine, double, SETTINGS[settings], 4)
        assert plain == wanted
        trouble = asyncio.create_task(misbehave(double, 1))
        troubled, wanted = await texts(engine, double, SETTINGS[settings], 4, salt=1)
        trouble.cancel()
        assert troubled == wanted
        assert double.harmed == 0


async def test_memory_that_nobody_has_written_would_make_another_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the count of cached tokens keeps such rows out: without it the check above must fail."""
    async with ScoringDouble(vocab=VOCAB, max_logprobs=-1) as double, engine_of(double) as engine:
        before, wanted = await texts(engine, double, SETTINGS["T 1"], 2, error=0.0)
        assert before == wanted
        monkeypatch.setattr(vllm_server, "cached_tokens", lambda answer: 0)
        again, _ = await texts(engine, double, SETTINGS["T 1"], 2, error=0.0)
        assert again != wanted


async def test_a_text_may_change_between_stream_and_probes_at_any_token() -> None:
    """Drafts come and go, so the server's stream begins and ends; never a token is lost, twice there or another."""
    async with ScoringDouble(vocab=VOCAB, max_logprobs=-1, step_s=0.004) as double, engine_of(double) as engine:
        wanted = ids(text_of((5, 6), GREEDY, EOS, logp=double.logp))
        for period in (2, 3, 5, 7):
            text, _ = await write(
                engine, (5, 6), GREEDY, lambda at, period=period: wanted[at : at + 4] if at % period == 0 else ()
            )
            assert ids(text) == wanted
        assert double.aborted > 3
        assert any("prompt_logprobs" in body["sampling_params"] for body in double.asked("/inference/v1/generate"))


async def test_another_model_behind_the_address_ends_texts_with_its_name() -> None:
    async with ScoringDouble(vocab=VOCAB, max_logprobs=-1) as double, engine_of(double) as engine:
        await texts(engine, double, GREEDY, 1)
        double.cards = {"made-up": {"root": "/models/other", "max_model_len": 900}}
        double.drop = 1
        with pytest.raises(ModelRefused, match="/models/other"):
            await texts(engine, double, SETTINGS["T 1"], 1)

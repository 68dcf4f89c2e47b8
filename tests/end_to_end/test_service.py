"""Goals of service over real gRPC: a verifier gets and reports them, and no text is another for them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from fleets import until

from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.verifier_config import VerifierConfig
from outrider.edge import Grammar, GrammarKind, Sampling, ServiceGoal, SyncClient, Tokens
from outrider.edge.edge_config import EdgeConfig
from outrider.proto.errors import ConfigError, InvalidArgument

PROMPTS = ("def main(argv):\n", "class A:\n    ", "import os\n", "# A list of\n")
ASKED: tuple[Any, ...] = ({"gap_ms": 60_000}, "batch", "interactive", None)
PERSON = Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"type": "object", "properties": {"a": {"type": "integer"}}}))


def counted(server: Any, service: str, outcome: str) -> float:
    names = {"model_name": server.rules.model, "verifier": server.rules.name, "service": service, "outcome": outcome}
    found = server._engine.metrics.registry.get_sample_value("outrider:verifier_service_texts_total", names)
    return found or 0.0


@pytest.mark.usefixtures("all_drafts_pay")
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_tokens=24),
        Sampling(max_tokens=24, temperature=1.0, seed=3),
        Sampling(max_tokens=24, grammar=PERSON),
    ],
    ids=["greedy", "drawn", "grammar"],
)
async def test_texts_of_all_classes_at_once_are_those_of_each_alone(verifier, edge, sampling) -> None:
    async with edge(verifier) as client:
        alone = [await client.complete(prompt, sampling) for prompt in PROMPTS]
        texts = [client.complete(prompt, sampling, service=asked) for prompt, asked in zip(PROMPTS, ASKED, strict=True)]
        together = await asyncio.gather(*texts)
    assert [each.ids for each in together] == [each.ids for each in alone]
    assert all(each.statistics.service is None for each in alone)
    first = together[0].statistics.service
    assert first is not None
    assert (first.goal, first.missed, first.unlikely) == (ServiceGoal(gap_s=60.0), False, False)
    assert first.kept == first.gaps == together[0].statistics.steps - 1
    assert together[3].statistics.service is None


async def test_a_verifier_counts_what_became_of_goals(edge) -> None:
    server = VerifierServer(VerifierConfig(threads=1, name="counting", min_step_s=0.01))
    address = await server.start()
    async with edge(address, drafter="none") as client:
        missed = await client.complete(PROMPTS[0], max_tokens=12, service={"gap_ms": 2})
        kept = await client.complete(PROMPTS[0], max_tokens=12, service={"gap_ms": 60_000, "first_token_ms": 60_000})
        batch = await client.complete(PROMPTS[0], max_tokens=12, service="batch")
        records = [each.statistics.service for each in (missed, kept, batch)]
        assert [record.missed for record in records] == [True, False, False]
        assert records[0].kept == 0
        assert all(record.gaps == 11 and record.first_token_s > 0 for record in records)
        assert missed.ids == kept.ids == batch.ids
        asked = [("figures", "missed"), ("figures", "kept"), ("batch", "kept"), ("batch", "missed")]
        await until(lambda: sum(counted(server, *each) for each in asked) == 3)  # after the answer, as its session ends
        assert [counted(server, *each) for each in asked] == [1, 1, 1, 0]
        assert 0.01 < server.status().gap_s < 10
    await server.stop(0)


async def test_a_goal_holds_for_every_turn_and_after_a_lost_stream(verifier, edge, relay) -> None:
    async with relay(verifier) as way, edge(way.address) as client:
        async with client.conversation(service={"gap_ms": 60_000}, max_tokens=16) as talk:
            first = await talk.complete(PROMPTS[0])
            decoding = talk._decoding
            cut = False
            async for event in talk.say("\n# more\n", max_tokens=32):
                if isinstance(event, Tokens) and not cut:
                    cut = True
                    way.cut()
            second = decoding.machine.statistics
        assert second.resumes > 0
        for statistics in (first.statistics, second):
            record = statistics.service
            assert record.goal == ServiceGoal(gap_s=60.0)
            assert record.kept == record.gaps > 0
        assert decoding.machine.service == ServiceGoal(gap_s=60.0)


async def test_the_configs_service_is_that_of_texts_that_ask_for_none(verifier, edge) -> None:
    async with edge(verifier, service="batch") as client:
        plain, other = [await client.complete(PROMPTS[0], max_tokens=4, service=each) for each in (None, "interactive")]
        assert plain.statistics.service.goal == ServiceGoal(batch=True)
        assert other.statistics.service.goal == ServiceGoal()
        with pytest.raises(InvalidArgument, match="gap_ms = -1"):
            await client.complete(PROMPTS[0], service={"gap_ms": -1})
    with pytest.raises(ConfigError, match="service"):
        EdgeConfig(verifier="a:1", model="m", service="slow")


def test_the_client_without_async_asks_as_well(verifier, tokenizer_file) -> None:
    config = EdgeConfig(verifier=verifier, model="reference", tokenizer=tokenizer_file, drafter="none")
    with SyncClient(config) as client:
        done = client.complete(PROMPTS[0], max_tokens=4, service={"gap_ms": 60_000})
    assert done.statistics.service.gaps == 3

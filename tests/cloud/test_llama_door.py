"""llama-server as a server that scores tokens: what it answers is right, whatever goes wrong on the way."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from other_doubles import DRAFTS, TEXT, LlamaDouble, SglangDouble, breaks_off, probed_through_trouble, refuses

from outrider.cloud.probes.http_door import HttpDoor, ServerAddress
from outrider.cloud.probes.llama_server import LlamaServer, examine_llama
from outrider.cloud.probes.scoring import FLOAT32_LOG, ListedRow
from outrider.proto.errors import ConfigError, Internal, ModelRefused, Unavailable

LONG = [(7 * i + i // 5) % 60 for i in range(150)]


async def examined(double: Any, model: str = "", vocab: int = 60) -> LlamaServer | None:
    return await examine_llama(HttpDoor(ServerAddress(double.url, patience_s=0.3)), model, lambda root: vocab)


async def ready(double: LlamaDouble) -> LlamaServer:
    server = await examined(double)
    assert server is not None
    double.requests.clear()
    double.reads = 0
    return server


def check_row(double: LlamaDouble, row: ListedRow, text: list[int], width: int) -> None:
    logp = double.logp(text)
    np.testing.assert_allclose(row.logp, logp[row.tokens], atol=2e-4)  # its softmax is added up in float32
    assert row.tokens.tolist() == np.argsort(-logp, kind="stable")[:width].tolist()
    assert np.delete(logp, row.tokens).max(initial=-math.inf) <= row.bound


@pytest.mark.parametrize("slots", [1, 4, 9])
async def test_rows_are_the_models_own_whatever_the_slots(slots: int) -> None:
    async with LlamaDouble(slots=slots) as double:
        server = await ready(double)
        for text in (TEXT, LONG, TEXT, LONG[:100]):
            for count in range(len(DRAFTS) + 1):
                probe = await server.probe(text, DRAFTS[:count], 3)
                assert len(probe.rows) == count + 1
                for place, row in enumerate(probe.rows):
                    check_row(double, row, text + DRAFTS[:place], 3)
        await server.close()


async def test_a_probe_that_goes_on_reads_what_is_new_alone() -> None:
    async with LlamaDouble() as double:
        server = await ready(double)
        assert (await server.probe(LONG, DRAFTS, 2)).cached_tokens == 0
        assert double.reads > 5 * len(LONG)  # a slot shares nothing with others
        double.reads = 0
        goes_on = [*LONG, *DRAFTS[:2], 11]
        assert (await server.probe(goes_on, DRAFTS, 2)).cached_tokens == len(LONG)
        assert double.reads < 50
        await server.close()


async def test_stream_is_the_greedy_text_with_its_rows() -> None:
    async with LlamaDouble() as double:
        server = await ready(double)
        told = [each async for each in server.stream(TEXT, 14, frozenset(), 3)]
        end = told[6].token
        ended = [each.token async for each in server.stream(TEXT, 14, frozenset({end}), 3)]
        await server.close()
    tokens = [each.token for each in told]
    assert tokens == double.greedy(TEXT, 14)
    assert ended == tokens[: tokens.index(end) + 1]
    for place, each in enumerate(told):
        check_row(double, each.row, TEXT + tokens[:place], 3)


@pytest.mark.parametrize("last", [False, True])
async def test_tokens_that_end_within_a_character_are_not_lost(last: bool) -> None:
    """The server tells of none of them, neither in an answer nor in a stream."""
    async with LlamaDouble() as double:
        truth = double.greedy(TEXT, 14)
        double.halves = (truth[13],) if last else (truth[0], truth[4], truth[5], truth[10])
        server = await ready(double)
        told = [each async for each in server.stream(TEXT, 14, frozenset(), 2)]
        assert [each.token for each in told] == truth
        for place, each in enumerate(told):
            check_row(double, each.row, TEXT + truth[:place], 2)
        place = truth.index(double.halves[0])
        probe = await server.probe(TEXT + truth[:place], truth[place : place + 3], 2)
        for count, row in enumerate(probe.rows):
            check_row(double, row, TEXT + truth[: place + count], 2)
        # What has no letter to sample is told nothing of.
        body = server._body([TEXT + truth[:place]], 1, 2)
        assert "completion_probabilities" not in await server.door.ask("/completion", body)
        await server.close()


async def test_a_text_goes_on_after_an_end_that_only_the_model_knows() -> None:
    async with LlamaDouble() as double:
        truth = double.greedy(TEXT, 12)
        double.end = truth[3]
        server = await ready(double)
        told = [each.token async for each in server.stream(TEXT, 12, frozenset(), 1)]
        ended = [each.token async for each in server.stream(TEXT, 12, frozenset({double.end}), 1)]
        await server.close()
    assert told == truth
    assert ended == truth[: truth.index(double.end) + 1]


async def test_to_close_a_stream_ends_the_request() -> None:
    async with LlamaDouble(step_s=0.02) as double:
        server = await ready(double)
        await asyncio.sleep(0.2)
        before = double.aborted  # texts that had what was asked for, and were not read to the end
        async with aclosing(server.stream(TEXT, 200, frozenset(), 1)) as told:
            async for _ in told:
                break
        await asyncio.sleep(0.2)
        await server.close()
        assert double.aborted == before + 1


async def test_probabilities_that_float32_cannot_hold_are_no_word_on_a_token() -> None:
    async with LlamaDouble(sharpness=60.0) as double:
        server = await ready(double)
        (row,) = (await server.probe(TEXT, (), 60)).rows
        await server.close()
    logp = double.logp(TEXT)
    assert logp.min() < -1e30
    assert set(row.tokens.tolist()) == set(np.flatnonzero(logp >= FLOAT32_LOG).tolist())
    assert row.bound == FLOAT32_LOG


async def test_a_whole_vocabulary_leaves_nothing_out() -> None:
    async with LlamaDouble(sharpness=1.0) as double:
        server = await ready(double)
        (row,) = (await server.probe(TEXT, (), 5000)).rows
        await server.close()
    assert len(row.tokens) == double.vocab == server.facts.max_list
    assert row.bound == -math.inf


FAULTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"fail": [500] * 99}, Unavailable, "out of order"),
    ({"drop": 99}, Unavailable, "cannot be reached"),
    ({"fail": [400]}, Internal, "out of order"),
    ({"halves": (7,)}, Internal, "answers in a form of its own"),  # rows are left out
]


@pytest.mark.parametrize(("fault", "error", "message"), FAULTS, ids=lambda value: str(value)[:30])
async def test_no_faulty_answer_passes_for_rows(fault: Any, error: Any, message: str) -> None:
    async with LlamaDouble() as double:
        await refuses(double, await ready(double), fault, error, message)


async def test_a_probe_outlives_a_broken_connection_and_an_error() -> None:
    async with LlamaDouble() as double:
        probe = await probed_through_trouble(double, await ready(double))
    for place, row in enumerate(probe.rows):
        check_row(double, row, TEXT + DRAFTS[:place], 3)


async def test_a_text_that_breaks_off_says_so() -> None:
    async with LlamaDouble() as double:
        await breaks_off(double, await ready(double), {"break_after": 3})


@pytest.mark.parametrize("broken", [False, True])
async def test_another_model_at_the_address_is_refused(broken: bool) -> None:
    """Its name is in every answer; its file is asked for where a connection broke."""
    async with LlamaDouble() as double:
        server = await ready(double)
        await server.probe(TEXT, DRAFTS, 3)
        double.name, double.path = ("m.gguf", "/models/other") if broken else ("other", "/models/m.gguf")
        double.drop = int(broken)
        with pytest.raises(ModelRefused, match="no longer serves"):
            await server.probe(TEXT, DRAFTS, 3)
        await server.close()


async def test_facts_are_the_servers_own() -> None:
    async with LlamaDouble() as double:
        server = await examined(double, "m.gguf")
        assert server is not None
        facts = server.facts
        assert facts.kind == "llama-server b1-0c1e570, all F32, 9 slots"
        assert (facts.model, facts.root, facts.context_length, facts.block_size) == ("m.gguf", "/models/m.gguf", 400, 1)
        assert (facts.max_list, facts.names, facts.names_in_rows, facts.door) == (60, False, False, "prompts")
        assert facts.tells_cached
        assert facts.repeatable
        assert not facts.drafts_itself
        assert facts.lacking == ()
        with pytest.raises(Internal, match="no tokens by name"):
            await server.name(TEXT, [1])
        await server.close()
        double.speculates = "draft-simple"
        server = await examined(double)
        assert server is not None
        assert server.facts.drafts_itself
        await server.close()
        with pytest.raises(ConfigError, match="no model 'n'; it serves m"):
            await examined(double, "n")
        with pytest.raises(ConfigError, match="has 60 tokens, and the tokenizer 61"):
            await examined(double, "", 61)


async def test_rows_that_depend_on_others_and_few_slots_are_found_out() -> None:
    async with LlamaDouble(unsteady=0.05, slots=4, step_s=0.005) as double:
        server = await examined(double)
        assert server is not None
        assert not server.facts.repeatable
        assert [each.split(" ")[0] for each in server.facts.lacking] == ["-np", "--no-repack"]
        await server.close()


async def test_other_kinds_are_left_to_others() -> None:
    async with SglangDouble() as double:
        assert await examined(double) is None

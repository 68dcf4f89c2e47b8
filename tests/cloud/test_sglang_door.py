"""SGLang as a server that scores tokens: what it answers is right, whatever goes wrong on the way."""

from __future__ import annotations

import asyncio
import math
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from other_doubles import DRAFTS, TEXT, LlamaDouble, SglangDouble, breaks_off, probed_through_trouble, refuses

from outrider.cloud.probes.http_door import HttpDoor, ServerAddress
from outrider.cloud.probes.scoring import FLOAT32_LOG, ListedRow
from outrider.cloud.probes.sglang_server import SglangServer, examine_sglang
from outrider.proto.errors import ConfigError, Internal, ModelRefused, OutriderError, Unavailable


async def examined(double: Any, model: str = "") -> SglangServer | None:
    return await examine_sglang(HttpDoor(ServerAddress(double.url, patience_s=0.3)), model, lambda root: double.vocab)


async def ready(double: SglangDouble) -> SglangServer:
    server = await examined(double)
    assert server is not None
    double.requests.clear()
    return server


def check_row(double: SglangDouble, row: ListedRow, text: list[int], width: int, named: list[int]) -> None:
    logp = double.logp(text)
    np.testing.assert_array_equal(row.logp, logp[row.tokens])
    order = np.argsort(-logp, kind="stable").tolist()
    assert row.tokens[:width].tolist() == order[:width]
    assert set(named) <= set(row.tokens.tolist())
    assert np.delete(logp, row.tokens).max() <= row.bound < 0


@pytest.mark.parametrize("page_size", [1, 4])
async def test_rows_are_the_models_own_cached_or_not(page_size: int) -> None:
    """At every place in a page, first and again, in one cache and apart."""
    async with SglangDouble(page_size=page_size) as double:
        server = await ready(double)
        for length in range(1, len(TEXT) + 1):
            for count in range(len(DRAFTS) + 1):
                for salt in ("", "apart"):
                    text, drafts = TEXT[:length], DRAFTS[:count]
                    probe = await server.probe(text, drafts, 3, salt=salt)
                    assert len(probe.rows) == count + 1
                    for place, row in enumerate(probe.rows):
                        check_row(double, row, text + drafts[:place], 3, [])
        await server.probe(TEXT, DRAFTS, 3, salt="new")
        again = await server.probe(TEXT, DRAFTS, 3, salt="new")
        assert (await server.probe(TEXT, DRAFTS, 3, salt="another")).cached_tokens == 0
        await server.close()
    assert again.cached_tokens == (len(TEXT) - 1) // page_size * page_size
    assert again.lost == 0


async def test_every_row_has_what_was_named() -> None:
    named = [[1, 2], [], [59], [0, 58, 57], [2]]
    async with SglangDouble() as double:
        server = await ready(double)
        probe = await server.probe(TEXT, DRAFTS, 3, named)
        alone = await server.probe(TEXT, (), 3, [[50, 51]])
        told = await server.name(TEXT, [0, 40, 59])
        await server.close()
    for place, row in enumerate(probe.rows):
        check_row(double, row, TEXT + DRAFTS[:place], 3, named[place])
    check_row(double, alone.rows[0], TEXT, 3, [50, 51])
    assert told == {token: double.logp(TEXT)[token] for token in (0, 40, 59)}


async def test_a_text_stays_with_one_data_parallel_rank() -> None:
    async with SglangDouble(settings={"dp_size": 8}) as double:
        server = await ready(double)
        for count in range(4):
            await server.probe([*TEXT, *DRAFTS[:count]], DRAFTS[count:], 2)
        for other in range(40):
            await server.probe([other, *TEXT], (), 2)
        await server.close()
        ranks = [body["routed_dp_rank"] for body in double.asked("/generate")]
    assert len(set(ranks[:4])) == 1
    assert set(ranks) == set(range(8))


@pytest.mark.parametrize("incremental", [False, True])
@pytest.mark.parametrize("interval", [1, 3])
async def test_stream_is_the_greedy_text_with_its_rows(incremental: bool, interval: int) -> None:
    async with SglangDouble(incremental=incremental, interval=interval) as double:
        server = await ready(double)
        told = [each async for each in server.stream(TEXT, 14, frozenset(), 3)]
        end = told[6].token
        ended = [each.token async for each in server.stream(TEXT, 14, frozenset({end}), 3)]
        await server.close()
    tokens = [each.token for each in told]
    assert tokens == double.greedy(TEXT, 14)
    for place, each in enumerate(told):
        check_row(double, each.row, TEXT + tokens[:place], 3, [])
    assert ended == tokens[: tokens.index(end) + 1]


async def test_to_close_a_stream_ends_the_request() -> None:
    async with SglangDouble(step_s=0.02) as double:
        server = await ready(double)
        async with aclosing(server.stream(TEXT, 200, frozenset(), 1)) as told:
            async for _ in told:
                break
        await asyncio.sleep(0.2)
        await server.close()
        assert double.aborted == 1


async def test_no_default_of_the_server_touches_a_text() -> None:
    preferred = {"temperature": 0.7, "repetition_penalty": 1.3}
    async with SglangDouble(preferred=preferred) as double:
        server = await ready(double)
        told = [each.token async for each in server.stream(TEXT, 8, frozenset(), 1)]
        await server.close()
        body = double.asked("/generate")[0]
    assert told == double.greedy(TEXT, 8)
    assert set(preferred) <= set(body["sampling_params"])


async def test_no_list_is_longer_than_the_vocabulary() -> None:
    """Its scheduler would end."""
    async with SglangDouble() as double:
        server = await ready(double)
        assert server.facts.max_list == double.vocab
        (row,) = (await server.probe(TEXT, (), 5000)).rows
        await server.close()
        assert not double.dead
    assert len(row.tokens) == double.vocab
    assert row.bound > -math.inf  # the model may have more tokens than the tokenizer


async def test_probabilities_that_float32_cannot_hold_are_no_word_on_a_token() -> None:
    """Beside requests that sample, SGLang takes logarithms of them: the least float32 for that of 0."""
    async with SglangDouble(sharpness=60.0) as double:
        server = await ready(double)
        (row,) = (await server.probe(TEXT, (), 60)).rows
        await server.close()
    logp = double.logp(TEXT)
    assert logp.min() < -1e30
    assert set(row.tokens.tolist()) == set(np.flatnonzero(logp >= FLOAT32_LOG).tolist())
    assert row.bound == FLOAT32_LOG


FAULTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"rows_left_out": 1}, Internal, "rows are missing"),
    ({"truncate": 11}, Internal, "the text was cut"),
    ({"nulls": True}, FloatingPointError, "no numbers"),
    ({"abort": True}, Unavailable, "evicted"),
    ({"fail": [500] * 99}, Unavailable, "out of order"),
    ({"drop": 99}, Unavailable, "cannot be reached"),
    ({"fail": [400]}, Internal, "out of order"),
]


@pytest.mark.parametrize(("fault", "error", "message"), FAULTS, ids=lambda value: str(value)[:30])
async def test_no_faulty_answer_passes_for_rows(fault: Any, error: Any, message: str) -> None:
    async with SglangDouble() as double:
        await refuses(double, await ready(double), fault, error, message, [[1]] * 5)


async def test_a_probe_outlives_a_broken_connection_and_an_error() -> None:
    async with SglangDouble() as double:
        probe = await probed_through_trouble(double, await ready(double))
    for place, row in enumerate(probe.rows):
        check_row(double, row, TEXT + DRAFTS[:place], 3, [])


@pytest.mark.parametrize("fault", [{"break_after": 3}, {"abort": True}])
async def test_a_text_that_breaks_off_says_so(fault: dict[str, Any]) -> None:
    async with SglangDouble() as double:
        await breaks_off(double, await ready(double), fault)


@pytest.mark.parametrize("changed", ["model_path", "served_model_name", "weight_version"])
async def test_another_model_at_the_address_is_refused(changed: str) -> None:
    async with SglangDouble() as double:
        server = await ready(double)
        await server.probe(TEXT, DRAFTS, 3)
        double.info[changed] = "other"
        double.drop = 1  # as if it had been started again
        with pytest.raises(ModelRefused, match="no longer serves"):
            await server.probe(TEXT, DRAFTS, 3)
        with pytest.raises(ModelRefused):
            _ = [each async for each in server.stream(TEXT, 9, frozenset(), 1)]
        await server.close()


@pytest.mark.parametrize("old", [False, True])
async def test_facts_are_the_servers_own(old: bool) -> None:
    async with SglangDouble(old=old, page_size=64) as double:
        server = await examined(double, "m")
        assert server is not None
        facts = server.facts
        await server.close()
        assert (facts.kind, facts.model, facts.root) == ("SGLang 0.5.23", "m", "/models/m")
        assert (facts.context_length, facts.block_size, facts.door) == (400, 64, "rows")
        assert facts.names
        assert facts.names_in_rows
        assert facts.tells_cached
        assert not facts.repeatable
        assert [each.split(":")[0] for each in facts.lacking] == [
            "--enable-deterministic-inference",
            "--incremental-streaming-output",
        ]
        double.settings = {"enable_deterministic_inference": True, "speculative_algorithm": "EAGLE"}
        double.settings |= {"incremental_streaming_output": True, "disable_radix_cache": True}
        server = await examined(double)
        assert server is not None
        assert server.facts.repeatable
        assert server.facts.drafts_itself
        assert [each.split(":")[0] for each in server.facts.lacking] == ["no --disable-radix-cache"]
        await server.close()
        with pytest.raises(ConfigError, match="no model 'n'; it serves m"):
            await examined(double, "n")


async def test_other_kinds_are_left_to_others() -> None:
    async with LlamaDouble() as double, SglangDouble(info={"model_path": "e", "is_generation": False}) as embedding:
        assert await examined(double) is None
        assert await examined(embedding) is None
    with pytest.raises(OutriderError):
        await examined(double)

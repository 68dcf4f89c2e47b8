"""A stock vLLM server as one that scores tokens: what it answers is right, whatever goes wrong on the way."""

from __future__ import annotations

import asyncio
import math
import random
import ssl
import subprocess
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scoring_double import ScoringDouble

from outrider.cloud.probes.canary import examine
from outrider.cloud.probes.http_door import HttpDoor, ServerAddress
from outrider.cloud.probes.scoring import ListedRow, Probe
from outrider.cloud.probes.vllm_server import VllmServer
from outrider.proto.errors import ConfigError, Internal, ModelRefused, OutriderError, Unavailable

TEXT = [5, 9, 7, 12, 30, 8] * 9
DRAFTS = [4, 21, 6, 33]
BOTH = pytest.mark.parametrize("runner", ["V1", "V2"])
DOORS = pytest.mark.parametrize(("runner", "scale_out"), [("V1", True), ("V2", True), ("V1", False)])


async def ready(double: ScoringDouble, model: str = "", **settings: Any) -> VllmServer:
    server = await examine(ServerAddress(double.url, **settings), model, lambda _: double.vocab)
    double.requests.clear()
    return server


def check_row(double: ScoringDouble, row: ListedRow, text: list[int], width: int, named: list[int] = []) -> None:  # noqa: B006
    logp = double.logp(text)
    np.testing.assert_array_equal(row.logp, logp[row.tokens])
    assert len(set(row.tokens.tolist())) == len(row.tokens)
    assert {*np.argsort(-logp)[:width].tolist(), *named} <= set(row.tokens.tolist())
    missing = np.delete(logp, row.tokens)
    assert missing.max(initial=-math.inf) <= row.bound


def check(
    double: ScoringDouble, probe: Probe, width: int, text: list[int] = TEXT, drafts: list[int] = DRAFTS, named: Any = ()
) -> None:
    assert len(probe.rows) == len(drafts) + 1
    for place, row in enumerate(probe.rows):
        check_row(double, row, text + drafts[:place], width, list(named[place]) if named else [])


@DOORS
async def test_rows_are_the_models_own_cached_or_not(runner, scale_out) -> None:
    """At every place in a block, beside the text's own stream and after it, in one cache and apart."""
    chance = random.Random(1)
    async with ScoringDouble(runner=runner, scale_out=scale_out) as double:
        server = await ready(double)
        assert server.facts.door == ("rows" if scale_out else "prompts")
        lost = 0
        for _ in range(120):
            text = TEXT[: chance.randrange(1, len(TEXT))]
            drafts = [chance.randrange(double.vocab) for _ in range(chance.randrange(6))]
            width = chance.randrange(1, 8)
            probe = await server.probe(text, drafts, width, salt=chance.choice(["", "a"]))
            check(double, probe, width, text, drafts)
            lost += probe.lost
        assert (lost > 0) == scale_out
        await server.close()


@BOTH
async def test_rows_of_cached_tokens_are_asked_for_one_by_one(runner) -> None:
    async with ScoringDouble(runner=runner) as double:
        server = await ready(double)
        check(double, await server.probe([*TEXT, *DRAFTS, 3], (), 3), 3, [*TEXT, *DRAFTS, 3], [])
        again = await server.probe(TEXT[:46], [*TEXT[46:], *DRAFTS], 3)
        check(double, again, 3, TEXT[:46], [*TEXT[46:], *DRAFTS])
        assert again.cached_tokens == 48
        assert again.lost == 3
        await server.close()


@BOTH
async def test_lost_rows_come_by_one_request_for_each_block(runner) -> None:
    drafts = [number % 40 for number in range(30)]
    async with ScoringDouble(runner=runner) as double:
        server = await ready(double)
        await server.probe([*TEXT, *drafts, 3], (), 3)
        before = len(double.requests)
        probe = await server.probe(TEXT, drafts, 3)
        check(double, probe, 3, TEXT, drafts)
        blocks = {position // double.block_size for position in range(len(TEXT) - 1, probe.cached_tokens or 0)}
        assert probe.lost > len(blocks) > 1
        assert len(double.requests) - before == 1 + len(blocks)
        await server.close()


async def test_rows_that_v1_never_wrote_would_fail_these_tests() -> None:
    """The door believes what a server says of its cache, even a lie."""
    async with ScoringDouble() as double:
        server = await ready(double)
        honest = double._usage
        double._usage = lambda tokens, _: honest(tokens, 0)  # type: ignore[method-assign]
        check(double, await server.probe([*TEXT, *DRAFTS], (), 3), 3, [*TEXT, *DRAFTS], [])
        wrong = await server.probe(TEXT[:30], TEXT[30:], 3)
        with pytest.raises(AssertionError):
            check(double, wrong, 3, TEXT[:30], TEXT[30:])
        await server.close()


async def test_rows_that_json_cannot_say_are_asked_for_again_at_last_without_the_cache() -> None:
    async with ScoringDouble() as double:
        server = await ready(double)
        await server.probe(TEXT, (), 3)
        for unsayable in (1, 3, 20):  # at last without the cache, where no row is unwritten
            double.nan = unsayable
            check(double, probe := await server.probe(TEXT, DRAFTS, 3), 3)
            assert probe.lost == len(DRAFTS) + 1
            assert (double.nan > 0) is (unsayable == 20)
        await server.close()


async def test_a_preempted_probe_loses_its_rows_alone() -> None:
    async with ScoringDouble(runner="V2") as double:
        server = await ready(double)
        double.preempt = 1
        probe = await server.probe(TEXT, DRAFTS, 3)
        check(double, probe, 3)
        assert probe.lost == 4
        await server.close()


async def test_v1_without_told_caches_gets_prompts_alone() -> None:
    async with ScoringDouble(tells_cached=False) as double:
        server = await ready(double)
        assert server.facts.door == "prompts"
        for _ in range(2):
            probe = await server.probe(TEXT, DRAFTS, 3)
            check(double, probe, 3)
            assert probe.cached_tokens is None
        assert not double.asked("/inference/v1/generate")
        await server.close()


@BOTH
async def test_a_server_that_stops_telling_caches_is_not_believed(runner) -> None:
    """It may have been started again with other flags."""
    async with ScoringDouble(runner=runner) as double:
        server = await ready(double)
        double.tells_cached = False
        for _ in range(3):
            check(double, await server.probe(TEXT, DRAFTS, 3), 3)
        await server.close()


@DOORS
async def test_rows_that_others_spoil_are_asked_for_again(runner, scale_out) -> None:
    async with ScoringDouble(runner=runner, scale_out=scale_out) as double:
        server = await ready(double)
        for width in (1, 2, 3, 20):
            double.spoil = 3 if runner == "V1" else 0
            check(double, await server.probe(TEXT, DRAFTS, width), width)
            double.spoil = 2 if runner == "V1" else 0
            async for each in server.stream(TEXT, 1, frozenset(), width):
                check_row(double, each.row, TEXT, width)
        double.spoil, double.runner = 1 << 20, "V1"
        with pytest.raises(FloatingPointError):
            await server.probe(TEXT, DRAFTS, 3)
        await server.close()


async def test_v1_is_never_asked_for_tokens_by_name() -> None:
    async with ScoringDouble() as double:
        server = await ready(double)
        assert not server.facts.names
        assert not server.facts.names_in_rows
        with pytest.raises(Internal):
            await server.name(TEXT, [1, 2])
        assert double.harmed == 0
        await server.close()


async def test_a_server_that_came_back_as_v1_gets_no_names() -> None:
    async with ScoringDouble(runner="V2") as double:
        server = await ready(double)
        double.runner, double.drop = "V1", 1
        with pytest.raises(ModelRefused, match="V1"):
            await server.name(TEXT, [1, 2])
        assert double.harmed == 0
        await server.close()


async def test_v2_tells_any_tokens_by_name() -> None:
    async with ScoringDouble(vocab=300, runner="V2") as double:
        server = await ready(double)
        told = await server.name(TEXT, range(300))
        assert list(told.values()) == double.logp(TEXT).tolist()
        assert sorted(len(each["logprob_token_ids"]) for each in double.asked("/v1/completions")) == [44, 128, 128]
        await server.close()


@pytest.mark.parametrize("tells_cached", [True, False])
async def test_v2_takes_names_by_row_with_the_probe(tells_cached) -> None:
    named = [[1, 2], [], [3], [17, 18, 19], [0]]
    async with ScoringDouble(runner="V2", tells_cached=tells_cached) as double:
        server = await ready(double)
        probe = await server.probe(TEXT, DRAFTS, 3, named)
        check(double, probe, 3, named=named)
        assert (probe.lost, len(double.requests)) == (0, 1)
        await server.probe([*TEXT, *DRAFTS] * 2, (), 3)  # by others: now the first row that is named was cached
        probe = await server.probe(TEXT[:46], [*TEXT[46:], *DRAFTS], 3, [[1, 2]] * 13)
        check(double, probe, 3, TEXT[:46], [*TEXT[46:], *DRAFTS], [[1, 2]] * 13)
        assert probe.lost == 3
        await server.close()


@DOORS
async def test_a_stream_is_the_greedy_text_with_its_rows(runner, scale_out) -> None:
    async with ScoringDouble(runner=runner, scale_out=scale_out) as double:
        server = await ready(double)
        text = list(TEXT)
        async for each in server.stream(TEXT, 30, frozenset(), 4):
            assert each.token == double.logp(text).argmax()
            check_row(double, each.row, text, 4)
            text.append(each.token)
        assert len(text) == len(TEXT) + 30
        end = text[len(TEXT) + 7]
        first = text.index(end, len(TEXT))
        ended = [each.token async for each in server.stream(TEXT, 30, frozenset([end]), 1)]
        assert ended == text[len(TEXT) : first + 1]
        long = [each.token async for each in server.stream(TEXT * 16, 1000, frozenset(), 1)]
        assert len(long) == 900 - 16 * len(TEXT)
        await server.close()
        assert double.connections <= 8


@DOORS
async def test_probes_reach_the_end_of_the_context(runner, scale_out) -> None:
    async with ScoringDouble(runner=runner, scale_out=scale_out) as double:
        server = await ready(double)
        text = (TEXT * 17)[: 899 - len(DRAFTS)]
        named = [[1]] * 5 if server.facts.names_in_rows else ()
        check(double, await server.probe(text, DRAFTS, 2, named), 2, text, named=named)
        await server.close()


async def test_a_stream_goes_on_after_the_models_own_ends() -> None:
    async with ScoringDouble(scale_out=False) as double:
        server = await ready(double)
        whole = [each.token async for each in server.stream(TEXT, 20, frozenset(), 1)]
        double.stop_by_default = (whole[4], whole[9])
        assert [each.token async for each in server.stream(TEXT, 20, frozenset(), 1)] == whole
        await server.close()


@DOORS
async def test_closing_a_stream_ends_its_request(runner, scale_out) -> None:
    async with ScoringDouble(runner=runner, scale_out=scale_out) as double:
        server = await ready(double)
        double.step_s = 0.01
        async with aclosing(server.stream(TEXT, 500, frozenset(), 1)) as tokens:
            async for _ in tokens:
                break
        for _ in range(100):
            await asyncio.sleep(0.01)
            if double.running == 0:
                break
        assert (double.running, double.aborted) == (0, 1)
        await server.close()


async def test_a_cancelled_probe_ends_its_request() -> None:
    async with ScoringDouble(step_s=0) as double:
        server = await ready(double)
        double.step_s = 30
        task = asyncio.create_task(server.probe(TEXT, DRAFTS, 3))
        await asyncio.sleep(0.05)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.05)
        assert (double.running, double.aborted) == (0, 1)
        await server.close()


async def test_a_broken_stream_is_said_at_once() -> None:
    async with ScoringDouble() as double:
        server = await ready(double)
        double.break_after = 3
        stream = server.stream(TEXT, 10, frozenset(), 1)
        for _ in range(3):
            await anext(stream)
        with pytest.raises(Unavailable, match="broke off"):
            await anext(stream)
        double.break_after = -1
        assert len([each async for each in server.stream(TEXT, 10, frozenset(), 1)]) == 10
        await server.close()


@DOORS
async def test_failures_are_tried_again_and_lose_nothing(runner, scale_out) -> None:
    async with ScoringDouble(runner=runner, scale_out=scale_out) as double:
        server = await ready(double)
        double.drop, double.fail = 2, [503, 500, 502]
        check(double, await server.probe(TEXT, DRAFTS, 3), 3)
        assert (double.drop, double.fail) == (0, [])
        double.drop = 1
        assert len([each async for each in server.stream(TEXT, 3, frozenset(), 1)]) == 3
        await server.close()


async def test_a_server_that_stays_down_is_unavailable() -> None:
    async with ScoringDouble() as double:
        server = await ready(double, patience_s=0.5)
        double.fail = [503] * 100
        with pytest.raises(Unavailable, match=r"fails \(503\): the engine has other worries"):
            await server.probe(TEXT, DRAFTS, 3)
    with pytest.raises(Unavailable, match="is the server running there"):
        await server.probe(TEXT, DRAFTS, 3)
    await server.close()


async def test_idle_connections_that_the_server_closed_do_no_harm() -> None:
    async with ScoringDouble(idle_s=0.1) as double:
        server = await ready(double)
        for _ in range(3):
            check(double, await server.probe(TEXT, DRAFTS, 3), 3)
            await asyncio.sleep(0.3)
        await server.close()


async def test_a_hung_server_is_unavailable_by_its_own_measure() -> None:
    async with ScoringDouble() as double:
        server = await ready(double, timeout_s=0.5)
        double.hang = True
        with pytest.raises(Unavailable, match="did not answer within"):
            await server.probe(TEXT, DRAFTS, 3)
        with pytest.raises(Unavailable, match="did not answer within"):
            [each async for each in server.stream(TEXT, 3, frozenset(), 1)]
        await server.close()


async def test_deadlines_follow_what_answers_took() -> None:
    async with ScoringDouble() as double:
        server = await ready(double)
        quick = server.door._deadline_s(100)
        assert 30 < quick < 60
        assert server.door._deadline_s(8000) > quick + 100
        double.step_s = 2.0
        await server.probe(TEXT, (), 1)
        assert server.door._deadline_s(100) > quick + 5
        await server.close()


async def test_a_restart_with_the_same_model_is_survived() -> None:
    async with ScoringDouble() as double:
        server = await ready(double)
        check(double, await server.probe(TEXT, DRAFTS, 3), 3)

    async def come_back() -> ScoringDouble:
        await asyncio.sleep(0.3)
        return await ScoringDouble(port=double.port).__aenter__()

    back, probe = await asyncio.gather(come_back(), server.probe(TEXT, DRAFTS, 3))
    check(double, probe, 3)
    assert "/v1/models" in [path for path, _, _ in back.requests]
    await server.close()
    await back.__aexit__()


@pytest.mark.parametrize("how", ["another name", "another root", "another context", "an idle server"])
async def test_another_model_behind_the_address_is_refused(how) -> None:
    async with ScoringDouble() as double:
        server = await ready(double)
        card = double.cards["made-up"]
        if how == "another name":
            double.cards = {"other": card}
        elif how == "another context":
            double.cards, double.drop = {"made-up": card | {"max_model_len": 512}}, 1
        else:
            double.cards = {"made-up": card | {"root": "/models/other"}}
            if how == "an idle server":
                server.door._heard_at -= 60
            else:
                double.drop = 1
        with pytest.raises(ModelRefused, match="made-up"):
            await server.probe(TEXT, DRAFTS, 3)
        await server.close()


async def test_an_alias_and_an_adapter_are_asked_for_by_their_names() -> None:
    base = {"root": "/models/made-up", "max_model_len": 900}
    cards = {"made-up": base, "alias": base, "adapter": {"root": "/adapters/1", "parent": "made-up"}}
    async with ScoringDouble(cards=cards) as double:
        for name in ("alias", "adapter"):
            server = await ready(double, name)
            assert (server.facts.model, server.facts.context_length) == (name, 900)
            check(double, await server.probe(TEXT, DRAFTS, 3), 3)
            assert {body["model"] for _, body, _ in double.requests} == {name}
            await server.close()


async def test_only_one_salt_shares_what_was_computed() -> None:
    async with ScoringDouble() as double:
        server = await ready(double)
        cached = [(await server.probe(TEXT, (), 1, salt=salt)).cached_tokens for salt in ("a", "b", "a", "")]
        assert cached == [0, 0, 48, 0]
        await server.close()


async def test_a_text_stays_with_its_data_parallel_rank() -> None:
    async with ScoringDouble(ranks=4, scale_out=False) as double:
        server = await ready(double)
        for salt in ("a", "b", "c", "d", "e", "f"):
            for length in (30, 40, 50):
                await server.probe(TEXT[:length], DRAFTS, 1, salt=salt)
            [each async for each in server.stream(TEXT, 2, frozenset(), 1, salt)]
        found: dict[str, set[str]] = {}
        for _, body, headers in double.requests:
            found.setdefault(body["cache_salt"], set()).add(headers["X-data-parallel-rank"])
        assert all(len(each) == 1 for each in found.values())
        assert len(set.union(*found.values())) > 1
        await server.close()
    async with ScoringDouble() as double:
        server = await ready(double)
        await server.probe(TEXT, DRAFTS, 1)
        assert "X-data-parallel-rank" not in double.requests[-1][2]
        await server.close()


async def test_the_models_own_settings_change_no_text() -> None:
    """A model's generation_config.json sets defaults where a request of /v1/completions sets none."""
    async with ScoringDouble(scale_out=False) as double:
        server = await ready(double)
        await server.probe(TEXT, DRAFTS, 1)
        [each async for each in server.stream(TEXT, 2, frozenset(), 1)]
        for body in double.asked("/v1/completions"):
            assert [body[name] for name in ("temperature", "repetition_penalty", "min_p", "ignore_eos")] == [
                0,
                1,
                0,
                True,
            ]
            assert [body[name] for name in ("presence_penalty", "frequency_penalty", "top_p", "top_k")] == [0, 0, 1, 0]
        await server.close()


async def test_what_no_vllm_should_answer_is_an_internal_error(monkeypatch) -> None:
    async with ScoringDouble() as double:
        server = await ready(double)
        monkeypatch.setattr(double, "_usage", lambda *_: {})
        monkeypatch.setattr(double, "_content", lambda *_: {"logprob": 0})
        with pytest.raises(Internal, match="in a form of its own"):
            await server.probe(TEXT, DRAFTS, 3)
        await server.close()


@pytest.mark.parametrize(
    ("switches", "facts"),
    [
        ({}, {"door": "rows", "kind": "vLLM 0.32.0, V1", "names": False, "block_size": 16, "max_list": 20}),
        ({"runner": "V2"}, {"door": "rows", "kind": "vLLM 0.32.0, V2", "names": True, "names_in_rows": True}),
        ({"runner": "V2", "tells_cached": False}, {"door": "rows", "tells_cached": False}),
        ({"tells_cached": False}, {"door": "prompts", "tells_cached": False, "names": False}),
        ({"scale_out": False}, {"door": "prompts", "kind": "vLLM 0.32.0", "tells_cached": True}),
        ({"scale_out": False, "runner": "V2"}, {"door": "prompts", "names": False}),
        ({"metrics": False}, {"block_size": 16, "drafts_itself": False}),
        ({"metrics": False, "block_size": 32, "runner": "V2"}, {"block_size": 32}),
        ({"metrics": False, "scale_out": False}, {"block_size": 0}),
        ({"metrics": False, "tells_cached": False}, {"block_size": 0}),
        ({"max_logprobs": -1}, {"max_list": 40}),
        ({"max_logprobs": 5}, {"max_list": 5}),
        ({"drafts_itself": True}, {"drafts_itself": True}),
        ({"unsteady": True}, {"repeatable": False}),
        ({"nan": 1}, {"kind": "vLLM 0.32.0, V1", "names": False}),
    ],
)
async def test_the_canary_finds_out_what_a_server_can_do(switches, facts) -> None:
    roots: list[str] = []
    async with ScoringDouble(**switches) as double:
        server = await examine(
            ServerAddress(double.url + "/v1/"), "made-up", lambda root: roots.append(root) or double.vocab
        )
        assert {name: getattr(server.facts, name) for name in facts} == facts
        assert (server.facts.model, server.facts.root) == ("made-up", "/models/made-up")
        assert (server.facts.context_length, roots) == (900, ["/models/made-up"])
        assert server.facts.repeatable is not double.unsteady
        assert len(double.requests) <= 18
        assert double.harmed == 0
        check(double, await server.probe(TEXT, DRAFTS, 3), 3)
        await server.close()


async def test_the_canary_names_the_flags_that_are_lacking() -> None:
    flags = {"scale_out": "--enable-scale-out", "tells_cached": "--enable-prompt-tokens-details"}
    for switch, flag in flags.items():
        async with ScoringDouble(**{switch: False, "max_logprobs": -1}) as double:
            server = await ready(double)
            assert [each.partition(":")[0] for each in server.facts.lacking] == [flag]
            await server.close()
    async with ScoringDouble() as double:
        server = await ready(double)
        assert [each.partition(":")[0] for each in server.facts.lacking] == ["--max-logprobs -1"]
        await server.close()


async def test_no_token_of_the_canary_kills_a_small_model() -> None:
    async with ScoringDouble(vocab=7) as double:
        server = await ready(double)
        assert not double.dead
        await server.close()


async def test_start_refuses_in_one_line_that_names_the_remedy() -> None:
    async with ScoringDouble(api_key="secret") as double:
        await refused(double.url, "target_key_file", "--target-key-file", api_key="wrong")
        await refused(double.url, "target_key_file", "--target-key-file")
        server = await ready(double, api_key="secret")
        double.api_key = "another"
        with pytest.raises(Unavailable, match="--target-key-file") as error:
            await server.probe(TEXT, DRAFTS, 1)
        assert error.value.field == "target_key_file"
        await server.close()
    with pytest.raises(Unavailable, match="is the server running there"):
        await ready(double)
    async with ScoringDouble(logits=True) as double:
        await refused(double.url, "target_url", "--logprobs-mode raw_logprobs")
    base = {"max_model_len": 900}
    async with ScoringDouble(cards={"one": base | {"root": "1"}, "two": base | {"root": "2"}}) as double:
        await refused(double.url, "target_model", "choose one of one, two")
        await refused(double.url, "target_model", "did you mean two", "tow")
    async with ScoringDouble(cards={"one": base | {"owned_by": "sglang"}}) as double:
        await refused(double.url, "target_url", "no vLLM server")
    async with ScoringDouble() as double:
        await refused(double.url + "/elsewhere", "target_url", "root")


async def refused(url: str, field: str, remedy: str, model: str = "", **settings: Any) -> None:
    with pytest.raises(ConfigError) as error:
        await examine(ServerAddress(url, **settings), model, lambda _: 40)
    assert error.value.field == field
    assert remedy in error.value.message
    assert "\n" not in error.value.message
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://x", "http://", "http://[", "http://x:99999", "http://u:p@x", "http://x/?a=b", ""]
)
def test_a_malformed_url_is_refused(url) -> None:
    with pytest.raises(ConfigError) as error:
        ServerAddress(url)
    assert error.value.field == "target_url"
    assert "u:p" not in str(error.value)


def test_a_key_is_shown_nowhere() -> None:
    assert "hidden" not in repr(ServerAddress("http://x", "hidden"))
    for key in ("two lines\n", "a b", "schlüssel"):
        with pytest.raises(ConfigError, match="one line") as error:
            ServerAddress("http://x", key)
        assert key.strip() not in str(error.value)


async def test_a_key_that_a_server_repeats_is_shown_nowhere(monkeypatch) -> None:
    async with ScoringDouble(api_key="hidden-key") as double:
        server = await ready(double, api_key="hidden-key")

        def repeat(*_: Any) -> Any:
            from scoring_double import _Refused

            raise _Refused(400, "bad key hidden-key")

        monkeypatch.setattr(double, "_check", repeat)
        with pytest.raises(OutriderError) as error:
            await server.probe(TEXT, DRAFTS, 1)
        assert "bad key" in str(error.value)
        assert "hidden-key" not in str(error.value)
        await server.close()


def certificates(folder: Path) -> tuple[ssl.SSLContext, Path]:
    key, cert = folder / "key.pem", folder / "cert.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", key, "-out", cert]
    made += ["-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(made, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context, cert


async def test_tls_wants_the_file_of_its_ca(tmp_path) -> None:
    context, cert = certificates(tmp_path)
    async with ScoringDouble(tls=context) as double:
        await refused(double.url, "target_url", "--target-ca")
        server = await ready(double, ca=cert)
        check(double, await server.probe(TEXT, DRAFTS, 3), 3)
        await server.close()
    async with ScoringDouble() as double:
        await refused(double.url.replace("http", "https"), "target_url", "http:// for a server without TLS")
    with pytest.raises(ConfigError, match="PEM") as error:
        await examine(ServerAddress(double.url, ca=tmp_path / "none"), "", lambda _: 40)
    assert error.value.field == "target_ca"


async def test_a_proxy_comes_from_the_environment(monkeypatch) -> None:
    """The double takes a proxy's requests for its own."""
    async with ScoringDouble() as double:
        monkeypatch.setenv("http_proxy", double.url)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        door = HttpDoor(ServerAddress("http://127.0.0.1:1", patience_s=0))
        with pytest.raises(Unavailable):
            await door.ask("/version")
        await door.close()
        monkeypatch.setenv("no_proxy", "")
        door = HttpDoor(ServerAddress("http://somewhere.invalid"))
        assert await door.ask("/version") == {"version": "0.32.0"}
        assert double.requests[-1][2]["Host"] == "somewhere.invalid"
        await door.close()

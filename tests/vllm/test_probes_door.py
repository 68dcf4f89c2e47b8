"""The door to a stock vLLM server, and the double that stands for one in other tests, against `vllm serve` itself."""

from __future__ import annotations

import asyncio
import math
import random
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from conformance_oracle import VOCAB
from scoring_double import ScoringDouble
from stock_process import BLOCK, stock_vllm

from outrider.cloud.probes.canary import examine
from outrider.cloud.probes.http_door import HttpDoor, Refusal, ServerAddress
from outrider.cloud.probes.scoring import ListedRow
from outrider.cloud.probes.vllm_server import VllmServer

CONTEXT = 256
ROWS = ("--enable-scale-out", "--enable-prompt-tokens-details")
SERVERS = {"V1": ROWS, "V2": ROWS, "V1, no flags": ()}
TOLERANCE = 2e-4


class Stock(NamedTuple):
    """A running server."""

    kind: str
    url: str

    async def door(self) -> VllmServer:
        return await examine(ServerAddress(self.url), "", lambda _: VOCAB)


@pytest.fixture(scope="module", params=SERVERS)
def stock(folder: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stock]:
    kind = request.param
    flags = ("--served-model-name", "tiny", "--skip-tokenizer-init", "--enforce-eager", *SERVERS[kind])
    with stock_vllm(folder, tmp_path_factory.mktemp("named"), *flags, v2=kind.startswith("V2")) as url:
        yield Stock(kind, url)


def logp_of(oracle: Any, text: Sequence[int]) -> np.ndarray:
    return oracle.logits(text).double().log_softmax(-1)[0].numpy()  # type: ignore[no-any-return]


def check_row(oracle: Any, row: ListedRow, text: Sequence[int], width: int, named: Sequence[int] = ()) -> None:
    logp = logp_of(oracle, text)
    np.testing.assert_allclose(row.logp, logp[row.tokens], atol=TOLERANCE)
    assert len(row.tokens) >= width
    assert set(named) <= set(row.tokens.tolist())
    assert np.delete(logp, row.tokens).max(initial=-math.inf) <= row.bound + TOLERANCE


def text_of(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()  # type: ignore[no-any-return]


async def test_the_canary_tells_what_was_started(stock) -> None:
    server = await stock.door()
    facts = server.facts
    rows = stock.kind != "V1, no flags"
    assert facts.kind == (f"vLLM 0.32.0, {stock.kind}" if rows else "vLLM 0.32.0")
    assert (facts.model, facts.context_length, facts.block_size, facts.max_list) == ("tiny", CONTEXT, BLOCK, 20)
    assert (facts.names, facts.names_in_rows) == (stock.kind == "V2",) * 2
    assert (facts.tells_cached, facts.door) == (rows, "rows" if rows else "prompts")
    assert (facts.drafts_itself, facts.repeatable) == (False, True)
    assert len(facts.lacking) == (1 if rows else 3)
    await server.close()


async def test_rows_are_those_of_the_plain_model(stock, oracle) -> None:
    """Cached or not, at every place in a block, in company, and where others wrote the same text."""
    chance = random.Random(3)
    server = await stock.door()
    lost = cached = 0

    async def one(number: int) -> None:
        nonlocal lost, cached
        text = text_of(number % 3, chance.randrange(1, 150))
        rest = text_of(number % 3, 200)[len(text) :] if number % 2 else text_of(1000 + number, 200)
        drafts, width = rest[: chance.randrange(10)], chance.randrange(1, 21)
        probe = await server.probe(text, drafts, width, salt=chance.choice(["", "a"]))
        assert len(probe.rows) == len(drafts) + 1
        for place, row in enumerate(probe.rows):
            check_row(oracle, row, [*text, *drafts[:place]], width)
        lost += probe.lost
        cached += probe.cached_tokens or 0

    for first in range(0, 60, 4):
        await asyncio.gather(*(one(number) for number in range(first, first + 4)))
    assert (lost > 0, cached > 0) == (server.facts.door == "rows",) * 2
    await server.close()


async def test_tokens_by_name_are_those_of_the_plain_model(stock, oracle) -> None:
    server = await stock.door()
    if server.facts.names:
        text, drafts = text_of(5, 70), [9, 8, 7]
        told = await server.name(text, range(VOCAB))
        np.testing.assert_allclose(list(told.values()), logp_of(oracle, text), atol=TOLERANCE)
        named = [[3, 4, 5], [], [6], [50, 51]]
        for salt in ("x", "x", "y"):
            probe = await server.probe(text, drafts, 4, named, salt)
            for place, row in enumerate(probe.rows):
                check_row(oracle, row, [*text, *drafts[:place]], 4, named[place])
        assert probe.lost == 0
        await server.probe(text_of(5, 70) + drafts + text_of(6, 40), (), 1, salt="x")
        probe = await server.probe(text[:60], [*text[60:], *drafts], 4, [[3]] * 14, "x")
        for place, row in enumerate(probe.rows):
            check_row(oracle, row, ([*text, *drafts])[: 60 + place], 4, [3])
        assert probe.lost == 5
    await server.close()


async def test_a_stream_is_the_plain_models_greedy_text(stock, oracle) -> None:
    server = await stock.door()
    prompt = text_of(11, 40)
    text = list(prompt)
    async for each in server.stream(prompt, 24, frozenset(), 3):
        assert each.token == logp_of(oracle, text).argmax()
        check_row(oracle, each.row, text, 3)
        text.append(each.token)
    written = text[len(prompt) :]
    assert len(written) == 24
    end = written[10]
    ended = [each.token async for each in server.stream(prompt, 24, frozenset([end, 1]), 1)]
    assert ended == written[: written.index(end) + 1]
    filled = [each.token async for each in server.stream(text_of(12, 250), 24, frozenset(), 1)]
    assert len(filled) == CONTEXT - 250
    await server.close()


async def test_closing_a_stream_or_a_probe_ends_its_request(stock) -> None:
    server = await stock.door()
    async with aclosing(server.stream(text_of(13, 10), 240, frozenset(), 1)) as tokens:
        async for _ in tokens:
            break
    probes = [asyncio.create_task(server.probe(text_of(14, 200), text_of(15, 8), 5)) for _ in range(3)]
    await asyncio.sleep(0.02)
    for probe in probes:
        probe.cancel()
    for _ in range(200):
        metrics = (await server.door.read("/metrics")).decode()
        if 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in metrics:
            break
        await asyncio.sleep(0.05)
    else:
        raise AssertionError("requests that nobody waits for go on")
    await server.close()


async def test_requests_of_others_with_tokens_by_name_spoil_no_row(stock, oracle) -> None:
    """On V1 they leave two tokens of every other row of their step."""
    server = await stock.door()
    spoilt, over = 0, asyncio.Event()
    sampled = server._sampled

    def counted(told: Any, width: int) -> list[ListedRow | None]:
        nonlocal spoilt
        rows = sampled(told, width)
        spoilt += rows.count(None)
        return rows

    async def other() -> None:
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 8, "logprobs": 1, "logprob_token_ids": [7, 8, 9]}
        body["return_tokens_as_token_ids"] = True
        while not over.is_set():
            await server.door.ask("/v1/completions", body)
            await asyncio.sleep(0.02)

    server._sampled = counted  # type: ignore[method-assign]
    others = asyncio.create_task(other())
    for seed in range(40 if stock.kind != "V2" else 5):
        text = text_of(seed, 50)
        for place, row in enumerate((await server.probe(text, [9, 8], 4)).rows):
            check_row(oracle, row, [*text, *[9, 8][:place]], 4)
    over.set()
    await others
    assert (spoilt > 0) == (stock.kind != "V2")
    await server.close()


async def test_idle_connections_do_no_harm(stock, oracle) -> None:
    server = await stock.door()
    for idle_s in (0, 4.9, 5.1):
        await asyncio.sleep(idle_s)
        check_row(oracle, (await server.probe([5, 6, 7], (), 2)).rows[0], [5, 6, 7], 2)
    await server.close()


async def test_the_double_answers_as_the_server_does(stock, oracle) -> None:
    """Everything that the door reads of an answer, cached and not, refusals too."""
    runner = stock.kind[:2]
    rows = stock.kind != "V1, no flags"
    language = lambda text: logp_of(oracle, text).astype(np.float32)  # noqa: E731
    cards = {"tiny": {"root": "/tiny", "max_model_len": CONTEXT}}
    double = ScoringDouble(VOCAB, language, runner, BLOCK, rows, rows, cards=cards)
    async with double:
        doors = HttpDoor(ServerAddress(stock.url)), HttpDoor(ServerAddress(double.url))
        for path, body, headers in questions(runner == "V2"):
            real, made_up = [await answer_of(door, path, body, headers) for door in doors]
            same(real, made_up, len(body.get("token_ids", ())))
        for door in doors:
            await door.close()


def questions(names: bool) -> list[tuple[str, dict[str, Any], dict[str, str]]]:
    text, fresh, salt = text_of(21, 70), text_of(22, 20), f"parity {time.time()}"
    greedy = {"temperature": 0, "max_tokens": 1, "ignore_eos": True}
    by_ids = {"return_tokens_as_token_ids": True, "return_token_ids": True}

    def generate(tokens: list[int], **settings: Any) -> tuple[str, dict[str, Any], dict[str, str]]:
        sampling = greedy | {"detokenize": False} | settings
        salted = {"cache_salt": salt, "model": "tiny"}
        return "/inference/v1/generate", {"token_ids": tokens, "sampling_params": sampling} | salted, {}

    def complete(prompts: Any, rank: int = 0, model: str = "tiny", **settings: Any) -> Any:
        body = {"prompt": prompts, "model": model, "cache_salt": salt} | greedy | by_ids | settings
        return "/v1/completions", body, {"X-data-parallel-rank": str(rank)}

    scored = {"prompt_logprobs": 3, "logprobs": 3, "skip_reading_prefix_cache": False}
    found = [generate(text, **scored), generate(text, **scored), generate(text, logprobs=1)]
    found += [generate(text, **scored | {"skip_reading_prefix_cache": True}), generate(text, prompt_logprobs=2)]
    found += [generate(text[:1], **scored), generate(text, logprobs=21), generate(text_of(1, CONTEXT + 1), logprobs=1)]
    found += [complete([text, fresh], logprobs=2), complete(text, logprobs=10**9), complete(fresh, 10**6, logprobs=1)]
    found += [complete(fresh, model="none"), complete(text_of(2, CONTEXT), logprobs=1)]
    if names:
        found += [complete([text], logprobs=1, logprob_token_ids=[7, 8, 9])]
        wanted = {"prompt_logprobs": 2, "skip_reading_prefix_cache": False}
        for first in (67, 10):  # after what is cached, and within it
            ids = [[3, 4], *[[5, -1]] * (len(text) - 2 - first)]
            found += [generate(text, **wanted, prompt_logprob_start=first, prompt_logprob_token_ids=ids)]
        found += [generate(text, **wanted, prompt_logprob_start=3, prompt_logprob_token_ids=[[3]])]
    return found


async def answer_of(door: HttpDoor, path: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
    try:
        return await door.ask(path, body, headers=headers, handled=(403,))
    except Refusal as refusal:
        return refusal.http_status, refusal.message


def same(real: Any, double: Any, length: int) -> None:
    """Compare what the door reads; rows that V1 never wrote are only counted."""
    assert isinstance(real, dict) == isinstance(double, dict), (real, double)
    if not isinstance(real, dict):
        limits = [re.findall(r"max allowed: \d+|out of range \[0, \d+\)", message) for _, message in (real, double)]
        assert (real[0], limits[0]) == (double[0], limits[1])
        return
    assert real["model"] == double["model"]
    details = [each["usage"]["prompt_tokens_details"] for each in (real, double)]
    told = [each.get("prompt_logprobs") for each in (real, double)]
    for first, second in (details, told, [each.get("prompt_token_id_logprobs") for each in (real, double)]):
        assert (first is None) == (second is None)
    assert details[0] is None or details[0]["cached_tokens"] == details[1]["cached_tokens"]
    assert len(told[0] or ()) == len(told[1] or ())
    written = length - 1 - (details[0]["cached_tokens"] if details[0] else 0)
    for one, other in zip((told[0] or [])[1:][-written:], (told[1] or [])[1:][-written:], strict=True):
        assert list(one) == list(other)
        np.testing.assert_allclose(
            *([entry["logprob"] for entry in row.values()] for row in (one, other)), atol=TOLERANCE
        )
    for one, other in zip(
        *(sorted(each["choices"], key=lambda each: each["index"]) for each in (real, double)), strict=True
    ):
        assert (one["token_ids"], one["finish_reason"]) == (other["token_ids"], other["finish_reason"])
        if one["logprobs"] is None:
            assert other["logprobs"] is None
        elif "content" in one["logprobs"]:
            tops = [each["logprobs"]["content"][0]["top_logprobs"] for each in (one, other)]
            assert [each["token_id"] for each in tops[0]] == [each["token_id"] for each in tops[1]]
        else:
            tops = [each["logprobs"]["top_logprobs"][0] for each in (one, other)]
            assert list(tops[0]) == list(tops[1])
            np.testing.assert_allclose(*(list(each.values()) for each in tops), atol=TOLERANCE)

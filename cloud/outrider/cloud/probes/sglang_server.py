"""SGLang by its own door, /generate: all rows of a probe come of one prompt, and every row takes names."""

from __future__ import annotations

import math
import sys
import zlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from outrider.cloud.probes.http_door import HttpDoor, Json, understood
from outrider.cloud.probes.scoring import ListedRow, Probe, ServerFacts, StreamedToken
from outrider.proto.errors import ConfigError, Internal, Unavailable

MAX_LIST = 1024  # the scheduler dies of a list that is longer than the vocabulary
IDENTITY = ("model_path", "served_model_name", "weight_version")
# In full, since a server may be started with settings that requests leave out (`preferred_sampling_params`).
GREEDY = {"temperature": 0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "min_new_tokens": 0, "ignore_eos": True} | {
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
FLAGS = {
    "enable_deterministic_inference": "--enable-deterministic-inference: rows do not depend on other requests",
    "incremental_streaming_output": "--incremental-streaming-output: no token of a text is sent over and over",
}

Ids = Sequence[int]
Told = AsyncGenerator[StreamedToken, None]


async def examine_sglang(door: HttpDoor, model: str, vocab_of: Callable[[str], int]) -> SglangServer | None:
    """Return the server ready to score the tokens of `model`, empty: whatever it has; None: it is no SGLang.

    Raises:
        ConfigError: it has another model.
        Unavailable: nothing answers.
    """
    info = await _first_of(door, "/model_info", "/get_model_info")
    if "model_path" not in info or not info.get("is_generation"):
        return None
    more = await _first_of(door, "/server_info", "/get_server_info")
    name = info.get("served_model_name") or more.get("served_model_name") or info["model_path"]
    if model not in ("", name, info["model_path"]):
        raise ConfigError(f"{door.address.url} has no model {model!r}; it serves {name}", field="target_model")
    lacking = [remedy for flag, remedy in FLAGS.items() if not more.get(flag)]
    if more.get("disable_radix_cache"):
        lacking.append("no --disable-radix-cache: no probe reads the whole text again")
    with understood():
        facts = ServerFacts(
            kind=f"SGLang {more['version']}",
            model=name,
            root=info["model_path"],
            context_length=more["max_req_input_len"] - 1,
            block_size=more["page_size"] or 0,
            max_list=min(MAX_LIST, vocab_of(info["model_path"])),
            names=True,
            names_in_rows=True,
            tells_cached=True,
            door="rows",
            drafts_itself=bool(more.get("speculative_algorithm")),
            repeatable=bool(more.get("enable_deterministic_inference")),
            lacking=tuple(lacking),
        )
    return SglangServer(door, facts, info, more.get("dp_size") or 1)


class SglangServer:
    """One model of an SGLang server, by the source of 0.5.23: untried on a real server.

    No row is lost to its cache, of which it reads no more than `logprob_start_len` tokens.
    """

    def __init__(self, door: HttpDoor, facts: ServerFacts, info: Mapping[str, Any], ranks: int) -> None:
        self.facts = facts
        self.door = door
        self._identity = [info.get(key) for key in IDENTITY]
        self._ranks = ranks

    async def probe(self, text: Ids, drafts: Ids, width: int, named: Sequence[Ids] = (), salt: str = "") -> Probe:
        """Return the rows after `text` and after each draft; whatever is named for one is told of all."""
        names = sorted(set().union(*named))
        body = self._body([*text, *drafts], 1, width, salt)
        if drafts:
            body["logprob_start_len"] = len(text) - 1
        if names:
            body["token_ids_logprob"] = names
        answer = await self._generate(body)
        top = _rows(answer, "top_logprobs", body)
        by_name = _rows(answer, "token_ids_logprobs", body) if names else [{}] * len(top)
        rows = [ListedRow.of_float32(row, sys.maxsize, more) for row, more in zip(top, by_name, strict=True)]
        return Probe(tuple(rows), answer["meta_info"].get("cached_tokens"))

    async def name(self, text: Ids, tokens: Ids, salt: str = "") -> Mapping[int, float]:
        """Return the log probabilities of `tokens` after `text`."""
        body = self._body(text, 1, 1, salt) | {"token_ids_logprob": list(tokens)}
        (row,) = _rows(await self._generate(body), "token_ids_logprobs", body)
        return row

    async def stream(self, text: Ids, max_tokens: int, ends: frozenset[int], width: int, salt: str = "") -> Told:
        """Yield the server's own greedy tokens after `text`; to close the generator ends the request."""
        goal = min(max_tokens, self.facts.context_length - len(text))
        body = self._body(text, goal, max(1, width), salt) | {"stream": True}
        done = 0
        await self._be_sure()
        async with aclosing(self.door.stream("/generate", body, tokens=len(text))) as events:
            async for event in events:
                with understood():
                    meta = _meta(event, body)
                    tokens, told = event["output_ids"], meta["output_top_logprobs"]
                    # Without --incremental-streaming-output all tokens come again with each.
                    known = done if len(tokens) >= meta["completion_tokens"] else 0
                    rows = [ListedRow.of_float32(_pairs(row), sys.maxsize) for row in told[known:]]
                    new = list(zip(tokens[known:], rows, strict=True))
                for token, row in new:
                    done += 1
                    yield StreamedToken(token, row)
                    if token in ends or done == goal:
                        return
        raise Unavailable("the server ended a text early", field="target_url", retry_after_s=1.0)

    async def chat(self, messages: Sequence[Mapping[str, str]]) -> Sequence[int]:  # noqa: ARG002
        """Return none: it does not tell."""
        return ()

    async def close(self) -> None:
        """Close the connections."""
        await self.door.close()

    def _body(self, tokens: Ids, count: int, width: int, salt: str) -> Json:
        sampling = {**GREEDY, "max_new_tokens": count}
        tokens = list(tokens)
        body: Json = {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True}
        if self._ranks > 1:  # each has a cache of its own, so a text stays with one of them
            body["routed_dp_rank"] = zlib.crc32(repr((salt, tokens[:8])).encode()) % self._ranks
        return body | {"top_logprobs_num": min(width, self.facts.max_list)} | ({"cache_salt": salt} if salt else {})

    async def _generate(self, body: Json) -> Json:
        await self._be_sure()
        answer = await self.door.ask("/generate", body, tokens=len(body["input_ids"]))
        await self._be_sure()  # a connection may have broken meanwhile
        return answer

    async def _be_sure(self) -> None:
        await self.door.be_sure(self.facts.model, self._how_changed)  # answers do not name theirs

    async def _how_changed(self) -> str:
        info = await _first_of(self.door, "/model_info", "/get_model_info")
        there = [info.get(key) for key in IDENTITY]
        return "" if there == self._identity else f"it is {there} now"


async def _first_of(door: HttpDoor, *paths: str) -> Json:
    for path in paths:
        try:
            return await door.ask(path)
        except Internal:  # no such path, or another kind's answer
            continue
    return {}


def _rows(answer: Json, key: str, body: Json) -> list[dict[int, float]]:
    """Return the row of each place from `logprob_start_len` on, of which the server leaves the first out."""
    with understood():
        meta = _meta(answer, body)
        scored = meta[f"input_{key}"][1:] if "logprob_start_len" in body else []
        (last,) = meta[f"output_{key}"]
        rows = [_pairs(row) for row in [*scored, last]]
        if len(rows) != len(body["input_ids"]) - body.get("logprob_start_len", len(body["input_ids"]) - 1):
            raise ValueError("rows are missing")
        return rows


def _meta(answer: Json, body: Json) -> Json:
    if "error" in answer:
        raise Unavailable(f"the server broke off a text: {answer['error']}", field="target_url")
    meta: Json = answer["meta_info"]
    reason = meta["finish_reason"]
    if reason and reason["type"] == "abort":
        raise Unavailable(f"the server broke off a request: {reason.get('message')}", field="target_url")
    if meta["prompt_tokens"] != len(body["input_ids"]):
        raise ValueError("the text was cut")  # --allow-auto-truncate
    return meta


def _pairs(row: Sequence[Any]) -> dict[int, float]:
    return {token: math.nan if logp is None else logp for logp, token, *_ in row}

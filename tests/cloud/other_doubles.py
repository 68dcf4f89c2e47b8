"""Small HTTP servers that answer as SGLang 0.5.23 and llama-server do, over a made-up language, with faults on purpose.

Each names the places of the source that it follows.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from outrider.proto.errors import Unavailable

Json = dict[str, Any]
LEAST = float(np.finfo(np.float32).min)

TEXT = [5, 9, 7, 12, 30, 8, 41, 3, 22]
DRAFTS = [4, 21, 6, 33]


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@dataclass
class Double:
    """A server of one model; `async with` starts and ends it.

    Attributes:
        vocab: tokens of the model.
        sharpness: spread of its logits.
        drop: requests whose connection is closed before an answer.
        fail: statuses of the next answers.
        break_after: events of a stream after which its connection breaks.
        requests: path and body of what was asked.
        aborted: streams that the client closed.
    """

    vocab: int = 60
    sharpness: float = 2.5
    drop: int = 0
    fail: list[int] = field(default_factory=list)
    break_after: int = -1
    requests: list[tuple[str, Json]] = field(default_factory=list)
    aborted: int = 0
    step_s: float = 0.0

    def probabilities(self, text: Sequence[int]) -> np.ndarray:
        digest = hashlib.blake2b(np.array(text, np.int64).tobytes(), digest_size=8).digest()
        logits = np.random.default_rng(int.from_bytes(digest, "little")).standard_normal(self.vocab) * self.sharpness
        return (np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()).astype(np.float32)

    def logp(self, text: Sequence[int]) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return np.maximum(np.log(self.probabilities(text)), np.float32(LEAST))

    def greedy(self, text: Sequence[int], count: int) -> list[int]:
        written = list(text)
        for _ in range(count):
            written.append(int(self.logp(written).argmax()))
        return written[len(text) :]

    def asked(self, path: str) -> list[Json]:
        return [body for each, body in self.requests if each == path]

    def routes(self) -> list[web.RouteDef]:
        return []

    async def __aenter__(self) -> Any:
        app = web.Application(middlewares=[self._guard])
        app.router.add_routes(self.routes())
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requests.append((request.path, await request.json() if request.method == "POST" else {}))
        if self.drop:
            self.drop -= 1
            request.transport.close()
            return web.Response()
        if self.fail:
            return web.json_response({"error": {"message": "out of order"}}, status=self.fail.pop(0))
        return await handler(request)

    async def send(self, request: web.Request, events: Sequence[Json], last: bytes) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        try:
            for count, event in enumerate(events):
                if count == self.break_after:
                    request.transport.close()
                    return answer
                await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
                await asyncio.sleep(self.step_s)
            await answer.write(last)
        except (asyncio.CancelledError, ConnectionError):
            self.aborted += 1
            raise
        return answer


@dataclass
class SglangDouble(Double):
    """SGLang, python/sglang/srt.

    - entrypoints/http_server.py, `model_info`, `server_info`, `generate_request`: paths, keys, errors, `[DONE]`.
    - managers/schedule_batch.py, `Req._compute_max_prefix_len`: the cache is read up to `logprob_start_len`.
    - layers/logits_processor.py, `_get_pruned_states`: a row by each token from there on, and one that is sampled from.
    - managers/scheduler_components/logprob_result_processor.py, `_process_input_top_logprobs` and
      `_process_input_token_ids_logprobs`: None before them, and the last, which is the sampled one's, taken away.
    - managers/tokenizer_manager.py, `_handle_batch_output`, `_validate_token_ids_logprob`, `detokenize_logprob_tokens`:
      `meta_info`, entries of (log p, id, text), what a stream repeats, ids beyond the vocabulary refused.
    - layers/sampler.py, `forward`: beside requests that sample, the sampled row has logarithms of float32 numbers.
    - layers/logprob_processor.py, `get_top_logprobs_raw`: `topk` beyond the vocabulary raises, and the scheduler ends.

    Attributes:
        page_size: of the prefix cache.
        incremental: --incremental-streaming-output.
        interval: --stream-interval.
        preferred: --preferred-sampling-params.
        truncate: --allow-auto-truncate, of longer texts than so many tokens.
        old: a version without /model_info and /server_info.
        rows_left_out: rows of a prompt that do not come.
        nulls: whether JSON has null for numbers of the sampled row that are none.
        abort: whether the scheduler ends the next request.
    """

    info: Json = field(
        default_factory=lambda: {"model_path": "/models/m", "served_model_name": "m", "weight_version": "default"}
    )
    settings: Json = field(default_factory=dict)
    page_size: int = 4
    incremental: bool = False
    interval: int = 1
    preferred: Json = field(default_factory=dict)
    truncate: int = 0
    old: bool = False
    rows_left_out: int = 0
    nulls: bool = False
    abort: bool = False
    dead: bool = False
    cache: list[tuple[Any, list[int]]] = field(default_factory=list)

    def routes(self) -> list[web.RouteDef]:
        prefix = "/get_" if self.old else "/"
        return [
            web.get(f"{prefix}model_info", self._model_info),
            web.get(f"{prefix}server_info", self._server_info),
            web.post("/generate", self._generate),
        ]

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"is_generation": True, **self.info})

    async def _server_info(self, _: web.Request) -> web.Response:
        flags: Json = {"page_size": self.page_size, "incremental_streaming_output": self.incremental}
        flags |= {"max_req_input_len": 401}
        flags |= {"enable_deterministic_inference": False, "speculative_algorithm": None, "disable_radix_cache": False}
        return web.json_response({**flags, "version": "0.5.23", **self.settings})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        tokens, top, names = body["input_ids"], body.get("top_logprobs_num", 0), body.get("token_ids_logprob")
        sampling = self.preferred | body["sampling_params"]
        out_of_range = [token for token in names or () if not 0 <= token < self.vocab]
        if out_of_range:
            error = {"message": f"token_ids_logprob contains out-of-vocabulary token id {out_of_range[0]}"}
            return web.json_response({"error": error}, status=400)
        if top > self.vocab or not all(0 <= token < self.vocab for token in tokens):
            self.dead = True
        if self.dead:
            request.transport.close()
            return web.Response()
        tokens = tokens[: self.truncate or None]
        start, salt = body.get("logprob_start_len", -1), body.get("cache_salt", "")
        salt = (body.get("routed_dp_rank"), salt)  # each rank has a cache of its own
        bound = len(tokens) - 1 if start < 0 else min(len(tokens) - 1, start)
        cached = max((common_prefix(tokens, known) for key, known in self.cache if key == salt), default=0)
        cached = min(cached, bound) // self.page_size * self.page_size
        self.cache.append((salt, tokens))
        written = list(tokens)
        for _ in range(sampling["max_new_tokens"]):
            order = np.argsort(-self.logp(written), kind="stable")
            is_plain = sampling.get("repetition_penalty", 1) == 1 and sampling.get("temperature", 1) == 0
            written.append(int(order[0 if is_plain else 1]))
        new = written[len(tokens) :]
        meta = {"id": "r", "prompt_tokens": len(tokens), "cached_tokens": cached}
        meta |= {"weight_version": self.info["weight_version"], "finish_reason": None}
        made = range(start, len(tokens)) if start >= 0 else range(0)
        for key, wanted in (("top_logprobs", top), ("token_ids_logprobs", names)):
            if wanted:
                rows = [self._row(tokens[: place + 1], wanted) for place in made]
                meta[f"input_{key}"] = ([None, *rows][:-1])[: len(rows) - self.rows_left_out] if rows else []
                meta[f"output_{key}"] = [self._row([*tokens, *new[:count]], wanted) for count in range(len(new))]
                if self.nulls:
                    meta[f"output_{key}"][0][-1][0] = None
        events = [self._event(meta, new, count) for count in range(self.interval, len(new), self.interval)]
        events.append(self._event(meta, new, len(new)))
        if self.abort:
            events[-1]["meta_info"]["finish_reason"] = {"type": "abort", "message": "evicted"}
        if not body.get("stream"):
            return web.json_response(events[-1])
        return await self.send(request, events, b"data: [DONE]\n\n")

    def _row(self, text: Sequence[int], wanted: int | list[int]) -> list[list[Any]]:
        logp = self.logp(text)
        tokens = wanted if isinstance(wanted, list) else np.argsort(-logp, kind="stable")[:wanted].tolist()
        return [[float(logp[token]), token, None] for token in tokens]

    def _event(self, meta: Json, new: list[int], count: int) -> Json:
        first = 0
        if self.incremental:
            first = (count - 1) // self.interval * self.interval
        told = {key: rows[first:count] if key.startswith("output_") else rows for key, rows in meta.items()}
        reason = {"type": "length", "length": count} if count == len(new) else None
        return {
            "text": "",
            "output_ids": new[first:count],
            "meta_info": told | {"completion_tokens": count, "finish_reason": reason},
        }


@dataclass
class LlamaDouble(Double):
    """llama-server, llama.cpp tools/server, of llama-cpp-python 0.3.36.

    - server-context.cpp, `handle_completions_impl`, `wait_for_all`: answers in the order of prompts; one is no list.
    - `get_available_slot`, `update_slots`: the idle slot with the longest prefix, else the one used least recently; all
      of a prompt but its last token may be cached.
    - `process_token`: a token that leaves the text within a character is told of neither in an answer nor in a stream,
      but counted in `tokens_predicted`; a stream has no `[DONE]`.
    - `populate_token_probs`, server-common.cpp `get_token_probabilities`, server-task.cpp `logarithm`: the model's own
      probabilities in float32 whatever is sampled, added up in float32, and the least float for the logarithm of 0.
    - `json_get_nested_values`: fields by path, named by the whole path; of parts of a stream the last alone.

    Attributes:
        slots: -np.
        name: --alias.
        halves: tokens that end within a character.
        end: the model's end of text.
        unsteady: by how much rows differ when others are computed beside them.
        speculates: --spec-type.
    """

    slots: int = 9
    name: str = "m.gguf"
    path: str = "/models/m.gguf"
    halves: tuple[int, ...] = ()
    end: int = -1
    unsteady: float = 0.0
    speculates: str = "none"
    letter: int = 7
    reads: int = 0

    def __post_init__(self) -> None:
        self.held: list[list[int]] = [[] for _ in range(self.slots)]
        self._used = list(range(self.slots))
        self._noise = np.random.default_rng(3)
        self._running = 0

    def routes(self) -> list[web.RouteDef]:
        routes = [web.get("/props", self._props), web.get("/v1/models", self._models)]
        return [*routes, web.post("/completion", self._completion)]

    async def _props(self, _: web.Request) -> web.Response:
        props: Json = {
            "default_generation_settings": {"n_ctx": 401},
            "total_slots": self.slots,
            "model_alias": self.name,
        }
        props |= {"model_path": self.path, "model_ftype": "all F32", "build_info": "b1-0c1e570"}
        return web.json_response(props)

    async def _models(self, _: web.Request) -> web.Response:
        card = {"id": self.name, "meta": {"n_vocab": self.vocab, "n_ctx": 401}}
        return web.json_response({"object": "list", "data": [card]})

    def _take(self, tokens: list[int], idle: list[int]) -> tuple[int, int]:
        best = max(idle, key=lambda slot: common_prefix(self.held[slot], tokens))
        if common_prefix(self.held[best], tokens) <= 0.1 * len(tokens):
            best = min(idle, key=lambda slot: self._used[slot])
        cached = min(common_prefix(self.held[best], tokens), len(tokens) - 1)
        self.reads += len(tokens) - cached
        self.held[best], self._used[best] = tokens, max(self._used) + 1
        return best, cached

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        several = isinstance(body["prompt"][0], list)
        prompts = body["prompt"] if several else [body["prompt"]]
        if not all(0 <= token < self.vocab for prompt in prompts for token in prompt):
            return web.json_response({"error": {"code": 400, "message": "Prompt contains invalid tokens"}}, status=400)
        self._running += 1
        await asyncio.sleep(self.step_s)
        answers, idle = [], []
        for prompt in prompts:
            idle = idle or list(range(self.slots))  # those that wait get a slot when others have ended
            slot, cached = self._take(prompt, idle)
            idle.remove(slot)
            beside = self._running > 1 or len(prompts) > 1
            answers.append(self._text(prompt, body, cached, beside))
        if body.get("stream"):
            events = [*answers[0][:-1], self._picked(answers[0][-1], body)]
            for event in events[:-1]:
                event.pop("timings")
            answer = await self.send(request, events, b"")
        else:
            told = [self._picked(text[-1], body) for text in answers]
            answer = web.json_response(told[0] if len(told) == 1 else told)
        self._running -= 1
        return answer

    def _text(self, prompt: list[int], body: Json, cached: int, beside: bool) -> list[Json]:
        """Return the parts of a text, of which the last stands for the whole."""
        written, told, parts = list(prompt), [], []
        while len(written) < len(prompt) + body["n_predict"] and written[len(prompt) :][-1:] != [self.end]:
            p = self.probabilities(written) * np.float32(1.00015)
            if beside and self.unsteady:
                p = p * np.exp(self._noise.standard_normal(self.vocab) * self.unsteady).astype(np.float32)
            order = np.argsort(-p, kind="stable")
            written.append(self.letter if body["logit_bias"] else int(order[0]))
            if written[-1] in self.halves:
                continue
            top = [{"id": int(token), "logprob": self._log(p[token])} for token in order[: body["n_probs"]]]
            each = {"id": written[-1], "logprob": self._log(p[written[-1]]), "top_logprobs": top}
            told.append(each)
            part = {"tokens": written[-1:], "stop": False, "tokens_predicted": len(written) - len(prompt)}
            parts.append({**part, "completion_probabilities": [each], "timings": {}})
        whole = {"model": self.name, "stop": True, "tokens_predicted": len(written) - len(prompt)}
        whole |= {"generation_settings": {"speculative.types": self.speculates}, "timings": {"cache_n": cached}}
        if told and not body.get("stream"):
            whole["completion_probabilities"] = told
        return [*parts, whole]

    @staticmethod
    def _log(p: np.float32) -> float:
        return LEAST if p == 0 else math.log(p)

    @staticmethod
    def _picked(answer: Json, body: Json) -> Json:
        picked = {}
        for path in body["response_fields"]:
            value: Any = answer
            for key in path.split("/"):
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                picked[path] = value
        return picked


async def refuses(double: Any, server: Any, fault: Json, error: type[Exception], message: str, *named: Any) -> None:
    """A probe of a double with a fault ends by an error, never by rows."""
    for name, value in fault.items():
        setattr(double, name, value)
    with pytest.raises(error, match=message):
        await server.probe(TEXT, DRAFTS, 3, *named)
    double.fail, double.drop = [], 0
    await server.close()


async def probed_through_trouble(double: Any, server: Any) -> Any:
    """A probe whose connection breaks first, and which an error answers then."""
    double.drop, double.fail = 1, [503]
    probe = await server.probe(TEXT, DRAFTS, 3)
    await server.close()
    return probe


async def breaks_off(double: Any, server: Any, fault: Json) -> None:
    """A stream of a double with a fault ends by an error that says so."""
    for name, value in fault.items():
        setattr(double, name, value)
    with pytest.raises(Unavailable, match="broke off"):
        _ = [each async for each in server.stream(TEXT, 9, frozenset(), 1)]
    await server.close()

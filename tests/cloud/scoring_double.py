"""A small HTTP server that answers as vLLM 0.32 does, over a made-up language, with faults that happen on purpose.

`tests/vllm/test_probes_door.py` asks a real server the same questions.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import math
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from aiohttp import web

Json = dict[str, Any]
CARD = {"root": "/models/made-up", "max_model_len": 900}
SHUT = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
OUT_OF_RANGE = "Out of range float values are not JSON compliant: nan"


def made_up(vocab: int, sharpness: float = 2.5, seed: int = 0) -> Callable[[tuple[int, ...]], np.ndarray]:
    """A language whose [vocab] float32 log probabilities after a text hash all of it."""
    known: dict[tuple[int, ...], np.ndarray] = {}

    def logp(text: tuple[int, ...]) -> np.ndarray:
        if text not in known:
            digest = hashlib.blake2b(np.array([seed, *text], np.int64).tobytes(), digest_size=8).digest()
            logits = np.random.default_rng(int.from_bytes(digest, "little")).standard_normal(vocab) * sharpness
            known[text] = (logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())).astype(np.float32)
        return known[text]

    return logp


@dataclass
class ScoringDouble:
    """A server of one model; `async with` starts and ends it.

    Attributes:
        language: log probabilities after a text.
        vocab: tokens of the model; a larger id kills the engine, as it does vLLM's.
        runner: V1 or V2.
        scale_out: whether `/inference/v1/generate` is open.
        tells_cached: --enable-prompt-tokens-details.
        max_logprobs: -1: the vocabulary.
        ranks: data-parallel ranks, each with a cache of its own.
        step_s: time of a token.
        cards: models by id, with root, max_model_len and parent.
        stop_by_default: tokens by which the model's own settings end a text of /v1/completions.
        drop: requests whose connection is closed before an answer.
        fail: statuses of the next answers.
        hang: whether nothing is answered any more.
        nan: V1 answers of which an unwritten row holds no number.
        preempt: V2 answers without any rows.
        spoil: sampled rows that somebody's request with tokens by name spoils.
        break_after: tokens of a stream after which its connection breaks.
        unsteady: whether greedy texts differ beside others.
        requests: path, body and headers of what was asked.
        harmed: requests with tokens by name that V1 was asked.
        aborted: streams that the client closed.
    """

    vocab: int = 40
    language: Callable[[tuple[int, ...]], np.ndarray] | None = None
    runner: str = "V1"
    block_size: int = 16
    scale_out: bool = True
    tells_cached: bool = True
    max_logprobs: int = 20
    api_key: str = ""
    ranks: int = 1
    step_s: float = 0.0
    metrics: bool = True
    drafts_itself: bool = False
    logits: bool = False
    cards: dict[str, Json] = field(
        default_factory=lambda: {"made-up": {"root": "/models/made-up", "max_model_len": 900}}
    )
    stop_by_default: tuple[int, ...] = ()
    drop: int = 0
    fail: list[int] = field(default_factory=list)
    hang: bool = False
    nan: int = 0
    preempt: int = 0
    spoil: int = 0
    break_after: int = -1
    unsteady: bool = False
    tls: ssl.SSLContext | None = None
    port: int = 0
    idle_s: float = 5.0

    def __post_init__(self) -> None:
        self.language = self.language or made_up(self.vocab)
        self.requests: list[tuple[str, Json, Json]] = []
        self.harmed = self.aborted = self.running = self.connections = 0
        self.dead = False
        self._seen: set[Any] = set()
        self._cache: set[tuple[str, str, str, tuple[int, ...]]] = set()
        self._noise = np.random.default_rng(1)

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}"

    def asked(self, path: str) -> list[Json]:
        return [body for each, body, _ in self.requests if each == path]

    async def __aenter__(self) -> ScoringDouble:
        app = web.Application(middlewares=[self._guard], client_max_size=1 << 26)
        app.router.add_get("/version", self._version)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/completions", self._completions)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, keepalive_timeout=self.idle_s, shutdown_timeout=0.1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self.tls)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        body = await request.json() if request.method == "POST" else {}
        self.requests.append((request.path, body, dict(request.headers)))
        if request.transport not in self._seen:
            self._seen.add(request.transport)
            self.connections += 1
        if self.hang:
            await asyncio.sleep(3600)
        if self.drop:
            self.drop -= 1
            request.transport.abort()  # type: ignore[union-attr]
            raise ConnectionResetError
        guarded = self.api_key and request.path.startswith(("/v1", "/inference"))
        if guarded and request.headers.get("Authorization") != f"Bearer {self.api_key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        if self.fail:
            return refuse(self.fail.pop(0), "the engine has other worries")
        if self.dead:
            return refuse(500, "EngineCore encountered an issue. See stack trace (above) for the root cause.")
        self.running += 1
        try:
            return await handler(request)
        except _Refused as refusal:
            return refuse(refusal.status, str(refusal))
        except (asyncio.CancelledError, ConnectionResetError):
            self.aborted += 1
            raise
        finally:
            self.running -= 1

    async def _version(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.32.0"})

    async def _models(self, _: web.Request) -> web.Response:
        plain = {"object": "model", "owned_by": "vllm", "parent": None, "max_model_len": None, "root": None}
        cards = [{"id": name} | plain | card for name, card in self.cards.items()]
        return web.json_response({"object": "list", "data": cards})

    async def _metrics(self, _: web.Request) -> web.Response:
        if not self.metrics:
            return refuse(404, "Not Found")
        told = f'vllm:cache_config_info{{block_size="{self.block_size}",cache_dtype="auto",engine="0"}} 1.0\n'
        if self.drafts_itself:
            told += 'vllm:spec_decode_num_drafts_total{engine="0",model_name="made-up"} 0.0\n'
        return web.Response(text="# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n" + told)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if not self.scale_out:
            raise _Refused(
                403, "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            )
        body = await request.json()
        settings = body["sampling_params"]
        if settings.get("logprob_token_ids") is not None:
            self._names(settings["logprob_token_ids"])
        named = settings.get("prompt_logprob_token_ids")
        if named and self.runner == "V1":
            raise _Refused(400, "prompt_logprob_token_ids require Model Runner V2")
        text = tuple(body["token_ids"])
        start = settings.get("prompt_logprob_start") or 0
        if named and len(named) != len(text) - 1 - start:
            raise _Refused(400, f"prompt_logprob_token_ids has {len(named)} rows, but the prompt has others")
        skip = settings.get("skip_reading_prefix_cache")
        skip = settings.get("prompt_logprobs") is not None if skip is None else skip
        self._check(body, settings, text)
        if body.get("stream"):
            return await self._stream(request, body, settings, text, self._streamed_rows)
        cached = self._read(request, body, text, skip)
        token = await self._next(text)
        rows: list[Json | None] | None = None
        scores = None
        if settings.get("prompt_logprobs") is not None:
            rows = [None] if self._take("preempt") else self._prompt_rows(text, settings["prompt_logprobs"], cached)
            if named and len(rows) > 1 and start >= cached:
                values = [
                    [self.logp(text[: start + row + 1])[id_] if id_ >= 0 else -math.inf for id_ in ids]
                    for row, ids in enumerate(named)
                ]
                file = io.BytesIO()
                np.save(file, np.array(values, np.float32))
                scores = base64.b64encode(file.getvalue()).decode()
        content = None
        if settings.get("logprobs") is not None:
            content = {"content": [self._content(text, token, settings["logprobs"])]}
        choice = {"index": 0, "finish_reason": "length", "token_ids": [token], "logprobs": content}
        answer = {"request_id": "1", "model": self._name(body), "usage": self._usage(len(text), cached)}
        return reply(answer | {"prompt_logprobs": rows, "prompt_token_id_logprobs": scores, "choices": [choice]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body.get("logprob_token_ids") is not None:
            self._names(body["logprob_token_ids"])
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        if any(len(prompt) + body["max_tokens"] > self._context(body) for prompt in prompts):
            raise _Refused(400, "This model's maximum context length is shorter")
        for prompt in prompts:
            self._check(body, body, tuple(prompt))
        rank = int(request.headers.get("X-data-parallel-rank", 0))
        if not 0 <= rank < self.ranks:
            raise _Refused(400, f"data_parallel_rank {rank} is out of range [0, {self.ranks}).")
        if body.get("stream"):
            body["stop_token_ids"] = [*body.get("stop_token_ids", ()), *self.stop_by_default]
            return await self._stream(request, body, body, tuple(prompts[0]), self._streamed_prompts)
        cached = [self._read(request, body, tuple(prompt), False) for prompt in prompts][-1]
        choices = []
        for index, prompt in enumerate(map(tuple, prompts)):
            token = await self._next(prompt)
            choices.append({"index": index, "finish_reason": "length"} | self._streamed_prompts(prompt, token, body))
        used = self._usage(sum(map(len, prompts)), cached)
        return reply({"id": "cmpl-1", "model": self._name(body), "choices": choices[::-1], "usage": used})

    async def _stream(
        self, request: web.Request, body: Json, settings: Json, text: tuple[int, ...], told: Callable[..., Json]
    ) -> web.StreamResponse:
        self._read(request, body, text, False)
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for number in range(settings["max_tokens"]):
            if number == self.break_after:
                request.transport.abort()  # type: ignore[union-attr]
                raise ConnectionResetError
            token = await self._next(text)
            ended = token in settings["stop_token_ids"]
            last = number + 1 == settings["max_tokens"]
            choice = {"index": 0, "finish_reason": "stop" if ended else "length" if last else None}
            event = {"choices": [choice | told(text, token, settings)]}
            await answer.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            text = (*text, token)
            self._write(request, body, text)
            if ended:
                break
        await answer.write(b"data: [DONE]\n\n")
        return answer

    def logp(self, text: Sequence[int]) -> np.ndarray:
        """[vocab] what the server says after a text."""
        assert self.language is not None
        return self.language(tuple(text)) + (50 if self.logits else 0)

    async def _next(self, text: tuple[int, ...]) -> int:
        await asyncio.sleep(self.step_s)
        token = int(self.logp(text).argmax())
        return (token + 1) % self.vocab if self.unsteady and self.running > 1 else token

    def _likeliest(self, text: tuple[int, ...], first: int, width: int) -> dict[int, float]:
        """The sampled token or that of the prompt, and the likeliest, as vLLM orders them."""
        logp = self.logp(text)
        likeliest = np.argsort(-logp, kind="stable")[: width if width >= 0 else self.vocab]
        return {int(token): max(float(logp[token]), -9999.0) for token in (first, *likeliest)}

    def _sampled(self, text: tuple[int, ...], token: int, width: int) -> dict[int, float]:
        if self.runner == "V1" and self._take("spoil"):
            return {token: float(self.logp(text)[token])} | {0: -9999.0}
        return self._likeliest(text, token, width)

    def _content(self, text: tuple[int, ...], token: int, width: int) -> Json:
        found = self._sampled(text, token, width)
        top = [{"token_id": id_, "logprob": logp, "rank": 1} for id_, logp in found.items()][: max(width, 1)]
        return {"token_id": token, "logprob": found[token], "rank": 1, "top_logprobs": top}

    def _streamed_rows(self, text: tuple[int, ...], token: int, settings: Json) -> Json:
        if settings.get("logprobs") is None:
            return {"token_ids": [token], "logprobs": None}
        return {"token_ids": [token], "logprobs": {"content": [self._content(text, token, settings["logprobs"])]}}

    def _streamed_prompts(self, text: tuple[int, ...], token: int, settings: Json) -> Json:
        names = settings.get("logprob_token_ids")
        if not names and settings.get("logprobs") is None:
            return {"token_ids": [token], "logprobs": None}
        if names:
            found = {id_: max(float(self.logp(text)[id_]), -9999.0) for id_ in (token, *names)}
        else:
            found = self._sampled(text, token, settings["logprobs"])
        return {
            "token_ids": [token],
            "logprobs": {"top_logprobs": [{f"token_id:{id_}": v for id_, v in found.items()}]},
        }

    def _prompt_rows(self, text: tuple[int, ...], width: int, cached: int) -> list[Json | None]:
        rows: list[Json | None] = [None]
        nan = cached > 0 and self.runner == "V1" and self._take("nan")
        for end in range(cached if self.runner == "V2" else 0, len(text) - 1):
            if end >= cached:
                row = self._likeliest(text[: end + 1], text[end + 1], width)
            else:  # memory that nobody has written
                ids = self._noise.integers(0, self.vocab, width + 1).tolist()
                row = {id_: math.nan if nan else -float(self._noise.random()) for id_ in ids}
            rows.append({str(id_): {"logprob": logp, "rank": 1, "decoded_token": None} for id_, logp in row.items()})
        return rows

    def _names(self, tokens: list[int]) -> None:
        if self.runner == "V1":
            self.harmed += 1
            self.spoil += self.running - 1
        if len(tokens) > 128:
            raise _Refused(400, f"Requested logprob_token_ids of length {len(tokens)}, which is greater than 128")

    def _check(self, body: Json, settings: Json, text: tuple[int, ...]) -> None:
        if body["model"] not in self.cards:
            raise _Refused(404, f"The model `{body['model']}` does not exist.")
        most = self.max_logprobs if self.max_logprobs >= 0 else self.vocab
        by_row = max(map(len, settings.get("prompt_logprob_token_ids") or [[]]))
        for count in (settings.get("logprobs"), settings.get("prompt_logprobs"), by_row):
            if (count or 0) > most:
                raise _Refused(400, f"Requested sample logprobs of {count}, which is greater than max allowed: {most}")
        if len(text) >= self._context(body):
            raise _Refused(400, f"The decoder prompt (length {len(text)}) is longer than the maximum model length")
        if max(text) >= self.vocab:
            self.dead = True
            raise _Refused(500, "EngineCore encountered an issue.")

    def _context(self, body: Json) -> int:
        card = self.cards.get(body["model"], {})
        return int(card.get("max_model_len") or self.cards[card["parent"]]["max_model_len"]) if card else 1 << 30

    def _name(self, body: Json) -> str:
        """An adapter's own name, or the first alias of the model."""
        whole = [name for name, card in self.cards.items() if not card.get("parent")]
        return body["model"] if self.cards[body["model"]].get("parent") else whole[0]

    def _take(self, fault: str) -> bool:
        left = getattr(self, fault)
        setattr(self, fault, max(0, left - 1))
        return left > 0

    def _owner(self, request: web.Request, body: Json) -> tuple[str, str, str]:
        return request.headers.get("X-data-parallel-rank", "0"), body["model"], body.get("cache_salt", "")

    def _read(self, request: web.Request, body: Json, text: tuple[int, ...], skip: bool) -> int:
        """How many tokens were cached; what is computed is written."""
        cached, owner = 0, self._owner(request, body)
        while not skip and cached + self.block_size < len(text):
            if (*owner, text[: cached + self.block_size]) not in self._cache:
                break
            cached += self.block_size
        self._write(request, body, text)
        return cached

    def _write(self, request: web.Request, body: Json, text: tuple[int, ...]) -> None:
        owner = self._owner(request, body)
        ends = range(self.block_size, len(text) + 1, self.block_size)
        self._cache |= {(*owner, text[:end]) for end in ends}

    def _usage(self, tokens: int, cached: int) -> Json:
        details = {"cached_tokens": cached} if self.tells_cached else None
        return {"prompt_tokens": tokens, "completion_tokens": 1, "prompt_tokens_details": details}


class _Refused(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def refuse(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "E", "param": None, "code": status}}, status=status)


def reply(answer: Json) -> web.Response:
    try:
        return web.Response(text=json.dumps(answer, allow_nan=False), content_type="application/json")
    except ValueError:
        return refuse(400, OUT_OF_RANGE)

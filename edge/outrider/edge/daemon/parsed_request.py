"""Preparation of requests for decoding: from a body to prompts in tokens and `Sampling`."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest

from outrider.drafters.suffix_index import SuffixIndex
from outrider.edge.daemon.cloud import Served
from outrider.edge.daemon.errors import ApiError
from outrider.edge.daemon.schema import ChatRequest, CompletionRequest, Message, Request, ResponseFormat
from outrider.edge.prediction import indexed_prediction
from outrider.edge.preparation import Ready
from outrider.proto.types import Grammar, GrammarKind, Sampling

MAX_BYTES = 8 << 20  # as much as a message to a verifier holds
MAX_DISCARDED_BYTES = 64 << 20
BODY_WITHIN_S = 60.0
COMPLETION_TOKENS = 16  # OpenAI's default for completions
CONTEXT_TOKENS = 1 << 20  # as many as the target's context holds: the verifier says where that ends
SEED_BITS = 53  # a number that JavaScript too keeps whole
_CLOSE = {"Connection": "close"}
_SEEDS = 1 << 64
_IN_THREAD = 4096  # characters; shorter texts are tokenized sooner than a thread takes over
_SAME_IN_SAMPLING = {
    *("temperature", "top_p", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "ignore_eos"),
}


@dataclass(frozen=True, slots=True)
class Choice:
    """One text to decode, which becomes a choice of the answer."""

    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """All texts of one request.

    Attributes:
        choices: [prompts x n] texts; each has a seed one higher than the last of its prompt.
        texts_per_prompt: texts that follow each prompt.
        prompt_tokens: tokens of all prompts, each counted once.
        seed: seed of the first text.
        stop: strings that end a text.
        logprobs: whether log probabilities are requested.
        top_logprobs: number of likeliest tokens to name at each position.
        prediction: index of what the text may repeat; None: not known.
    """

    choices: tuple[Choice, ...]
    texts_per_prompt: int
    prompt_tokens: int
    seed: int
    stop: tuple[str, ...]
    logprobs: bool
    top_logprobs: int
    prediction: SuffixIndex | None = None


async def parse_chat(request: ChatRequest, served: Served) -> ParsedRequest:
    """Parse the request of a chat.

    Raises:
        ApiError: the target has no chat template.
        InvalidArgument: the template refuses the messages, or a parameter is wrong.
    """
    if served.template is None:
        message = f"{served.ready.model} has no chat template; use /v1/completions"
        raise ApiError(400, message, param="messages", code="no_chat_template")
    variables = {} if request.reasoning_effort is None else {"reasoning_effort": request.reasoning_effort}
    turns = [_turn(message) for message in request.messages]
    text = await served.template.render(turns, **variables)
    prompt = await _encode(served.ready, text, special=False)  # the template writes them itself
    max_tokens = request.max_completion_tokens or request.max_tokens or CONTEXT_TOKENS
    parsed = _parsed(request, [prompt], max_tokens, bool(request.logprobs), request.top_logprobs)
    if request.prediction is None:
        return parsed
    return replace(parsed, prediction=await indexed_prediction(served.ready, request.prediction.content))


async def parse_completion(request: CompletionRequest, served: Served) -> ParsedRequest:
    """Parse the request of a completion; raises `InvalidArgument`."""
    prompts = [await _encode(served.ready, prompt, special=True) for prompt in request.prompt]
    max_tokens = request.max_tokens or COMPLETION_TOKENS
    return _parsed(request, prompts, max_tokens, request.logprobs is not None, request.logprobs)


def _parsed(
    request: Request, prompts: list[tuple[int, ...]], max_tokens: int, logprobs: bool, top_logprobs: int | None
) -> ParsedRequest:
    seed = secrets.randbits(SEED_BITS) if request.seed is None else request.seed % _SEEDS
    given = request.model_dump(include=_SAME_IN_SAMPLING, exclude_none=True)
    sampling = Sampling(
        **{"temperature": 1.0, **given},
        seed=seed,
        top_k=max(0, request.top_k or 0),
        logit_bias=tuple((int(token), bias) for token, bias in (request.logit_bias or {}).items()),
        max_tokens=min(max_tokens, CONTEXT_TOKENS),
        stop_tokens=tuple(request.stop_token_ids or ()),
        grammar=_grammar(request.response_format),
    )
    each = [replace(sampling, seed=(seed + i) % _SEEDS) for i in range(request.choices)]
    return ParsedRequest(
        choices=tuple(Choice(prompt, sampling) for prompt in prompts for sampling in each),
        texts_per_prompt=request.choices,
        prompt_tokens=sum(map(len, prompts)),
        seed=seed,
        stop=tuple(request.stop or ()),
        logprobs=logprobs,
        top_logprobs=top_logprobs or 0,
    )


def _grammar(form: ResponseFormat | None) -> Grammar | None:
    if form is None or form.type == "text":
        return None
    if form.json_schema is None:
        return Grammar(GrammarKind.JSON_OBJECT)
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(form.json_schema.schema_, ensure_ascii=False))


def _turn(message: Message) -> dict[str, Any]:
    """Return a turn as templates know it: `developer` is OpenAI's newer name for their `system`."""
    turn = message.model_dump(exclude_none=True)
    turn["role"] = "system" if message.role == "developer" else message.role
    turn.setdefault("content", message.refusal or "")
    return turn


async def _encode(ready: Ready, prompt: str | list[int], *, special: bool) -> tuple[int, ...]:
    if len(prompt) < _IN_THREAD:
        return ready.encode(prompt, special=special)
    return await asyncio.to_thread(ready.encode, prompt, special=special)


async def json_object(request: HttpRequest) -> dict[str, Any]:
    """Read the JSON object in the body of a request.

    Raises:
        ApiError: 415 another type, 413 too long, 400 no JSON object in UTF-8.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise ApiError(415, "the body must be JSON; send Content-Type: application/json", code="unsupported_media_type")
    return _parse_json(await _read(request))


async def _read(request: HttpRequest) -> bytes:
    """Read the body.

    The rest of one that is too long is read and thrown away, up to a point: a client that is cut off while it writes
    would never see the answer.
    """
    body = bytearray()
    taken = 0
    try:
        async with asyncio.timeout(BODY_WITHIN_S):
            async for piece in request.stream():
                taken += len(piece)
                if taken <= MAX_BYTES:
                    body += piece
                elif taken > MAX_DISCARDED_BYTES:
                    break
    except ClientDisconnect as error:
        raise ApiError(400, "the body broke off") from error
    except TimeoutError as error:
        raise ApiError(408, f"the body did not come within {BODY_WITHIN_S:g} s", headers=_CLOSE) from error
    if taken > MAX_BYTES:
        headers = _CLOSE if taken > MAX_DISCARDED_BYTES else None
        raise ApiError(413, f"the body has more than {MAX_BYTES} bytes", code="body_too_large", headers=headers)
    return bytes(body)


def _parse_json(body: bytes) -> dict[str, Any]:
    try:
        parsed = json.loads(body, parse_constant=_no_constant, parse_float=_finite)
        if b"\\ud" in body.lower():
            json.dumps(parsed, ensure_ascii=False).encode()
    except UnicodeError as error:
        raise ApiError(400, "the body is not UTF-8, or holds half a surrogate pair", code="invalid_json") from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply", code="invalid_json") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {str(error)[:200]}", code="invalid_json") from error
    if not isinstance(parsed, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    return parsed


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is beyond any number")
    return value

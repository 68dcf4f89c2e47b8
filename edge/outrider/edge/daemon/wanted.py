"""From a checked request to what a `Client` is asked for."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from outrider.edge.daemon.chat_template import ChatTemplate
from outrider.edge.daemon.errors import ApiError
from outrider.edge.daemon.schema import ChatRequest, CompletionRequest, Message, Request, ResponseFormat, schema_text
from outrider.edge.preparation import Ready
from outrider.proto.types import Grammar, GrammarKind, Sampling

COMPLETION_TOKENS = 16  # OpenAI's, of a completion that does not say
CONTEXT_TOKENS = 1 << 20  # as many as the target's context holds: the verifier says where that ends
SEED_BITS = 53  # a number that JavaScript too keeps whole
_SEEDS = 1 << 64
_IN_THREAD = 4096  # characters; shorter texts are tokenized sooner than a thread takes over


@dataclass(frozen=True, slots=True)
class Text:
    """One text to decode: `choice` in the answer."""

    choice: int
    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Wanted:
    """All texts of one request.

    Attributes:
        texts: [prompts x n] with choices counted up; the seed of each text of one prompt is one more than the last's.
        prompt_tokens: of every prompt once.
        seed: of the first text.
        stop: strings that end a text.
        logprobs: whether they are wanted.
        top_logprobs: so many likeliest tokens of each position.
    """

    texts: tuple[Text, ...]
    prompt_tokens: int
    seed: int
    stop: tuple[str, ...]
    logprobs: bool
    top_logprobs: int


async def wanted_chat(request: ChatRequest, ready: Ready, template: ChatTemplate | None) -> Wanted:
    """What a chat asks for.

    Raises:
        ApiError: the target has no chat template.
        InvalidArgument: the template refuses the messages, or a parameter is wrong.
    """
    if template is None:
        raise ApiError(
            400, f"{ready.model} has no chat template; use /v1/completions", param="messages", code="no_chat_template"
        )
    variables = {} if request.reasoning_effort is None else {"reasoning_effort": request.reasoning_effort}
    text = await asyncio.to_thread(template.render, [_turn(message) for message in request.messages], **variables)
    prompt = await _encode(ready, text, add_special_tokens=False)  # the template writes them itself
    max_tokens = request.max_completion_tokens or request.max_tokens or CONTEXT_TOKENS
    top = request.top_logprobs or 0
    return _wanted(request, [prompt], max_tokens, logprobs=bool(request.logprobs), top_logprobs=top)


async def wanted_completion(request: CompletionRequest, ready: Ready) -> Wanted:
    """What a completion asks for. Raises `InvalidArgument`."""
    prompts = [
        await _encode(ready, prompt, add_special_tokens=True) if isinstance(prompt, str) else tuple(prompt)
        for prompt in request.prompt
    ]
    max_tokens = request.max_tokens or COMPLETION_TOKENS
    logprobs = request.logprobs is not None
    return _wanted(request, prompts, max_tokens, logprobs=logprobs, top_logprobs=request.logprobs or 0)


def _wanted(
    request: Request, prompts: list[tuple[int, ...]], max_tokens: int, *, logprobs: bool, top_logprobs: int
) -> Wanted:
    seed = secrets.randbits(SEED_BITS) if request.seed is None else request.seed % _SEEDS
    sampling = _sampling(request, min(max_tokens, CONTEXT_TOKENS), seed)
    return Wanted(
        texts=tuple(_texts(prompts, request.choices, sampling)),
        prompt_tokens=sum(map(len, prompts)),
        seed=seed,
        stop=tuple(request.stop or ()),
        logprobs=logprobs,
        top_logprobs=top_logprobs,
    )


def _texts(prompts: list[tuple[int, ...]], choices: int, sampling: Sampling) -> Iterator[Text]:
    for at, prompt in enumerate(prompts):
        for i in range(choices):
            yield Text(at * choices + i, prompt, replace(sampling, seed=(sampling.seed + i) % _SEEDS))


def _sampling(request: Request, max_tokens: int, seed: int) -> Sampling:
    return Sampling(
        temperature=1.0 if request.temperature is None else request.temperature,
        seed=seed,
        top_k=max(0, request.top_k or 0),
        top_p=1.0 if request.top_p is None else request.top_p,
        min_p=request.min_p or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=tuple((int(token), bias) for token, bias in (request.logit_bias or {}).items()),
        max_tokens=max_tokens,
        stop_tokens=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        grammar=_grammar(request.response_format),
    )


def _grammar(form: ResponseFormat | None) -> Grammar | None:
    if form is None or form.type == "text":
        return None
    if form.json_schema is None:
        return Grammar(GrammarKind.JSON_OBJECT)
    return Grammar(GrammarKind.JSON_SCHEMA, schema_text(form.json_schema))


def _turn(message: Message) -> dict[str, Any]:
    """As templates know turns. `developer` is OpenAI's newer name for `system`, which templates know."""
    said = message.model_dump(exclude_none=True)
    said["role"] = "system" if message.role == "developer" else message.role
    said.setdefault("content", message.refusal or "")
    return said


async def _encode(ready: Ready, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
    def encode() -> tuple[int, ...]:
        return tuple(ready.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    return encode() if len(text) < _IN_THREAD else await asyncio.to_thread(encode)

"""Preparation of requests for decoding: from what they say to prompts in tokens and `Sampling`."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace
from typing import Any

from outrider.drafters.suffix_index import SuffixIndex
from outrider.edge.daemon.cloud import Served, ToolSupport
from outrider.edge.daemon.http_errors import ApiError
from outrider.edge.daemon.schema import (
    NO_PARAMETERS,
    ChatRequest,
    CompletionRequest,
    Message,
    Request,
    Tool,
    ToolChoice,
)
from outrider.edge.event_stream import Event, Tokens
from outrider.edge.prompts import indexed_prediction
from outrider.edge.tool_calls.call_grammar import CallableFunction, CallRules, grammar_of
from outrider.edge.tool_calls.formats import ToolFormat
from outrider.edge.tool_calls.reading import CallParser
from outrider.proto.errors import InvalidArgument, PromptTooLong
from outrider.proto.types import FinishReason, Grammar, GrammarKind, Sampling, ServiceGoal

COMPLETION_TOKENS = 16  # OpenAI's default for completions
CONTEXT_TOKENS = 1 << 20  # as many as the target's context holds: the verifier says where that ends
SEED_BITS = 53  # a number that JavaScript too keeps whole
_SEEDS = 1 << 64
_SETTINGS = set(Request.model_fields) & set(Sampling.__dataclass_fields__)  # those of one name on both sides


@dataclass(frozen=True, slots=True)
class Choice:
    """One text to decode, which becomes a choice of the answer."""

    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of one request.

    Attributes:
        format: format of the calls.
        tools: functions that the model is shown.
        shown: special tokens that the text must show, for its calls to be found.
        grammar: grammar of the text; None: the model writes what it likes.
    """

    format: ToolFormat
    tools: tuple[Tool, ...]
    shown: frozenset[int]
    grammar: Grammar | None

    def parser(self) -> CallParser:
        return self.format.parser({tool.function.name for tool in self.tools})


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
        tools: functions that the texts may call; None: none.
        grammar_field: field of the request that their grammar is made of; empty: they have none.
        echo: prompts that are repeated before their texts; empty: none.
        prompt_logprobs: number of likeliest tokens to name beside each token of the prompt; None: not requested.
        has_text: whether a text is requested; false: the prompt alone is repeated.
        service: service of the texts; None: the request asks for none.
    """

    choices: tuple[Choice, ...]
    texts_per_prompt: int
    prompt_tokens: int
    seed: int
    stop: tuple[str, ...]
    logprobs: bool
    top_logprobs: int
    prediction: SuffixIndex | None = None
    tools: ToolUse | None = None
    grammar_field: str = ""
    echo: tuple[str, ...] = ()
    prompt_logprobs: int | None = None
    has_text: bool = True
    service: ServiceGoal | None = None

    @property
    def scored_echo(self) -> bool:
        """Whether the repeated prompt has log probabilities."""
        return bool(self.echo) and self.logprobs

    @property
    def prompt_scores(self) -> int | None:
        """Likeliest tokens to ask for beside each token of the prompt; None: nothing of them is needed."""
        wanted = self.top_logprobs if self.scored_echo else None, self.prompt_logprobs
        return max((count for count in wanted if count is not None), default=None)

    def shown(self, event: Event) -> Event:
        """Return an event as the answer shows it: a verifier decodes one token at least, wanted or not."""
        if self.has_text:
            return event
        if isinstance(event, Tokens):
            return replace(event, tokens=(), provenance=(), pieces=())
        return replace(event, reason=FinishReason.LENGTH, text="", stop_string=None)


async def parse(request: ChatRequest | CompletionRequest, served: Served) -> ParsedRequest:
    """Parse a request.

    Raises:
        ApiError: the target has no chat template, or its context cannot hold the chat.
        InvalidArgument: the template refuses the messages, no context can hold the prompt, or a parameter is wrong.
    """
    return await (_chat(request, served) if isinstance(request, ChatRequest) else _completion(request, served))


async def _chat(request: ChatRequest, served: Served) -> ParsedRequest:
    if served.template is None:
        message = f"{served.ready.model} has no chat template; use /v1/completions"
        raise ApiError(400, message, param="messages", code="no_chat_template")
    tools = _tool_use(request, served.tools, served.ready.model)
    variables = request.model_dump(include={"reasoning_effort", "verbosity"}, exclude_none=True)
    variables |= request.chat_template_kwargs or {}
    if tools:
        variables["tools"] = [tool.for_template for tool in tools.tools]
    turns = [_turn(message, served.tools) for message in request.messages]
    text = await served.template.render(turns, **variables)
    try:
        prompt = await served.ready.encode_prompt(text, special=False)  # the template writes them itself
    except PromptTooLong as error:
        raise ApiError(400, error.message, param="messages", code="context_length_exceeded") from error
    max_tokens = request.max_completion_tokens or request.max_tokens or CONTEXT_TOKENS
    parsed = _parsed(request, [prompt], max_tokens, bool(request.logprobs), request.top_logprobs, tools)
    if request.prediction is None:
        return parsed
    return replace(parsed, prediction=await indexed_prediction(served.ready.tokenizer, request.prediction.content))


async def _completion(request: CompletionRequest, served: Served) -> ParsedRequest:
    prompts = [await served.ready.encode_prompt(prompt, special=True) for prompt in request.prompt]
    max_tokens = COMPLETION_TOKENS if request.max_tokens is None else max(1, request.max_tokens)
    parsed = _parsed(request, prompts, max_tokens, request.logprobs is not None, request.logprobs)
    if not request.echo:
        return parsed
    given = zip(request.prompt, prompts, strict=True)
    echo = tuple(text if isinstance(text, str) else served.ready.decode(tokens) for text, tokens in given)
    return replace(parsed, echo=echo, has_text=request.max_tokens != 0)


def _parsed(
    request: Request,
    prompts: list[tuple[int, ...]],
    max_tokens: int,
    logprobs: bool,
    top_logprobs: int | None,
    tools: ToolUse | None = None,
) -> ParsedRequest:
    seed = secrets.randbits(SEED_BITS) if request.seed is None else request.seed % _SEEDS
    source = next(iter(request.grammars()), None)
    grammar, grammar_field = (source.grammar(), source.field) if source is not None else (None, "")
    if tools is not None and tools.grammar is not None:  # which holds an answer to the response format, too
        grammar, grammar_field = tools.grammar, "tools"
    given: dict[str, Any] = {
        "temperature": 1.0,
        **request.model_dump(include=_SETTINGS, exclude_none=True),
        "seed": seed,
        "top_k": max(0, request.top_k or 0),
        "logit_bias": tuple((int(token), bias) for token, bias in (request.logit_bias or {}).items()),
        "max_tokens": min(max_tokens, CONTEXT_TOKENS),
        "stop_tokens": tuple(request.stop_token_ids or ()),
        "grammar": grammar,
    }
    sampling = Sampling(**given)
    each = [replace(sampling, seed=(seed + i) % _SEEDS) for i in range(request.choices)]
    return ParsedRequest(
        choices=tuple(Choice(prompt, sampling) for prompt in prompts for sampling in each),
        texts_per_prompt=request.choices,
        prompt_tokens=sum(map(len, prompts)),
        seed=seed,
        stop=tuple(request.stop or ()),
        logprobs=logprobs,
        top_logprobs=top_logprobs or 0,
        tools=tools,
        grammar_field=grammar_field,
        prompt_logprobs=request.prompt_logprobs,
        service=request.service,
    )


def _tool_use(request: ChatRequest, support: ToolSupport, model: str) -> ToolUse | None:
    """Return a request's tools, if it may call any; raise `ApiError` 400 where the target cannot call functions."""
    if not request.tools or (request.tool_choice is not None and request.tool_choice.mode == "none"):
        return None
    if support.format is None:
        raise ApiError(400, f"tools: {model} {support.why_not}", param="tools", code="tools_not_supported")
    grammar = _grammar(request, request.tools, support, support.format.name)
    return ToolUse(support.format, tuple(request.tools), frozenset(support.special.values()), grammar)


def _grammar(request: ChatRequest, tools: list[Tool], support: ToolSupport, format_name: str) -> Grammar | None:
    """Return the grammar that holds a text to what its request says about calls; None: it leaves all to the model."""
    choice = request.tool_choice or ToolChoice(mode="auto")
    answer = request.response_format.schema_of_answer if request.response_format else None
    must_call, one = choice.mode == "required", request.parallel_tool_calls is False
    strict = any(tool.function.strict for tool in tools)
    if not (must_call or one or strict or answer is not None or choice.names is not None):
        return None
    functions = [tool.function for tool in tools if choice.names is None or tool.function.name in choice.names]
    rules = CallRules(
        functions=[
            CallableFunction(function.name, function.parameters or NO_PARAMETERS, bool(function.strict))
            for function in functions
        ],
        must_call=must_call,
        max_calls=1 if one else None,
        answer=answer,
        special=support.special,
        template=support.template,
    )
    try:
        return Grammar(GrammarKind.LARK, grammar_of(format_name, rules))
    except InvalidArgument as error:
        message = f"tools: the grammar of their calls {error.message}; give fewer tools, or simpler schemas"
        raise ApiError(400, message, param="tools") from error


def _turn(message: Message, tools: ToolSupport) -> dict[str, Any]:
    """Return a turn as templates know it: `developer` is OpenAI's newer name for their `system`."""
    turn = message.model_dump(exclude_none=True)
    if not message.tool_calls:
        turn.pop("tool_calls", None)  # to some templates an empty list is a turn with calls
    if tools.format is not None:
        for call in turn.get("tool_calls", ()):
            call["id"] = tools.format.old_id(call["id"])
        if message.tool_call_id is not None:
            turn["tool_call_id"] = tools.format.old_id(message.tool_call_id)
    turn["role"] = "system" if message.role == "developer" else message.role
    turn.setdefault("content", message.refusal or "")
    return turn

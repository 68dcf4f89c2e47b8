"""The forms of OpenAI's answers to /v1/chat/completions and /v1/completions, at once or in chunks."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from outrider.drafters.token_text import TokenText
from outrider.edge.daemon.generation import Generation, Step
from outrider.edge.daemon.http_errors import ApiError
from outrider.edge.daemon.schema import ChatRequest, CompletionRequest
from outrider.edge.event_stream import Event, Tokens
from outrider.edge.tool_calls.reading import CallArguments, CallBegun, Part
from outrider.proto.release import release
from outrider.proto.types import TokenFacts

MIN_LOGPROB = -9999.0  # OpenAI's number for a probability of nearly 0
DONE = "[DONE]"

Piece = dict[str, Any] | str  # of a stream: JSON, or text as it is


class Answer(ABC):
    """One answer in the making, in the form of one API: its pieces as a stream, or the whole body.

    A piece is to be written before the next is asked for.
    """

    @abstractmethod
    def begin(self) -> Iterable[Piece]:
        """Return the pieces of a stream that come before any text."""

    @abstractmethod
    def take(self, step: Step) -> Iterable[Piece]:
        """Return the pieces that tell of an addition to a text."""

    @abstractmethod
    def end(self) -> Iterable[Piece]:
        """Return the pieces that end a stream, after all texts."""

    @abstractmethod
    def fail(self, error: ApiError) -> Iterable[Piece]:
        """Return the last pieces of a stream that cannot be finished."""

    @abstractmethod
    def whole(self, steps: Sequence[Step]) -> dict[str, Any]:
        """Return the body for texts that have ended, each of which is one step."""


class EventAnswer(Answer):
    """An answer whose body is what the events of its stream lead to."""

    def whole(self, steps: Sequence[Step]) -> dict[str, Any]:
        """Return the body of an answer with one text."""
        (step,) = steps
        for pieces in (self.begin(), self.take(step), self.end()):
            for _ in pieces:
                pass  # the body grows with each
        return self.body()

    @abstractmethod
    def body(self) -> dict[str, Any]:
        """Return the body as far as it has come."""


class _OpenAIAnswer(Answer):
    """An answer of OpenAI's chats or completions, which differ in what a choice holds."""

    _prefix: ClassVar[str]  # of the id
    _object: ClassVar[str]  # OpenAI's name for the type of a whole answer
    _chunk_object: ClassVar[str]  # and of a chunk

    def __init__(self, options: ChatRequest | CompletionRequest, generation: Generation) -> None:
        self._options = options
        self._generation = generation
        self._request = generation.request
        self._tokens = generation.tokens
        self._created = int(time.time())
        self._left = len(self._request.choices)
        self._last = 0  # choice of the last chunk

    def begin(self) -> Iterable[Piece]:
        """Return a chunk for each choice that begins with more than its text."""
        for choice in range(len(self._request.choices)):
            if (content := self._beginning(choice)) is not None:
                made = {"index": choice, **content, "logprobs": None, "finish_reason": None}
                yield self._completed(self._envelope(self._chunk_object, [made]), choice)

    def take(self, step: Step) -> Iterable[Piece]:
        """Return a chunk, unless the step adds nothing that was asked for."""
        self._last = step.choice
        self._left -= step.finish is not None
        # Tokens may come before their text does.
        if not (step.parts or step.finish or self._options.wants_speculation or self._request.logprobs):
            return
        logprobs = self._logprobs(step) if self._request.logprobs and step.tokens else None
        chunk = self._envelope(self._chunk_object, [_choice(step, self._delta(step), logprobs)])
        if not self._left and not self._options.wants_usage:
            chunk["metrics"] = self._generation.metrics()
        yield self._completed(chunk, step.choice, step.events)

    def end(self) -> Iterable[Piece]:
        """Return the chunk without choices, if it was asked for, and OpenAI's mark."""
        if self._options.wants_usage:
            chunk = self._envelope(self._chunk_object, [])
            yield self._completed({**chunk, "usage": self._usage, "metrics": self._generation.metrics()}, self._last)
        yield DONE

    def fail(self, error: ApiError) -> Iterable[Piece]:
        return [error.body()]

    def whole(self, steps: Sequence[Step]) -> dict[str, Any]:
        """Return the body, with what vLLM says of the prompts where that was asked for."""
        choices = [
            _choice(step, self._message(step), self._logprobs(step) if self._request.logprobs else None)
            for step in steps
        ]
        body = self._envelope(self._object, choices) | {"usage": self._usage}
        if self._request.prompt_logprobs is not None:
            self._put_prompt_logprobs(body, steps)
        return body | {"metrics": self._generation.metrics()}

    @property
    def _usage(self) -> dict[str, Any]:
        """OpenAI's counts of tokens so far; those of a prediction are no completion tokens."""
        usage = self._generation.usage
        counts: dict[str, Any] = {
            "prompt_tokens": usage.prompt,
            "completion_tokens": usage.completion,
            "total_tokens": usage.prompt + usage.completion,
            "prompt_tokens_details": {"cached_tokens": usage.cached},
        }
        if (predicted := usage.prediction) is not None:
            counts["completion_tokens_details"] = {
                "accepted_prediction_tokens": predicted.accepted,
                "rejected_prediction_tokens": predicted.rejected,
            }
        return counts

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._prefix + self._generation.request_id,
            "object": kind,
            "created": self._created,
            "model": self._options.model,
            "system_fingerprint": f"outrider-{release()}",  # names the release, not how the text was drafted
            "choices": choices,
        }

    def _completed(self, chunk: dict[str, Any], choice: int, events: Sequence[Event] = ()) -> Piece:
        """Add to a chunk what the options of the stream ask for."""
        if self._options.wants_usage:
            chunk.setdefault("usage", self._usage if self._options.wants_running_usage else None)
        if self._options.wants_speculation:
            chunk["speculation"] = self._generation.speculation(choice, events)
        return chunk

    @abstractmethod
    def _beginning(self, choice: int) -> dict[str, Any] | None:
        """Return what a choice of a stream begins with, before its text."""

    @abstractmethod
    def _delta(self, step: Step) -> dict[str, Any]: ...

    @abstractmethod
    def _message(self, step: Step) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, step: Step) -> dict[str, Any]: ...

    @abstractmethod
    def _put_prompt_logprobs(self, body: dict[str, Any], steps: Sequence[Step]) -> None:
        """Add vLLM's lists of the prompts where this API has them."""

    def _prompt_entries(self, step: Step) -> list[dict[str, Any] | None]:
        """Return vLLM's list: for each token of a prompt but the first what it and the likeliest have, by their ids."""
        entries: list[dict[str, Any] | None] = [None]
        scores = next((event.prompt for event in step.tokens if event.prompt), ())
        for token, said in zip(self._request.choices[step.choice].prompt[1:], scores, strict=True):
            top = said.top[: self._request.prompt_logprobs]
            ranked = [*((t, logprob, i) for i, (t, logprob) in enumerate(top, 1)), (token, said.logprob, said.rank)]
            entries.append({str(t): self._ranked(t, logprob, rank) for t, logprob, rank in ranked})
        return entries

    def _ranked(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": _number(logprob), "rank": rank, "decoded_token": self._tokens.text(token)}


class ChatAnswer(_OpenAIAnswer):
    """An answer of /v1/chat/completions."""

    _prefix = "chatcmpl-"
    _object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def _beginning(self, choice: int) -> dict[str, Any]:  # noqa: ARG002 - they all begin alike
        return {"delta": {"role": "assistant", "content": None if self._request.tools else ""}}

    def _delta(self, step: Step) -> dict[str, Any]:
        calls = _calls(step.parts)
        return {"delta": ({"content": step.text} if step.text else {}) | ({"tool_calls": calls} if calls else {})}

    def _message(self, step: Step) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": step.text, "refusal": None}
        if calls := _calls(step.parts):
            for call in calls:
                del call["index"]
            message |= {"content": step.text or None, "tool_calls": calls}
        return {"message": message}

    def _logprobs(self, step: Step) -> dict[str, Any]:
        return {"content": chat_logprobs(step, self._tokens), "refusal": None}

    def _put_prompt_logprobs(self, body: dict[str, Any], steps: Sequence[Step]) -> None:
        body["prompt_logprobs"] = self._prompt_entries(steps[0])


def _calls(parts: Sequence[Part]) -> list[dict[str, Any]]:
    """Return what is added to calls: name and id where one begins, and pieces of its arguments."""
    calls: dict[int, dict[str, Any]] = {}
    for part in parts:
        match part:
            case CallBegun(index, name, call_id):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": call_id, "type": "function", "function": function}
            case CallArguments(index, text):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += text
    return list(calls.values())


def chat_logprobs(step: Step, tokens: TokenText) -> list[dict[str, Any]]:
    """Return a chat's entries for the tokens of a step, of those that have log probabilities."""

    def named(token: int, logprob: float) -> dict[str, Any]:
        return {"token": tokens.text(token), "logprob": _number(logprob), "bytes": list(tokens.bytes(token))}

    return [
        named(token.id, token.facts.logprob)
        | {"top_logprobs": [named(*entry) for entry in token.facts.top]}
        | ({} if token.facts.entropy is None else {"entropy": token.facts.entropy})
        for event in step.tokens
        for token in event.tokens
        if token.facts is not None
    ]


class CompletionAnswer(_OpenAIAnswer):
    """An answer of /v1/completions."""

    _prefix = "cmpl-"
    _object = _chunk_object = "text_completion"

    def __init__(self, options: CompletionRequest, generation: Generation) -> None:
        super().__init__(options, generation)
        self._lengths = [len(self._prompt_of(choice)) for choice in range(self._left)]  # of prompts and texts so far

    def _beginning(self, choice: int) -> dict[str, Any] | None:
        """Return a prompt that is to be repeated; one with log probabilities comes with the first tokens."""
        repeated = self._request.echo and not self._request.scored_echo
        return {"text": self._prompt_of(choice)} if repeated else None

    def _prompt_of(self, choice: int) -> str:
        return self._request.echo[choice // self._request.texts_per_prompt] if self._request.echo else ""

    def _prompt_comes_with(self, choice: int, event: Event) -> bool:
        """Return whether the prompt, with its log probabilities, comes with an event of its text."""
        first = isinstance(event, Tokens) and event.position == len(self._request.choices[choice].prompt)
        return self._request.scored_echo and first

    def _delta(self, step: Step) -> dict[str, Any]:
        (event,) = step.events
        return {
            "text": (self._prompt_of(step.choice) if self._prompt_comes_with(step.choice, event) else "") + step.text
        }

    def _message(self, step: Step) -> dict[str, Any]:
        return {"text": self._prompt_of(step.choice) + step.text}

    def _put_prompt_logprobs(self, body: dict[str, Any], steps: Sequence[Step]) -> None:
        for choice, step in zip(body["choices"], steps, strict=True):
            choice["prompt_logprobs"] = self._prompt_entries(step)

    def _logprobs(self, step: Step) -> dict[str, Any]:
        made: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for event in step.tokens:
            if self._prompt_comes_with(step.choice, event):
                self._put_prompt(made, step.choice, event.prompt)
            for token, piece in zip(event.tokens, event.pieces, strict=True):
                made["tokens"].append(self._tokens.text(token.id))
                if token.facts is not None:
                    made["token_logprobs"].append(_number(token.facts.logprob))
                    made["top_logprobs"].append(self._top(token.id, token.facts))
                made["text_offset"].append(self._lengths[step.choice])
                self._lengths[step.choice] += len(piece)
        return made

    def _put_prompt(self, made: dict[str, list[Any]], choice: int, scores: Sequence[TokenFacts]) -> None:
        """Begin the lists with the prompt; nothing comes before its first token, which has no probability."""
        prompt, length = self._request.choices[choice].prompt, len(self._prompt_of(choice))
        made["tokens"] += map(self._tokens.text, prompt)
        made["text_offset"] += (min(offset, length) for offset in self._tokens.offsets(prompt))
        made["token_logprobs"].append(None)
        made["top_logprobs"].append(None)
        for token, said in zip(prompt[1:], scores, strict=True):
            made["token_logprobs"].append(_number(said.logprob))
            made["top_logprobs"].append(self._top(token, said._replace(top=said.top[: self._request.top_logprobs])))

    def _top(self, token: int, facts: TokenFacts) -> dict[str, float]:
        """Return the likeliest tokens of the position of `token`, and the token itself where it is not among them."""
        entries = list(facts.top)
        if token not in dict(facts.top):
            entries.append((token, facts.logprob))
        named = {self._tokens.text(likely): _number(logprob) for likely, logprob in reversed(entries)}
        return dict(reversed(named.items()))


def _choice(step: Step, content: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
    choice = {"index": step.choice, **content, "logprobs": logprobs, "finish_reason": step.finish}
    if step.stop_string is not None:
        choice["stop_reason"] = step.stop_string  # vLLM's name
    return choice


def _number(logprob: float) -> float:
    """Return a log probability as JSON can hold it."""
    return logprob if math.isfinite(logprob) else MIN_LOGPROB

"""Answers of /v1/chat/completions and /v1/completions, at once or in chunks."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from outrider.drafters.retrieval import PredictionCount
from outrider.drafters.token_text import TokenText
from outrider.edge.daemon.parsed_request import ParsedRequest
from outrider.edge.event_stream import Event, Finished, Tokens
from outrider.edge.tool_calls.parts import CallArguments, CallBegun, Part, PlainParser, Said, WrittenAnswer
from outrider.proto.release import release
from outrider.proto.types import FinishReason, TokenFacts

MIN_LOGPROB = -9999.0  # OpenAI's number for a probability of nearly 0


class Answer(ABC):
    """One answer in the making, in the format of one endpoint.

    Args:
        request_id: suffix of the answer's id.
        model: name that the request gave.
        request: texts that were requested.
        tokens: text of single tokens.
    """

    _prefix: str  # of the id
    _object: str  # OpenAI's name for the type of a whole answer
    _chunk_object: str  # and of a chunk

    def __init__(self, request_id: str, model: str, request: ParsedRequest, tokens: TokenText) -> None:
        self._id = self._prefix + request_id
        self._model = model
        self.logprobs = request.logprobs
        self._prompt_tokens = request.prompt_tokens
        self._texts_per_prompt = request.texts_per_prompt
        self._echo = request.echo
        self._prompts = [choice.prompt for choice in request.choices]
        self._scores: list[tuple[TokenFacts, ...]] = [()] * len(request.choices)
        self._prompt_logprobs = request.prompt_logprobs
        self._cached_tokens: dict[int, int] = {}  # by prompt
        self._tokens = tokens
        self._created = int(time.time())
        self._texts = [""] * len(request.choices)
        self._completion_tokens = 0
        self._predicted = PredictionCount(request.prediction) if request.prediction is not None else None

    def take(self, choice: int, event: Event) -> None:
        """Count an event in."""
        self._texts[choice] += event.text
        if isinstance(event, Tokens):
            self._completion_tokens += len(event.tokens)
            self._scores[choice] = self._scores[choice] or event.prompt
            if self._predicted is not None:
                self._predicted.take(event.ids)
        else:
            prompt, cached = choice // self._texts_per_prompt, event.statistics.cached_tokens
            self._cached_tokens[prompt] = min(cached, self._cached_tokens.get(prompt, cached))

    def first_chunk(self, choice: int) -> dict[str, Any] | None:  # noqa: ARG002 - for the format that has one
        """Return the chunk before the text of a choice, if the format has one."""
        return None

    def has_news(self, choice: int, event: Event) -> bool:  # noqa: ARG002 - for the format that holds text back
        """Return whether an event that was taken last adds something to its choice."""
        return bool(event.text)

    def chunk(self, choice: int, event: Event) -> dict[str, Any]:
        """Return what an event adds after it was taken: text, and at the end the reason."""
        tokens = [event] if isinstance(event, Tokens) else None
        offset = len(self._texts[choice]) - len(event.text)
        return self._envelope(
            self._chunk_object, [self._choice(choice, self._delta(choice, event.text), tokens, event, offset)]
        )

    def usage_chunk(self) -> dict[str, Any]:
        """Return the last chunk, without choices."""
        return self._envelope(self._chunk_object, []) | {"usage": self.usage}

    def whole(self, events: Sequence[Sequence[Event]]) -> dict[str, Any]:
        """Return the answer at once, from the events of each choice."""
        choices = []
        for choice, of_choice in enumerate(events):
            tokens = [event for event in of_choice if isinstance(event, Tokens)]
            choices.append(self._choice(choice, self._message(choice), tokens, of_choice[-1]))
        return self._envelope(self._object, choices) | {"usage": self.usage}

    @property
    def usage(self) -> dict[str, Any]:
        """OpenAI's counts of tokens so far; those of a prompt count once, however many texts follow it.

        Cached are those that the verifier had computed before any of these texts began. Where there was a prediction,
        its tokens are accepted if copying it on finds them in the text, whoever drafted them, and else rejected; these
        are no completion tokens, since nobody had to decode them.
        """
        prompt, completion = self._prompt_tokens, self._completion_tokens
        predicted = self._predicted
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached_tokens.values())},
            **({} if predicted is None else {"completion_tokens_details": _prediction_details(predicted)}),
        }

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": f"outrider-{release()}",  # names the release, not how the text was drafted
            "choices": choices,
        }

    def _choice(
        self, index: int, content: dict[str, Any], tokens: Sequence[Tokens] | None, last: Event, offset: int = 0
    ) -> dict[str, Any]:
        reason = None
        if isinstance(last, Finished):
            reason = "length" if last.reason is FinishReason.LENGTH else self._whole_reason(index)
        logprobs = self._logprobs(index, tokens, offset) if self.logprobs and tokens is not None else None
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": reason}
        if isinstance(last, Finished) and last.stop_string is not None:
            choice["stop_reason"] = last.stop_string  # vLLM's name
        return choice

    def _whole_reason(self, choice: int) -> str:  # noqa: ARG002 - for the format that has others
        """Return OpenAI's reason for the end of a text that no limit cut."""
        return "stop"

    @abstractmethod
    def _delta(self, choice: int, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def _message(self, choice: int) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, choice: int, events: Sequence[Tokens], offset: int) -> dict[str, Any]:
        """Return OpenAI's object for events whose first begins after `offset` characters of the text."""

    def _prompt_entries(self, choice: int) -> list[dict[str, Any] | None]:
        """Return vLLM's list: for each token of a prompt but the first what it and the likeliest have, by their ids."""
        entries: list[dict[str, Any] | None] = [None]
        for token, said in zip(self._prompts[choice][1:], self._scores[choice], strict=True):
            top = said.top[: self._prompt_logprobs]
            ranked = [*((t, logprob, i) for i, (t, logprob) in enumerate(top, 1)), (token, said.logprob, said.rank)]
            entries.append({str(t): self._ranked(t, logprob, rank) for t, logprob, rank in ranked})
        return entries

    def _ranked(self, token: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": _number(logprob), "rank": rank, "decoded_token": self._tokens.text(token)}

    def _named(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._tokens.text(token),
            "logprob": _number(logprob),
            "bytes": list(self._tokens.bytes(token)),
        }


class ChatAnswer(Answer):
    """An answer of /v1/chat/completions.

    Attributes:
        written: [choices] text and calls so far.
        call_ids: [choices] ids of the calls so far.
        news: [choices] what the last event of each added.
    """

    _prefix = "chatcmpl-"
    _object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def __init__(self, request_id: str, model: str, request: ParsedRequest, tokens: TokenText) -> None:
        super().__init__(request_id, model, request, tokens)
        self._tools = request.tools
        self._parsers = [self._tools.parser() if self._tools else PlainParser() for _ in request.choices]
        self.written = [WrittenAnswer() for _ in request.choices]
        self.call_ids: list[list[str]] = [[] for _ in request.choices]
        self.news: list[list[Part]] = [[] for _ in request.choices]

    def take(self, choice: int, event: Event) -> None:
        """Count an event in, and find the calls in its text."""
        super().take(choice, event)
        parser = self._parsers[choice]
        parts = parser.take(event.text)
        if isinstance(event, Finished):
            parts = parts + parser.end()
        for part in parts:
            if isinstance(part, CallBegun) and self._tools is not None:
                self.call_ids[choice].append(self._tools.new_id())
        self.written[choice].add(parts)
        self.news[choice] = parts

    def has_news(self, choice: int, event: Event) -> bool:  # noqa: ARG002 - the event was taken
        """Return whether an event that was taken last adds something to its choice."""
        return bool(self.news[choice])

    def first_chunk(self, choice: int) -> dict[str, Any]:
        """Return a chunk with the role."""
        delta = {"role": "assistant", "content": None if self._tools else ""}
        made = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
        return self._envelope(self._chunk_object, [made])

    def whole(self, events: Sequence[Sequence[Event]]) -> dict[str, Any]:
        """Return the answer at once, with what vLLM says of the prompt where that was asked for."""
        asked = self._prompt_logprobs is not None
        return super().whole(events) | ({"prompt_logprobs": self._prompt_entries(0)} if asked else {})

    def _whole_reason(self, choice: int) -> str:
        return "tool_calls" if self.written[choice].calls else "stop"

    def _delta(self, choice: int, text: str) -> dict[str, Any]:  # noqa: ARG002 - which may be a call's
        said = "".join(part.text for part in self.news[choice] if isinstance(part, Said))
        calls = self._call_deltas(choice)
        return {"delta": ({"content": said} if said else {}) | ({"tool_calls": calls} if calls else {})}

    def _call_deltas(self, choice: int) -> list[dict[str, Any]]:
        """Return what the last event added to calls: name and id where one begins, and pieces of its arguments."""
        deltas: dict[int, dict[str, Any]] = {}
        for part in self.news[choice]:
            match part:
                case CallBegun(index, name):
                    function = {"name": name, "arguments": ""}
                    call_id = self.call_ids[choice][index]
                    deltas[index] = {"index": index, "id": call_id, "type": "function", "function": function}
                case CallArguments(index, text):
                    delta = deltas.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    delta["function"]["arguments"] += text
        return list(deltas.values())

    def _message(self, choice: int) -> dict[str, Any]:
        written = self.written[choice]
        message: dict[str, Any] = {"role": "assistant", "content": written.text, "refusal": None}
        if written.calls:
            message |= {"content": written.text or None, "tool_calls": self._whole_calls(choice)}
        return {"message": message}

    def _whole_calls(self, choice: int) -> list[dict[str, Any]]:
        calls = zip(self.call_ids[choice], self.written[choice].calls, strict=True)
        return [{"id": call_id, "type": "function", "function": asdict(call)} for call_id, call in calls]

    def _logprobs(self, choice: int, events: Sequence[Tokens], offset: int) -> dict[str, Any]:  # noqa: ARG002
        content = [
            self._named(token.id, token.facts.logprob)
            | {"top_logprobs": [self._named(*entry) for entry in token.facts.top]}
            | ({} if token.facts.entropy is None else {"entropy": token.facts.entropy})
            for event in events
            for token in event.tokens
            if token.facts is not None
        ]
        return {"content": content, "refusal": None}


class CompletionAnswer(Answer):
    """An answer of /v1/completions."""

    _prefix = "cmpl-"
    _object = _chunk_object = "text_completion"

    def __init__(self, request_id: str, model: str, request: ParsedRequest, tokens: TokenText) -> None:
        super().__init__(request_id, model, request, tokens)
        self._scored_echo = request.scored_echo
        self._top_logprobs = request.top_logprobs

    def first_chunk(self, choice: int) -> dict[str, Any] | None:
        """Return a chunk with the prompt, where it is to be repeated; with its log probabilities it comes later."""
        if not self._echo or self._scored_echo:
            return None
        made = {"index": choice, "text": self._prompt_of(choice), "logprobs": None, "finish_reason": None}
        return self._envelope(self._chunk_object, [made])

    def _prompt_of(self, choice: int) -> str:
        return self._echo[choice // self._texts_per_prompt] if self._echo else ""

    def chunk(self, choice: int, event: Event) -> dict[str, Any]:
        """Return what an event adds, and before the first tokens a prompt with its log probabilities."""
        made = super().chunk(choice, event)
        if self._scored_echo and isinstance(event, Tokens) and self._is_first(choice, event):
            made["choices"][0]["text"] = self._prompt_of(choice) + event.text
        return made

    def whole(self, events: Sequence[Sequence[Event]]) -> dict[str, Any]:
        """Return the answer at once, with what vLLM says of the prompts where that was asked for."""
        made = super().whole(events)
        if self._prompt_logprobs is not None:
            for choice in made["choices"]:
                choice["prompt_logprobs"] = self._prompt_entries(choice["index"])
        return made

    def _is_first(self, choice: int, event: Tokens) -> bool:
        return event.position == len(self._prompts[choice])

    def _delta(self, choice: int, text: str) -> dict[str, Any]:  # noqa: ARG002 - a text is the same in all
        return {"text": text}

    def _message(self, choice: int) -> dict[str, Any]:
        return {"text": self._prompt_of(choice) + self._texts[choice]}

    def _logprobs(self, choice: int, events: Sequence[Tokens], offset: int) -> dict[str, Any]:
        made: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        offset += len(self._prompt_of(choice))
        for event in events:
            if self._scored_echo and self._is_first(choice, event):
                self._put_prompt(made, choice)
            for token, piece in zip(event.tokens, event.pieces, strict=True):
                made["tokens"].append(self._tokens.text(token.id))
                if token.facts is not None:
                    made["token_logprobs"].append(_number(token.facts.logprob))
                    made["top_logprobs"].append(self._top(token.id, token.facts))
                made["text_offset"].append(offset)
                offset += len(piece)
        return made

    def _put_prompt(self, made: dict[str, list[Any]], choice: int) -> None:
        """Begin the lists with the prompt; nothing comes before its first token, which has no probability."""
        prompt, length = self._prompts[choice], len(self._prompt_of(choice))
        made["tokens"] += map(self._tokens.text, prompt)
        made["text_offset"] += (min(offset, length) for offset in self._tokens.offsets(prompt))
        made["token_logprobs"].append(None)
        made["top_logprobs"].append(None)
        for token, said in zip(prompt[1:], self._scores[choice], strict=True):
            made["token_logprobs"].append(_number(said.logprob))
            made["top_logprobs"].append(self._top(token, said._replace(top=said.top[: self._top_logprobs])))

    def _top(self, token: int, facts: TokenFacts) -> dict[str, float]:
        """Return the likeliest tokens of the position of `token`, and the token itself where it is not among them."""
        entries = list(facts.top)
        if token not in dict(facts.top):
            entries.append((token, facts.logprob))
        named = {self._tokens.text(likely): _number(logprob) for likely, logprob in reversed(entries)}
        return dict(reversed(named.items()))


def _prediction_details(count: PredictionCount) -> dict[str, int]:
    """Return OpenAI's counts of a prediction's tokens."""
    return {"accepted_prediction_tokens": count.accepted, "rejected_prediction_tokens": count.rejected}


def _number(logprob: float) -> float:
    """Return a log probability as JSON can hold it."""
    return logprob if math.isfinite(logprob) else MIN_LOGPROB

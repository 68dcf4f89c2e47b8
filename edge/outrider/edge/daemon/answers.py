"""Answers of /v1/chat/completions and /v1/completions, at once or in chunks."""

from __future__ import annotations

import json
import math
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from outrider.edge.daemon.parsed_request import ParsedRequest
from outrider.edge.event_stream import Event, Finished, Tokens
from outrider.proto.release import release
from outrider.proto.types import CommittedToken, FinishReason

MIN_LOGPROB = -9999.0  # OpenAI's number for a probability of nearly 0
_REASONS = {FinishReason.LENGTH: "length"}
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(slots=True)
class Answer:
    """One answer in the making.

    Attributes:
        id: such as `chatcmpl-…`.
        model: name that the request gave.
        request: what was asked for.
        tokens: text of single tokens.
        created: Unix s.
        texts: [choices] text so far.
        counts: [choices] tokens so far.
    """

    id: str
    model: str
    request: ParsedRequest
    tokens: TokenText
    created: int = field(default_factory=lambda: int(time.time()))
    texts: list[str] = field(init=False)
    counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.texts = [""] * len(self.request.texts)
        self.counts = [0] * len(self.request.texts)

    def take(self, choice: int, event: Event) -> None:
        """Count an event in."""
        self.texts[choice] += event.text
        if isinstance(event, Tokens):
            self.counts[choice] += len(event.tokens)

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return OpenAI's object around choices; its fingerprint names the release, not how the text was drafted."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"outrider-{release()}",
            "choices": choices,
        }

    def usage(self) -> dict[str, int]:
        """Return the tokens so far; those of a prompt count once, however many texts follow it."""
        completion = sum(self.counts)
        prompt = self.request.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class AnswerFormat(ABC):
    """How one endpoint writes its answers."""

    prefix: str  # of an answer's id
    _whole: str  # OpenAI's `object` of a whole answer
    _chunk: str  # and of a chunk

    def first_chunk(self, answer: Answer, choice: int) -> dict[str, Any] | None:  # noqa: ARG002 - for those that have one
        """Return the chunk before the text of a choice, if the format has one."""
        return None

    def chunk(self, answer: Answer, choice: int, event: Event) -> dict[str, Any]:
        """Return what an event adds, which `answer` has taken: text, and at the end the reason."""
        return answer.envelope(self._chunk, [self._chunk_choice(answer, choice, event)])

    def usage_chunk(self, answer: Answer) -> dict[str, Any]:
        """Return the last chunk, without choices."""
        return answer.envelope(self._chunk, []) | {"usage": answer.usage()}

    def whole(self, answer: Answer, events: Sequence[Sequence[Event]]) -> dict[str, Any]:
        """Return the answer at once, from the events of each choice."""
        choices = [
            self._whole_choice(answer, choice, of_choice) | {"finish_reason": finish_reason(of_choice[-1])}
            for choice, of_choice in enumerate(events)
        ]
        return answer.envelope(self._whole, choices) | {"usage": answer.usage()}

    @abstractmethod
    def _chunk_choice(self, answer: Answer, choice: int, event: Event) -> dict[str, Any]: ...

    @abstractmethod
    def _whole_choice(self, answer: Answer, choice: int, events: Sequence[Event]) -> dict[str, Any]: ...


class ChatFormat(AnswerFormat):
    """Answers of /v1/chat/completions."""

    prefix = "chatcmpl-"
    _whole = "chat.completion"
    _chunk = "chat.completion.chunk"

    def first_chunk(self, answer: Answer, choice: int) -> dict[str, Any]:
        """Return a chunk with the role."""
        delta = {"role": "assistant", "content": ""}
        made = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
        return answer.envelope(self._chunk, [made])

    def _chunk_choice(self, answer: Answer, choice: int, event: Event) -> dict[str, Any]:
        logprobs = None
        if isinstance(event, Tokens) and answer.request.logprobs:
            logprobs = {"content": chat_logprobs(answer.tokens, event), "refusal": None}
        delta = {"content": event.text} if event.text else {}
        return {"index": choice, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason(event)}

    def _whole_choice(self, answer: Answer, choice: int, events: Sequence[Event]) -> dict[str, Any]:
        content = [
            entry for event in events if isinstance(event, Tokens) for entry in chat_logprobs(answer.tokens, event)
        ]
        return {
            "index": choice,
            "message": {"role": "assistant", "content": answer.texts[choice], "refusal": None},
            "logprobs": {"content": content, "refusal": None} if answer.request.logprobs else None,
        }


class CompletionFormat(AnswerFormat):
    """Answers of /v1/completions."""

    prefix = "cmpl-"
    _whole = _chunk = "text_completion"

    def _chunk_choice(self, answer: Answer, choice: int, event: Event) -> dict[str, Any]:
        logprobs = None
        if isinstance(event, Tokens) and answer.request.logprobs:
            offset = len(answer.texts[choice]) - len(event.text)
            logprobs = completion_logprobs(answer.tokens, [event], offset)
        return {"index": choice, "text": event.text, "logprobs": logprobs, "finish_reason": finish_reason(event)}

    def _whole_choice(self, answer: Answer, choice: int, events: Sequence[Event]) -> dict[str, Any]:
        logprobs = completion_logprobs(answer.tokens, events, 0) if answer.request.logprobs else None
        return {"index": choice, "text": answer.texts[choice], "logprobs": logprobs}


def finish_reason(event: Event) -> str | None:
    """Return OpenAI's word for the reason of a text's end, and None for any other event."""
    return _REASONS.get(event.reason, "stop") if isinstance(event, Finished) else None


def chat_logprobs(tokens: TokenText, event: Tokens) -> list[dict[str, Any]]:
    """Return OpenAI's objects of an event's tokens, [n]; empty where no log probabilities were asked for."""
    return [
        _named(tokens, token.id, token.logprob) | {"top_logprobs": [_named(tokens, *entry) for entry in token.top]}
        for token in event.tokens
        if token.logprob is not None
    ]


def completion_logprobs(tokens: TokenText, events: Sequence[Event], offset: int) -> dict[str, list[Any]]:
    """Return OpenAI's older object, with [n] entries in each of its lists.

    Args:
        tokens: text of single tokens.
        events: those of one choice.
        offset: characters of the text before the first event.
    """
    made: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for event in events:
        if not isinstance(event, Tokens):
            continue
        for token, piece in zip(event.tokens, event.pieces, strict=True):
            made["tokens"].append(tokens.text(token.id))
            if token.logprob is not None:
                made["token_logprobs"].append(_number(token.logprob))
            made["top_logprobs"].append(_top(tokens, token))
            made["text_offset"].append(offset)
            offset += len(piece)
    return made


def _top(tokens: TokenText, token: CommittedToken) -> dict[str, float]:
    """Return the likeliest tokens of the position of `token`, and the token itself where it is not among them."""
    entries = list(token.top)
    if token.logprob is not None and token.id not in dict(token.top):
        entries.append((token.id, token.logprob))
    named = {tokens.text(likely): _number(logprob) for likely, logprob in reversed(entries)}
    return dict(reversed(named.items()))


def _named(tokens: TokenText, token: int, logprob: float) -> dict[str, Any]:
    return {"token": tokens.text(token), "logprob": _number(logprob), "bytes": list(tokens.bytes(token))}


def _number(logprob: float) -> float:
    """Return a log probability as JSON can hold it."""
    return logprob if math.isfinite(logprob) else MIN_LOGPROB


class TokenText:
    """Single tokens of one tokenizer as text, and as bytes, which may be a part of a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoders = _kinds(json.loads(tokenizer.to_str()).get("decoder"))
        self._byte_level = "ByteLevel" in decoders
        self._byte_fallback = "ByteFallback" in decoders
        self._special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}

    def text(self, token: int) -> str:
        """Return a token for people; U+FFFD where it holds only a part of a character."""
        return self.bytes(token).decode(errors="replace")

    def bytes(self, token: int) -> bytes:
        """Return what a token adds to a text; special tokens add their names."""
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if piece not in self._special:
            if self._byte_level and all(character in _BYTE_OF for character in piece):
                return bytes(_BYTE_OF[character] for character in piece)
            found = _BYTE.fullmatch(piece) if self._byte_fallback else None
            if found:
                return bytes([int(found[1], 16)])
            if self._byte_fallback:
                return str(piece).replace("▁", " ").encode()
        return str(self._tokenizer.decode([token], skip_special_tokens=False)).encode()


def _kinds(decoder: object) -> set[str]:
    """Return the types of a decoder in a tokenizer.json and of those inside it."""
    if not isinstance(decoder, dict):
        return set()
    inner = [_kinds(part) for part in decoder.get("decoders", [])]
    return {str(decoder.get("type"))}.union(*inner)


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's characters for bytes: printable Latin-1 for itself, the others from U+0100 on, in order."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()

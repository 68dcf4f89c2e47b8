"""Answers of /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.edge.daemon.answer import Answer, finish_reason, number
from outrider.edge.daemon.token_text import TokenText
from outrider.edge.events import Event, Finished, Tokens

CHUNK = "chat.completion.chunk"


def first_chunk(answer: Answer, choice: int) -> dict[str, Any]:
    """Who speaks."""
    return answer.envelope(CHUNK, [_chunk_choice(choice, {"role": "assistant", "content": ""})])


def chunk(answer: Answer, choice: int, event: Event) -> dict[str, Any]:
    """What an event adds: text, and at the end the reason."""
    delta = {"content": event.text} if event.text else {}
    made = _chunk_choice(choice, delta)
    if isinstance(event, Finished):
        made["finish_reason"] = finish_reason(event)
    elif answer.wanted.logprobs:
        made["logprobs"] = {"content": token_logprobs(answer.tokens, event), "refusal": None}
    return answer.envelope(CHUNK, [made])


def usage_chunk(answer: Answer) -> dict[str, Any]:
    """The last chunk, without choices."""
    return answer.envelope(CHUNK, []) | {"usage": answer.usage()}


def whole(answer: Answer, events: Sequence[Sequence[Event]]) -> dict[str, Any]:
    """The answer at once; `events` are those of each choice."""
    choices = [_whole_choice(answer, choice, of_choice) for choice, of_choice in enumerate(events)]
    return answer.envelope("chat.completion", choices) | {"usage": answer.usage()}


def _whole_choice(answer: Answer, choice: int, events: Sequence[Event]) -> dict[str, Any]:
    content = [entry for event in events if isinstance(event, Tokens) for entry in token_logprobs(answer.tokens, event)]
    last = events[-1]
    return {
        "index": choice,
        "message": {"role": "assistant", "content": answer.texts[choice], "refusal": None},
        "logprobs": {"content": content, "refusal": None} if answer.wanted.logprobs else None,
        "finish_reason": finish_reason(last) if isinstance(last, Finished) else None,
    }


def _chunk_choice(choice: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}


def token_logprobs(tokens: TokenText, event: Tokens) -> list[dict[str, Any]]:
    """[n] OpenAI's objects of an event's tokens; empty where no log probabilities were asked for."""
    made = []
    for i, (token, logprob) in enumerate(zip(event.tokens, event.logprobs, strict=False)):
        top = event.top_logprobs[i] if event.top_logprobs else ()
        made.append(_named(tokens, token, logprob) | {"top_logprobs": [_named(tokens, *entry) for entry in top]})
    return made


def _named(tokens: TokenText, token: int, logprob: float) -> dict[str, Any]:
    return {"token": tokens.text(token), "logprob": number(logprob), "bytes": list(tokens.bytes(token))}

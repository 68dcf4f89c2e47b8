"""Answers of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outrider.edge.daemon.answer import Answer, finish_reason, finite, number
from outrider.edge.daemon.token_text import TokenText
from outrider.edge.events import Event, Finished, Tokens

KIND = "text_completion"


def chunk(answer: Answer, choice: int, event: Event) -> dict[str, Any]:
    """What an event adds: text, and at the end the reason. The answer has counted it already."""
    made = {"index": choice, "text": event.text, "logprobs": None, "finish_reason": None}
    if isinstance(event, Finished):
        made["finish_reason"] = finish_reason(event)
    elif answer.wanted.logprobs:
        made["logprobs"] = token_logprobs(answer.tokens, [event], len(answer.texts[choice]) - len(event.text))
    return answer.envelope(KIND, [made])


def usage_chunk(answer: Answer) -> dict[str, Any]:
    """The last chunk, without choices."""
    return answer.envelope(KIND, []) | {"usage": answer.usage()}


def whole(answer: Answer, events: Sequence[Sequence[Event]]) -> dict[str, Any]:
    """The answer at once; `events` are those of each choice."""
    choices = [_whole_choice(answer, choice, of_choice) for choice, of_choice in enumerate(events)]
    return answer.envelope(KIND, choices) | {"usage": answer.usage()}


def _whole_choice(answer: Answer, choice: int, events: Sequence[Event]) -> dict[str, Any]:
    last = events[-1]
    return {
        "index": choice,
        "text": answer.texts[choice],
        "logprobs": token_logprobs(answer.tokens, events, 0) if answer.wanted.logprobs else None,
        "finish_reason": finish_reason(last) if isinstance(last, Finished) else None,
    }


def token_logprobs(tokens: TokenText, events: Sequence[Event], offset: int) -> dict[str, list[Any]]:
    """OpenAI's older object, [n] in each of its lists; `offset`: characters of the text before the first event."""
    made: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for event in events:
        if not isinstance(event, Tokens):
            continue
        made["tokens"] += map(tokens.text, event.tokens)
        made["token_logprobs"] += finite(event.logprobs)
        for i, piece in enumerate(event.pieces):
            made["text_offset"].append(offset)
            offset += len(piece)
            made["top_logprobs"].append(_top(tokens, event, i))
    return made


def _top(tokens: TokenText, event: Tokens, i: int) -> dict[str, float]:
    """Of the i-th token: the likeliest, and itself where it is not among them."""
    named = {tokens.text(token): number(logprob) for token, logprob in reversed(_entries(event, i))}
    return dict(reversed(named.items()))


def _entries(event: Tokens, i: int) -> list[tuple[int, float]]:
    top = list(event.top_logprobs[i]) if event.top_logprobs else []
    own = (event.tokens[i], event.logprobs[i]) if event.logprobs else None
    return [*top, own] if own is not None and own[0] not in dict(top) else top

"""What the answers of both endpoints share: ids, times, usage, reasons."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from outrider.edge.daemon.token_text import TokenText
from outrider.edge.daemon.wanted import Wanted
from outrider.edge.events import Event, Finished, Tokens
from outrider.proto.release import release
from outrider.proto.types import FinishReason

UNLIKELY = -9999.0  # OpenAI's number for a probability of nearly 0
_REASONS = {FinishReason.LENGTH: "length"}


@dataclass(slots=True)
class Answer:
    """One answer in the making: what has come of each of its texts.

    Attributes:
        id: such as `chatcmpl-…`.
        model: that the request named.
        wanted: by the request.
        tokens: of the target's tokenizer, one by one.
        texts: [choices] so far.
        counts: [choices] tokens so far.
    """

    id: str
    model: str
    wanted: Wanted
    tokens: TokenText
    created: int = field(default_factory=lambda: int(time.time()))
    texts: list[str] = field(init=False)
    counts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.texts = [""] * len(self.wanted.texts)
        self.counts = [0] * len(self.wanted.texts)

    def take(self, choice: int, event: Event) -> None:
        """Count an event in."""
        self.texts[choice] += event.text
        if isinstance(event, Tokens):
            self.counts[choice] += len(event.tokens)

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """OpenAI's object around choices; its fingerprint names what made it, not how it was drafted."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"outrider-{release()}",
            "choices": choices,
        }

    def usage(self) -> dict[str, int]:
        """Tokens so far; those of a prompt count once, however many texts follow it."""
        completion = sum(self.counts)
        prompt = self.wanted.prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def finish_reason(event: Finished) -> str:
    """OpenAI's word for it."""
    return _REASONS.get(event.reason, "stop")


def number(logprob: float) -> float:
    """As JSON can hold it."""
    return logprob if math.isfinite(logprob) else UNLIKELY


def finite(logprobs: Iterable[float]) -> list[float]:
    """All of them as JSON can hold them."""
    return [number(logprob) for logprob in logprobs]

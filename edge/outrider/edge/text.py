"""Tokens as text, as they come, up to a stop string, which only this side can see."""

from __future__ import annotations

from collections.abc import Collection

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from outrider.drafters.token_text import special_tokens


class TextStream:
    """Decoder of one text, token by token; a piece that was returned never changes.

    A stop string is never emitted, also where it spans tokens: text that could be its beginning is held back until
    it turns out not to be.

    Args:
        tokenizer: the target's.
        stop: strings that end the text.
        shown: special tokens that the text has by their names, unlike all others.
        min_tokens: tokens before which no stop string ends the text; one that is complete by then never does.

    Attributes:
        stopped_by: the stop string that ended the text; None: none has.
    """

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), shown: Collection[int] = (), min_tokens: int = 0
    ) -> None:
        self.stopped_by: str | None = None
        self._tokenizer = tokenizer
        self._hidden = special_tokens(tokenizer).difference(shown) if shown else frozenset()
        self._decoder = DecodeStream(skip_special_tokens=not shown)
        self._skips_special = not shown
        self._stop = stop
        self._tokens: list[int] = []
        self._decoded = ""
        self._taken = 0
        self._early_tokens = min_tokens  # still to come, in which no stop string may end
        self._early = 0  # length of the text of those that have come

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.stopped_by is not None

    def push(self, tokens: tuple[int, ...]) -> tuple[str, ...]:
        """Return the text that each of `tokens` adds for certain, as far as the token that completes a stop string.

        Fewer pieces than tokens mean that the rest of the tokens are not part of the text.
        """
        pieces: list[str] = []
        for token in tokens:
            if self.stopped:
                break
            pieces.append(self._push_one(token))
        return tuple(pieces)

    def _push_one(self, token: int) -> str:
        early, self._early_tokens = self._early_tokens > 0, max(0, self._early_tokens - 1)
        if token in self._hidden:
            return ""
        self._tokens.append(token)
        self._decoded += self._decoder.step(self._tokenizer, token) or ""
        if early:
            self._early = len(self._decoded)
        return self._take(self._final_length())

    def finish(self) -> str:
        """Return the rest, held back as the possible beginning of a stop string or of a character."""
        if self.stopped:
            return ""
        whole = str(self._tokenizer.decode(self._tokens, skip_special_tokens=self._skips_special))
        if whole.startswith(self._decoded):
            self._decoded = whole
        self._final_length()
        return self._take(len(self._decoded))

    def _take(self, until: int) -> str:
        piece = self._decoded[self._taken : until]
        self._taken = max(self._taken, until)
        return piece

    def _final_length(self) -> int:
        """Return the length of the text that no later token can change."""
        if self.stopped or not self._stop:
            return len(self._decoded)
        found = [
            (at, stop)
            for stop in self._stop
            if (at := self._decoded.find(stop, max(0, max(self._taken, self._early) - len(stop) + 1))) >= 0
        ]
        if found:
            at, self.stopped_by = min(found, key=lambda each: each[0])
            self._decoded = self._decoded[:at]
            return len(self._decoded)
        held = max(_overlap(self._decoded, stop) for stop in self._stop)
        return max(self._taken, len(self._decoded) - held)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

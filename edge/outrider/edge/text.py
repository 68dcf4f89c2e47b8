"""Tokens as text, as they come, up to a stop string, which only this side can see."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tokenizers import Tokenizer

from outrider.drafters.token_text import TokenDecoder, special_tokens


class TextStream:
    """Decoder of one text, token by token; a piece that was returned never changes.

    A stop string is never emitted, also where it spans tokens: text that could be its beginning is held back until
    it turns out not to be.

    Args:
        tokenizer: the target's.
        stop: strings that end the text.
        shown: special tokens that the text has by their names, unlike all others.
        min_tokens: tokens before which no stop string ends the text; one that is complete by then never does.
        before: tokens before the text, a character of which its first tokens may complete.

    Attributes:
        stopped_by: the stop string that ended the text; None: none has.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: tuple[str, ...] = (),
        shown: Collection[int] = (),
        min_tokens: int = 0,
        before: Sequence[int] = (),
    ) -> None:
        self.stopped_by: str | None = None
        self._decoder = TokenDecoder(tokenizer, special_tokens(tokenizer).difference(shown), before)
        self._stop = stop
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
        self._decoded += self._decoder.push(token)
        if not self._stop:
            return self._take(len(self._decoded))
        rest = self._decoder.rest().rstrip("\N{REPLACEMENT CHARACTER}")  # of a character that may still come
        if early:
            self._early = len(self._decoded) + len(rest)
        return self._take(self._final_length(rest))

    def finish(self) -> str:
        """Return the rest, held back as the possible beginning of a stop string or of a character."""
        if self.stopped:
            return ""
        rest = self._decoder.rest()
        self._final_length(rest)
        if not self.stopped:
            self._decoded += rest
        return self._take(len(self._decoded))

    def _take(self, until: int) -> str:
        piece = self._decoded[self._taken : until]
        self._taken = max(self._taken, until)
        return piece

    def _final_length(self, rest: str) -> int:
        """Return the length of the text that no later token can change; `rest` is what the decoder holds back."""
        text = self._decoded + rest
        start = max(self._taken, self._early)
        found = [(at, stop) for stop in self._stop if (at := text.find(stop, max(0, start - len(stop) + 1))) >= 0]
        if found:
            at, self.stopped_by = min(found, key=lambda each: each[0])
            self._decoded = text[:at]
            return at
        held = max((_overlap(self._decoded, stop) for stop in self._stop), default=0)
        return max(self._taken, len(self._decoded) - held)


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

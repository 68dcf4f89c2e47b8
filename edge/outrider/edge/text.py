"""Tokens to text as they come, and stop strings, which are settled here because the text is here."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TextStream:
    """Decodes one text token by token; what it gives out is never taken back.

    A stop string is never emitted, also where it spans tokens: text that could be its beginning is held back until
    it turns out not to be.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = ()) -> None:
        self.stopped = False
        self._tokenizer = tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stop = stop
        self._tokens: list[int] = []
        self._decoded = ""
        self._given = 0

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
        self._tokens.append(token)
        self._decoded += self._decoder.step(self._tokenizer, token) or ""
        return self._give(self._settled())

    def finish(self) -> str:
        """Return the rest, held back as the possible beginning of a stop string or of a character."""
        if self.stopped:
            return ""
        whole = str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))
        if whole.startswith(self._decoded):
            self._decoded = whole
        self._settled()
        return self._give(len(self._decoded))

    def _give(self, until: int) -> str:
        piece = self._decoded[self._given : until]
        self._given = max(self._given, until)
        return piece

    def _settled(self) -> int:
        """Length of the text that no later token can change."""
        if self.stopped or not self._stop:
            return len(self._decoded)
        found = [at for at in (self._decoded.find(stop, self._search_from(stop)) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            self._decoded = self._decoded[: min(found)]
            return len(self._decoded)
        held = max(_overlap(self._decoded, stop) for stop in self._stop)
        return max(self._given, len(self._decoded) - held)

    def _search_from(self, stop: str) -> int:
        return max(0, self._given - len(stop) + 1)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)

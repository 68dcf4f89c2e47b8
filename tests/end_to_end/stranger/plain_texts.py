"""Whole texts by a stranger: transformers' forward pass, a plain loop, and rules written apart from the product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import regex
import torch
from plain_rule import Choice, choose
from vocabularies import Vocabulary

from outrider.proto.types import FinishReason, Sampling

ROUNDING = {"float32": 2e-5, "bfloat16": 1e-2}
BROKEN = "\ufffd"  # what stands for bytes that are no character, or not a whole one


@dataclass
class PlainText:
    """A text, and why it is what it is.

    Attributes:
        choices: the choice of each of its tokens.
        text: its text, as far as a stop string.
        stop: stop string that ended it; None: none did.
    """

    choices: list[Choice] = field(default_factory=list)
    reason: FinishReason | None = None
    text: str = ""
    stop: str | None = None

    @property
    def ids(self) -> list[int]:
        """Ids of its tokens."""
        return [choice.token for choice in self.choices]


class PlainModel:
    """A model as transformers runs it, without the product.

    Attributes:
        eos: id of the token that ends a text.
    """

    def __init__(self, folder: Path, vocabulary: Vocabulary, dtype: str, model: Any = None) -> None:
        from transformers import AutoModelForCausalLM

        self.eos = 1
        self.vocabulary = vocabulary
        self._rounding = ROUNDING[dtype]
        self._model = model or AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    @torch.inference_mode()
    def rows(self, tokens: Sequence[int], last: int = 0) -> np.ndarray:
        """Return [tokens, vocab] the logits after each token, or after the `last`, from one pass over all of them."""
        out = self._model(torch.tensor([list(tokens)]), use_cache=False, logits_to_keep=last)
        return out.logits[0].float().numpy()

    def scores(self, prompt: Sequence[int]) -> list[float]:
        """Return the log probabilities of a prompt's tokens after the first."""
        logp = torch.log_softmax(torch.from_numpy(self.rows(prompt)).double(), -1)
        return [float(logp[place, token]) for place, token in enumerate(prompt[1:])]

    def write(self, prompt: Sequence[int], sampling: Sampling, context: int, pattern: str = "") -> PlainText:
        """Return the text of a prompt in a `context` of so many positions, in which `pattern` stands for a grammar.

        Raises:
            NoLaw: the settings leave no number.
        """
        made, said = PlainText(), list(prompt)
        limit = min(sampling.max_tokens, context - len(prompt))
        while made.reason is None:
            allowed = self.allowed(pattern, made.ids) if pattern else None
            row = self.rows(said, 1)[-1]
            made.choices.append(choose(row, sampling, said, len(prompt), {self.eos}, allowed, self._rounding))
            said.append(token := made.choices[-1].token)
            if token == self.eos and not sampling.ignore_eos:
                made.reason = FinishReason.EOS
            elif token in sampling.stop_tokens:
                made.reason = FinishReason.STOP_TOKEN
            elif len(made.choices) >= limit:
                made.reason = FinishReason.LENGTH
        made.text = self.shown(prompt, made.ids)
        return made

    def shortened(self, made: PlainText, prompt: Sequence[int], limit: int) -> PlainText:
        """Return a text as it is where only `limit` tokens have room."""
        if len(made.choices) <= limit:
            return made
        return PlainText(made.choices[:limit], FinishReason.LENGTH, self.shown(prompt, made.ids[:limit]))

    def stopped(self, made: PlainText, prompt: Sequence[int], stop: Sequence[str], min_tokens: int) -> PlainText:
        """Return a text as far as the first stop string that is complete after `min_tokens` tokens."""
        early = len(self.shown(prompt, made.ids[:min_tokens]).rstrip(BROKEN))
        for count in range(min_tokens + 1, len(made.choices) + 1):
            text = self.shown(prompt, made.ids[:count])
            found = [(at, each) for each in stop if (at := text.find(each, max(0, early - len(each) + 1))) >= 0]
            if found:
                at, which = min(found, key=lambda each: each[0])
                return PlainText(made.choices[:count], FinishReason.STOP_STRING, text[:at], which)
        return made

    def shown(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """Return the text of tokens after a prompt; where that ends inside a character, with all of the character."""
        before = self.decode(prompt)
        if not before.endswith(BROKEN):
            return self.decode(ids)
        both = self.decode([*prompt, *ids])
        shared = next((at for at, (a, b) in enumerate(zip(before, both, strict=False)) if a != b), len(before))
        return both[shared:]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of all tokens at once."""
        return self.vocabulary.tokenizer.decode(list(ids))

    def allowed(self, pattern: str, ids: Sequence[int]) -> np.ndarray:
        """Return [vocab] bool, the tokens after which a text can still become a whole match of `pattern`."""
        spelt, known = self.vocabulary.bytes_of, regex.compile(pattern.encode())
        said = b"".join(spelt[token] or b"" for token in ids)
        allowed = np.zeros(len(spelt), bool)
        first = {byte for byte in range(256) if known.fullmatch(said + bytes([byte]), partial=True)}
        for token, spelling in enumerate(spelt):
            if spelling and spelling[0] in first:
                allowed[token] = known.fullmatch(said + spelling, partial=True) is not None
        allowed[self.eos] = known.fullmatch(said) is not None
        return allowed

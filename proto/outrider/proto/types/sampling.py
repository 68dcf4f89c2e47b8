"""Settings that process the target's distribution and limit a text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from outrider.proto.errors import InvalidArgument
from outrider.proto.settings import option
from outrider.proto.types.bounds import BOUNDS
from outrider.proto.types.checks import require, require_text, require_tokens

GROUP = "sampling"
MAX_STOP_TOKENS = 256  # all are compared with every token
MAX_GRAMMAR_BYTES = 1 << 16
# Those that came after protocol 2, which verifiers of older releases would ignore.
LATER_SETTINGS = ("min_tokens", "no_repeat_ngram_size")


class GrammarKind(Enum):
    """Notation of a grammar."""

    JSON_OBJECT = 1
    JSON_SCHEMA = 2
    REGEX = 3
    LARK = 4


@dataclass(frozen=True, slots=True)
class Grammar:
    """A language that the text belongs to: the grammar can complete it after every token, and EOS comes when it does.

    Attributes:
        text: JSON schema, regular expression, or grammar in the Lark dialect of llguidance; empty for `JSON_OBJECT`,
            which is any JSON object. The verifier compiles it and says what is wrong with it.
    """

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        require(isinstance(self.kind, GrammarKind), "sampling.grammar", f"{self.kind!r} is not a kind of grammar")
        require_text(self.text, "sampling.grammar")
        if self.kind is GrammarKind.JSON_OBJECT:
            require(not self.text, "sampling.grammar", "any JSON object has no text; use JSON_SCHEMA for a schema")
        else:
            require(bool(self.text.strip()), "sampling.grammar", f"is empty; a {self.kind.name} needs its text")
        size = len(self.text.encode())
        message = f"has {size} bytes, more than {MAX_GRAMMAR_BYTES}; make it smaller"
        require(size <= MAX_GRAMMAR_BYTES, "sampling.grammar", message)


def _number(name: str, default: float, about: str, metavar: str = "") -> Any:
    """Declare a number of `BOUNDS`."""
    return option(default, about, metavar=metavar, group=GROUP, check=BOUNDS[name].check)


@dataclass(frozen=True, slots=True)
class Sampling:
    """Processing of the target's distribution.

    The order is: grammar, allowed tokens, `min_tokens`, bias, repetition, presence and frequency penalty, n-grams,
    temperature, top-k, top-p, min-p. At temperature 0 the argmax before temperature is taken.

    Attributes:
        min_tokens: tokens of text before which EOS and the stop tokens have no chance, also with `ignore_eos`; where
            nothing else may come, as after a complete grammar, they keep it.
        no_repeat_ngram_size: length of n-grams of prompt and text that may not come twice; where nothing else may come,
            they may.
    """

    temperature: float = _number("temperature", 0.0, "temperature; 0: greedy", "T")
    seed: int = _number("seed", 0, "seed of the noise; the same seed gives the same text")
    top_k: int = _number("top_k", 0, "number of most likely tokens to keep; 0: all", "K")
    top_p: float = _number("top_p", 1.0, "probability mass of the tokens to keep (nucleus); 1: all", "P")
    min_p: float = _number("min_p", 0.0, "minimum probability relative to the most likely token; 0: none", "P")
    repetition_penalty: float = _number("repetition_penalty", 1.0, "penalty of repeated tokens, a factor; 1: none")
    presence_penalty: float = _number("presence_penalty", 0.0, "penalty of tokens in the text; 0: none")
    frequency_penalty: float = _number(
        "frequency_penalty", 0.0, "penalty of tokens per occurrence in the text; 0: none"
    )
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_tokens: tuple[int, ...] = ()
    max_tokens: int = _number("max_tokens", 128, "limit of generated tokens")
    min_tokens: int = _number("min_tokens", 0, "tokens before which neither EOS nor a stop ends the text; 0: none")
    no_repeat_ngram_size: int = _number(
        "no_repeat_ngram_size",
        0,
        "length of runs of tokens that may not come twice, prompt included; 0: any may",
        "N",
    )
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name, bounds in BOUNDS.items():
            if name != "logit_bias" and not bounds.allows(getattr(self, name)):
                kind = "a whole number" if bounds.is_whole else "a number"
                raise InvalidArgument(f"must be {kind} in {bounds}", field=f"sampling.{name}")
        message = f"is {self.min_tokens}, more than max_tokens, {self.max_tokens}; lower it, or allow more tokens"
        require(self.min_tokens <= self.max_tokens, "sampling.min_tokens", message)
        for name in ("logit_bias", "allowed_tokens", "stop_tokens"):
            require(isinstance(getattr(self, name), tuple | list), f"sampling.{name}", "must be a tuple")
        pairs = all(isinstance(entry, tuple | list) and len(entry) == 2 for entry in self.logit_bias)
        require(pairs, "sampling.logit_bias", "must hold pairs of a token id and a number")
        bias_tokens = tuple(token for token, _ in self.logit_bias)
        require_tokens(bias_tokens, "sampling.bias_tokens")
        require_tokens(self.allowed_tokens, "sampling.allowed_tokens")
        require_tokens(self.stop_tokens, "sampling.stop_tokens")
        require(len(self.stop_tokens) <= MAX_STOP_TOKENS, "sampling.stop_tokens", f"holds more than {MAX_STOP_TOKENS}")
        require(len(set(bias_tokens)) == len(bias_tokens), "sampling.bias_tokens", "a token stands twice")
        bias = BOUNDS["logit_bias"]
        require(all(bias.allows(b) for _, b in self.logit_bias), "sampling.bias_values", f"must be in {bias}")
        require(
            len(set(self.allowed_tokens)) == len(self.allowed_tokens), "sampling.allowed_tokens", "a token stands twice"
        )
        require(isinstance(self.ignore_eos, bool), "sampling.ignore_eos", "must be True or False")
        if self.grammar is not None:
            require(isinstance(self.grammar, Grammar), "sampling.grammar", "is no Grammar")
            require(not self.ignore_eos, "sampling.ignore_eos", "cannot go with a grammar, whose texts end with EOS")
            message = "cannot go with a grammar, which decides what is allowed"
            require(not self.allowed_tokens, "sampling.allowed_tokens", message)

    @property
    def constrains(self) -> bool:
        """Whether it rules on single tokens beyond penalties, so that drafters learn nothing from the text."""
        single = self.grammar or self.logit_bias or self.allowed_tokens or self.min_tokens
        return bool(single or self.no_repeat_ngram_size)

    @property
    def penalises(self) -> bool:
        """Whether the processing depends on which tokens came before, as penalties and n-grams do."""
        return self.has_penalties or self.no_repeat_ngram_size > 0

    @property
    def has_penalties(self) -> bool:
        """Whether there is a repetition, presence or frequency penalty."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

"""Settings that process the target's distribution and limit a text."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from typing import Any

from outrider.proto.errors import InvalidArgument
from outrider.proto.settings import option
from outrider.proto.types.checks import MAX_TOKEN_ID, require, require_text, require_tokens

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


@dataclass(frozen=True, slots=True)
class NumberRange:
    """Range of one number.

    Attributes:
        low: least value.
        high: largest value.
        or_zero: whether 0 is allowed below `low`.
        http_high: largest value of the HTTP APIs; None: `high`.
        http_low: least value of the HTTP APIs; None: `low`.
    """

    low: float
    high: float
    or_zero: bool = False
    http_high: float | None = None
    http_low: float | None = None

    @property
    def of_http(self) -> NumberRange:
        """Range of the number in the HTTP APIs."""
        low = self.low if self.http_low is None else self.http_low
        return NumberRange(low, self.high if self.http_high is None else self.http_high, self.or_zero)

    @property
    def is_whole(self) -> bool:
        """Whether the number is a whole one."""
        return isinstance(self.high, int)

    def allows(self, value: float) -> bool:
        """Return whether a value is a number of its kind, and within; NaN never is."""
        if not isinstance(value, Integral if self.is_whole else Real) or isinstance(value, bool):
            return False
        return self.low <= value <= self.high or (self.or_zero and value == 0)

    def check(self, value: float) -> None:
        """Raise `ValueError` that names the range unless a number is within."""
        if not self.allows(value):
            raise ValueError(f"{value} is not in {self}")

    def __str__(self) -> str:
        low, high = (str(end) if self.is_whole else f"{end:g}" for end in (self.low, self.high))
        return f"{low}..{high}{', or 0' if self.or_zero else ''}"


BOUNDS = {"logit_bias": NumberRange(-1e4, 1e4, http_low=-100.0, http_high=100.0)}
"""Range by the name of the setting in `Sampling`; those of `logit_bias` are of each value.

They are wider than an honest client needs, and so narrow that even float32 holds what comes of them: a million times
the largest penalty, or a logit of 1e30 under the largest repetition penalty and a temperature of 0.01. HTTP APIs are
narrower, as OpenAI's and vLLM's are.
"""


ADDED = NumberRange(-100.0, 100.0, http_low=-2.0, http_high=2.0)


def _number(name: str, default: float, about: str, bounds: NumberRange, metavar: str = "") -> Any:
    """Declare a number in `bounds`."""
    BOUNDS[name] = bounds
    return option(default, about, metavar=metavar, group=GROUP, check=bounds.check)


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

    temperature: float = _number(  # some write 1e-8 for greedy
        "temperature", 0.0, "temperature; 0: greedy", NumberRange(1e-12, 1e3, or_zero=True, http_high=2.0), "T"
    )
    seed: int = _number(
        "seed", 0, "seed of the noise; the same seed gives the same text", NumberRange(0, (1 << 64) - 1)
    )
    top_k: int = _number("top_k", 0, "number of most likely tokens to keep; 0: all", NumberRange(0, MAX_TOKEN_ID), "K")
    top_p: float = _number(
        "top_p", 1.0, "probability mass of the tokens to keep (nucleus); 1: all", NumberRange(1e-12, 1.0), "P"
    )
    min_p: float = _number(
        "min_p", 0.0, "minimum probability relative to the most likely token; 0: none", NumberRange(0.0, 1.0), "P"
    )
    repetition_penalty: float = _number(
        "repetition_penalty",
        1.0,
        "penalty of repeated tokens, a factor; 1: none",
        NumberRange(1e-3, 1e3, http_high=2.0),
    )
    presence_penalty: float = _number("presence_penalty", 0.0, "penalty of tokens in the text; 0: none", ADDED)
    frequency_penalty: float = _number(
        "frequency_penalty", 0.0, "penalty of tokens per occurrence in the text; 0: none", ADDED
    )
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_tokens: tuple[int, ...] = ()
    max_tokens: int = _number("max_tokens", 128, "limit of generated tokens", NumberRange(1, MAX_TOKEN_ID))
    min_tokens: int = _number(
        "min_tokens",
        0,
        "tokens before which neither EOS nor a stop ends the text; 0: none",
        NumberRange(0, MAX_TOKEN_ID),
    )
    no_repeat_ngram_size: int = _number(
        "no_repeat_ngram_size",
        0,
        "length of runs of tokens that may not come twice, prompt included; 0: any may",
        NumberRange(0, 64),  # each row compares so many tokens with all before
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

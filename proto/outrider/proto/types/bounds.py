"""NumberRange of the numbers that process a text's distribution: one table for SDK, wire, command line and HTTP.

They are wider than an honest client needs, and so narrow that even float32 holds what comes of them: a million times
the largest penalty, or a logit of 1e30 under the largest repetition penalty and a temperature of 0.01. HTTP APIs are
narrower, as OpenAI's and vLLM's are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real

from outrider.proto.types.checks import MAX_TOKEN_ID


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


BOUNDS: Mapping[str, NumberRange] = {
    "temperature": NumberRange(1e-12, 1e3, or_zero=True, http_high=2.0),  # some write 1e-8 for greedy
    "top_p": NumberRange(1e-12, 1.0),
    "min_p": NumberRange(0.0, 1.0),
    "repetition_penalty": NumberRange(1e-3, 1e3, http_high=2.0),
    "presence_penalty": NumberRange(-100.0, 100.0, http_low=-2.0, http_high=2.0),
    "frequency_penalty": NumberRange(-100.0, 100.0, http_low=-2.0, http_high=2.0),
    "logit_bias": NumberRange(-1e4, 1e4, http_low=-100.0, http_high=100.0),
    "seed": NumberRange(0, (1 << 64) - 1),
    "top_k": NumberRange(0, MAX_TOKEN_ID),
    "max_tokens": NumberRange(1, MAX_TOKEN_ID),
    "min_tokens": NumberRange(0, MAX_TOKEN_ID),
    "no_repeat_ngram_size": NumberRange(0, 64),  # each row compares so many tokens with all before
}
"""NumberRange by the name of the setting in `Sampling`; those of `logit_bias` are of each value."""

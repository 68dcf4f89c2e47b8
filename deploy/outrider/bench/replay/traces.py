"""Hit traces: what a target said, and where a drafter would have said the same."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from outrider.proto.errors import ConfigError
from outrider.proto.types import MAX_TOKEN_ID

LISTS = ("tokens", "hits", "confidence", "silent", "entropy", "certainty", "agreement")  # of an entry a token
OPTIONAL_LISTS = LISTS[3:]  # which may be empty
MEASURES = ("confidence", "entropy", "certainty", "agreement")  # which may be NaN


@dataclass(frozen=True, slots=True)
class HitTrace:
    """One text.

    Attributes:
        id: of the prompt.
        domain: of the prompt, may be empty.
        drafter: its name.
        drafter_version: its version.
        temperature: of the text.
        prompt_tokens: length of the prompt.
        tokens: [n] the text, which is the target's own.
        hits: [n] whether the drafter proposes tokens[i] after prompt + tokens[:i].
        confidence: [n] the drafter's probability of what it proposes there; NaN: it does not say.
        ended: whether the text ended by itself (EOS, its last token), not for its length.
        silent: [n] whether the drafter proposes nothing there; empty: nowhere.
        entropy: [n] of the drafter's processed distribution there, nats; NaN: it does not say; empty: not recorded.
        certainty: [n] softmax of (log q + G) at what it proposes there, G the shared noise; likewise.
        agreement: [n] min(1, p / q) of what it proposes there, p the target's processed probability of it; likewise.
            At temperature 0 both are those at temperature 1, as in the verifier's rewards.
        seed: of the text.
        prompt_log_q: nats a token, that the drafter gave to the prompt's end; NaN: not recorded.

    Raises:
        ConfigError: lists of unequal length, or a text that no run can have given; the field is named.
    """

    id: str
    domain: str
    drafter: str
    drafter_version: str
    temperature: float
    prompt_tokens: int
    tokens: tuple[int, ...]
    hits: tuple[bool, ...]
    confidence: tuple[float, ...]
    ended: bool = False
    silent: tuple[bool, ...] = ()
    entropy: tuple[float, ...] = ()
    certainty: tuple[float, ...] = ()
    agreement: tuple[float, ...] = ()
    seed: int = 0
    prompt_log_q: float = math.nan

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ConfigError("is empty", field="trace.tokens")
        for name in LISTS:
            if len(getattr(self, name)) not in (len(self.tokens), *((0,) if name in OPTIONAL_LISTS else ())):
                raise ConfigError("must hold one entry for each token", field=f"trace.{name}")
        if any(hit and silent for hit, silent in zip(self.hits, self.silent, strict=False)):
            raise ConfigError("is set where the drafter hits", field="trace.silent")
        if self.prompt_tokens < 1:
            raise ConfigError("must be 1 or more", field="trace.prompt_tokens")
        if self.ended and self.tokens[-1] in self.tokens[:-1]:
            raise ConfigError("holds the token that ended it before its end", field="trace.tokens")

    def first(self, tokens: int) -> HitTrace:
        """The beginning of the text."""
        n = min(tokens, len(self.tokens))
        return replace(self, ended=False, **{name: getattr(self, name)[:n] for name in LISTS})

    @property
    def acceptance(self) -> float:
        """The share of positions where the drafter hits."""
        return sum(self.hits) / len(self.hits)

    def silent_at(self, i: int) -> bool:
        """Whether the drafter proposes nothing after prompt + tokens[:i]."""
        return bool(self.silent) and self.silent[i]


def save_traces(traces: Iterable[HitTrace], path: Path) -> None:
    """One JSON object a line; what is not known is null, and a list that was not recorded is left out."""
    path.write_text("".join(_to_line(trace) + "\n" for trace in traces), encoding="utf-8")


def load_traces(path: Path) -> list[HitTrace]:
    """What `save_traces` wrote.

    Raises:
        ConfigError: the file cannot be read, or a line is no trace; line and field are named.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read {path}: {reason}", field="traces") from error
    traces = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            traces.append(_from_line(line))
        except ConfigError as error:
            where = f"line {number} of {path} is no hit trace"
            raise ConfigError(f"{where}: {error.message}", field=error.field) from error
    return traces


def _to_line(trace: HitTrace) -> str:
    values = {name: getattr(trace, name) for name in _FIELDS}
    for name in OPTIONAL_LISTS:
        if not values[name]:
            del values[name]
    if math.isnan(trace.prompt_log_q):
        del values["prompt_log_q"]
    for name in values.keys() & set(MEASURES):
        values[name] = [None if value != value else value for value in values[name]]  # NaN alone is not itself
    return json.dumps(values, separators=(",", ":"), allow_nan=False)


def _from_line(line: str) -> HitTrace:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"it is not JSON: {error}", field="traces") from error
    if not isinstance(values, dict):
        raise ConfigError("it is not a JSON object", field="traces")
    for name in sorted(values.keys() - set(_FIELDS)):
        raise ConfigError("is not a field of a trace", field=f"trace.{name}")
    for name in ("id", "domain", "drafter", "drafter_version", "temperature", "prompt_tokens", "tokens", "hits"):
        if name not in values:
            raise ConfigError("is missing", field=f"trace.{name}")
    values.setdefault("confidence", [None] * len(values["tokens"]) if isinstance(values["tokens"], list) else [])
    return HitTrace(**{name: _checked(name, value) for name, value in values.items()})


def _checked(name: str, value: Any) -> Any:
    """`value` as the field `name` wants it."""
    if name in _ENTRIES:
        what, is_entry = _ENTRIES[name]
        if not isinstance(value, list) or not all(is_entry(entry) for entry in value):
            raise ConfigError(f"must be a list of {what}", field=f"trace.{name}")
        return tuple(math.nan if entry is None else entry for entry in value)
    what, is_value = _VALUES[name]
    if not is_value(value):
        raise ConfigError(f"must be {what}", field=f"trace.{name}")
    return value


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_probability(value: Any) -> bool:
    return value is None or (_is_number(value) and value <= 1)


_FIELDS = tuple(entry.name for entry in fields(HitTrace))
_Check = tuple[str, Callable[[Any], bool]]
_VALUES: dict[str, _Check] = {
    "id": ("a string", _is_text),
    "domain": ("a string", _is_text),
    "drafter": ("a string", _is_text),
    "drafter_version": ("a string", _is_text),
    "temperature": ("a number, 0 or more", _is_number),
    "prompt_tokens": ("a whole number", _is_count),
    "ended": ("true or false", _is_bool),
    "seed": ("a whole number", _is_count),
    "prompt_log_q": ("a number, 0 or less", lambda value: isinstance(value, int | float) and value <= 0),
}
_ENTRIES: dict[str, _Check] = {
    "tokens": ("token ids", lambda value: _is_count(value) and 0 <= value < MAX_TOKEN_ID),
    "hits": ("true or false", _is_bool),
    "confidence": ("probabilities or null", _is_probability),
    "silent": ("true or false", _is_bool),
    "entropy": ("nats or null", lambda value: value is None or _is_number(value)),
    "certainty": ("probabilities or null", _is_probability),
    "agreement": ("probabilities or null", _is_probability),
}

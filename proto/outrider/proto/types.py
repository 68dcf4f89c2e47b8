"""Frozen domain types, checked when made; `codec` alone knows their protobuf twins.

`v1/decoding.proto` says what each field of a message means, with its unit and shape, and is not repeated here; None
stands for a field that is unset. Positions are absolute (prompt + text, from 0). Token ids are Python ints in tuples.
Seconds are floats.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from numbers import Integral, Real
from typing import Any, NamedTuple, Self

from outrider.proto.errors import InvalidArgument
from outrider.proto.settings import option

PROTOCOL_VERSION = 2
MAX_ISOLATION_BYTES = 16
MAX_TOKEN_ID = (1 << 31) - 1
MAX_CHAIN = (1 << 31) - 1  # the verifier numbers a chain of its own after it, where a branch is taken
MAX_STOP_TOKENS = 256  # all are compared with every token
MAX_GRAMMAR_BYTES = 1 << 16
MAX_TOP_LOGPROBS = 20
PROMPT_CLASSES = 16  # 0 included: unknown
LINK_CLASSES = 6  # 0 included: unknown
MAX_REPORTED_DRAFTERS = 16  # in a report or a prior
MAX_PREFIXES = 24  # of a text
PROJECTION = re.compile(r"[0-9a-f]{12}")
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
SHA256 = re.compile(r"[0-9a-f]{64}")


# --- checks ---


def require(holds: bool, field: str, message: str) -> None:
    """Raise `InvalidArgument` with `message` about `field` unless the condition `holds`."""
    if not holds:
        raise InvalidArgument(message, field=field)


def _require_chain(chain: int, field: str) -> None:
    """Refuse chain numbers that no edge reaches."""
    require(0 <= chain <= MAX_CHAIN, field, f"is {chain}; chains are numbered 0 to {MAX_CHAIN}")


def require_text(text: Any, field: str) -> None:
    """Refuse what is no string, and a string that UTF-8 cannot hold."""
    require(isinstance(text, str), field, f"is {type(text).__name__}, not str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"holds half a surrogate pair at character {error.start}; give both halves, or leave it out"
        raise InvalidArgument(message, field=field) from error


def require_tokens(tokens: tuple[int, ...], field: str) -> None:
    """Refuse what is no token id of any vocabulary."""
    if not all(issubclass(kind, Integral) and not issubclass(kind, bool) for kind in set(map(type, tokens)) - {int}):
        raise InvalidArgument("holds something other than token ids, which are whole numbers", field=field)
    if tokens and not (min(tokens) >= 0 and max(tokens) <= MAX_TOKEN_ID):
        raise InvalidArgument(f"holds a token id that is not in 0..{MAX_TOKEN_ID}", field=field)


# --- settings of a text ---

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
    """A language that the text belongs to: the grammar can complete it after every token; EOS comes when it does."""

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


_PENALTY = NumberRange(-100.0, 100.0, http_low=-2.0, http_high=2.0)


def _number(name: str, default: float, about: str, bounds: NumberRange, metavar: str = "") -> Any:
    BOUNDS[name] = bounds
    return option(default, about, metavar=metavar, group="sampling", check=bounds.check)


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
    presence_penalty: float = _number("presence_penalty", 0.0, "penalty of tokens in the text; 0: none", _PENALTY)
    frequency_penalty: float = _number(
        "frequency_penalty", 0.0, "penalty of tokens per occurrence in the text; 0: none", _PENALTY
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
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


# --- service ---

_FIGURES = {"gap_ms": NumberRange(1.0, 600_000.0), "first_token_ms": NumberRange(1.0, 600_000.0)}
_FORMS = """must be "interactive", "batch" or figures such as {"gap_ms": 75, "first_token_ms": 500}"""


class ServiceClass(IntEnum):
    """Class of a text by the worth of its service, the least first; one whose user asks for nothing is interactive."""

    BATCH = 0
    INTERACTIVE = 1
    FIGURES = 2


@dataclass(frozen=True, slots=True)
class ServiceGoal:
    """Service that a text asks for; it decides when the text's tokens come, and never which.

    Attributes:
        batch: whether nobody waits for the text.
        gap_s: longest time from one commit to the next, in seconds; 0: not asked for.
        first_token_s: longest time to the first token, in seconds; 0: not asked for.
    """

    batch: bool = False
    gap_s: float = 0.0
    first_token_s: float = 0.0

    def __post_init__(self) -> None:
        for name, bounds in _FIGURES.items():
            value = 1e3 * getattr(self, name.replace("_ms", "_s"))
            within = value == 0 or bounds.allows(value)
            require(within, "service", f"has {name} = {value:g}; give milliseconds in {bounds}, or leave it out")
        figures = bool(self.gap_s or self.first_token_s)
        require(not (self.batch and figures), "service", "is batch and has figures; leave one of them out")

    @classmethod
    def parse(cls, value: Any) -> Self:
        """Return the goal that a request, an option or a file names: a word, figures, or their JSON as text.

        Raises:
            InvalidArgument: it is none of these, or a figure is out of range; the message names it.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str) and value.lstrip().startswith("{"):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError) as error:
                raise InvalidArgument(f"{_FORMS}; this is no JSON", field="service") from error
        if value in ("interactive", "batch"):
            return cls(batch=value == "batch")
        require(isinstance(value, Mapping) and bool(value), "service", _FORMS)
        for name, number in value.items():
            require(name in _FIGURES, "service", f"has {str(name)[:40]!r}; its figures are {', '.join(_FIGURES)}")
            message = f"has {name} = {str(number)[:40]}; give milliseconds in {_FIGURES[name]}, or leave it out"
            require(_FIGURES[name].allows(number), "service", message)
        return cls(gap_s=value.get("gap_ms", 0) / 1e3, first_token_s=value.get("first_token_ms", 0) / 1e3)

    def __str__(self) -> str:
        """Return the text that `parse` takes."""
        if not self.has_figures:
            return "batch" if self.batch else "interactive"
        figures = {name: 1e3 * getattr(self, name.replace("_ms", "_s")) for name in _FIGURES}
        return "{" + ", ".join(f'"{name}": {number:.9g}' for name, number in figures.items() if number) + "}"

    @property
    def has_figures(self) -> bool:
        return bool(self.gap_s or self.first_token_s)


def class_of(service: ServiceGoal | None) -> ServiceClass:
    """Return the class of a text that asks for this service; None: for nothing."""
    if service is None or not (service.batch or service.has_figures):
        return ServiceClass.INTERACTIVE
    return ServiceClass.BATCH if service.batch else ServiceClass.FIGURES


# --- tokens ---


TopLogprobs = tuple[tuple[int, float], ...]  # the likeliest tokens of one position with log p, likeliest first


class TokenFacts(NamedTuple):
    """The model's word on a token of prompt or text, given those before it.

    Attributes:
        logprob: natural log of its probability: what OpenAI's API and vLLM call logprob.
        rank: 1 and the number of likelier tokens; 0: a verifier of an older release did not say.
        top: likeliest tokens of the position as (id, natural log of p), likeliest first and the lower id first among
            equals; empty: not requested.
        entropy: entropy of the position's distribution, in nats; None: a verifier of an older release did not say.
    """

    logprob: float
    rank: int
    top: TopLogprobs = ()
    entropy: float | None = None


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The model's word on the prompt's tokens from position `start` on; nothing comes before its first token."""

    start: int
    tokens: tuple[TokenFacts, ...]
    epoch: int = 0

    def __post_init__(self) -> None:
        require(self.start >= 1, "prompt_logprobs.start", "must be 1 or more")
        require(bool(self.tokens), "prompt_logprobs.logprobs", "is empty")


# --- steering vectors ---


class SteeringPrecision(Enum):
    """Number format of a steering vector on the wire."""

    FLOAT16 = 1
    INT8 = 2

    @property
    def number_bytes(self) -> int:
        return 2 if self is SteeringPrecision.FLOAT16 else 1


@dataclass(frozen=True, slots=True)
class SteeringRequest:
    """Which steering vectors an edge wants in commits."""

    projection: str
    precision: SteeringPrecision = SteeringPrecision.INT8
    every: int = 1

    def __post_init__(self) -> None:
        require(bool(PROJECTION.fullmatch(self.projection)), "steering.projection", "must be 12 hexadecimal digits")
        require(isinstance(self.precision, SteeringPrecision), "steering.precision", "is no SteeringPrecision")
        require(0 <= self.every < 1 << 32, "steering.every", "must be in 0..2^32-1; 0 means none for now")


@dataclass(frozen=True, slots=True)
class Steering:
    """A steering vector [rank] = scale * values of the target's hidden state.

    `outrider.proto.steering_vector` decodes it.

    A commit carries that of position `start + len(tokens) - 2`, the newest committed one that the verifier has
    processed.
    """

    scale: float
    values: bytes = field(repr=False)
    precision: SteeringPrecision

    def __post_init__(self) -> None:
        require(isinstance(self.precision, SteeringPrecision), "steering.precision", "is no SteeringPrecision")
        require(math.isfinite(self.scale) and self.scale > 0, "steering.scale", "must be a finite number above 0")
        size = self.precision.number_bytes
        require(len(self.values) % size == 0, "steering.values", f"must be {size} bytes a number")


# --- branches ---


class Branch(NamedTuple):
    """A likely miss of a chain at position `start`: the token in place of the draft, and drafts that follow it.

    Attributes:
        tokens: [1 + m] that token, and the drafts.
        chance: chance that the target's token is the first, given that the chain agrees before it; it travels in
            255ths. NaN: unknown.
    """

    start: int
    tokens: tuple[int, ...]
    chance: float = math.nan


@dataclass(frozen=True, slots=True)
class Branches:
    """Branches of chain number `chain`; one whose token is the target's becomes the next chain at once."""

    chain: int
    branches: tuple[Branch, ...]

    def __post_init__(self) -> None:
        _require_chain(self.chain, "branches.chain")
        require(bool(self.branches), "branches.starts", "is empty")
        _require_branches(self.branches, "branches.")


def _require_branches(branches: tuple[Branch, ...], prefix: str) -> None:
    """Refuse branches that mean nothing; errors name the field after `prefix`."""
    for branch in branches:
        require(branch.start >= 0, f"{prefix}starts", "must be 0 or more")
        require(bool(branch.tokens), f"{prefix}lengths", "must be 1 or more")
        require_tokens(branch.tokens, f"{prefix}tokens")
        require(math.isnan(branch.chance) or 0 <= branch.chance <= 1, f"{prefix}chances", "must be probabilities")


# --- frames of a decoding stream ---


class FinishReason(Enum):
    """Why a text ended; `STOP_STRING` is decided at the edge, which alone has the text."""

    EOS = 1
    STOP_TOKEN = 2
    LENGTH = 3
    CANCELLED = 4
    STOP_STRING = 5


class Goal(Enum):
    """Goal of a deployment: low latency, or few target steps at a bounded cost in time."""

    LATENCY = 1
    EFFICIENCY = 2


class Guarantee(Enum):
    """Promise for a text whatever shares its steps: its distribution, or also its bytes."""

    DISTRIBUTION = 0
    BYTES = 1
    BYTES_BY_TILES = 2


class Provenance(Enum):
    """Origin of a committed token, which is the target's token either way."""

    DRAFT = "draft"
    TARGET = "target"


@dataclass(frozen=True, slots=True)
class Patience:
    """Time that the verifier waits for drafts before a step."""

    seconds: float
    drafts: int = 1

    def __post_init__(self) -> None:
        require(self.seconds >= 0, "patience.seconds", "must be 0 or more")
        require(self.drafts >= 1, "patience.drafts", "must be 1 or more")


@dataclass(frozen=True, slots=True)
class Learning:
    """Permission to keep a prompt and its text in memory for a day, and to train drafters with them."""

    prompt_class: int = 0

    def __post_init__(self) -> None:
        known = 0 <= self.prompt_class < PROMPT_CLASSES
        require(known, "learning.prompt_class", f"must be below {PROMPT_CLASSES}; 0 means unknown")


@dataclass(frozen=True, slots=True)
class QuietWire:
    """Sizes of the cells that a stream has in place of frames, in bytes."""

    up_bytes: int
    down_bytes: int

    def __post_init__(self) -> None:
        for name in ("up_bytes", "down_bytes"):
            require(32 <= getattr(self, name) <= 4096, f"open.quiet.{name}", "must be in 32..4096")


@dataclass(frozen=True, slots=True)
class Open:
    """Everything that decides a text, so that any verifier can begin it or take it over."""

    model: str
    tokenizer_sha256: str
    prompt: tuple[int, ...]
    sampling: Sampling
    session: str
    committed: tuple[int, ...] = ()
    lease: bytes = field(default=b"", repr=False)
    patience: Patience | None = None
    drafting: bool = True
    window: int = 0
    max_drafts: int = 0
    logp: bool = True
    protocol_version: int = PROTOCOL_VERSION
    logprobs: bool = False
    top_logprobs: int = 0
    keep_s: float = 0.0
    steering: SteeringRequest | None = None
    drafts_here: int | None = None
    learning: Learning | None = None
    epoch: int = 0
    prompt_logprobs: int | None = None
    prompt_logprobs_from: int = 0
    trees: bool = False
    isolation: bytes = field(default=b"", repr=False)
    context_length: int = 0
    service: ServiceGoal | None = None
    quiet: QuietWire | None = None

    def __post_init__(self) -> None:
        most = f"has more than {MAX_ISOLATION_BYTES} bytes; send a hash"
        require(len(self.isolation) <= MAX_ISOLATION_BYTES, "open.isolation", most)
        require(self.drafts_here is None or self.drafts_here >= 0, "open.drafts_here", "must be 0 or more")
        require(0 <= self.top_logprobs <= MAX_TOP_LOGPROBS, "open.top_logprobs", f"must be in 0..{MAX_TOP_LOGPROBS}")
        require(self.logprobs or not self.top_logprobs, "open.top_logprobs", "needs logprobs; set both")
        most = f"must be in 0..{MAX_TOP_LOGPROBS}"
        require(0 <= (self.prompt_logprobs or 0) <= MAX_TOP_LOGPROBS, "open.prompt_logprobs", most)
        within = 0 <= self.prompt_logprobs_from < max(1, len(self.prompt))
        require(within, "open.prompt_logprobs_from", "lies beyond the prompt")
        require(bool(NAME.fullmatch(self.session)), "open.session", "must be 1 to 64 of A-Z a-z 0-9 - _")
        require(bool(self.model), "open.model", "is empty; name the target")
        require(bool(SHA256.fullmatch(self.tokenizer_sha256)), "open.tokenizer_sha256", "must be 64 hexadecimal digits")
        require(len(self.prompt) > 0, "open.prompt", "is empty; give at least one token, such as BOS")
        require(self.keep_s >= 0, "open.keep_s", "must be 0 seconds or more")
        require(not (self.quiet and self.keep_s), "open.keep_s", "must be 0 in a quiet stream, which has one turn")
        require_tokens(self.prompt, "open.prompt")
        require_tokens(self.committed, "open.committed")
        require(
            len(self.committed) < self.sampling.max_tokens or not self.committed,
            "open.committed",
            "already holds sampling.max_tokens tokens; there is nothing left to generate",
        )


@dataclass(frozen=True, slots=True)
class Continue:
    """Another turn on a kept session, whose text follows a new prompt."""

    start: int
    prompt: tuple[int, ...]
    sampling: Sampling | None = None
    chain: int = 0

    def __post_init__(self) -> None:
        require(self.start >= 0, "continuation.start", "must be 0 or more")
        _require_chain(self.chain, "continuation.chain")
        require_tokens(self.prompt, "continuation.prompt")


class DraftToken(NamedTuple):
    """A proposed token, and what the drafter's distribution says about it; NaN: unknown.

    Attributes:
        id: token id; -1 where nothing may be proposed.
        confidence: the drafter's probability of the token.
        perturbed_probability: softmax of log probability plus shared noise at the token, over the candidates: how
            surely it wins under the noise that the target will use too; the confidence at temperature 0.
        runners_up: [r] the tokens that would have been proposed next, best first; they never travel.
        other: whether its author is not the edge's active drafter but an idle one, or the verifier's own; at one end.
    """

    id: int
    confidence: float = math.nan
    perturbed_probability: float = math.nan
    runners_up: tuple[int, ...] = ()
    other: bool = False

    @property
    def score(self) -> float:
        """Signal that calibration turns into a chance of agreement: perturbed probability; if unknown, confidence."""
        perturbed = self.perturbed_probability
        return perturbed if perturbed == perturbed else self.confidence


class CommittedToken(NamedTuple):
    """A token of the text, and what the target's distributions say about it.

    Attributes:
        logp: natural log of the processed probability that it was drawn with; None: not requested.
        facts: the model's own word on it; None: not requested.
    """

    id: int
    logp: float | None = None
    facts: TokenFacts | None = None

    @property
    def logprob(self) -> float | None:
        """Natural log of the model's own probability; None: not requested."""
        return None if self.facts is None else self.facts.logprob

    @property
    def top(self) -> TopLogprobs:
        """Likeliest tokens of the position; empty: not requested."""
        return () if self.facts is None else self.facts.top


def token_ids(tokens: Iterable[DraftToken | CommittedToken]) -> tuple[int, ...]:
    """Return the ids of `tokens` [n]."""
    return tuple([token.id for token in tokens])


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Return how many items two sequences have in common, from their beginnings on."""
    return sum(itertools.takewhile(bool, map(operator.eq, first, second)))


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed from `start` on, as part of `chain`; their ids travel, and all confidences or none."""

    chain: int
    start: int
    tokens: tuple[DraftToken, ...]
    drafter: str = ""
    drafter_version: str = ""
    complete: bool = False
    branches: tuple[Branch, ...] = ()

    def __post_init__(self) -> None:
        _require_chain(self.chain, "draft.chain")
        require(self.start >= 0, "draft.start", "must be 0 or more")
        require(bool(self.tokens) or self.complete, "draft.tokens", "is empty and the chain is not complete")
        if self.tokens:
            ids, confidences, *_ = zip(*self.tokens, strict=True)  # every token is in here: one pass
            require_tokens(ids, "draft.tokens")
            known = [confidence for confidence in confidences if not math.isnan(confidence)]
            require(len(known) in (0, len(ids)), "draft.q", "must hold one number for each token, or none")
            require(not known or 0 <= min(known) <= max(known) <= 1, "draft.q", "must be probabilities")
        _require_branches(self.branches, "draft.branches.")


class BlockBranch(NamedTuple):
    """Drafts [m] that a step verifies beside its block: they follow the block's first `index` drafts."""

    index: int  # type: ignore[assignment]  # a tuple has a method of this name, which nobody calls
    drafts: tuple[DraftToken, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Measurements of the edge that the verifier's patience rests on."""

    drafting: bool
    drafting_s: float = 0.0
    round_trip_s: float = 0.0
    acceptance: float = 0.0
    steering: SteeringRequest | None = None

    def __post_init__(self) -> None:
        require(0 <= self.acceptance <= 1, "report.acceptance", "must be a probability")
        for name in ("drafting_s", "round_trip_s"):
            value = getattr(self, name)
            require(math.isfinite(value) and value >= 0, f"report.{name}", "must be a finite number, 0 or more")


@dataclass(frozen=True, slots=True)
class Cancel:
    """The edge's end of a text."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Ping:
    """A question that the verifier answers at once, whatever its engine does."""

    number: int = 0


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to a Ping of the same number."""

    number: int = 0
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class Opened:
    """The verifier's terms for a session that it has taken."""

    committed: int
    credit: int
    max_tokens: int
    verifier: str
    context_length: int
    guarantee: Guarantee = Guarantee.DISTRIBUTION
    vocab_size: int = MAX_TOKEN_ID + 1
    goal: Goal = Goal.LATENCY
    max_drafts: int = 16
    planned: bool = True
    keep_s: float = 0.0
    release: str = ""
    steered: bool = False
    drafter_here: str = ""
    branches: bool = False
    precision: str = ""
    epoch: int = 0
    settings: tuple[str, ...] = ()
    eos_tokens: tuple[int, ...] = ()
    trees: bool = False


@dataclass(frozen=True, slots=True)
class Timing:
    """Parts of the time that one commit took."""

    echo: int = 0
    hold_s: float = 0.0
    queue_s: float = 0.0
    verify_s: float = 0.0
    drafting_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens that are now part of the text, for ever."""

    start: int
    tokens: tuple[CommittedToken, ...]
    accepted: int
    credit: int
    reward: float | None = None
    steering: Steering | None = None
    timing: Timing = field(default_factory=Timing)
    finish: FinishReason | None = None
    chain: int = 0
    verified: int = 0
    turn: int = 0
    cached_tokens: int = 0
    verified_here: int = 0
    covered: int = 0
    epoch: int = 0
    verified_beside: int = 0

    @property
    def accepted_here(self) -> int:
        return max(0, self.accepted - self.verified + self.verified_here)

    def __post_init__(self) -> None:
        require(self.verified_here <= self.verified, "commit.verified_here", "exceeds the verified drafts")
        require(bool(self.tokens) or self.finish is not None, "commit.tokens", "is empty and the text goes on")
        require(0 <= self.cached_tokens <= self.start, "commit.cached_tokens", "exceeds the tokens before the commit")
        require(0 <= self.accepted <= len(self.tokens), "commit.accepted", "exceeds the tokens")
        if self.tokens:
            _, logp, facts = zip(*self.tokens, strict=True)
            message = "must be there for each token, or for none"
            require(logp.count(None) in (0, len(logp)), "commit.logp", message)
            require(facts.count(None) in (0, len(facts)), "commit.logprobs", message)
            require(len({len(token.top) for token in self.tokens}) == 1, "commit.top_logprobs", message)


@dataclass(frozen=True, slots=True)
class Goaway:
    """The verifier's end of a stream, whose text goes on elsewhere."""

    reason: str
    retry_after_s: float = 0.0
    epoch: int = 0


EdgeFrame = Open | Continue | Draft | Branches | Report | Ping | Cancel
CloudFrame = Opened | PromptLogprobs | Commit | Goaway | Pong


# --- leases and reports ---


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file that the coordinator serves, known by the hash of its content."""

    name: str
    sha256: str
    bytes: int

    def __post_init__(self) -> None:
        plain = bool(self.name) and "/" not in self.name and "\\" not in self.name and not self.name.startswith(".")
        require(plain, "file.name", f"{self.name!r} is not a plain file name")
        require(bool(SHA256.fullmatch(self.sha256)), "file.sha256", "must be 64 hexadecimal digits")


@dataclass(frozen=True, slots=True)
class DrafterManifest:
    """A drafter package: its identity and its files, `manifest.json` among them."""

    name: str
    version: str
    tokenizer_sha256: str
    target: str
    files: tuple[RemoteFile, ...]
    share: float = 0.0

    def __post_init__(self) -> None:
        require(bool(NAME.fullmatch(self.name)), "drafter.name", "must be 1 to 64 of A-Z a-z 0-9 - _")
        require(bool(NAME.fullmatch(self.version)), "drafter.version", "must be 1 to 64 of A-Z a-z 0-9 - _")
        require(0 <= self.share <= 1, "drafter.share", "must be between 0 and 1")


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """An edge's question where to decode."""

    model: str
    session: str
    tokenizer_sha256: str = ""
    avoid: tuple[str, ...] = ()
    protocol_version: int = PROTOCOL_VERSION
    inquiry: bool = False
    prompt_class: int = 0
    link_class: int = 0
    prefixes: tuple[int, ...] = ()
    precision: str = ""
    epoch: int = 0
    suspected: bool = False
    context_length: int = 0
    service: ServiceGoal | None = None

    def __post_init__(self) -> None:
        _require_classes(self.prompt_class, self.link_class, "lease_request")
        require(len(self.prefixes) <= MAX_PREFIXES, "lease_request.prefixes", f"holds more than {MAX_PREFIXES}")


def _require_classes(prompt_class: int, link_class: int, message: str) -> None:
    for name, value, count in (
        ("prompt_class", prompt_class, PROMPT_CLASSES),
        ("link_class", link_class, LINK_CLASSES),
    ):
        require(0 <= value < count, f"{message}.{name}", f"must be below {count}; 0 means unknown")


@dataclass(frozen=True, slots=True)
class DrafterPrior:
    """Hits of a drafter over the texts of many edges."""

    drafter: str
    drafter_version: str
    acceptance: float
    trials: float

    def __post_init__(self) -> None:
        require(0 <= self.acceptance <= 1, "prior.acceptance", "must be between 0 and 1")
        require(0 <= self.trials < math.inf, "prior.trials", "must be a finite number, 0 or more")


@dataclass(frozen=True, slots=True)
class DraftingPrior:
    """Knowledge of the fleet before a session's first commit."""

    drafters: tuple[DrafterPrior, ...] = ()

    def __post_init__(self) -> None:
        require(
            len(self.drafters) <= MAX_REPORTED_DRAFTERS, "prior.drafters", f"holds more than {MAX_REPORTED_DRAFTERS}"
        )


@dataclass(frozen=True, slots=True)
class Lease:
    """Permission to decode on one verifier for a while."""

    token: bytes = field(repr=False)
    verifier: str
    address: str
    expires_in_s: float
    model: str
    tokenizer_sha256: str
    tokenizer: RemoteFile | None = None
    drafters: tuple[DrafterManifest, ...] = ()
    prior: DraftingPrior = field(default_factory=DraftingPrior)
    chat_template: RemoteFile | None = None
    tls: bool = False
    tls_name: str = ""
    relayed: bool = False
    release: str = ""
    context_length: int = 0
    ask_again_s: float = 0.0
    service: ServiceGoal | None = None
    service_unkept: bool = False


@dataclass(frozen=True, slots=True)
class DrafterHits:
    """Proposals of one drafter in one text, counterfactual ones included."""

    drafter: str
    drafter_version: str
    hits: int
    compared: int
    draft_s: float = 0.0

    def __post_init__(self) -> None:
        require(0 <= self.hits <= self.compared, "report.drafter_hits", "must not have more hits than compared")
        require(0 <= self.draft_s < math.inf, "report.drafter_hits", "must have finite times, 0 or more")


@dataclass(frozen=True, slots=True)
class SessionReport:
    """Counts and times of a finished session; no prompt and no text.

    `drafter_hits` and the two classes go into the fleet's sums, and a coordinator keeps them nowhere else.
    """

    session: str
    model: str
    verifier: str
    drafter: str = ""
    drafter_version: str = ""
    committed_tokens: int = 0
    accepted_tokens: int = 0
    drafted_tokens: int = 0
    verified_tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    resumes: int = 0
    round_trip_s: float = 0.0
    edge: str = ""
    drafter_hits: tuple[DrafterHits, ...] = ()
    prompt_class: int = 0
    link_class: int = 0

    def __post_init__(self) -> None:
        few = len(self.drafter_hits) <= MAX_REPORTED_DRAFTERS
        require(few, "report.drafter_hits", f"holds more than {MAX_REPORTED_DRAFTERS}")
        _require_classes(self.prompt_class, self.link_class, "report")

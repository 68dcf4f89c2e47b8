"""Frozen domain types: what the messages mean, checked when made. Only `codec` knows their protobuf twins.

Positions are absolute (prompt + text, from 0). Token ids are Python ints in tuples. Seconds are floats.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import Enum

from outrider.proto.errors import InvalidArgument

PROTOCOL_VERSION = 2
MAX_TOKEN_ID = (1 << 31) - 1
DRAFTER_FORMAT = "outrider-drafter/2"  # of the packages that are exported, served and loaded
MOST_STOP_TOKENS = 256  # they are looked through at every token
MOST_TOP_LOGPROBS = 20
MOST_GRAMMAR_BYTES = 1 << 16
PROMPT_CLASSES, LINK_CLASSES = 16, 6  # each with 0 among them: not said
MOST_DRAFTERS_TOLD = 16  # in a report or a prior
_SESSION = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PROJECTION = re.compile(r"[0-9a-f]{12}")


class FinishReason(Enum):
    """Why a text ended. `STOP_STRING` is settled at the edge, where the text is."""

    EOS = 1
    STOP_TOKEN = 2
    LENGTH = 3
    CANCELLED = 4
    STOP_STRING = 5


class Goal(Enum):
    """What a deployment wants of speculation: tokens soonest, or the fewest target steps at a bounded cost in time."""

    LATENCY = 1
    EFFICIENCY = 2


class Provenance(Enum):
    """Where a committed token was first thought of. Either way it is the target's token."""

    DRAFT = "draft"
    TARGET = "target"


class GrammarKind(Enum):
    """How a grammar is written."""

    JSON_OBJECT = 1
    JSON_SCHEMA = 2
    REGEX = 3
    LARK = 4


def _require(holds: bool, field_name: str, message: str) -> None:
    if not holds:
        raise InvalidArgument(message, field=field_name)


def _check_tokens(tokens: tuple[int, ...], field_name: str) -> None:
    if tokens and not (min(tokens) >= 0 and max(tokens) <= MAX_TOKEN_ID):
        raise InvalidArgument(f"holds a token id that is not in 0..{MAX_TOKEN_ID}", field=field_name)


@dataclass(frozen=True, slots=True)
class Grammar:
    """What texts may be: every token keeps the text one that the grammar can complete, and EOS comes when it is.

    The text is a JSON schema, a regular expression, or a grammar in the Lark dialect of llguidance; empty for
    `JSON_OBJECT`, which is any JSON object. The verifier compiles it and says what is wrong with it.
    """

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        _require(isinstance(self.kind, GrammarKind), "sampling.grammar", f"{self.kind!r} is not a kind of grammar")
        if self.kind is GrammarKind.JSON_OBJECT:
            _require(not self.text, "sampling.grammar", "any JSON object has no text; use JSON_SCHEMA for a schema")
        else:
            _require(bool(self.text.strip()), "sampling.grammar", f"is empty; a {self.kind.name} needs its text")
        size = len(self.text.encode(errors="replace"))
        message = f"has {size} bytes, more than {MOST_GRAMMAR_BYTES}; make it smaller"
        _require(size <= MOST_GRAMMAR_BYTES, "sampling.grammar", message)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target's distribution is processed.

    In this order: grammar, allowed tokens, bias, repetition, presence and frequency penalty, temperature, top-k,
    top-p, min-p. At temperature 0 the argmax before temperature is taken.
    """

    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_tokens: tuple[int, ...] = ()
    max_tokens: int = 128
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            _require(math.isfinite(getattr(self, name)), f"sampling.{name}", "must be a finite number")
        _require(self.temperature >= 0, "sampling.temperature", f"{self.temperature} is below 0; 0 means greedy")
        _require(0 <= self.seed < 1 << 64, "sampling.seed", "must be in 0..2^64-1")
        _require(self.top_k >= 0, "sampling.top_k", "must be 0 (off) or more")
        _require(0 < self.top_p <= 1, "sampling.top_p", f"{self.top_p} is not in (0, 1]; 1 means off")
        _require(0 <= self.min_p <= 1, "sampling.min_p", f"{self.min_p} is not in [0, 1]; 0 means off")
        _require(self.repetition_penalty > 0, "sampling.repetition_penalty", "must be above 0; 1 means off")
        _require(self.max_tokens >= 1, "sampling.max_tokens", "must be 1 or more")
        bias_tokens = tuple(token for token, _ in self.logit_bias)
        _require(
            len(self.stop_tokens) <= MOST_STOP_TOKENS, "sampling.stop_tokens", f"holds more than {MOST_STOP_TOKENS}"
        )
        _require(len(set(bias_tokens)) == len(bias_tokens), "sampling.bias_tokens", "a token stands twice")
        _require(all(math.isfinite(b) for _, b in self.logit_bias), "sampling.bias_values", "must be finite numbers")
        _require(
            len(set(self.allowed_tokens)) == len(self.allowed_tokens), "sampling.allowed_tokens", "a token stands twice"
        )
        _check_tokens(bias_tokens, "sampling.bias_tokens")
        _check_tokens(self.allowed_tokens, "sampling.allowed_tokens")
        _check_tokens(self.stop_tokens, "sampling.stop_tokens")
        if self.grammar is not None:
            _require(not self.ignore_eos, "sampling.ignore_eos", "cannot go with a grammar, whose texts end with EOS")
            message = "cannot go with a grammar, which says by itself what is allowed"
            _require(not self.allowed_tokens, "sampling.allowed_tokens", message)

    @property
    def penalises(self) -> bool:
        """Whether the distribution depends on which tokens came before, beyond the target's own view of them."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class Patience:
    """How long (seconds from the last commit, may be infinite) and for how many drafts the verifier waits."""

    seconds: float
    drafts: int = 1

    def __post_init__(self) -> None:
        _require(self.seconds >= 0, "patience.seconds", "must be 0 or more")
        _require(self.drafts >= 1, "patience.drafts", "must be 1 or more")


class SteeringPrecision(Enum):
    """How the numbers of a steering code travel."""

    FLOAT16 = 1
    INT8 = 2

    @property
    def number_bytes(self) -> int:
        """Bytes a number."""
        return 2 if self is SteeringPrecision.FLOAT16 else 1


@dataclass(frozen=True, slots=True)
class SteeringWish:
    """Which steering codes an edge wants in commits.

    Attributes:
        projection: 12 hexadecimal digits: what the drafter's manifest names, and the code is made by.
        precision: of its numbers.
        every: with every so many commits; 0: none for now.
    """

    projection: str
    precision: SteeringPrecision = SteeringPrecision.INT8
    every: int = 1

    def __post_init__(self) -> None:
        _require(bool(_PROJECTION.fullmatch(self.projection)), "steering.projection", "must be 12 hexadecimal digits")
        _require(isinstance(self.precision, SteeringPrecision), "steering.precision", "is no SteeringPrecision")
        _require(0 <= self.every < 1 << 32, "steering.every", "must be in 0..2^32-1; 0 means none for now")


@dataclass(frozen=True, slots=True)
class Open:
    """Everything that decides a text, so that any verifier can begin it or take it over; `steering` decides nothing."""

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
    steering: SteeringWish | None = None

    def __post_init__(self) -> None:
        _require(0 <= self.top_logprobs <= MOST_TOP_LOGPROBS, "open.top_logprobs", f"must be in 0..{MOST_TOP_LOGPROBS}")
        _require(self.logprobs or not self.top_logprobs, "open.top_logprobs", "needs logprobs; set both")
        _require(bool(_SESSION.fullmatch(self.session)), "open.session", "must be 1 to 64 of A-Z a-z 0-9 - _")
        _require(bool(self.model), "open.model", "is empty; name the target")
        _require(
            bool(_SHA256.fullmatch(self.tokenizer_sha256)), "open.tokenizer_sha256", "must be 64 hexadecimal digits"
        )
        _require(len(self.prompt) > 0, "open.prompt", "is empty; give at least one token, such as BOS")
        _require(self.keep_s >= 0, "open.keep_s", "must be 0 seconds or more")
        _check_tokens(self.prompt, "open.prompt")
        _check_tokens(self.committed, "open.committed")
        _require(
            len(self.committed) < self.sampling.max_tokens or not self.committed,
            "open.committed",
            "already holds sampling.max_tokens tokens; there is nothing left to generate",
        )


@dataclass(frozen=True, slots=True)
class Continue:
    """Another turn on a kept session: `prompt` [n] stands from `start` on, and the text follows it.

    `sampling` None: that of the last turn. Drafts of chains below `chain` belong to earlier turns.
    """

    start: int
    prompt: tuple[int, ...]
    sampling: Sampling | None = None
    chain: int = 0

    def __post_init__(self) -> None:
        _require(self.start >= 0, "continuation.start", "must be 0 or more")
        _require(self.chain >= 0, "continuation.chain", "must be 0 or more")
        _check_tokens(self.prompt, "continuation.prompt")


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens proposed from `start` on, as part of `chain`."""

    chain: int
    start: int
    tokens: tuple[int, ...]
    parents: tuple[int, ...] = ()
    q: tuple[float, ...] = ()
    drafter: str = ""
    drafter_version: str = ""
    complete: bool = False

    def __post_init__(self) -> None:
        _check_tokens(self.tokens, "draft.tokens")
        _require(self.chain >= 0, "draft.chain", "must be 0 or more")
        _require(self.start >= 0, "draft.start", "must be 0 or more")
        _require(bool(self.tokens) or self.complete, "draft.tokens", "is empty and the chain is not complete")
        _require(len(self.q) in (0, len(self.tokens)), "draft.q", "must hold one number for each token, or none")
        _require(all(0 <= value <= 1 for value in self.q), "draft.q", "must be probabilities")
        _require(len(self.parents) in (0, len(self.tokens)), "draft.parents", "must hold one for each token, or none")
        _require(
            all(-1 <= parent < child for child, parent in enumerate(self.parents)),
            "draft.parents",
            "must point to an earlier token of the message, or be -1",
        )

    def first_path(self) -> tuple[int, ...]:
        """The tokens of the tree's first branch, in order: what a verifier without tree attention judges."""
        if not self.parents:
            return self.tokens
        length = next((i for i, parent in enumerate(self.parents) if parent != i - 1), len(self.tokens))
        return self.tokens[:length]


@dataclass(frozen=True, slots=True)
class Report:
    """What the edge knows and the verifier's patience needs, and a changed wish for codes; None: as before."""

    drafting: bool
    drafting_s: float = 0.0
    round_trip_s: float = 0.0
    acceptance: float = 0.0
    steering: SteeringWish | None = None

    def __post_init__(self) -> None:
        _require(0 <= self.acceptance <= 1, "report.acceptance", "must be a probability")
        for name in ("drafting_s", "round_trip_s"):
            value = getattr(self, name)
            _require(math.isfinite(value) and value >= 0, f"report.{name}", "must be a finite number, 0 or more")


@dataclass(frozen=True, slots=True)
class Cancel:
    """The edge wants no more of this text."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Opened:
    """The verifier has taken the session."""

    committed: int
    credit: int
    max_tokens: int
    verifier: str
    context_length: int
    batch_invariant: bool = False
    vocab_size: int = MAX_TOKEN_ID + 1
    goal: Goal = Goal.LATENCY
    max_drafts: int = 16
    planned: bool = True
    keep_s: float = 0.0
    release: str = ""
    steered: bool = False  # it has the projection that is wished for, and sends its codes


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time of one commit went, seconds; `echo` Draft messages of its stream had come before it was sent."""

    echo: int = 0
    hold_s: float = 0.0
    queue_s: float = 0.0
    verify_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Steering:
    """A code [rank] = scale * values of the target's hidden state, as it travels; `outrider.proto.steering` reads it.

    In a commit it is of position `start + len(tokens) - 2`, the newest that the verifier has processed and that holds.
    """

    scale: float
    values: bytes = field(repr=False)
    precision: SteeringPrecision

    def __post_init__(self) -> None:
        _require(isinstance(self.precision, SteeringPrecision), "steering.precision", "is no SteeringPrecision")
        _require(math.isfinite(self.scale) and self.scale > 0, "steering.scale", "must be a finite number above 0")
        each = self.precision.number_bytes
        _require(len(self.values) % each == 0, "steering.values", f"must be {each} bytes a number")


TopLogprobs = tuple[tuple[int, float], ...]  # the likeliest tokens of one position with log p, likeliest first


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens that are now part of the text, for ever. The first `accepted` of them were drafts."""

    start: int
    tokens: tuple[int, ...]
    accepted: int
    credit: int
    logp: tuple[float, ...] = ()
    reward: float | None = None
    steering: Steering | None = None
    timing: Timing = field(default_factory=Timing)
    finish: FinishReason | None = None
    chain: int = 0
    judged: int = 0
    turn: int = 0
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()

    def __post_init__(self) -> None:
        for name in ("logprobs", "top_logprobs"):
            count = len(getattr(self, name))
            _require(count in (0, len(self.tokens)), f"commit.{name}", "must hold one for each token, or none")
        _require(bool(self.tokens) or self.finish is not None, "commit.tokens", "is empty and the text goes on")
        _require(0 <= self.accepted <= len(self.tokens), "commit.accepted", "exceeds the tokens")
        _require(len(self.logp) in (0, len(self.tokens)), "commit.logp", "must hold one for each token, or none")


@dataclass(frozen=True, slots=True)
class Goaway:
    """The verifier ends the stream; the text goes on elsewhere."""

    reason: str
    retry_after_s: float = 0.0


EdgeFrame = Open | Continue | Draft | Report | Cancel
CloudFrame = Opened | Commit | Goaway


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file that the coordinator serves, known by the hash of its content."""

    name: str
    sha256: str
    bytes: int

    def __post_init__(self) -> None:
        plain = bool(self.name) and "/" not in self.name and "\\" not in self.name and not self.name.startswith(".")
        _require(plain, "file.name", f"{self.name!r} is not a plain file name")
        _require(bool(_SHA256.fullmatch(self.sha256)), "file.sha256", "must be 64 hexadecimal digits")


@dataclass(frozen=True, slots=True)
class DrafterManifest:
    """A drafter package: its identity and its files, `manifest.json` among them."""

    name: str
    version: str
    tokenizer_sha256: str
    target: str
    files: tuple[RemoteFile, ...]

    def __post_init__(self) -> None:
        _require(bool(_SESSION.fullmatch(self.name)), "drafter.name", "must be 1 to 64 of A-Z a-z 0-9 - _")
        _require(bool(_SESSION.fullmatch(self.version)), "drafter.version", "must be 1 to 64 of A-Z a-z 0-9 - _")


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """An edge asks where to decode."""

    model: str
    session: str
    tokenizer_sha256: str = ""
    avoid: tuple[str, ...] = ()
    protocol_version: int = PROTOCOL_VERSION
    inquiry: bool = False  # only to know what a lease says: no token, and no session counted
    prompt_class: int = 0  # what kind of text the prompt is; 0: not said
    link_class: int = 0  # what kind of round trip; 0: not said

    def __post_init__(self) -> None:
        _require_classes(self.prompt_class, self.link_class, "lease_request")


def _require_classes(prompt_class: int, link_class: int, of: str) -> None:
    for name, value, count in (
        ("prompt_class", prompt_class, PROMPT_CLASSES),
        ("link_class", link_class, LINK_CLASSES),
    ):
        _require(0 <= value < count, f"{of}.{name}", f"must be below {count}; 0 says nothing")


@dataclass(frozen=True, slots=True)
class DrafterPrior:
    """How often a drafter hits over the texts of many edges, and how many tokens that rests on, faded with age."""

    drafter: str
    drafter_version: str
    acceptance: float
    trials: float

    def __post_init__(self) -> None:
        _require(0 <= self.acceptance <= 1, "prior.acceptance", "must be between 0 and 1")
        _require(0 <= self.trials < math.inf, "prior.trials", "must be a finite number, 0 or more")


@dataclass(frozen=True, slots=True)
class DraftingPrior:
    """What the fleet knows before a session's first commit; 0: not known. `drafters`: of each that it knows."""

    acceptance: float = 0.0
    step_s: float = 0.0
    drafters: tuple[DrafterPrior, ...] = ()

    def __post_init__(self) -> None:
        _require(len(self.drafters) <= MOST_DRAFTERS_TOLD, "prior.drafters", f"holds more than {MOST_DRAFTERS_TOLD}")


@dataclass(frozen=True, slots=True)
class Lease:
    """Permission to decode on one verifier for a while.

    With `relayed` the coordinator passes the stream on: `address` is empty and means its own, the token goes into the
    call's metadata too. `tls_name` is what the certificate at `address` is checked for; empty: its host.
    """

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


@dataclass(frozen=True, slots=True)
class DrafterHits:
    """What one drafter proposed in one text, or would have: tokens `compared` with the target's, and the `hits`."""

    drafter: str
    drafter_version: str
    hits: int
    compared: int

    def __post_init__(self) -> None:
        _require(0 <= self.hits <= self.compared, "report.drafter_hits", "must not have more hits than compared")


@dataclass(frozen=True, slots=True)
class SessionReport:
    """The figures of a finished session; no prompt and no text.

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
    judged_tokens: int = 0
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
        told = len(self.drafter_hits)
        _require(told <= MOST_DRAFTERS_TOLD, "report.drafter_hits", f"holds more than {MOST_DRAFTERS_TOLD}")
        _require_classes(self.prompt_class, self.link_class, "report")


@dataclass(frozen=True, slots=True)
class ClassAcceptance:
    """How often a drafter hits in texts of one kind, over links of one kind."""

    model: str
    prompt_class: int
    link_class: int
    of: DrafterPrior


@dataclass(frozen=True, slots=True)
class VerifierStatus:
    """One verifier as the coordinator sees it; state is `ready`, `draining` or `down`."""

    name: str
    address: str
    model: str
    state: str
    sessions: int = 0
    step_s: float = 0.0
    restarts: int = 0
    kv_pages_free: int = 0
    release: str = ""
    max_sessions: int = 0
    kv_pages: int = 0


@dataclass(frozen=True, slots=True)
class EdgeStatus:
    """One edge: its newest report, how long ago that came, and how many have come."""

    edge: str
    last: SessionReport
    age_s: float
    sessions: int


@dataclass(frozen=True, slots=True)
class RelayStatus:
    """What the coordinator has forwarded since it started; times are upper bounds of the quantiles, 0 without any."""

    streams: int = 0
    streams_total: int = 0
    refused: int = 0
    broken: int = 0
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    forward_p50_s: float = 0.0
    forward_p99_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """The coordinator's whole view; `relay` is None where it relays nothing."""

    verifiers: tuple[VerifierStatus, ...]
    drafters: tuple[DrafterManifest, ...]
    leases_granted: int
    recent: tuple[SessionReport, ...]
    relay: RelayStatus | None = None
    edges: tuple[EdgeStatus, ...] = ()
    acceptance: tuple[ClassAcceptance, ...] = ()

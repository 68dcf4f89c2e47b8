"""Frames of the decoding stream and their parts."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from outrider.proto.types.branches import Branch, Branches, require_branches
from outrider.proto.types.checks import (
    MAX_TOKEN_ID,
    NAME,
    PROMPT_CLASSES,
    SHA256,
    require,
    require_chain,
    require_tokens,
)
from outrider.proto.types.logprobs import MAX_TOP_LOGPROBS, PromptLogprobs, TokenFacts, TopLogprobs
from outrider.proto.types.sampling import Sampling
from outrider.proto.types.steering import Steering, SteeringRequest

PROTOCOL_VERSION = 2
MAX_ISOLATION_BYTES = 16


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
    """Time that the verifier waits for drafts before a step.

    Attributes:
        seconds: longest wait since the last commit, in seconds; may be infinite.
        drafts: number of drafts that ends the wait.
    """

    seconds: float
    drafts: int = 1

    def __post_init__(self) -> None:
        require(self.seconds >= 0, "patience.seconds", "must be 0 or more")
        require(self.drafts >= 1, "patience.drafts", "must be 1 or more")


@dataclass(frozen=True, slots=True)
class Learning:
    """Permission to keep a prompt and its text in memory for a day, and to train drafters with them.

    Attributes:
        prompt_class: kind of text, as in the lease's request; 0: unknown.
    """

    prompt_class: int = 0

    def __post_init__(self) -> None:
        known = 0 <= self.prompt_class < PROMPT_CLASSES
        require(known, "learning.prompt_class", f"must be below {PROMPT_CLASSES}; 0 means unknown")


@dataclass(frozen=True, slots=True)
class Open:
    """Everything that decides a text, so that any verifier can begin it or take it over.

    Attributes:
        prompt: [p] tokens, at least one.
        committed: [c] text so far, when resuming.
        patience: how long to wait for drafts; None: the verifier decides.
        window: most unverified tokens that the edge will have in flight; 0: unknown.
        max_drafts: most drafts to verify in one step; 0: the verifier's limit.
        logp: whether commits carry processed log probabilities.
        logprobs: whether they carry the model's own log probabilities.
        top_logprobs: likeliest tokens to carry for each position; needs `logprobs`.
        keep_s: time to keep the session after its last commit, in seconds.
        steering: requested steering vectors, which do not change the text; None: none.
        drafts_here: drafts that the verifier makes itself before every step, none during one, as a drafter beside the
            target does; 0: none at all; None: as it prices them.
        learning: permission to learn from the text; None: nothing may be kept of it.
        epoch: streams that the session had before, as its lease says.
        prompt_logprobs: likeliest tokens to carry for each token of the prompt, beside its own log probability; None:
            neither.
        prompt_logprobs_from: first position of the prompt for which these are wanted; those before it have come.
        trees: whether steps may verify branches beside the chain.
        isolation: mark of whoever the edge decodes for, at most `MAX_ISOLATION_BYTES`; only texts of one mark and one
            API key share what was computed. Empty: the edge does not tell between those it serves.
        context_length: positions that the text was promised, prompt included, and ends at; 0: none yet.
    """

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
        require_tokens(self.prompt, "open.prompt")
        require_tokens(self.committed, "open.committed")
        require(
            len(self.committed) < self.sampling.max_tokens or not self.committed,
            "open.committed",
            "already holds sampling.max_tokens tokens; there is nothing left to generate",
        )


@dataclass(frozen=True, slots=True)
class Continue:
    """Another turn on a kept session, whose text follows a new prompt.

    Attributes:
        start: position of prompt[0]; the transcript is dropped from there on.
        prompt: [n] new tokens, may be empty.
        sampling: parameters of this turn; None: those of the last.
        chain: first chain of this turn; drafts of lower ones belong to earlier turns.
    """

    start: int
    prompt: tuple[int, ...]
    sampling: Sampling | None = None
    chain: int = 0

    def __post_init__(self) -> None:
        require(self.start >= 0, "continuation.start", "must be 0 or more")
        require_chain(self.chain, "continuation.chain")
        require_tokens(self.prompt, "continuation.prompt")


class DraftToken(NamedTuple):
    """A proposed token, and what the drafter's distribution says about it; NaN: unknown.

    Attributes:
        id: token id; -1 where nothing may be proposed.
        confidence: the drafter's probability of the token.
        perturbed_probability: softmax of log probability plus shared noise at the token, over the candidates: how far
            it leads under the very noise that the target will use; the confidence at temperature 0.
        runners_up: [r] the tokens that would have been proposed next, best first; they never travel.
        other: whether its author is not the edge's active drafter but an idle one, or the verifier's own; at one end.
    """

    id: int
    confidence: float = math.nan
    perturbed_probability: float = math.nan
    runners_up: tuple[int, ...] = ()
    other: bool = False

    @property
    def lead(self) -> float:
        """Signal by which its chance to agree is calibrated: the perturbed probability; if unknown, the confidence."""
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
        require_chain(self.chain, "draft.chain")
        require(self.start >= 0, "draft.start", "must be 0 or more")
        require(bool(self.tokens) or self.complete, "draft.tokens", "is empty and the chain is not complete")
        if self.tokens:
            ids, confidences, *_ = zip(*self.tokens, strict=True)  # every token is in here: one pass
            require_tokens(ids, "draft.tokens")
            known = [confidence for confidence in confidences if not math.isnan(confidence)]
            require(len(known) in (0, len(ids)), "draft.q", "must hold one number for each token, or none")
            require(not known or 0 <= min(known) <= max(known) <= 1, "draft.q", "must be probabilities")
        require_branches(self.branches, "draft.branches.")


class BlockBranch(NamedTuple):
    """Drafts [m] that a step verifies beside its block: they follow the block's first `index` drafts."""

    index: int  # type: ignore[assignment]  # a tuple has a method of this name, which nobody calls
    drafts: tuple[DraftToken, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """Measurements of the edge that the verifier's patience rests on.

    Attributes:
        round_trip_s: smoothed round-trip time without the verifier's work, in seconds.
        acceptance: chance that a draft agrees; 0: unknown.
        steering: changed request for steering vectors; None: unchanged.
    """

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
    """The verifier's terms for a session that it has taken.

    Attributes:
        committed: tokens of text taken over from Open.
        credit: unverified drafts allowed.
        guarantee: what the text keeps whatever shares its steps.
        planned: whether the verifier plans how long it waits for drafts; its patience is fixed otherwise.
        keep_s: time that an idle session is kept, in seconds; 0: the stream ends with the text.
        steered: whether it has the requested projection and sends its vectors.
        drafter_here: drafter of the verifier's own in this text, as name@version; empty: none.
        branches: whether it takes Branches.
        precision: what decides its rounding, such as `bfloat16`; empty: unknown.
        epoch: that of the Open, as in every frame of the verifier: an edge ignores those of another.
        settings: names of the `LATER_SETTINGS` that it holds to.
        eos_tokens: ids that end a text of the target, by which drafters propose.
        trees: whether steps verify branches beside the chain, so that branches of one token are of use.
    """

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
    """Parts of the time that one commit took.

    Attributes:
        echo: Draft messages of the stream that had come before the commit was sent.
        hold_s: time from the arrival of the last one to the sending of the commit, in seconds.
        queue_s: time that the session was due and waited for the engine, in seconds.
        drafting_s: time that the verifier's own drafter has worked for this text since the last commit, in seconds.
    """

    echo: int = 0
    hold_s: float = 0.0
    queue_s: float = 0.0
    verify_s: float = 0.0
    drafting_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Commit:
    """Tokens that are now part of the text, for ever.

    Attributes:
        accepted: drafts among the tokens, which come first.
        credit: unverified drafts allowed from now on.
        reward: mean of min(1, p / q) over the verified drafts (MetaSD); None: unknown.
        steering: vector of position `start + len(tokens) - 2`.
        finish: why the text ends, in its last commit only.
        chain: newest chain that the verifier knew.
        verified: drafts that the step verified: those of the chain, or of the path along a branch that it followed.
        verified_beside: other drafts that it verified.
        turn: Continues of this stream that had come before it.
        cached_tokens: tokens before `start` that the verifier had computed already, in the first commit of a turn only.
        verified_here: verified drafts that the verifier made itself, which come last.
        covered: tokens after these that the verifier will have by its own drafts before the edge's answer can come.
    """

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
        """Accepted drafts that the verifier made itself."""
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

"""Messages of the control plane: leases, drafter packages, reports and the status of a cluster."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from outrider.proto.types.checks import NAME, PROMPT_CLASSES, SHA256, require
from outrider.proto.types.frames import PROTOCOL_VERSION

LINK_CLASSES = 6  # 0 included: unknown
MAX_REPORTED_DRAFTERS = 16  # in a report or a prior
MAX_PREFIXES = 24  # of a text


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
    """A drafter package: its identity and its files, `manifest.json` among them.

    Attributes:
        share: share of the edges, by hash of their id, that take it beside the current version; 0: all take it.
    """

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
    """An edge's question where to decode.

    Attributes:
        avoid: verifiers that it has just lost, the newest last.
        inquiry: whether it only asks what a lease says: no token is signed and no session counted.
        prompt_class: kind of text of the prompt; 0: unknown.
        link_class: kind of round trip; 0: unknown.
        prefixes: [n] keyed 64-bit hashes of beginnings of the text, the shortest first, equal where texts begin alike.
        precision: precision of the text so far, which its verifier must have; empty: any.
        epoch: streams that the session had before.
        suspected: whether the last of `avoid` is silent and its stream still stands, to be left where there is another.
        context_length: positions that the text needs, which its verifier should have; 0: any.
    """

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
    """Hits of a drafter over the texts of many edges.

    Attributes:
        acceptance: share of hits, 0 to 1.
        trials: tokens that the share rests on, faded with age.
    """

    drafter: str
    drafter_version: str
    acceptance: float
    trials: float

    def __post_init__(self) -> None:
        require(0 <= self.acceptance <= 1, "prior.acceptance", "must be between 0 and 1")
        require(0 <= self.trials < math.inf, "prior.trials", "must be a finite number, 0 or more")


@dataclass(frozen=True, slots=True)
class DraftingPrior:
    """Knowledge of the fleet before a session's first commit; 0: unknown.

    Attributes:
        acceptance: share of drafts that the target accepts.
    """

    acceptance: float = 0.0
    step_s: float = 0.0
    drafters: tuple[DrafterPrior, ...] = ()

    def __post_init__(self) -> None:
        require(
            len(self.drafters) <= MAX_REPORTED_DRAFTERS, "prior.drafters", f"holds more than {MAX_REPORTED_DRAFTERS}"
        )


@dataclass(frozen=True, slots=True)
class Lease:
    """Permission to decode on one verifier for a while.

    Attributes:
        address: host:port of the verifier; empty with `relayed`, and then the coordinator's own.
        tls_name: name that the certificate at `address` must have; empty: its host.
        relayed: whether the coordinator passes the stream on; the token then goes into the call's metadata too.
        context_length: positions that the target can hold there; 0: unknown.
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
    context_length: int = 0


@dataclass(frozen=True, slots=True)
class DrafterHits:
    """Proposals of one drafter in one text, counterfactual ones included.

    Attributes:
        hits: proposals that agree with the committed token.
        compared: proposals that were compared with one.
        draft_s: smoothed time to draft a token, in seconds; 0: unknown.
    """

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


@dataclass(frozen=True, slots=True)
class ClassAcceptance:
    """Hits of a drafter in texts of one kind, over links of one kind."""

    model: str
    prompt_class: int
    link_class: int
    prior: DrafterPrior


@dataclass(frozen=True, slots=True)
class VersionStatus:
    """One version of a drafter, and how it compares with the one before it.

    Attributes:
        state: `current`, `former` or `retired`.
        share: share of the edges that are offered it.
        why: reason for its state; empty: none yet.
        age_s: time in this state, in seconds.
        against: version that it is compared with; empty: none.
        texts: texts compared so far.
        difference: mean difference of hit rates over these texts.
        evidence: natural log of the wealth that bets on its being worse have made.
        acceptance: share of hits over all texts.
        trials: tokens that the share rests on, faded with age.
    """

    drafter: str
    version: str
    state: str
    share: float = 0.0
    why: str = ""
    age_s: float = 0.0
    against: str = ""
    texts: int = 0
    difference: float = 0.0
    evidence: float = 0.0
    acceptance: float = 0.0
    trials: float = 0.0


@dataclass(frozen=True, slots=True)
class VerifierStatus:
    """One verifier as the coordinator sees it.

    Attributes:
        state: `ready`, `draining` or `down`.
        guarantee: what its texts keep whatever shares their steps: `bytes`, `bytes_by_tiles`, `distribution`; empty:
            unknown.
        precision: what decides its rounding, such as `bfloat16`; empty: unknown.
        drafter_here: drafter of its own, as name@version; empty: none that works.
        committed_tokens: tokens of all its texts since it started, as are the next.
        drafted_here: tokens that its own drafter has proposed.
        verified_here: those that its steps verified.
        accepted_here: those that became text.
        drafting_here_s: time that its own drafter has worked, over all its threads, in seconds.
        context_length: positions that its target can hold; 0: unknown.
    """

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
    guarantee: str = ""
    precision: str = ""
    drafter_here: str = ""
    committed_tokens: int = 0
    drafted_here: int = 0
    verified_here: int = 0
    accepted_here: int = 0
    drafting_here_s: float = 0.0
    context_length: int = 0


@dataclass(frozen=True, slots=True)
class TrainerStatus:
    """One trainer as the coordinator sees it.

    Attributes:
        model: target of the drafter that learns.
        state: `training`, `waiting for idle time`, `nothing to learn from`, `loading` or `down`.
        drafter: name of the drafter that learns.
        version: newest version that proved better, or its parent.
        sequence: number of that version.
        load: share of its node's cores that verifiers took lately, 0 to 1; 0 if it does not look.
        waited_s: time that the next step has waited for idle time, in seconds.
        hurried: number of steps made without idle time.
        cpu_share: share of one core that it took lately.
        max_cpu_share: limit of that share.
        steps: number of optimizer steps.
        positions: number of judged positions that it learned from.
        keys: number of API keys that these came from.
        waiting: number of positions that it has not learned from yet.
        candidate: sequence of the version on trial; 0: none.
        candidate_texts: number of texts that it was compared on.
        candidate_difference: mean difference of hit rates on these texts.
        published: number of versions that proved better.
        dropped: number of versions that did not.
    """

    model: str
    state: str
    drafter: str = ""
    version: str = ""
    sequence: int = 0
    load: float = 0.0
    waited_s: float = 0.0
    hurried: int = 0
    cpu_share: float = 0.0
    max_cpu_share: float = 0.0
    steps: int = 0
    positions: int = 0
    keys: int = 0
    waiting: int = 0
    candidate: int = 0
    candidate_texts: int = 0
    candidate_difference: float = 0.0
    published: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class EdgeStatus:
    """One edge: its newest report, how long ago that came, and how many have come."""

    edge: str
    last: SessionReport
    age_s: float
    sessions: int


@dataclass(frozen=True, slots=True)
class RelayStatus:
    """Forwarding of the coordinator since it started; times are upper bounds of the quantiles, 0 before any."""

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
    versions: tuple[VersionStatus, ...] = ()
    trainers: tuple[TrainerStatus, ...] = ()

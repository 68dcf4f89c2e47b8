"""The coordinator's view of its cluster, and its bytes on the wire; `v1/decoding.proto` says what each field means."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.proto.codec import DRAFTER_PRIOR, MANIFEST, REPORT, Table, many, one, optional
from outrider.proto.types import DrafterManifest, DrafterPrior, SessionReport
from outrider.proto.v1 import decoding_pb2 as pb


@dataclass(frozen=True, slots=True)
class ClassAcceptance:
    """Hits of a drafter in texts of one kind, over links of one kind."""

    model: str
    prompt_class: int
    link_class: int
    prior: DrafterPrior


@dataclass(frozen=True, slots=True)
class VersionStatus:
    """One version of a drafter, and how it compares with the one before it."""

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
    """One verifier as the coordinator sees it."""

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
    server: str = ""
    gap_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainerStatus:
    """One trainer as the coordinator sees it."""

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
    """Traffic that the coordinator has relayed since it started; times are upper bounds of quantiles, 0 before any."""

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
    release: str = ""


_STATUS = Table(
    ClusterStatus,
    pb.ClusterStatus,
    verifiers=many(Table(VerifierStatus, pb.VerifierStatus)),
    drafters=many(MANIFEST),
    recent=many(REPORT),
    relay=optional(Table(RelayStatus, pb.RelayStatus)),
    edges=many(Table(EdgeStatus, pb.EdgeStatus, last=one(REPORT))),
    acceptance=many(Table(ClassAcceptance, pb.ClassAcceptance, prior=one(DRAFTER_PRIOR))),
    versions=many(Table(VersionStatus, pb.VersionStatus)),
    trainers=many(Table(TrainerStatus, pb.TrainerStatus)),
)
encode_status, decode_status = _STATUS.encode, _STATUS.decode

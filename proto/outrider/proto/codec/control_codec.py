"""Messages of the control plane on the wire."""

from __future__ import annotations

from outrider.proto import types as t
from outrider.proto.codec.fields import Single, Table, many, one, optional, parse
from outrider.proto.v1 import decoding_pb2 as pb

CONTROL_SERVICE = "outrider.proto.v1.Control"

FILE = Table(t.RemoteFile, pb.RemoteFile)
MANIFEST = Table(t.DrafterManifest, pb.DrafterManifest, files=many(FILE))
DRAFTER_PRIOR = Table(t.DrafterPrior, pb.DrafterPrior)
PRIOR = Table(
    t.DraftingPrior, pb.DraftingPrior, drafters=many(DRAFTER_PRIOR, t.MAX_REPORTED_DRAFTERS, "prior.drafters")
)
LEASE_REQUEST = Table(t.LeaseRequest, pb.LeaseRequest)
LEASE = Table(
    t.Lease,
    pb.Lease,
    tokenizer=optional(FILE),
    chat_template=optional(FILE),
    drafters=many(MANIFEST),
    prior=one(PRIOR),
)
REPORT = Table(
    t.SessionReport,
    pb.SessionReport,
    drafter_hits=many(Table(t.DrafterHits, pb.DrafterHits), t.MAX_REPORTED_DRAFTERS, "report.drafter_hits"),
)
STATUS = Table(
    t.ClusterStatus,
    pb.ClusterStatus,
    verifiers=many(Table(t.VerifierStatus, pb.VerifierStatus)),
    drafters=many(MANIFEST),
    recent=many(REPORT),
    relay=optional(Table(t.RelayStatus, pb.RelayStatus)),
    edges=many(Table(t.EdgeStatus, pb.EdgeStatus, last=one(REPORT))),
    acceptance=many(Table(t.ClassAcceptance, pb.ClassAcceptance, prior=one(DRAFTER_PRIOR))),
    versions=many(Table(t.VersionStatus, pb.VersionStatus)),
    trainers=many(Table(t.TrainerStatus, pb.TrainerStatus)),
)
# They serve DrafterUpdate and WatchDraftersRequest too, which have the same fields.
DRAFTERS: Single[tuple[t.DrafterManifest, ...]] = Single(pb.ListDraftersReply, "drafters", many(MANIFEST))
DRAFTER_QUERY: Single[str] = Single(pb.ListDraftersRequest, "tokenizer_sha256")
CHUNK: Single[bytes] = Single(pb.FileChunk, "data")
DRAIN: Single[str] = Single(pb.DrainRequest, "verifier")
DRAINED: Single[int] = Single(pb.DrainReply, "sessions")

encode_lease_request, decode_lease_request = LEASE_REQUEST.encode, LEASE_REQUEST.decode
encode_lease, decode_lease = LEASE.encode, LEASE.decode
encode_report, decode_report = REPORT.encode, REPORT.decode
encode_status, decode_status = STATUS.encode, STATUS.decode
encode_drafters, decode_drafters = DRAFTERS.encode, DRAFTERS.decode
encode_drafter_query, decode_drafter_query = DRAFTER_QUERY.encode, DRAFTER_QUERY.decode
encode_chunk, decode_chunk = CHUNK.encode, CHUNK.decode
encode_drain, decode_drain = DRAIN.encode, DRAIN.decode
encode_drained, decode_drained = DRAINED.encode, DRAINED.decode


def encode_fetch(sha256: str, offset: int) -> bytes:
    """Return one `FetchFileRequest` message."""
    result: bytes = pb.FetchFileRequest(sha256=sha256, offset=offset).SerializeToString()
    return result


def decode_fetch(data: bytes) -> tuple[str, int]:
    """Return the hash of the requested content and the bytes to skip."""
    wire = parse(pb.FetchFileRequest, data)
    return wire.sha256, wire.offset


def encode_nothing(_: None) -> bytes:
    """Return a message without fields."""
    return b""


def decode_nothing(_: bytes) -> None:
    """Read a message without fields."""

"""Frozen domain types: what the messages mean, checked when made. Only `codec` knows their protobuf twins.

Positions are absolute (prompt + text, from 0). Token ids are Python ints in tuples. Seconds are floats.

sampling  how the target's distribution is processed
decoding  frames of the decoding stream
control   messages of the control plane
"""

from __future__ import annotations

from outrider.proto.types.checks import MAX_TOKEN_ID
from outrider.proto.types.control import (
    DRAFTER_FORMAT,
    LINK_CLASSES,
    MOST_DRAFTERS_TOLD,
    PROMPT_CLASSES,
    ClassAcceptance,
    ClusterStatus,
    DrafterHits,
    DrafterManifest,
    DrafterPrior,
    DraftingPrior,
    EdgeStatus,
    Lease,
    LeaseRequest,
    RelayStatus,
    RemoteFile,
    SessionReport,
    VerifierStatus,
)
from outrider.proto.types.decoding import (
    MOST_TOP_LOGPROBS,
    PROTOCOL_VERSION,
    Cancel,
    CloudFrame,
    Commit,
    Continue,
    Draft,
    EdgeFrame,
    FinishReason,
    Goal,
    Goaway,
    Open,
    Opened,
    Patience,
    Provenance,
    Report,
    Steering,
    SteeringPrecision,
    SteeringRequest,
    Timing,
    TopLogprobs,
)
from outrider.proto.types.sampling import MOST_GRAMMAR_BYTES, MOST_STOP_TOKENS, Grammar, GrammarKind, Sampling

__all__ = [
    "DRAFTER_FORMAT",
    "LINK_CLASSES",
    "MAX_TOKEN_ID",
    "MOST_DRAFTERS_TOLD",
    "MOST_GRAMMAR_BYTES",
    "MOST_STOP_TOKENS",
    "MOST_TOP_LOGPROBS",
    "PROMPT_CLASSES",
    "PROTOCOL_VERSION",
    "Cancel",
    "ClassAcceptance",
    "CloudFrame",
    "ClusterStatus",
    "Commit",
    "Continue",
    "Draft",
    "DrafterHits",
    "DrafterManifest",
    "DrafterPrior",
    "DraftingPrior",
    "EdgeFrame",
    "EdgeStatus",
    "FinishReason",
    "Goal",
    "Goaway",
    "Grammar",
    "GrammarKind",
    "Lease",
    "LeaseRequest",
    "Open",
    "Opened",
    "Patience",
    "Provenance",
    "RelayStatus",
    "RemoteFile",
    "Report",
    "Sampling",
    "SessionReport",
    "Steering",
    "SteeringPrecision",
    "SteeringRequest",
    "Timing",
    "TopLogprobs",
    "VerifierStatus",
]

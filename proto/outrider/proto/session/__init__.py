"""The session machine: both halves of the decoding contract, without any input or output.

Events go in with a clock reading, instructions come out. The edge, the verifier, the simulator and the tests run this
same code; sockets, threads and models live in thin shells around it.

The rules, in short. Positions are absolute and commits append only. A *chain* is a run of drafts that continues the
transcript; it dies at the first draft that contradicts a committed token, and its later drafts are ignored. A chain
whose next draft equals the target's own token lives on. Where the verifier keeps a session after its text, the edge
begins another *turn* by naming the tokens that are new; both halves are then as after a fresh Open.

This package exports the edge's half, `edge`, with its drafts in `tree`. Only `verifier` loads the verifier's half, with
the edge's drafts in `received`, its own in `both_ends`, and `acceptance`.
"""

from __future__ import annotations

from outrider.proto.session.edge import EdgeSession
from outrider.proto.session.events import (
    CaughtUp,
    Disconnected,
    Done,
    Drafted,
    DrafterFailed,
    EdgeEvent,
    EdgeInstruction,
    Emit,
    Reopen,
    Send,
    Started,
    StopRequested,
    StreamReady,
    TurnBegun,
)
from outrider.proto.session.jobs import CatchUpJob, DrafterSteering, DraftJob, TeacherForced
from outrider.proto.session.measuring import SentMessages, SharedMeasurements
from outrider.proto.session.selection import PROMPT_TOKENS, DrafterName, Selection
from outrider.proto.session.stream import DrafterCounts, EdgeStatistics, RetryRules

__all__ = [
    "PROMPT_TOKENS",
    "CatchUpJob",
    "CaughtUp",
    "Disconnected",
    "Done",
    "DraftJob",
    "Drafted",
    "DrafterCounts",
    "DrafterFailed",
    "DrafterName",
    "DrafterSteering",
    "EdgeEvent",
    "EdgeInstruction",
    "EdgeSession",
    "EdgeStatistics",
    "Emit",
    "Reopen",
    "RetryRules",
    "Selection",
    "Send",
    "SentMessages",
    "SharedMeasurements",
    "Started",
    "StopRequested",
    "StreamReady",
    "TeacherForced",
    "TurnBegun",
]

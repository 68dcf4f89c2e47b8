"""The session machine: both halves of the decoding contract, without any input or output.

Events go in with a clock reading, instructions come out. The edge, the verifier, the simulator and the tests run this
same code; sockets, threads and models live in thin shells around it.

The rules, in short. Positions are absolute and commits append only. A *chain* is a run of drafts that continues the
transcript; it dies at the first draft that contradicts a committed token, and what else arrives of it is ignored. A
chain whose next draft equals the target's own token lives on. Where the verifier keeps a session after its text, the
edge begins another *turn* by naming the tokens that are new; both halves are then as after a fresh Open.

acceptance    the one place where verified drafts become text
verifier      the cloud's half
admission     its rules, and the frames that break them
received      drafts that it has received
edge          the edge's half: `EdgeSession.handle(event, now) -> instructions`
events        its input, beside the verifier's frames
instructions  its output, drafting jobs included
text          its transcript and counts
chain         its unverified drafts, sent and unsent
stream        its streams: opened, lost, retried, kept between turns
drafting      its drafters' jobs, and the fate of their drafts
sending       when drafts are sent
measuring     measurements that the text adds to its edge's
steering      steering vectors that it keeps
selection     which of several drafters is active
"""

from __future__ import annotations

from outrider.proto.session.acceptance import accept_drafts
from outrider.proto.session.admission import VerifierRules
from outrider.proto.session.drafting import job_tokens
from outrider.proto.session.edge import EdgeSession
from outrider.proto.session.events import (
    Cancelled,
    CaughtUp,
    Disconnected,
    Drafted,
    DrafterFailed,
    EdgeEvent,
    Started,
    StreamReady,
    TurnBegun,
)
from outrider.proto.session.instructions import (
    CatchUpJob,
    Done,
    DraftJob,
    EdgeInstruction,
    Emit,
    Reopen,
    Send,
    TeacherForced,
)
from outrider.proto.session.measuring import SharedMeasurements
from outrider.proto.session.selection import PROMPT_TOKENS, Selection
from outrider.proto.session.steering import DrafterSteering, Steer
from outrider.proto.session.stream import RetryRules
from outrider.proto.session.text import DrafterCounts, EdgeStatistics
from outrider.proto.session.verifier import Verified, VerifierSession

__all__ = [
    "PROMPT_TOKENS",
    "Cancelled",
    "CatchUpJob",
    "CaughtUp",
    "Disconnected",
    "Done",
    "DraftJob",
    "Drafted",
    "DrafterCounts",
    "DrafterFailed",
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
    "SharedMeasurements",
    "Started",
    "Steer",
    "StreamReady",
    "TeacherForced",
    "TurnBegun",
    "Verified",
    "VerifierRules",
    "VerifierSession",
    "accept_drafts",
    "job_tokens",
]

"""The session machine: both halves of the decoding contract, without any input or output.

Events go in with the time of a clock that is passed in, instructions come out. The edge, the verifier, the simulator
and the tests run this same code; sockets, threads and models live in thin shells around it.

The rules, in short. Positions are absolute and commits append only. A *chain* is a run of drafts that continues the
transcript; it dies at the first draft that contradicts a committed token, and what else arrives of it is ignored. A
chain whose next draft equals the target's own token lives on. Where the verifier keeps a session after its text, the
edge begins another *turn* by naming the tokens that are new; both halves are then as after a fresh Open.

acceptance the one place where verified drafts become text
verifier   the cloud's half
codes      the steering codes that an edge keeps
selection  which of several drafters drafts
edge       the edge's half
"""

from __future__ import annotations

from outrider.proto.session.acceptance import accept_drafts
from outrider.proto.session.codes import Codes, Steer
from outrider.proto.session.edge import (
    NOTHING_FORESEEN,
    Done,
    DrafterCounts,
    DraftJob,
    EdgeInstruction,
    EdgeSession,
    EdgeStatistics,
    Emit,
    Foreseen,
    Reopen,
    RetryRules,
    Send,
)
from outrider.proto.session.selection import PROMPT_TOKENS, ReadJob, Selection
from outrider.proto.session.verifier import Verified, VerifierRules, VerifierSession

__all__ = [
    "NOTHING_FORESEEN",
    "PROMPT_TOKENS",
    "Codes",
    "Done",
    "DraftJob",
    "DrafterCounts",
    "EdgeInstruction",
    "EdgeSession",
    "EdgeStatistics",
    "Emit",
    "Foreseen",
    "ReadJob",
    "Reopen",
    "RetryRules",
    "Selection",
    "Send",
    "Steer",
    "Verified",
    "VerifierRules",
    "VerifierSession",
    "accept_drafts",
]

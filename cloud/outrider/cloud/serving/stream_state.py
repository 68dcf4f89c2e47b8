"""The state of one stream at its verifier, which frame is its last, and what its session does with each.

Rules without socket or clock, which the engine and the simulators share.
"""

from __future__ import annotations

from outrider.proto.errors import InvalidArgument
from outrider.proto.session.verifier import VerifierRules, VerifierSession
from outrider.proto.types import (
    Branches,
    Cancel,
    CloudFrame,
    Commit,
    Draft,
    EdgeFrame,
    Goaway,
    Open,
    Opened,
    Report,
)


class StreamState:
    """A stream as its verifier serves it.

    Attributes:
        session: id of its session; empty until Open has come.
        epoch: that of the Open.
        opened: whether its Open has been answered.
        goes_on: whether a Continue may still follow the last commit of a turn.
    """

    def __init__(self) -> None:
        self.session = ""
        self.epoch = 0
        self.opened = False
        self.goes_on = False

    def begin(self, frame: Open, rules: VerifierRules) -> None:
        """Note the Open."""
        self.session, self.epoch = frame.session, frame.epoch
        self.goes_on = frame.keep_s > 0 and rules.keep_s > 0

    def half_close(self) -> None:
        """Note that no more frames will come."""
        self.goes_on = False

    def ends_after(self, frame: CloudFrame) -> bool:
        """Note a frame that has been sent; return whether the stream ends with it."""
        self.opened |= isinstance(frame, Opened)
        last = isinstance(frame, Commit) and frame.finish is not None and not self.goes_on
        return last or isinstance(frame, Goaway)


def expects(session: VerifierSession, frame: EdgeFrame) -> bool:
    """Return whether a session takes a frame; where its text has ended, what was on its way is passed over."""
    return session.finish is None or not isinstance(frame, Draft | Branches | Cancel)


def pass_frame(session: VerifierSession, frame: EdgeFrame, arrived: float) -> Commit | None:
    """Pass a frame that arrived at `arrived`, and is no Continue, to its session; return what it answers at once.

    Raises:
        InvalidArgument, ResourceExhausted: no honest edge sends it; the field is named.
    """
    match frame:
        case Draft():
            session.on_draft(frame, arrived)
        case Branches():
            session.on_branches(frame)
        case Report():
            session.on_report(frame)
        case Cancel():
            return session.on_cancel()
        case Open():
            raise opened_twice()
    return None


def opened_twice() -> InvalidArgument:
    """Return the error of a stream with a second Open."""
    return InvalidArgument("comes twice in one stream; open another stream", field="frame.open")

"""The state of one stream at its verifier, which frame is its last, and what its session does with each.

Rules without socket or clock, which the engine and the simulators share.
"""

from __future__ import annotations

from outrider.proto.session.verifier import VerifierRules
from outrider.proto.types import (
    CloudFrame,
    Commit,
    Goaway,
    Open,
    Opened,
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

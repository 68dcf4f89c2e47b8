"""The ends of leases at one verifier: a coordinator decides whether a text goes on, once one is there to be asked."""

from __future__ import annotations

import asyncio
import time
from weakref import WeakSet

from outrider.cloud.serving.stream_outbox import StreamOutbox
from outrider.proto.lease import LeaseClaim
from outrider.proto.types import Goaway

OVERTIME_S = 600.0  # for which a text goes on after its lease where no coordinator is there to give another


class LeaseEnds:
    """Sends sessions away whose leases have ended, in one event loop.

    An edge whose coordinator is away could not get another lease, and would lose its text after a minute. So a verifier
    that reports to coordinators sends a session away when the next report is asked for, or after `OVERTIME_S`.
    """

    def __init__(self) -> None:
        self._is_asked = False  # by any coordinator, ever
        self._overdue = WeakSet[StreamOutbox]()

    def begin(self, outbox: StreamOutbox, claim: LeaseClaim) -> None:
        """Wait for the end of a stream's lease; the stream cancels `outbox.end_of_lease` when it ends itself."""
        lasts_s = max(0.0, claim.expires_at_s - time.time())
        outbox.end_of_lease = asyncio.get_running_loop().call_later(lasts_s, self._end, outbox)

    def asked(self) -> None:
        """Note that a coordinator asks for a report, so that edges can get leases."""
        self._is_asked = True
        overdue, self._overdue = self._overdue, WeakSet()
        for outbox in overdue:
            if not outbox.closed:
                self._send_away(outbox)

    def _end(self, outbox: StreamOutbox) -> None:
        if not self._is_asked:
            self._send_away(outbox)
            return
        self._overdue.add(outbox)
        outbox.end_of_lease = asyncio.get_running_loop().call_later(OVERTIME_S, self._send_away, outbox)

    def _send_away(self, outbox: StreamOutbox) -> None:
        self._overdue.discard(outbox)
        if outbox.end_of_lease is not None:
            outbox.end_of_lease.cancel()
        outbox.put(Goaway("the lease has expired", epoch=outbox.stream.epoch))

"""One stream of a verifier: its state, its frames from the engine's thread, and the end of its lease."""

from __future__ import annotations

import asyncio
import threading
import time
from weakref import WeakSet

from outrider.cloud.serving.metering import TextMeter
from outrider.cloud.serving.slots import MAX_UNREAD, Outbox
from outrider.proto.errors import OutriderError
from outrider.proto.lease import LeaseClaim
from outrider.proto.session.verifier import VerifierRules
from outrider.proto.types import CloudFrame, Commit, Goaway, Open, Opened, Ping, Pong, QuietWire

OVERTIME_S = 600.0  # for which a text goes on after its lease where no coordinator is there to give another


class StreamState:
    """A stream as its verifier serves it.

    Attributes:
        session: id of its session; empty until Open has come.
        opened: whether its Open has been answered.
        goes_on: whether a Continue may still follow the last commit of a turn.
    """

    def __init__(self) -> None:
        self.session = ""
        self.epoch = 0
        self.opened = False
        self.goes_on = False

    def begin(self, frame: Open, rules: VerifierRules) -> None:
        self.session, self.epoch = frame.session, frame.epoch
        self.goes_on = frame.keep_s > 0 and rules.keep_s > 0

    def half_close(self) -> None:
        self.goes_on = False

    def ends_after(self, frame: CloudFrame) -> bool:
        """Note a frame that has been sent; return whether the stream ends with it."""
        self.opened |= isinstance(frame, Opened)
        last = isinstance(frame, Commit) and frame.finish is not None and not self.goes_on
        return last or isinstance(frame, Goaway)


class StreamOutbox(Outbox):
    """Frames from the engine's thread to one stream's task."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue: asyncio.Queue[CloudFrame | OutriderError] = asyncio.Queue()
        self._unread = 0
        self._counting = threading.Lock()
        self.taken = 0
        self.stream = StreamState()
        self.closed = False  # whether the stream has ended
        self.end_of_lease: asyncio.TimerHandle | None = None
        self.admitted: asyncio.Task[None] | None = None
        self.reader: asyncio.Task[None] | None = None
        self.quiet: QuietWire | None = None  # as its Open says
        self.meter: TextMeter | None = None  # if its API key has a limit

    def put(self, item: CloudFrame | OutriderError) -> None:
        with self._counting:  # several threads put
            self._unread += 1
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    def unread(self) -> int:
        """Return how many frames gRPC has not taken yet; it takes none while the client reads none."""
        return self._unread

    async def get(self) -> CloudFrame | OutriderError:
        return await self._queue.get()

    def answer(self, ping: Ping) -> None:
        """Answer a ping, unless the client reads no answers."""
        if self._unread <= MAX_UNREAD:
            self.put(Pong(ping.number, self.stream.epoch))

    def sent(self) -> None:
        """Note that gRPC has taken the last item."""
        with self._counting:
            self._unread -= 1
        self.taken += 1


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

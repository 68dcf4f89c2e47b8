"""One stream of a verifier: its state, its frames from the engine's thread, and what ends it from outside.

It is ended where its client leaves its frames unread, and where its lease has ended.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from outrider.cloud.serving.metering import TextMeter
from outrider.cloud.serving.slots import MAX_UNREAD, Outbox
from outrider.proto.errors import OutriderError, Unavailable
from outrider.proto.lease import LeaseClaim
from outrider.proto.plumbing.logs import about
from outrider.proto.rpc_errors import to_status
from outrider.proto.session import VerifierRules
from outrider.proto.types import CloudFrame, Commit, Goaway, Open, Opened, Ping, Pong

OVERTIME_S = 600.0  # for which a text goes on after its lease where no coordinator is there to give another

log = logging.getLogger(__name__)


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


class Stalls:
    """Ends streams whose clients leave their frames unread."""

    def __init__(self, stall_s: float, verifier: str, count: Callable[[OutriderError], None]) -> None:
        """Watch streams of the verifier of that name.

        Args:
            stall_s: time without a frame taken, in seconds.
            verifier: its name, for the log.
            count: counts the errors of ended streams.
        """
        self._stall_s = stall_s
        self._verifier = verifier
        self._count = count
        self._endings: set[asyncio.Task[None]] = set()

    async def watch(self, outbox: StreamOutbox, stream: asyncio.Task[Any], context: Any) -> None:
        """End a stream whose client has left its frames unread for too long.

        The stream's task is then stuck in a write that flow control holds back. It is cancelled, which frees the
        session now; the status is queued after that write, for a client that reads again and resumes.
        """
        taken, since = outbox.taken, time.monotonic()
        while True:
            await asyncio.sleep(self._stall_s / 4)
            if outbox.taken != taken or not outbox.unread():
                taken, since = outbox.taken, time.monotonic()
            elif time.monotonic() - since > self._stall_s:
                error = Unavailable("you left commits unread too long; resume")
                self._count(error)
                log.warning(
                    "the client left its commits unread for %g s; its stream is ended",
                    self._stall_s,
                    extra=about(outbox.stream.session, self._verifier, error),
                )
                status, message, metadata = to_status(error)
                ending = asyncio.create_task(context.abort(status, message, metadata))
                self._endings.add(ending)
                ending.add_done_callback(self._ended)
                stream.cancel()
                return

    def _ended(self, ending: asyncio.Task[None]) -> None:
        self._endings.discard(ending)
        if not ending.cancelled():
            ending.exception()  # abort always raises


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

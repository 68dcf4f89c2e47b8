"""A verifier whose process dies, freezes, hangs and drains: the shipped rules of sessions on a counted KV cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from outrider.bench.chaos.call import SimulatedCall
from outrider.bench.chaos.pages import CountedPages, toy_facts
from outrider.bench.chaos.target import EOS, VOCAB
from outrider.bench.chaos.world import Event, LocalClock, Violation, World
from outrider.cloud.admission import Admission
from outrider.cloud.batching import Batch, Batching, Share
from outrider.cloud.inbox import WaitingEvents
from outrider.cloud.local_source import NoSource
from outrider.cloud.session_events import SessionEvents
from outrider.cloud.slots import MAX_UNREAD, Outbox, Slot, Slots
from outrider.cloud.stream_state import StreamState
from outrider.proto.errors import InvalidArgument, OutriderError
from outrider.proto.lease import verify_lease
from outrider.proto.session import Verified, VerifierRules, VerifierSession
from outrider.proto.types import CloudFrame, EdgeFrame, Goaway, Open, Ping, Pong

SECRET = b"a secret of sixteen bytes or more"
MODEL = "toy"
TOKENIZER = "ab" * 32
CONTEXT = 96
IDLE_S = 0.5
MAX_WAITING = 400  # events of all sessions of a schedule; more would be a queue without bound
Watch = Callable[[str], None]
SERVER_S = 0.0002  # of the server's event loop, for one item


class ServedStream(Outbox):
    """One stream as a process serves it: the state that ships, without its socket."""

    def __init__(self, process: Process, key: int, call: SimulatedCall) -> None:
        self.state = StreamState()
        self._process = process
        self._key = key
        self._call = call
        self._items: list[CloudFrame | OutriderError] = []
        self._reads = True
        self._closed = False

    def put(self, item: CloudFrame | OutriderError) -> None:
        """Hand over a frame, or the error that ends the stream."""
        self._items.append(item)
        self._process.serve_later(SERVER_S, self._pump)

    def unread(self) -> int:
        """Return how many frames wait."""
        return len(self._items)

    def received(self, frame: EdgeFrame) -> None:
        """Take a frame from the edge, when the process runs."""
        self._process.serve(partial(self._take, frame))

    def cancelled(self) -> None:
        """End, since the edge has left or the connection is gone."""
        self._process.serve(self._finish)

    def _take(self, frame: EdgeFrame) -> None:
        if self._closed or not self._reads:
            return
        if self.state.session:
            if not isinstance(frame, Ping):
                self._process.post_frame(self._key, frame)
            elif self.unread() <= MAX_UNREAD:
                self.put(Pong(frame.number, self.state.epoch))
            return
        try:
            self._open(frame)
        except OutriderError as error:
            self._reads = False
            self.put(error)

    def _open(self, frame: EdgeFrame) -> None:
        process = self._process
        if not isinstance(frame, Open):
            raise InvalidArgument("must be the first frame of a stream", field="frame.open")
        self.state.begin(frame, process.rules)
        wall_s = process.clock.wall()
        claim = verify_lease(
            frame.lease,
            SECRET,
            verifier=process.rules.name,
            model=MODEL,
            session=frame.session,
            now_s=wall_s,
            epoch=frame.epoch,
            incarnation=process.incarnation,
        )
        process.post_open(self._key, frame, self)
        lasts_s = max(0.0, claim.expires_at_s - wall_s)
        process.clock.after(lasts_s, self.end_lease)

    def end_lease(self) -> None:
        """Let the lease run out now."""
        self._process.serve(self._end_lease)

    @property
    def has_ended(self) -> bool:
        """Whether the text has ended here."""
        slot = self._process.slots.get(self._key)
        return slot is not None and slot.session.finish is not None

    def _end_lease(self) -> None:
        if not self._closed:
            self._process.note("the lease of", self.state.session, "ends")
            self.put(Goaway("the lease has expired", epoch=self.state.epoch))

    def _pump(self) -> None:
        if self._closed:
            return
        item = self._items.pop(0)
        if isinstance(item, OutriderError):
            self._call.end(item)
            self._finish()
            return
        self._call.send_down(item)
        if self.state.ends_after(item):
            self._call.end(None)
            self._finish()

    def _finish(self) -> None:
        if not self._closed:
            self._closed = True
            self._process.forget(self._key)


class Process:
    """One process of a verifier: server and engine, both of which may stand still.

    Attributes:
        number: how many processes the verifier has had before.
        incarnation: name of this start.
        alive: whether it has not been killed or replaced.
        watch: called with the id of a session after its commit.
    """

    def __init__(
        self, world: World, name: str, number: int, clock: LocalClock, shape: tuple[int, int], watch: Watch
    ) -> None:
        pages, max_sessions = shape
        self.watch = watch
        self.number = number
        self.incarnation = f"start {number}"
        self.alive = True
        self.clock = clock
        self.rules = VerifierRules(
            f"{name}", MODEL, TOKENIZER, VOCAB, CONTEXT, frozenset({EOS}), max_drafts=4, max_credit=12, keep_s=6.0
        )
        self.streams: dict[int, ServedStream] = {}
        self.pages = CountedPages(pages, toy_facts(VOCAB, EOS, CONTEXT))
        self.slots = Slots(self.pages, name, lambda *_: None)
        self.admission = Admission(self.slots, self.rules, max_sessions, NoSource())
        self.max_sessions = max_sessions
        self.batching = Batching()
        self.events = SessionEvents(self.slots, self.admission, self.pages)
        self.waiting = WaitingEvents()
        self.frozen_until = 0.0
        self.hung_until = 0.0
        self._world = world
        self._held: list[Event] = []
        self._keys = 0
        self._busy = False
        self._alarm_at = math.inf

    def note(self, *what: object) -> None:
        """Add a line to the trace."""
        self._world.note(f"{self.rules.name}.{self.number}", *what)

    # --- the server ---

    def serve(self, event: Event) -> None:
        """Let the server do something as soon as the process runs; a dead one never does."""
        if not self.alive:
            return
        if self.is_frozen:
            self._held.append(event)
        else:
            event()

    def serve_later(self, seconds: float, event: Event) -> None:
        """Let the server do something after `seconds` of its clock."""
        self.clock.after(seconds, lambda: self.serve(event))

    def freeze(self, seconds: float) -> None:
        """Stand still for true `seconds`, as a stopped process does."""
        self.frozen_until = max(self.frozen_until, self._world.now + seconds)
        self._world.after(seconds, self._wake)

    @property
    def is_frozen(self) -> bool:
        """Whether the whole process stands still now."""
        return self._world.now < self.frozen_until

    def crowd(self, seconds: float) -> None:
        """Let others take every place for true `seconds`."""
        self.admission._max_sessions = 0
        self._world.after(seconds, self._disperse)

    def _disperse(self) -> None:
        self.admission._max_sessions = self.max_sessions

    def hang(self, seconds: float) -> None:
        """Let the engine's thread stand still for true `seconds`, while the server answers."""
        self.hung_until = max(self.hung_until, self._world.now + seconds)
        self._world.after(seconds, self._run)

    def _wake(self) -> None:
        if self.alive and self._world.now >= self.frozen_until:
            held, self._held = self._held, []
            for event in held:
                self.serve(event)
            self._run()

    def accept(self, call: SimulatedCall) -> ServedStream:
        """Serve another stream."""
        self._keys += 1
        stream = self.streams[self._keys] = ServedStream(self, self._keys, call)
        return stream

    def forget(self, key: int) -> None:
        """Free what a stream held that has ended."""
        del self.streams[key]
        self._post(partial(self.events.close, key), key)

    def post_open(self, key: int, frame: Open, outbox: Outbox) -> None:
        """Have the engine admit a session."""
        self._post(partial(self._admit, key, frame, outbox), key)

    def post_frame(self, key: int, frame: EdgeFrame) -> None:
        """Have the engine take a later frame of stream `key`."""
        self._post(partial(self._take_frame, key, frame, self.clock.monotonic()), key, frame)

    def drain(self) -> None:
        """Have the engine send all sessions elsewhere."""
        self._post(self.admission.drain)

    def stop(self) -> None:
        """End as a process that is told to: its sessions are sent elsewhere first."""
        self.events.stop()

    def report(self) -> dict[str, Any]:
        """Return what the coordinator is told."""
        return {
            "name": self.rules.name,
            "address": f"{self.rules.name}:{self.number}",
            "model": MODEL,
            "tokenizer_sha256": TOKENIZER,
            "state": "draining" if self.admission.draining else "ready",
            "sessions": self.slots.num_running if self.admission._max_sessions else self.max_sessions,
            "max_sessions": self.max_sessions,
            "kv_pages": self.pages.capacity.pages,
            "kv_pages_free": self.pages.capacity.free_pages,
            "incarnation": self.incarnation,
        }

    # --- the engine ---

    @property
    def stands_still(self) -> bool:
        """Whether the engine does nothing now."""
        return not self.alive or self._world.now < max(self.frozen_until, self.hung_until)

    def _post(self, event: Event, key: int | None = None, frame: EdgeFrame | None = None) -> None:
        self.waiting.add(event, key, frame)
        if len(self.waiting) > MAX_WAITING:
            raise Violation(f"{len(self.waiting)} events wait for the engine of {self.rules.name}")
        self._run()

    def _admit(self, key: int, frame: Open, outbox: Outbox) -> None:
        slot = self.events.admit(key, frame, outbox, None, "", self.clock.monotonic())
        if slot is not None:
            self.note("admits", frame.session, "with", len(frame.committed), "tokens")
            outbox.put(slot.session.opened())

    def _take_frame(self, key: int, frame: EdgeFrame, arrived: float) -> None:
        slot = self.events.expects(key, frame)
        if slot is not None:
            self.events.take(slot, frame, None, arrived, self.clock.monotonic())

    def _run(self) -> None:
        """Take the events that wait, then begin a step if one is due, as the engine's thread does."""
        if self._busy or self.stands_still:
            return
        while self.waiting:
            for event in self.waiting.take():
                event()
        now = self.clock.monotonic()
        self.slots.expire(now)
        self.slots.grow()
        self.slots.start_waiting()
        batch = self.batching.plan([slot for slot in self.slots.running() if not slot.backlogged], now)
        if batch.shares:
            self._busy = True
            seconds = 0.004 + 0.001 * batch.num_rows
            sessions = [share.slot.session for share in batch.shares]
            self.clock.after(seconds, partial(self._end_step, batch, sessions, now))
        elif len(self.slots):
            self._set_alarm(min(batch.wake_at, now + IDLE_S))

    def _set_alarm(self, at: float) -> None:
        if at < self._alarm_at:
            self._alarm_at = at
            self.clock.after(at - self.clock.monotonic(), partial(self._ring, at))

    def _ring(self, at: float) -> None:
        if at == self._alarm_at:
            self._alarm_at = math.inf
            self._run()

    def _end_step(self, batch: Batch[Slot], sessions: list[VerifierSession], began: float) -> None:
        if self.stands_still:
            if self.alive:
                until = max(self.frozen_until, self.hung_until)
                self._world.clock.at(until, partial(self._end_step, batch, sessions, began))
            return
        self._busy = False
        now = self.clock.monotonic()
        self.batching.measure(batch, now - began, self.slots.num_running)
        for event in self.waiting.take_drafts():
            event()
        for share, session in zip(batch.shares, sessions, strict=True):
            if self.slots.get(share.slot.key) is share.slot and share.slot.session is session:
                self._finish_share(share, now - began)
        self._run()

    def _finish_share(self, share: Share[Slot], verify_s: float) -> None:
        slot = share.slot
        self.pages.compute(slot.handle, share.num_rows)
        if share.block is None:
            return
        session = slot.session
        tokens = self._world.targets.of(session.sampling).after(session.transcript, share.block)
        commit = self.events.commit(slot, Verified(share.block, tokens, verify_s=verify_s), self.clock.monotonic())
        self._check_commit(slot, commit.start, len(commit.tokens))
        self.watch(session.id)

    def _check_commit(self, slot: Slot, start: int, count: int) -> None:
        """Fail where a commit is anything but an append, or a session holds more than its credit."""
        session = slot.session
        if start + count != len(session.transcript):
            raise Violation(f"{session.id}: a commit from {start} of {count} tokens ends no transcript")
        if len(session._next.received) > session._rules.max_credit:
            raise Violation(f"{session.id}: more unverified drafts than any credit")


class Verifier:
    """A verifier's host: one process after the other, each without what the last one held.

    Attributes:
        process: present process.
        former: processes that are gone, which must have left nothing behind.
    """

    def __init__(self, world: World, name: str, clock: LocalClock, pages: int, max_sessions: int, watch: Watch) -> None:
        """Run a process with `pages` KV pages and `max_sessions` places; `watch` sees each commit's session."""
        self.name = name
        self.clock = clock
        self._world = world
        self._shape, self._watch = (pages, max_sessions), watch
        self._calls: list[SimulatedCall] = []
        self.process = Process(world, name, 0, clock, self._shape, watch)
        self.is_up = True

    def accept(self, call: SimulatedCall) -> ServedStream | None:
        """Begin to serve a call, if a process listens."""
        if not self.is_up:
            return None
        self._calls = [each for each in self._calls if each.served is not None]
        self._calls.append(call)
        return self.process.accept(call)

    @property
    def calls(self) -> list[SimulatedCall]:
        """Calls that a process serves, as the network sees it."""
        return [call for call in self._calls if call.served is not None]

    def kill(self, restart_s: float, lose: Callable[[SimulatedCall], None]) -> None:
        """End the process at once, `lose` each of its calls, and start another after true `restart_s`."""
        if not self.is_up:
            return
        self.is_up = self.process.alive = False
        calls, self._calls = self.calls, []
        for call in calls:
            call.served = None
            lose(call)
        self._world.note(self.name, "is killed")
        self._world.after(restart_s, self._start)

    def _start(self) -> None:
        self.process = Process(self._world, self.name, self.process.number + 1, self.clock, self._shape, self._watch)
        self.is_up = True
        self._world.note(self.name, "is back")

"""A verifier whose process dies, freezes, hangs, fails and drains: the shipped rules of a server and of its health."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any

from outrider.cloud.serving.engine_health import VerifierHealth
from outrider.cloud.serving.heartbeat import EngineCondition, HealthRules
from outrider.cloud.serving.local_source import NoSource
from outrider.cloud.serving.metering import TextMeter, meter_of
from outrider.cloud.serving.slots import MAX_UNREAD, Outbox, Owner
from outrider.cloud.serving.stream_outbox import StreamState
from outrider.proto import codec
from outrider.proto.errors import InvalidArgument, OutriderError, Unavailable
from outrider.proto.lease import verify_lease
from outrider.proto.plumbing.access import Bucket, Meters
from outrider.proto.plumbing.loop_watch import LOOK_S
from outrider.proto.session.verifier import VerifierRules
from outrider.proto.types import (
    Branches,
    CloudFrame,
    Commit,
    Continue,
    Draft,
    EdgeFrame,
    Goaway,
    Open,
    Opened,
    Ping,
    Pong,
)
from research.chaos.chaos_engine import OwnDrafting, Shape, SimulatedEngine, Watch
from research.chaos.world import (
    CONTEXT,
    EOS,
    KEEPALIVE_S,
    MODEL,
    SECRET,
    TOKENIZER,
    VOCAB,
    Event,
    LocalClock,
    OneWay,
    Path,
    Violation,
    World,
)
from research.simulator.virtual_engine import shared_metrics

HEALTH = HealthRules(first_s=6.0, lost_s=6.0, forget_s=5.0)  # shorter than by default: schedules are short
HUNG_WITHIN_S = 40.0  # true time after which a hung process must be gone: its clock may be slow for a while
SICK_WITHIN_S = 4.0  # after which the coordinator must know: the poll, on a slow clock
RESTART_S = 0.5  # of a process that has ended by itself
FAILED_WITHIN_S = 1.0  # of a process that has failed, to end
SERVER_S = 0.0002  # of the server's event loop, for one item


class CountedBucket(Bucket):
    """A bucket that notes how many tokens are taken out of it."""

    spent = 0.0

    def spend(self, tokens: float, now_s: float) -> None:
        self.spent += tokens
        super().spend(tokens, now_s)


class CountedMeters(Meters):
    """The buckets of one process, and the tokens that its streams that have ended must have cost."""

    def __init__(self) -> None:
        super().__init__()
        self.due = 0

    def of(self, name: str, tokens_per_minute: int, now_s: float) -> Bucket:
        self._buckets.setdefault(name, CountedBucket(tokens_per_minute, now_s))
        return super().of(name, tokens_per_minute, now_s)

    def check(self, who: str) -> None:
        """Fail where keys have paid for more or less than their streams have cost, once all have ended."""
        spent = sum(bucket.spent for bucket in self._buckets.values() if isinstance(bucket, CountedBucket))
        if abs(spent - self.due) > 1e-6:
            raise Violation(f"{who} has charged {spent:g} tokens for {self.due}")


class StreamCost:
    """The cost of one stream: what its turns bring until they are read, then what was read, and what was generated."""

    def __init__(self) -> None:
        self.tokens = 0
        self._turns = 0
        self._brought: dict[int, int] = {}  # by turns that are not read yet
        self._read = 0

    def begin(self, frame: Open | Continue) -> None:
        brought = len(frame.prompt) + (len(frame.committed) if isinstance(frame, Open) else 0)
        self._brought[self._turns] = self._read = brought
        self._turns += 1
        self.tokens += brought

    def refuse(self) -> None:
        self.tokens = 0

    def commit(self, commit: Commit) -> None:
        self.tokens += len(commit.tokens)
        if commit.tokens and commit.turn in self._brought:
            more = commit.start - commit.cached_tokens - self._brought.pop(commit.turn)
            self.tokens += more
            self._read += more

    def check_stays(self, meter: TextMeter, now: float, who: str) -> None:
        """Fail where a text goes on though its key has spent more than what the text itself has read."""
        if (level := meter._bucket.level(now)) < -self._read:
            raise Violation(f"{who} goes on with {level:.1f} tokens of its key, having read {self._read}")


class SimulatedCall:
    """One call: frames arrive in order; an end that leaves is known to the other when the path lets it know.

    Attributes:
        served: the verifier's end; None: it is not or no longer there.
        silent: whether the connection drops everything without a word (half-open).
        copies: frames in each direction that will still come twice.
        strays: whether frames still come to an edge that has left.
    """

    def __init__(
        self,
        world: World,
        path: Path,
        received: Callable[[SimulatedCall, CloudFrame], None],
        broken: Callable[[SimulatedCall, OutriderError], None],
        server: Verifier,
        *,
        encoded: bool,
    ) -> None:
        """Call the server; `encoded` lets every frame pass through the codec."""
        self.edge_open = True
        self.served: ServedStream | None = None
        self.silent = False
        self.copies = 0
        self.strays = False
        self._world = world
        self._received, self._broken = received, broken
        self._up, self._down = OneWay(world, path), OneWay(world, path)
        self._encoded = encoded
        self._up.send(partial(self._connect, server))

    @property
    def num_under_way(self) -> int:
        return len(self._up) + len(self._down)

    # --- the edge's end ---

    def send_up(self, frame: EdgeFrame) -> None:
        data = codec.encode_edge_frame(frame) if self._encoded else b""
        self._up.send(partial(self._serve, codec.decode_edge_frame(data) if self._encoded else frame))
        if self.copies and isinstance(frame, Draft | Branches):
            self.copies -= 1
            again = partial(self._up.send, partial(self._serve, frame))
            self._world.after(self._world.rng.uniform(0, 0.1), again)

    def leave(self) -> None:
        """Close the edge's end; what is on its way to it is lost."""
        if self.edge_open:
            self.edge_open = False
            self._up.send(self._cancel)

    def break_edge(self, error: OutriderError) -> None:
        """Let the edge's end find that the connection is gone."""
        if self.edge_open:
            self.leave()
            self._broken(self, error)

    # --- the verifier's end ---

    def send_down(self, frame: CloudFrame) -> None:
        data = codec.encode_cloud_frame(frame) if self._encoded else b""
        self._down.send(partial(self._deliver, codec.decode_cloud_frame(data) if self._encoded else frame))
        if self.copies and isinstance(frame, Commit | Opened):
            self.copies -= 1
            again = partial(self._down.send, partial(self._deliver, frame))
            self._world.after(self._world.rng.uniform(0, 0.1), again)

    def end(self, error: OutriderError | None) -> None:
        """Close the verifier's end with a status, after the frames before; None: all is well."""
        self.served = None
        error = error or Unavailable("the verifier ended the stream before the text")
        self._down.send(partial(self._end_edge, error))

    def break_served(self) -> None:
        """Let the verifier's end find that the connection is gone."""
        served, self.served = self.served, None
        if served is not None:
            served.cancelled()

    # --- trouble ---

    def fall_silent(self) -> None:
        """Let the connection drop everything from now on; each end gives up after its keepalive."""
        self.silent = True
        rng = self._world.rng
        self._world.after(rng.uniform(*KEEPALIVE_S), partial(self.break_edge, Unavailable("the stream broke: silent")))
        self._world.after(rng.uniform(*KEEPALIVE_S), self.break_served)

    def reset(self) -> None:
        """Break the connection; both ends learn of it, each in its own time."""
        self._up.send(self.break_served)
        self._down.send(partial(self.break_edge, Unavailable("the stream broke: reset")))

    def lose_server(self) -> None:
        """Let the edge learn that the process at the other end is gone."""
        self._down.send(partial(self.break_edge, Unavailable("the stream broke: connection reset")))

    def lose_edge(self) -> None:
        """Break the edge's end at once, while the other goes on until its keepalive and what it sends comes astray."""
        self.edge_open, silence_s = False, self._world.rng.uniform(*KEEPALIVE_S)
        self.strays = True
        self._world.after(silence_s, self.break_served)
        self._broken(self, Unavailable("the stream broke: no route"))

    # --- arrivals ---

    def _connect(self, server: Verifier) -> None:
        if self.silent:
            return
        self.served = server.accept(self)
        if self.served is None:
            self._down.send(partial(self._end_edge, Unavailable("the stream broke: nobody listens")))

    def _serve(self, frame: EdgeFrame) -> None:
        if not self.silent and self.served is not None:
            self.served.received(frame)

    def _cancel(self) -> None:
        if not self.silent:
            self.break_served()

    def _deliver(self, frame: CloudFrame) -> None:
        if not self.silent and (self.edge_open or self.strays):
            self._received(self, frame)

    def _end_edge(self, error: OutriderError) -> None:
        if not self.silent and self.edge_open:
            self.edge_open = False
            self._broken(self, error)


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
        self._meter: TextMeter | None = None
        self._cost = StreamCost()

    def put(self, item: CloudFrame | OutriderError) -> None:
        if isinstance(item, Opened):
            self._process.note("admits", self.state.session)
        self._items.append(item)
        self._process.serve_later(SERVER_S, self._pump)

    def unread(self) -> int:
        return len(self._items)

    def received(self, frame: EdgeFrame) -> None:
        self._process.serve(partial(self._take, frame))

    def cancelled(self) -> None:
        """End, since the edge has left or the connection is gone."""
        self._process.serve(self._finish)

    def _take(self, frame: EdgeFrame) -> None:
        if self._closed or not self._reads:
            return
        try:
            if not self.state.session:
                self._open(frame)
            elif not isinstance(frame, Ping):
                self._go_on(frame)
            elif self.unread() <= MAX_UNREAD:
                self.put(Pong(frame.number, self.state.epoch))
        except OutriderError as error:
            self._reads = False
            self.put(error)

    def _open(self, frame: EdgeFrame) -> None:
        process = self._process
        if not isinstance(frame, Open):
            raise InvalidArgument("must be the first frame of a stream", field="frame.open")
        self.state.begin(frame, process.rules)
        process.health.check()
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
        self._meter = meter_of(process.meters, claim, frame, process.clock.monotonic)
        if self._meter is not None:
            self._cost.begin(frame)
        process.engine.post_open(self._key, frame, self, owner=Owner(claim.key, claim.max_sessions))
        lasts_s = max(0.0, claim.expires_at_s - wall_s)
        process.clock.after(lasts_s, self.end_lease)

    def _go_on(self, frame: EdgeFrame) -> None:
        if isinstance(frame, Continue) and self._meter is not None:
            self._meter.begin_turn(len(frame.prompt))
            self._cost.begin(frame)
        self._process.engine.post_frame(self._key, frame, lambda: None)

    def end_lease(self) -> None:
        self._process.serve(self._end_lease)

    @property
    def has_ended(self) -> bool:
        slot = self._process.engine.sessions.get(self._key)
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
            if self._meter is not None and not self.state.opened:
                self._meter.give_back()
                self._cost.refuse()
            self._call.end(item)
            self._finish()
            return
        self._call.send_down(item)
        if self._meter is not None and isinstance(item, Commit):
            self._charge(self._meter, item)
        if self.state.ends_after(item):
            self._call.end(None)
            self._finish()

    def _charge(self, meter: TextMeter, commit: Commit) -> None:
        goaway = meter.charge(commit, self.state.epoch)
        if goaway is not None:
            self.put(goaway)
        self._cost.commit(commit)
        if not any(isinstance(item, Goaway) for item in self._items):
            self._cost.check_stays(meter, self._process.clock.monotonic(), self.state.session)

    def _finish(self) -> None:
        if not self._closed:
            self._closed = True
            self._process.meters.due += self._cost.tokens
            self._process.forget(self._key)


class SilentHealthService:
    """gRPC's health service, which nobody asks here."""

    async def set(self, service: str, status: Any) -> None:
        """Do nothing."""


class Process:
    """One process of a verifier: server and engine, both of which may stand still.

    Attributes:
        number: how many processes the verifier has had before.
        alive: whether it has not been killed or replaced.
        own: its own drafter; None: it has none.
        sick_since: true time since which its health is bad; infinite: it is well.
    """

    def __init__(
        self,
        world: World,
        name: str,
        number: int,
        clock: LocalClock,
        shape: Shape,
        watch: Watch,
        on_failure: Callable[[], None],
    ) -> None:
        self.number = number
        self.incarnation = f"start {number}"
        self.alive = True
        self.clock = clock
        self.rules = VerifierRules(
            name,
            MODEL,
            TOKENIZER,
            VOCAB,
            CONTEXT,
            frozenset({EOS}),
            max_drafts=4,
            max_credit=12,
            keep_s=6.0,
            trees=True,
        )
        self.max_sessions = shape.max_sessions
        self.streams: dict[int, ServedStream] = {}
        self.meters = CountedMeters()
        self.frozen_until = 0.0
        self.hung_until = 0.0
        self._has_failed = False
        self.num_freezes = 0
        self.sick_since = math.inf
        self._world = world
        self._held: list[Event] = []
        self._keys = 0
        self._on_failure = on_failure
        own = (
            OwnDrafting(world, clock, self.serve_later, shape.right, shape.threads) if shape.right is not None else None
        )
        self.own = own
        source = own.source if own is not None else NoSource()
        self.engine = SimulatedEngine(
            world, clock, self.rules, shape, source, watch, self._watch_engine, self._still_until, self._engine_failed
        )
        self.health = VerifierHealth(
            self.engine.heart, shared_metrics(), SilentHealthService(), name, self._fail, HEALTH, clock.monotonic
        )
        self._watched = False

    def note(self, *what: object) -> None:
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
        self.num_freezes += 1
        self._world.after(seconds, self._wake)

    @property
    def is_frozen(self) -> bool:
        return self._world.now < self.frozen_until

    def hang(self, seconds: float) -> None:
        """Let the engine's thread stand still for true `seconds`, while the server answers."""
        self.hung_until = max(self.hung_until, self._world.now + seconds)
        self._world.after(seconds, self.engine.run)
        self._watch_engine()
        if seconds > HUNG_WITHIN_S and not self.is_frozen:
            self._world.after(HUNG_WITHIN_S, partial(self._check_gone, self.num_freezes))

    def _check_gone(self, num_freezes: int) -> None:
        if self.alive and self.num_freezes == num_freezes:
            raise Violation(f"{self.rules.name} has hung for {HUNG_WITHIN_S:g} s, and its process goes on")

    def _wake(self) -> None:
        if self.alive and self._world.now >= self.frozen_until:
            held, self._held = self._held, []
            for event in held:
                self.serve(event)
            self.engine.run()

    def accept(self, call: SimulatedCall) -> ServedStream:
        self._keys += 1
        stream = self.streams[self._keys] = ServedStream(self, self._keys, call)
        self.health.outboxes.add(stream)
        return stream

    def forget(self, key: int) -> None:
        self.health.outboxes.discard(self.streams.pop(key))
        self.engine.post_close(key)

    def report(self) -> dict[str, Any]:
        engine = self.engine
        return {
            "name": self.rules.name,
            "address": f"{self.rules.name}:{self.number}",
            "model": MODEL,
            "tokenizer_sha256": TOKENIZER,
            "state": self.health.state(engine.sessions),
            "sessions": engine.sessions.num_running if engine.sessions.max_sessions else self.max_sessions,
            "max_sessions": self.max_sessions,
            "kv_pages": engine.pages.capacity.pages,
            "kv_pages_free": engine.pages.capacity.free_pages,
            "incarnation": self.incarnation,
            "admitted": dict(engine.sessions.admitted),
        }

    # --- its health ---

    def _still_until(self) -> float:
        """Return the true time until which the engine does nothing."""
        return max(self.frozen_until, self.hung_until) if self.alive else math.inf

    def _watch_engine(self) -> None:
        """Look at the engine every so often; while it has nothing to do that would change nothing."""
        if not self._watched:
            self._watched = True
            self.serve_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._watched = False
        self.engine.idle()
        _run(self.health.look())
        bad = self.health.condition is not EngineCondition.WELL or self.engine.failed
        self.sick_since = min(self.sick_since, self._world.now) if bad else math.inf
        if not (self.is_well and self.engine.is_idle):
            self._watch_engine()

    @property
    def is_well(self) -> bool:
        return self.sick_since == math.inf

    def check_lease(self) -> None:
        """Fail where a coordinator that can reach it gives it a session though it has been sick for long."""
        if self._world.now - self.sick_since > SICK_WITHIN_S and not self.is_frozen:
            raise Violation(f"{self.rules.name} gets a lease though it is {self.health.condition.value}")

    def _engine_failed(self) -> None:
        self.note("fails")
        self._has_failed = True
        self.serve_later(0.0, lambda: _run(self.health.fail()))

    def _fail(self) -> None:
        """End the process, since its engine has failed; its sessions must know by then."""
        self.note("ends, since its engine is", self.health.condition.value)
        self.serve_later(self._world.rng.uniform(0.1, FAILED_WITHIN_S), self._end_failed)

    def _end_failed(self) -> None:
        left = [stream.state.session for stream in self.streams.values() if stream.state.session]
        # One that opens while it hangs too, or stands still and ends as it goes on, hears nothing more.
        still_too = self._world.now < self.hung_until or self._world.now == self.frozen_until
        if left and not (self._has_failed and still_too):
            raise Violation(f"{self.rules.name} has failed, and does not tell {left}")
        self._on_failure()


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine that waits for nothing."""
    with suppress(StopIteration):
        work.send(None)


class Verifier:
    """A verifier's host: one process after the other, each without what the last one held."""

    def __init__(self, world: World, name: str, clock: LocalClock, shape: Shape, watch: Watch) -> None:
        """Run a process of this size; `watch` sees each commit's session."""
        self.name = name
        self.clock = clock
        self._world = world
        self._shape, self._watch = shape, watch
        self._calls: list[SimulatedCall] = []
        self.process = self._new(0)
        self.is_up = True

    def _new(self, number: int) -> Process:
        return Process(self._world, self.name, number, self.clock, self._shape, self._watch, self._restart)

    def _restart(self) -> None:
        self.kill(RESTART_S, SimulatedCall.lose_server)

    def accept(self, call: SimulatedCall) -> ServedStream | None:
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
        self.process = self._new(self.process.number + 1)
        self.is_up = True
        self._world.note(self.name, "is back")

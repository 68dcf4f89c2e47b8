"""The guard of an edge's stream: the shipped rules of silence and suspicion, on the edge's own clock."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from outrider.edge.link.silence_guard import ANSWER_WITHIN_S
from outrider.proto.errors import OutriderError
from outrider.proto.policy.suspicion import AnswerLaw, ReopenBudget, SilenceRules
from outrider.proto.session.silence import SilenceWatch, Silent
from outrider.proto.types import CloudFrame, Lease, LeaseRequest, Ping
from research.chaos.chaos_verifier import Verifier
from research.chaos.coordinator import CoordinatorCalls
from research.chaos.world import LocalClock, OneWay, Path, World


class StreamGuard:
    """The guard of one session's streams, one after the other."""

    def __init__(
        self,
        world: World,
        clock: LocalClock,
        coordinator: CoordinatorCalls,
        verifiers: dict[str, tuple[Verifier, Path]],
        send: Callable[[Ping], None],
        leave: Callable[[Lease], None],
    ) -> None:
        """Send pings by `send`, and `leave` a silent verifier for the one of another lease."""
        self._world = world
        self._clock = clock
        self._coordinator = coordinator
        self._verifiers = verifiers
        self._send = send
        self._leave = leave
        self._law, self._rules, self._budget = AnswerLaw(), SilenceRules(), ReopenBudget()
        self._watch: SilenceWatch | None = None
        self._idle = False
        self._verifier = ""
        self._opened_at = 0.0
        self._usual_s: Callable[[], float] = lambda: 0.0
        self._request: Callable[[str], LeaseRequest] | None = None

    def begin(self, verifier: str, usual_s: Callable[[], float], request: Callable[[str], LeaseRequest]) -> None:
        """Guard a stream to `verifier`, just opened; `request` asks for another, and `usual_s` is the round trip."""
        self._opened_at = self._clock.monotonic()
        self._verifier, self._usual_s, self._request = verifier, usual_s, request
        self._idle = False
        watch = self._watch = SilenceWatch(self._law, self._rules, self._opened_at)
        self._look_later(watch)

    def end(self) -> None:
        """Guard nothing: the stream is left."""
        self._watch = None

    def hear(self, frame: CloudFrame) -> None:
        """Note a frame of the stream."""
        if self._watch is not None:
            self._watch.hear(frame, self._clock.monotonic())

    def rest(self) -> None:
        """Watch no more until `resume`: no text runs."""
        self._idle = True

    def resume(self) -> None:
        """Watch again, since a turn begins."""
        if self._idle and self._watch is not None:
            self._idle = False
            self._watch.resume(self._clock.monotonic())
            self._look_later(self._watch)

    def _look_later(self, watch: SilenceWatch) -> None:
        self._clock.after(watch.next_look - self._clock.monotonic(), partial(self._look, watch, watch.next_look))

    def _look(self, watch: SilenceWatch, planned: float) -> None:
        if watch is not self._watch or self._idle or planned != watch.next_look:
            return
        word = watch.look(self._clock.monotonic(), self._usual_s())
        if isinstance(word, Silent):
            self._find_another(watch, word)
            return
        if word is not None:
            self._send(word)
        self._look_later(watch)

    def _find_another(self, watch: SilenceWatch, word: Silent) -> None:
        """Leave the stream for a verifier that answers now, or look again some time later."""
        over = False

        def settle(found: Lease | None) -> None:
            nonlocal over
            if over or watch is not self._watch:
                return
            over, now = True, self._clock.monotonic()
            if found is not None and watch.silent and not self._idle:
                self._budget.take(self._verifier, self._opened_at, now)
                self._world.counts["left for silence"] += 1
                self._leave(found)
            else:
                watch.postpone(now)
                if not self._idle:
                    self._look_later(watch)

        def granted(result: Lease | OutriderError) -> None:
            if isinstance(result, OutriderError):
                settle(None)
            else:
                self._knock(result, settle)

        if self._request is None or not self._budget.allows(self._verifier, self._opened_at, self._clock.monotonic()):
            settle(None)
            return
        self._clock.after(max(ANSWER_WITHIN_S, word.bound_s), partial(settle, None))
        self._coordinator.lease(self._request(self._verifier), granted)

    def _knock(self, lease: Lease, settle: Callable[[Lease | None], None]) -> None:
        """Connect to the verifier of a lease, which answers if it runs and can be reached."""
        verifier, path = self._verifiers[lease.verifier]

        def answer() -> None:
            if verifier.is_up:
                verifier.process.serve(lambda: OneWay(self._world, path).send(partial(settle, lease)))

        OneWay(self._world, path).send(answer)

"""Effects of frames, steps and ends of streams on a verifier's sessions: rules without thread, clock or target.

The engine's thread and the simulators run them; the time of each event is an argument.
"""

from __future__ import annotations

from collections.abc import Callable

from outrider.cloud.grammar.grammar import GrammarMatcher
from outrider.cloud.serving.admission import Admission, verifier_failed
from outrider.cloud.serving.slots import KeyLimit, Outbox, Slot, Slots
from outrider.cloud.serving.stream_state import expects, pass_frame
from outrider.cloud.target.backend import Backend
from outrider.proto.errors import OutriderError, Unavailable
from outrider.proto.session import Verified
from outrider.proto.types import Commit, Continue, EdgeFrame, Open, Report, token_ids


class SessionEvents:
    """Passes events to the session machines of one verifier, and their answers to the outboxes."""

    def __init__(
        self, slots: Slots, admission: Admission, backend: Backend, count: Callable[[Commit], None] = lambda _: None
    ) -> None:
        """Serve the sessions in `slots`; `count` sees every commit before its edge can."""
        self._slots = slots
        self._admission = admission
        self._backend = backend
        self._count = count

    def admit(
        self,
        key: int,
        frame: Open,
        outbox: Outbox,
        matcher: GrammarMatcher | None,
        isolation: str,
        now: float,
        limit: KeyLimit | None = None,
    ) -> Slot | None:
        """Give the session of stream `key` a slot, which has yet to be answered; None: its edge is told why not."""
        try:
            return self._admission.admit(key, frame, outbox, matcher, isolation, now, limit)
        except OutriderError as error:
            outbox.put(error)
            return None

    def expects(self, key: int, frame: EdgeFrame) -> Slot | None:
        """Return the slot that takes a later frame of stream `key`; None: its session is gone or has ended."""
        slot = self._slots.get(key)
        return slot if slot is not None and expects(slot.session, frame) else None

    def take(self, slot: Slot, frame: EdgeFrame, matcher: GrammarMatcher | None, arrived: float, now: float) -> None:
        """Pass a frame that arrived at `arrived` to its session, or end the session for it."""
        try:
            if isinstance(frame, Continue):
                self._admission.resume(slot, frame, matcher, arrived)
            elif (commit := pass_frame(slot.session, frame, arrived)) is not None:
                self._send(slot, commit, now)
        except OutriderError as error:
            self._slots.fail(slot, error)

    def commit(self, slot: Slot, verified: Verified, now: float) -> Commit:
        """Make text of a step's result, send it, and return it."""
        slot.session.credit = self._admission.credit
        commit = slot.session.on_verified(verified, now)
        if slot.matcher is not None:
            slot.matcher.advance(token_ids(commit.tokens))
        slot.forget_drafts(self._backend)
        slot.ready_since = now
        self._send(slot, commit, now)
        return commit

    def close(self, key: int) -> None:
        """Free what `key` held: its stream is gone."""
        if slot := self._slots.get(key):
            self._slots.release(slot)

    def half_close(self, key: int) -> None:
        """Expect nothing more on the stream of `key`; a text that runs goes on to its end."""
        if slot := self._slots.get(key):
            slot.session.on_report(Report(drafting=False))
            if self._slots.is_parked(slot):
                self._slots.evict(slot, "its edge has closed the stream")

    def give_up(self) -> None:
        """Send every session elsewhere, and admit no more: no step succeeds here."""
        self._admission.failed = True
        self._slots.fail_all(verifier_failed)

    def stop(self) -> None:
        """Send every session elsewhere, since the verifier ends."""
        for slot in self._slots:
            slot.outbox.put(Unavailable("the verifier has stopped; resume elsewhere", retry_after_s=0.1))

    def _send(self, slot: Slot, commit: Commit, now: float) -> None:
        self._count(commit)
        slot.outbox.put(commit)
        if commit.finish is not None:
            self._slots.park(slot, now)

"""The sessions of a verifier: which are admitted, and what frames, steps and the ends of streams do to them.

Rules without thread, clock or target, which the engine and the tests run; the time of each event is an argument.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from outrider.cloud.grammar.grammar import GrammarMatcher
from outrider.cloud.serving.batching import credit_of
from outrider.cloud.serving.local_source import NoSource
from outrider.cloud.serving.slots import KeyLimit, Outbox, Slot, Slots, key_name
from outrider.cloud.serving.stream_state import expects, pass_frame
from outrider.cloud.target.backend import Backend
from outrider.proto.errors import Fenced, Internal, OutriderError, ResourceExhausted, Unavailable
from outrider.proto.lease import text_name
from outrider.proto.session.verifier import Verified, VerifierRules, VerifierSession
from outrider.proto.types import Commit, Continue, EdgeFrame, Goaway, Open, Report, Sampling, token_ids

MAX_ADMITTED = 256


class Sessions:
    """Admits sessions while there are slots, and passes events to their machines, and the answers to their outboxes.

    Attributes:
        draining: whether sessions are being sent elsewhere.
        failed: whether no step succeeds here any more.
        admitted: epochs of the newest `MAX_ADMITTED` texts that got a slot, by name, for the coordinator's account.
    """

    def __init__(
        self,
        slots: Slots,
        backend: Backend,
        rules: VerifierRules,
        max_sessions: int,
        source: NoSource,
        count: Callable[[Commit], None] = lambda _: None,
    ) -> None:
        """Serve the sessions in `slots`; `count` sees every commit before its edge can."""
        self.draining = False
        self.failed = False
        self.admitted: dict[str, int] = {}
        self._slots = slots
        self._rules = rules
        self._max_sessions = max_sessions
        self._source = source
        self._backend = backend
        self._count = count

    @property
    def credit(self) -> int:
        """Unverified tokens that each session may have in flight."""
        return credit_of(self._rules, self._slots.num_running)

    def admit(
        self,
        key: int,
        frame: Open,
        outbox: Outbox,
        matcher: GrammarMatcher | None,
        isolation: str,
        now: float,
        limit: KeyLimit | None = None,
    ) -> bool:
        """Give the session of a new stream a slot and tell its edge, or tell it why there is none.

        Those of one `isolation` share KV pages; `limit` is that of its API key. Return whether it has a slot.
        """
        try:
            session = self._new_session(frame, matcher, now, limit)
        except OutriderError as error:
            outbox.put(error)
            return False
        slot = Slot(key, session, outbox, now, isolation, limit, matcher=matcher)
        self._slots.open(slot)
        self._note_admitted(slot)
        outbox.put(session.opened())
        return True

    def _new_session(
        self, frame: Open, matcher: GrammarMatcher | None, now: float, limit: KeyLimit | None
    ) -> VerifierSession:
        """Return a session for which there is a slot.

        Raises:
            OutriderError: the verifier drains or is full, a later stream has the session, the API key has no session
                left, or the session's own errors.
        """
        _check_matcher(matcher, frame.sampling)
        if self.failed:
            raise verifier_failed()
        if self.draining:
            raise Unavailable("the verifier is draining; ask the coordinator for another", retry_after_s=0.1)
        session = VerifierSession(frame, self._rules, now, self._source.here)
        # Another key's session is another one, whatever its name: edges choose names, and a coordinator signs any.
        name = text_name(key_name(limit), frame.session)
        others = [slot for slot in self._slots if _text_name(slot) == name]
        if any(other.session.epoch > session.epoch for other in others):
            raise Fenced("is older than that of the stream that has the session", field="open.epoch")
        for other in others:
            # Its edge lost the old stream, and this end has not noticed yet.
            self._slots.fail(other, Unavailable("the session goes on in another stream"))
        self._check_limit(limit)
        if len(self._slots) >= self._max_sessions:
            self._slots.evict_longest_idle("its place is needed")
        if len(self._slots) >= self._max_sessions:
            raise ResourceExhausted(f"all {self._max_sessions} sessions are taken; try again later", retry_after_s=1.0)
        session.credit = self.credit
        return session

    def _note_admitted(self, slot: Slot) -> None:
        name = _text_name(slot)
        self.admitted.pop(name, None)
        self.admitted[name] = slot.session.epoch
        if len(self.admitted) > MAX_ADMITTED:
            del self.admitted[next(iter(self.admitted))]

    def expecting(self, key: int, frame: EdgeFrame) -> Slot | None:
        """Return the slot that takes a later frame of stream `key`; None: its session is gone or has ended."""
        slot = self._slots.get(key)
        return slot if slot is not None and expects(slot.session, frame) else None

    def take(self, slot: Slot, frame: EdgeFrame, matcher: GrammarMatcher | None, arrived: float, now: float) -> None:
        """Pass a frame that arrived at `arrived` to its session, or end the session for it."""
        try:
            if isinstance(frame, Continue):
                self._resume(slot, frame, matcher, arrived)
            elif (commit := pass_frame(slot.session, frame, arrived)) is not None:
                self._send(slot, commit, now)
        except OutriderError as error:
            self._slots.fail(slot, error)

    def commit(self, slot: Slot, verified: Verified, now: float) -> Commit:
        """Make text of a step's result, send it, and return it."""
        slot.session.credit = self.credit
        commit = slot.session.on_verified(verified, now)
        if slot.matcher is not None:
            slot.matcher.advance(token_ids(commit.tokens))
        slot.forget_drafts(self._backend)
        slot.ready_since = now
        self._send(slot, commit, now)
        return commit

    def _send(self, slot: Slot, commit: Commit, now: float) -> None:
        self._count(commit)
        slot.outbox.put(commit)
        if commit.finish is not None:
            self._slots.park(slot, now)

    def _resume(self, slot: Slot, frame: Continue, matcher: GrammarMatcher | None, now: float) -> None:
        """Begin the next turn of a parked session; raise its own errors, or that its API key has no session left."""
        if slot.session.finish is not None:
            self._check_limit(slot.limit)
        session = slot.session.continued(frame, now)
        _check_matcher(matcher, session.sampling)
        self._slots.resume(slot, session, matcher, now)

    def _check_limit(self, limit: KeyLimit | None) -> None:
        """Raise `ResourceExhausted` where as many texts of an API key go on as it may have.

        Counted here, a key's place lasts as long as its text, whatever is reported to the coordinator.
        """
        if limit is None or not limit.max_sessions:
            return
        texts = sum(slot.limit is not None and slot.limit.key == limit.key for slot in self._slots.unfinished())
        if texts >= limit.max_sessions:
            raise ResourceExhausted(
                f"key {limit.key!r} has {texts} sessions running, which is all it may have; wait for one to end",
                field="api_key",
                retry_after_s=1.0,
            )

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

    def send_away(self, texts: Collection[str]) -> None:
        """End those of the texts that go on; they may return with another lease, where they get one.

        They go by `text_name`; coordinators of older releases name the session alone.
        """
        for slot in self._slots.unfinished():
            if _text_name(slot) in texts or slot.session.id in texts:
                self._slots.fail(slot, Unavailable("the API key has no place for this text; ask for another lease"))

    def drain(self) -> None:
        """Send all sessions elsewhere and admit no more."""
        self.draining = True
        self._slots.evict_all("the verifier is draining")
        for slot in self._slots.unfinished():
            slot.outbox.put(Goaway("the verifier is draining", retry_after_s=0.0, epoch=slot.session.epoch))

    def give_up(self) -> None:
        """Send every session elsewhere, and admit no more: no step succeeds here."""
        self.failed = True
        self._slots.fail_all(verifier_failed)

    def stop(self) -> None:
        """Send every session elsewhere, since the verifier ends."""
        for slot in self._slots:
            slot.outbox.put(Unavailable("the verifier has stopped; resume elsewhere", retry_after_s=0.1))


def _text_name(slot: Slot) -> str:
    return text_name(slot.key_name, slot.session.id)


def _check_matcher(matcher: GrammarMatcher | None, sampling: Sampling) -> None:
    """Refuse a grammar without the matcher that enforces it: the text would ignore it."""
    if matcher is None and sampling.grammar is not None:
        raise Internal("came without its matcher", field="sampling.grammar")


def verifier_failed() -> Unavailable:
    """Return the error of sessions that are at a failed verifier, or come to it."""
    return Unavailable("the verifier has failed; resume elsewhere", retry_after_s=0.1)

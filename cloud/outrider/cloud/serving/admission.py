"""Admission of sessions to the slots of a verifier, and their credit of unverified tokens."""

from __future__ import annotations

from collections.abc import Collection

from outrider.cloud.grammar.grammar import GrammarMatcher
from outrider.cloud.serving.batching import credit_of
from outrider.cloud.serving.local_source import NoSource
from outrider.cloud.serving.slots import KeyLimit, Outbox, Slot, Slots, key_name
from outrider.proto.errors import Fenced, Internal, ResourceExhausted, Unavailable
from outrider.proto.lease import text_name
from outrider.proto.session import VerifierRules, VerifierSession
from outrider.proto.types import Continue, Goaway, Open, Sampling

MAX_ADMITTED = 256


class Admission:
    """The rule that admits sessions while there are slots and the verifier neither drains nor has failed.

    Attributes:
        draining: whether sessions are being sent elsewhere.
        failed: whether no step succeeds here any more.
        admitted: epochs of the newest `MAX_ADMITTED` texts that got a slot, by name, for the coordinator's account.
    """

    def __init__(self, slots: Slots, rules: VerifierRules, max_sessions: int, source: NoSource) -> None:
        self.draining = False
        self.failed = False
        self.admitted: dict[str, int] = {}
        self._slots = slots
        self._rules = rules
        self._max_sessions = max_sessions
        self._source = source

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
    ) -> Slot:
        """Give the session of a new stream a slot; those of one `isolation` share KV pages; `limit` is its API key's.

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
        slot = Slot(key, session, outbox, now, isolation, limit, matcher=matcher)
        self._slots.open(slot)
        self._note_admitted(slot)
        return slot

    def _note_admitted(self, slot: Slot) -> None:
        name = _text_name(slot)
        self.admitted.pop(name, None)
        self.admitted[name] = slot.session.epoch
        if len(self.admitted) > MAX_ADMITTED:
            del self.admitted[next(iter(self.admitted))]

    def resume(self, slot: Slot, frame: Continue, matcher: GrammarMatcher | None, now: float) -> None:
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


def _text_name(slot: Slot) -> str:
    return text_name(slot.key_name, slot.session.id)


def _check_matcher(matcher: GrammarMatcher | None, sampling: Sampling) -> None:
    """Refuse a grammar without the matcher that enforces it: the text would ignore it."""
    if matcher is None and sampling.grammar is not None:
        raise Internal("came without its matcher", field="sampling.grammar")


def verifier_failed() -> Unavailable:
    """Return the error of sessions that are at a failed verifier, or come to it."""
    return Unavailable("the verifier has failed; resume elsewhere", retry_after_s=0.1)

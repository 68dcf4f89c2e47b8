"""The sessions of a verifier and their KV pages: who is admitted, and what frames, steps and the ends of streams do.

Rules without thread or clock, which the engine and the tests run; the time of each event is an argument. Only sessions
whose text goes on hold pages. Those that wait for their next turn leave theirs to the backend, which finds them again
as long as nobody needs the room.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from outrider.cloud.grammar.grammar import Allowed, GrammarMatcher
from outrider.cloud.serving.batching import Share, credit_of
from outrider.cloud.serving.slots import NO_HANDLE, Outbox, Owner, Slot
from outrider.cloud.target.backend import Backend
from outrider.proto.errors import Fenced, Internal, InvalidArgument, OutriderError, ResourceExhausted, Unavailable
from outrider.proto.lease import text_name
from outrider.proto.plumbing.logs import about
from outrider.proto.session.both_ends import DraftingHere
from outrider.proto.session.service_record import ServiceRecord
from outrider.proto.session.verifier import Verified, VerifierRules, VerifierSession
from outrider.proto.types import (
    BlockBranch,
    Branches,
    Cancel,
    Commit,
    Continue,
    Draft,
    DraftToken,
    EdgeFrame,
    Goaway,
    Open,
    Report,
    Sampling,
    class_of,
    token_ids,
)

MAX_ADMITTED = 256
AHEAD = 64  # positions for which a running session has pages beyond those that its next step can fill
MASKS_WITHIN_S = 0.005  # a session whose grammar takes longer to say what is allowed misses the step

log = logging.getLogger(__name__)


class Sessions:
    """All sessions by the key of their stream, those whose turn began first in front.

    Attributes:
        draining: whether sessions are being sent elsewhere.
        failed: whether no step succeeds here any more.
        admitted: epochs of the newest `MAX_ADMITTED` texts that got a slot, by name, for the coordinator's account.
        here: the verifier's own drafter as new sessions see it; None: there is none, or it is broken.
    """

    def __init__(
        self,
        backend: Backend,
        rules: VerifierRules,
        max_sessions: int,
        count: Callable[[Commit], None] = lambda _: None,
        count_cached: Callable[[int, int], None] = lambda *_: None,
        count_service: Callable[[ServiceRecord], None] = lambda _: None,
    ) -> None:
        """Serve at most `max_sessions` sessions with the pages of `backend`.

        `count` sees every commit before its edge can. `count_cached` sees the length of a transcript that begins to be
        computed, and how much of it is cached. `count_service` sees what became of an ended text's service.
        """
        self.draining = False
        self.failed = False
        self.admitted: dict[str, int] = {}
        self.here: DraftingHere | None = None
        self.backend = backend
        self.rules = rules
        self.max_sessions = max_sessions
        self._count = count
        self._count_cached = count_cached
        self._count_service = count_service
        self._by_key: dict[int, Slot] = {}
        self._parked: dict[Slot, float] = {}  # waiting for their next turn, until when; longest idle first

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Slot]:
        return iter(list(self._by_key.values()))

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    @property
    def num_running(self) -> int:
        return len(self._by_key) - len(self._parked)

    @property
    def credit(self) -> int:
        return credit_of(self.rules, self.num_running)

    def get(self, key: int) -> Slot | None:
        return self._by_key.get(key)

    def unfinished(self) -> list[Slot]:
        return [slot for slot in self._by_key.values() if slot.session.finish is None]

    def running(self) -> list[Slot]:
        """Return the slots whose text goes on and that have KV pages, in order."""
        return [slot for slot in self.unfinished() if not slot.waits_for_pages]

    def texts_of_keys(self, now: float) -> dict[str, dict[str, float]]:
        """Return how long each text has gone on, in seconds, by API key and session; any thread may ask."""
        ages: dict[str, dict[str, float]] = {}
        for slot in self:
            if slot.owner.key and slot.session.finish is None:
                ages.setdefault(slot.owner.key, {})[slot.session.id] = now - slot.began
        return ages

    # --- admission ---

    def admit(
        self,
        key: int,
        frame: Open,
        outbox: Outbox,
        matcher: GrammarMatcher | None,
        owner: Owner,
        now: float,
    ) -> bool:
        """Give a new stream's session a slot, and tell its edge, or why there is none; return whether it has one."""
        try:
            session = self._new_session(frame, matcher, owner, now)
        except OutriderError as error:
            outbox.put(error)
            return False
        slot = Slot(key, session, outbox, now, owner, matcher=matcher)
        self.open(slot)
        self.admitted.pop(slot.text_name, None)
        self.admitted[slot.text_name] = session.epoch
        if len(self.admitted) > MAX_ADMITTED:
            del self.admitted[next(iter(self.admitted))]
        outbox.put(session.opened())
        return True

    def open(self, slot: Slot) -> None:
        """Add a slot, behind those that wait for their pages."""
        self._by_key[slot.key] = slot

    def _new_session(self, frame: Open, matcher: GrammarMatcher | None, owner: Owner, now: float) -> VerifierSession:
        """Return a session for which there is a slot.

        Raises:
            OutriderError: the verifier drains or is full, a later stream has the session, the API key has no session
                left, or the session's own errors.
        """
        _check_matcher(matcher, frame.sampling)
        if self.failed:
            raise verifier_failed()
        if self.draining:
            message = "the verifier is draining; ask the coordinator for another"
            raise Unavailable(message, retry_after_s=0.1, code="OUT-301")
        session = VerifierSession(frame, self.rules, now, self.here)
        name = text_name(owner.key, frame.session)
        others = [slot for slot in self if slot.text_name == name]
        if any(other.session.epoch > session.epoch for other in others):
            raise Fenced("is older than that of the stream that has the session", field="open.epoch")
        for other in others:
            # Its edge lost the old stream, and this end has not noticed yet.
            self.fail(other, Unavailable("the session goes on in another stream"))
        self._check_limit(owner)
        if len(self) >= self.max_sessions and self._parked:
            self.evict(next(iter(self._parked)), "its slot is needed")
        if len(self) >= self.max_sessions:
            message = f"all {self.max_sessions} sessions are taken; try again later"
            raise ResourceExhausted(message, retry_after_s=1.0, code="OUT-302")
        session.credit = self.credit
        return session

    def _check_limit(self, owner: Owner) -> None:
        """Raise `ResourceExhausted` where as many texts of an API key go on as it may have.

        Counted here, a key's slot lasts as long as its text, whatever is reported to the coordinator.
        """
        if not (owner.key and owner.max_sessions):
            return
        texts = sum(slot.owner.key == owner.key for slot in self.unfinished())
        if texts >= owner.max_sessions:
            message = f"key {owner.key!r} has {texts} sessions running, which is all it may have; wait for one to end"
            raise ResourceExhausted(message, field="api_key", retry_after_s=1.0, code="OUT-205")

    # --- frames and steps ---

    def expecting(self, key: int, frame: EdgeFrame) -> Slot | None:
        """Return the slot that takes a later frame of stream `key`; None: its session is gone or has ended."""
        slot = self._by_key.get(key)
        if slot is None or (slot.session.finish is not None and isinstance(frame, Draft | Branches | Cancel)):
            return None  # what was on its way when the text ended
        return slot

    def take(self, slot: Slot, frame: EdgeFrame, matcher: GrammarMatcher | None, arrived: float, now: float) -> None:
        """Pass a frame that arrived at `arrived` to its session, or end the session for it."""
        session = slot.session
        try:
            match frame:
                case Draft():
                    session.on_draft(frame, arrived)
                case Branches():
                    session.on_branches(frame)
                case Report():
                    session.on_report(frame)
                case Cancel():
                    self._send(slot, session.on_cancel(), now)
                case Continue():
                    self._begin_turn(slot, frame, matcher, arrived)
                case Open():
                    raise opened_twice()
        except OutriderError as error:
            self.fail(slot, error)

    def _begin_turn(self, slot: Slot, frame: Continue, matcher: GrammarMatcher | None, now: float) -> None:
        """Begin the next turn of a parked session; raise its own errors, or that its API key has no session left."""
        if slot.session.finish is not None:
            self._check_limit(slot.owner)
        session = slot.session.continued(frame, now)
        _check_matcher(matcher, session.sampling)
        self._parked.pop(slot, None)
        slot.session, slot.matcher, slot.counts = session, matcher, None
        slot.began = slot.ready_since = now
        self.open(self._by_key.pop(slot.key))

    def commit(self, slot: Slot, verified: Verified, now: float) -> Commit:
        slot.session.credit = self.credit
        commit = slot.session.on_verified(verified, now)
        if slot.matcher is not None:
            slot.matcher.advance(token_ids(commit.tokens))
        slot.forget_drafts(self.backend)
        slot.ready_since = now
        self._send(slot, commit, now)
        return commit

    def _send(self, slot: Slot, commit: Commit, now: float) -> None:
        self._count(commit)
        slot.outbox.put(commit)
        if commit.finish is not None:
            self._note_service(slot)
            self.park(slot, now)

    def _note_service(self, slot: Slot) -> None:
        record = slot.session.record
        if record is None:
            return
        self._count_service(record)
        if record.missed:
            line = "the service %s of a text was missed: %d of %d gaps were kept, its first token took %.3f s"
            where = about(slot.session.id, self.rules.name)
            log.info(line, record.goal, record.kept, record.gaps, record.first_token_s, extra=where)

    def masked(self, shares: Sequence[Share], now: float, wake: Callable[[], None]) -> list[Share]:
        """Return the shares whose grammar, if any, has its masks ready.

        The other grammars are asked; each calls `wake`, from another thread, when it has answered. What a grammar does
        not allow is cut off the drafts.
        """
        masked = []
        for share in shares:
            slot, block = share.slot, share.block
            if slot.matcher is None or block is None:
                masked.append(share)
                continue
            try:
                if not slot.matcher.asked:
                    slot.masks_by = now + MASKS_WITHIN_S
                    slot.matcher.ask(token_ids(block), wake, share.tokens_beside)
                allowed = slot.matcher.allowed(token_ids(block), share.tokens_beside)
            except Exception as error:  # a parser may raise anything for a stranger's grammar
                known = error if isinstance(error, OutriderError) else Internal(f"the grammar failed: {error!r}")
                self.fail(slot, known)
                continue
            if allowed is not None:
                masked.append(_within(share, block, allowed))
        return masked

    # --- pages ---

    def start_waiting(self) -> None:
        """Give pages to the sessions that wait for them where enough are free, first to the API key that has fewest.

        Those of one key have them in order, as those without a key among themselves. One page is left for each session
        that runs: to start a text and send it away at once would help nobody. A session waits for what another is
        reading, and reads on from there.
        """
        waiting = [slot for slot in self.unfinished() if slot.waits_for_pages]
        while waiting:
            running = self.running()
            if self.backend.capacity.free_pages <= len(running):
                return
            held = _pages_of_keys(running)
            slot = min(waiting, key=lambda slot: held[slot.owner.key])  # the first of several
            waiting.remove(slot)
            session, known = slot.session, slot.session.transcript
            if session.prompt_logprobs is not None:  # of cached positions there are no logits
                known = known[: session.prompt_logprobs_from]
            handle = self.backend.open(known, slot.owner.isolation)
            needed = self.backend.capacity.pages_for(slot.next_tokens) - handle.num_pages
            enough = needed + len(running) <= self.backend.capacity.free_pages
            if not enough or self._is_being_read(slot, handle.length, running):
                self.backend.release(handle)
                if not enough:
                    return
                continue
            slot.handle = handle
            try:
                self._grow(slot)
            except Exception:
                self._give_back(slot)
                raise
            session.cached_tokens = handle.length
            self._count_cached(len(session.transcript), handle.length)

    def _is_being_read(self, slot: Slot, found: int, running: Sequence[Slot]) -> bool:
        """Return whether a session with no more to read is about to compute more of a text than is `found`."""
        size, mine = self.backend.capacity.page_size, slot.session.transcript
        if slot.session.prompt_logprobs is not None:
            return False  # it reads on from nowhere
        worth = class_of(slot.session.service)
        for other in running:
            if class_of(other.session.service) < worth:
                continue  # its prompt is read when others leave room
            if other.owner.isolation == slot.owner.isolation and 1 < other.num_uncomputed_tokens <= len(mine) - found:
                shared = (max(found, other.handle.length) // size + 1) * size
                if shared < len(mine) and mine[:shared] == other.session.transcript[:shared]:
                    return True
        return False

    def grow(self) -> list[Slot]:
        """Give each running session pages for its next step, in order, and return those that were sent elsewhere.

        These are sessions of the API key that has most pages where the pool runs dry: those whose turns began last.
        """
        running, sent_away = self.running(), []
        for slot in list(running):
            needed = self.backend.capacity.pages_for(slot.next_tokens)
            if needed <= slot.handle.num_pages:
                continue
            while slot in running and needed - slot.handle.num_pages > self.backend.capacity.free_pages:
                held = _pages_of_keys(running)
                last = max(reversed(running), key=lambda slot: held[slot.owner.key])  # the first of several
                running.remove(last)
                sent_away.append(last)
                self.fail(last, Unavailable("the verifier has no KV pages left; resume elsewhere", code="OUT-303"))
            if slot in running:
                self._grow(slot)
        return sent_away

    def _grow(self, slot: Slot) -> None:
        """Give a session the pages for its next step, which are free, and a few more where these are free too."""
        longest = slot.session.prompt_length + slot.session.sampling.max_tokens
        ahead = min(slot.next_tokens + AHEAD, longest)
        capacity = self.backend.capacity
        spare = capacity.pages_for(ahead) <= capacity.free_pages + slot.handle.num_pages
        self.backend.reserve(slot.handle, ahead if spare else slot.next_tokens)

    # --- ends ---

    def park(self, slot: Slot, now: float) -> None:
        """Keep a session whose turn has ended, if its edge wants that."""
        if slot.session.keep_s:
            self._parked[slot] = now + slot.session.keep_s
        self._give_back(slot)

    def expire(self, now: float) -> None:
        for slot in [slot for slot, until in self._parked.items() if until <= now]:
            self.evict(slot, f"no turn came within {slot.session.keep_s:g} s")

    def evict(self, slot: Slot, reason: str) -> None:
        log.info("a parked session is evicted: %s", reason, extra=about(slot.session.id, self.rules.name))
        self.release(slot)
        slot.outbox.put(Goaway(reason, epoch=slot.session.epoch))

    def fail(self, slot: Slot, error: OutriderError) -> None:
        self.release(slot)
        slot.outbox.put(error)

    def release(self, slot: Slot) -> None:
        """Free a slot and its pages, once."""
        if self._by_key.pop(slot.key, None) is not None:
            self._parked.pop(slot, None)
            self._give_back(slot)

    def _give_back(self, slot: Slot) -> None:
        if slot.handle is not NO_HANDLE:
            slot.forget_drafts(self.backend)  # of a step that has just run: what is released can be found
        handle, slot.handle = slot.handle, NO_HANDLE
        if handle is not NO_HANDLE:
            self.backend.release(handle)

    def close(self, key: int) -> None:
        if slot := self._by_key.get(key):
            self.release(slot)

    def half_close(self, key: int) -> None:
        """Expect nothing more on the stream of `key`; a text that runs goes on to its end."""
        if slot := self._by_key.get(key):
            slot.session.on_report(Report(drafting=False))
            if slot in self._parked:
                self.evict(slot, "its edge has closed the stream")

    def send_away(self, texts: Collection[str]) -> None:
        """End those of the texts that go on; they may return with another lease, where they get one.

        They go by `text_name`; coordinators of older releases name the session alone.
        """
        for slot in self.unfinished():
            if slot.text_name in texts or slot.session.id in texts:
                self.fail(slot, Unavailable("the API key has no slot for this text; ask for another lease"))

    def drain(self) -> None:
        self.draining = True
        for slot in list(self._parked):
            self.evict(slot, "the verifier is draining")
        for slot in self.unfinished():
            slot.outbox.put(Goaway("the verifier is draining", retry_after_s=0.0, epoch=slot.session.epoch))

    def give_up(self) -> None:
        self.failed = True
        for slot in self:
            try:
                self.fail(slot, verifier_failed())
            except Exception:  # the others must be told
                log.exception("a session cannot be sent elsewhere")

    def stop(self) -> None:
        for slot in self:
            slot.outbox.put(Unavailable("the verifier has stopped; resume elsewhere", retry_after_s=0.1))


def _check_matcher(matcher: GrammarMatcher | None, sampling: Sampling) -> None:
    """Refuse a grammar without the matcher that enforces it: the text would ignore it."""
    if matcher is None and sampling.grammar is not None:
        raise Internal("came without its matcher", field="sampling.grammar")


def _within(share: Share, block: tuple[DraftToken, ...], allowed: Allowed) -> Share:
    beside = (
        BlockBranch(branch.index, branch.drafts[: len(allowed.branches[asked])])
        for branch, asked in zip(share.branches, share.tokens_beside, strict=True)
        if asked in allowed.branches
    )
    return replace(share, block=block[: len(allowed.block)], branches=tuple(beside))


def _pages_of_keys(slots: Sequence[Slot]) -> Counter[str]:
    held: Counter[str] = Counter()
    for slot in slots:
        held[slot.owner.key] += slot.handle.num_pages
    return held


def opened_twice() -> InvalidArgument:
    """Return the error of a stream with a second Open."""
    return InvalidArgument("comes twice in one stream; open another stream", field="frame.open")


def verifier_failed() -> Unavailable:
    """Return the error of sessions that are at a failed verifier, or come to it."""
    return Unavailable("the verifier has failed; resume elsewhere", retry_after_s=0.1, code="OUT-307")

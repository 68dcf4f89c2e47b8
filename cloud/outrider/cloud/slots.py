"""The slots of a verifier's sessions, and the KV pages that they hold."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from outrider.cloud.backend import Backend, Handle
from outrider.cloud.grammar import GrammarMatcher
from outrider.proto.errors import OutriderError, ResourceExhausted, Unavailable
from outrider.proto.plumbing.logs import about
from outrider.proto.session import VerifierSession
from outrider.proto.token_counts import TokenCounts
from outrider.proto.types import CloudFrame, Goaway

MAX_UNREAD = 64
AHEAD = 64  # positions for which a running session has pages beyond those that its next step can fill

log = logging.getLogger(__name__)


class Outbox:
    """The way of a session's frames to its stream, called from the engine's thread."""

    def put(self, item: CloudFrame | OutriderError) -> None:
        """Hand over a frame, or the error that ends the stream."""
        raise NotImplementedError

    def unread(self) -> int:
        """Return how many frames the client has not taken yet."""
        raise NotImplementedError


@dataclass(slots=True, eq=False)
class Slot:
    """An admitted session and the engine's state for it.

    Attributes:
        key: number of its stream.
        session: session machine of the present turn.
        handle: its sequence in the backend.
        outbox: where its frames go.
        ready_since: when it could have begun its next step, seconds.
        matcher: enforces its grammar, if it has one.
        masks_by: until when a step waits for its grammar's mask, seconds.
        counts: those of its transcript so far, where penalties want them.
    """

    key: int
    session: VerifierSession
    handle: Handle
    outbox: Outbox
    ready_since: float
    matcher: GrammarMatcher | None = None
    masks_by: float = 0.0
    counts: TokenCounts | None = None

    @property
    def num_uncomputed_tokens(self) -> int:
        """Committed tokens that the KV cache lacks; 1 while decoding: the last one."""
        return len(self.session.transcript) - self.handle.length

    @property
    def waits_for_pages(self) -> bool:
        """Whether it has no KV pages yet."""
        return not self.handle.num_pages

    @property
    def max_tokens(self) -> int:
        """Positions that its whole text may take, prompt included."""
        return self.session.prompt_length + self.session.sampling.max_tokens

    @property
    def backlogged(self) -> bool:
        """Whether its client leaves so much unread that its text stands still."""
        return self.outbox.unread() > MAX_UNREAD

    @property
    def busy(self) -> bool:
        """Whether its grammar is being asked what may come next."""
        return self.matcher is not None and self.matcher.busy

    def count_tokens(self) -> TokenCounts:
        """Return the counts of its transcript."""
        transcript = self.session.transcript
        if self.counts is None:
            self.counts = TokenCounts(self.session.prompt_length)
        self.counts.extend(transcript[self.counts.length :])
        return self.counts

    def forget_drafts(self, backend: Backend) -> None:
        """Truncate the sequence to the transcript, but for its last token, which the next step computes."""
        backend.truncate(self.handle, min(self.handle.length, len(self.session.transcript) - 1))


class Slots:
    """All slots by key; parked ones wait for their next turn and are evicted, longest idle first, to make room."""

    def __init__(self, backend: Backend, verifier: str) -> None:
        self._backend = backend
        self._verifier = verifier
        self._by_key: dict[int, Slot] = {}
        self._parked: dict[Slot, float] = {}  # until when; longest idle first

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Slot]:
        return iter(list(self._by_key.values()))

    @property
    def num_parked(self) -> int:
        """Sessions that are kept for their next turn."""
        return len(self._parked)

    @property
    def num_running(self) -> int:
        """Sessions that are not parked."""
        return len(self._by_key) - len(self._parked)

    def get(self, key: int) -> Slot | None:
        """Return the slot of a stream, if it has one."""
        return self._by_key.get(key)

    def unfinished(self) -> list[Slot]:
        """Return the slots whose text goes on, longest admitted first."""
        return [slot for slot in self._by_key.values() if slot.session.finish is None]

    def running(self) -> list[Slot]:
        """Return the slots whose text goes on and that have KV pages, longest admitted first."""
        return [slot for slot in self.unfinished() if not slot.waits_for_pages]

    def open(
        self, key: int, session: VerifierSession, outbox: Outbox, matcher: GrammarMatcher | None, now: float
    ) -> Slot:
        """Give `session` a slot, with pages as soon as there are enough for those that came before it too."""
        slot = self._by_key[key] = Slot(key, session, self._backend.open(), outbox, now, matcher)
        self.start_waiting()
        return slot

    def start_waiting(self) -> None:
        """Give pages to the sessions that wait for them, longest admitted first, where enough are free.

        One page is left for each that runs: to start a text and send it away at once would help nobody.
        """
        waiting = [slot for slot in self.unfinished() if slot.waits_for_pages]
        for slot in waiting:
            needed = self._backend.capacity.pages_for(_next_tokens(slot))
            if not self._make_room(needed + len(self.running())):
                return
            self._grow(slot)

    def grow(self) -> list[Slot]:
        """Give each running session pages for its next step, longest admitted first.

        Where the pool runs dry the sessions that were admitted last are sent elsewhere, where their texts go on; a
        parked one goes before any of them.

        Returns:
            Those that were sent away.
        """
        running, sent_away = self.running(), []
        for slot in list(running):
            needed = self._backend.capacity.pages_for(_next_tokens(slot))
            if needed <= slot.handle.num_pages:
                continue
            while slot in running and not self._make_room(needed - slot.handle.num_pages):
                sent_away.append(running.pop())
                self.fail(sent_away[-1], Unavailable("the verifier has no KV pages left; resume elsewhere"))
            if slot in running:
                self._grow(slot)
        return sent_away

    def _grow(self, slot: Slot) -> None:
        """Give a session the pages for its next step, which are free, and a few more where these are free too."""
        needed = _next_tokens(slot)
        ahead = min(needed + AHEAD, slot.max_tokens)
        capacity = self._backend.capacity
        spare = capacity.pages_for(ahead) <= capacity.free_pages + slot.handle.num_pages
        self._backend.reserve(slot.handle, ahead if spare else needed)

    def resume(
        self, slot: Slot, session: VerifierSession, kept: int, matcher: GrammarMatcher | None, now: float
    ) -> None:
        """Begin the next turn of a parked slot on the first `kept` positions of its cache.

        Raises:
            ResourceExhausted: there are not enough pages.
        """
        self._parked.pop(slot, None)
        self._backend.truncate(slot.handle, min(slot.handle.length, kept, session.prompt_length - 1))
        slot.session, slot.matcher, slot.ready_since, slot.counts = session, matcher, now, None
        needed = self._backend.capacity.pages_for(_next_tokens(slot))
        if not self._make_room(needed - slot.handle.num_pages):
            raise ResourceExhausted("there are not enough KV pages for this turn; try again later", retry_after_s=1.0)
        self._grow(slot)

    def park(self, slot: Slot, now: float) -> None:
        """Keep a session whose turn has ended, if its edge wants that, on the pages that hold something."""
        if slot.session.keep_s and not slot.waits_for_pages:
            self._backend.reserve(slot.handle, slot.handle.length)
            self._parked[slot] = now + slot.session.keep_s
        else:
            self._backend.release(slot.handle)

    def is_parked(self, slot: Slot) -> bool:
        """Return whether a slot waits for its next turn."""
        return slot in self._parked

    def expire(self, now: float) -> None:
        """Evict slots that were parked for longer than they asked for."""
        for slot in [slot for slot, until in self._parked.items() if until <= now]:
            self.evict(slot, f"no turn came within {slot.session.keep_s:g} s")

    def evict_longest_idle(self, reason: str) -> None:
        """Evict the slot that has been parked for longest, if any."""
        for slot in list(self._parked)[:1]:
            self.evict(slot, reason)

    def evict_all(self, reason: str) -> None:
        """Evict every parked slot."""
        for slot in list(self._parked):
            self.evict(slot, reason)

    def evict(self, slot: Slot, reason: str) -> None:
        """Keep a parked session no longer; its edge begins the next turn with a new stream."""
        log.info("a parked session is evicted: %s", reason, extra=about(slot.session.id, self._verifier))
        self.release(slot)
        slot.outbox.put(Goaway(reason))

    def fail(self, slot: Slot, error: OutriderError) -> None:
        """End a session with `error`."""
        self.release(slot)
        slot.outbox.put(error)

    def fail_all(self, error: Callable[[], OutriderError]) -> None:
        """End every session with an error of its own."""
        for slot in self:
            try:
                self.fail(slot, error())
            except Exception:  # the others must be told
                log.exception("a session cannot be sent elsewhere")

    def release(self, slot: Slot) -> None:
        """Free a slot and its pages, once."""
        if self._by_key.pop(slot.key, None) is not None:
            self._parked.pop(slot, None)
            self._backend.release(slot.handle)

    def _make_room(self, pages: int) -> bool:
        """Return whether `pages` are free, after evicting parked slots, longest idle first, as far as that helps."""
        if self._backend.capacity.free_pages + sum(slot.handle.num_pages for slot in self._parked) < pages:
            return False
        while self._backend.capacity.free_pages < pages:
            self.evict_longest_idle("its KV pages are needed")
        return True


def _next_tokens(slot: Slot) -> int:
    """Return the positions that a session's next steps fill until they commit a token, with all drafts."""
    return len(slot.session.transcript) + slot.session.max_useful_drafts

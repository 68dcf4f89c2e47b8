"""The slots of a verifier's sessions, and the KV pages that they hold."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from outrider.cloud.grammar import GrammarMatcher
from outrider.cloud.kv_cache import PagedKVCache, SessionCache
from outrider.proto.errors import OutriderError
from outrider.proto.plumbing.logs import about
from outrider.proto.session import VerifierSession
from outrider.proto.token_counts import TokenCounts
from outrider.proto.types import CloudFrame, Goaway

MAX_UNREAD = 64

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
        cache: its share of the KV pages.
        outbox: where its frames go.
        ready_since: when it could have begun its next step, seconds.
        matcher: enforces its grammar, if it has one.
        masks_by: until when a step waits for its grammar's mask, seconds.
        counts: those of its transcript so far, where penalties want them.
    """

    key: int
    session: VerifierSession
    cache: SessionCache
    outbox: Outbox
    ready_since: float
    matcher: GrammarMatcher | None = None
    masks_by: float = 0.0
    counts: TokenCounts | None = None

    @property
    def num_uncomputed_tokens(self) -> int:
        """Committed tokens that the KV cache lacks; 1 while decoding: the last one."""
        return len(self.session.transcript) - self.cache.length

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

    def forget_drafts(self) -> None:
        """Truncate the KV cache to the transcript, but for its last token, which the next step computes."""
        self.cache.truncate(min(self.cache.length, len(self.session.transcript) - 1))


class Slots:
    """All slots by key; parked ones wait for their next turn and are evicted, longest idle first, to make room."""

    def __init__(self, pool: PagedKVCache, verifier: str) -> None:
        self._pool = pool
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

    def running(self) -> list[Slot]:
        """Return the slots whose text goes on, longest admitted first."""
        return [slot for slot in self._by_key.values() if slot.session.finish is None]

    def open(
        self, key: int, session: VerifierSession, outbox: Outbox, matcher: GrammarMatcher | None, now: float
    ) -> Slot:
        """Give `session` a slot with room for its whole text.

        Raises:
            ResourceExhausted: there are not enough pages.
        """
        tokens = session.prompt_length + session.sampling.max_tokens
        self._make_room(self._pool.pages_for(tokens))
        slot = self._by_key[key] = Slot(key, session, self._pool.allocate(tokens), outbox, now, matcher)
        return slot

    def resume(
        self, slot: Slot, session: VerifierSession, kept: int, matcher: GrammarMatcher | None, now: float
    ) -> None:
        """Begin the next turn of a parked slot on the first `kept` positions of its cache.

        Raises:
            ResourceExhausted: there are not enough pages.
        """
        del self._parked[slot]
        slot.cache.truncate(min(slot.cache.length, kept, session.prompt_length - 1))
        tokens = session.prompt_length + session.sampling.max_tokens
        self._make_room(self._pool.pages_for(tokens) - len(slot.cache.pages))
        self._pool.resize(slot.cache, tokens)
        slot.session, slot.matcher, slot.ready_since, slot.counts = session, matcher, now, None

    def park(self, slot: Slot, now: float) -> None:
        """Keep a session whose turn has ended, if its edge wants that, on the pages that hold something."""
        if slot.session.keep_s:
            self._pool.resize(slot.cache, slot.cache.length)
            self._parked[slot] = now + slot.session.keep_s

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

    def release(self, slot: Slot) -> None:
        """Free a slot and its pages, once."""
        if self._by_key.pop(slot.key, None) is not None:
            self._parked.pop(slot, None)
            self._pool.release(slot.cache)

    def _make_room(self, pages: int) -> None:
        """Evict parked slots, longest idle first, until `pages` are free; evict none where that would not suffice."""
        if self._pool.free_pages + sum(len(slot.cache.pages) for slot in self._parked) >= pages:
            while self._pool.free_pages < pages:
                self.evict_longest_idle("its KV pages are needed")

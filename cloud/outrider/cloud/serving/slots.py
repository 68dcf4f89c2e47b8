"""The slots of a verifier's sessions, and the KV pages that they hold.

Only sessions whose text goes on hold pages. Those that wait for their next turn leave theirs to the backend, which
finds them again as long as nobody needs the room.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from outrider.cloud.grammar.grammar import GrammarMatcher
from outrider.cloud.target.backend import Backend, Handle
from outrider.proto.errors import OutriderError, Unavailable
from outrider.proto.plumbing.logs import about
from outrider.proto.session.verifier import VerifierSession
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


@dataclass(frozen=True, slots=True)
class NoHandle:
    """The sequence of a session that holds no pages."""

    length: int = 0
    num_pages: int = 0


NO_HANDLE = NoHandle()


@dataclass(frozen=True, slots=True)
class KeyLimit:
    """The API key of a session, and the most of its sessions whose texts may go on here at once; 0: any number."""

    key: str
    max_sessions: int = 0


def key_name(limit: KeyLimit | None) -> str:
    """Return the name of a session's API key; empty: it has none."""
    return limit.key if limit is not None else ""


@dataclass(slots=True, eq=False)
class Slot:
    """An admitted session and the engine's state for it.

    Attributes:
        key: number of its stream.
        session: session machine of the present turn.
        outbox: where its frames go.
        isolation: only sessions of the same one share KV pages.
        limit: that of its API key; None: it has no key.
        began: start of its turn, in seconds.
        handle: its sequence in the backend.
        ready_since: when it could have begun its next step, seconds.
        matcher: enforces its grammar, if it has one.
        masks_by: until when a step waits for its grammar's mask, seconds.
        counts: those of its transcript so far, where penalties want them.
    """

    key: int
    session: VerifierSession
    outbox: Outbox
    ready_since: float
    isolation: str = ""
    limit: KeyLimit | None = None
    handle: Handle = NO_HANDLE
    matcher: GrammarMatcher | None = None
    masks_by: float = 0.0
    counts: TokenCounts | None = None
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.ready_since

    @property
    def num_uncomputed_tokens(self) -> int:
        """Committed tokens that the KV cache lacks; 1 while decoding: the last one."""
        return len(self.session.transcript) - self.handle.length

    @property
    def key_name(self) -> str:
        """Name of its API key; empty: it has none."""
        return key_name(self.limit)

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
    """All slots by key, those whose turn began first in front; parked ones wait for their next turn."""

    def __init__(self, backend: Backend, verifier: str, on_start: Callable[[int, int], None]) -> None:
        """Give out the pages of `backend`.

        Args:
            backend: target with the KV cache of all sessions.
            verifier: name, for the log.
            on_start: called with the length of a transcript that begins to be computed, and how much of it is cached.
        """
        self._on_start = on_start
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
        """Return the slots whose text goes on, in order."""
        return [slot for slot in self._by_key.values() if slot.session.finish is None]

    def texts_of_keys(self, now: float) -> dict[str, dict[str, float]]:
        """Return how long each text has gone on, in seconds, by API key and session; any thread may ask."""
        ages: dict[str, dict[str, float]] = {}
        for slot in self:
            if slot.limit is not None and slot.session.finish is None:
                ages.setdefault(slot.limit.key, {})[slot.session.id] = now - slot.began
        return ages

    def running(self) -> list[Slot]:
        """Return the slots whose text goes on and that have KV pages, in order."""
        return [slot for slot in self.unfinished() if not slot.waits_for_pages]

    def open(self, slot: Slot) -> None:
        """Add a slot, which waits for its pages."""
        self._by_key[slot.key] = slot

    def start_waiting(self) -> None:
        """Give pages to the sessions that wait for them where enough are free, first to the API key that has fewest.

        Those of one key have them in order, as those without a key among themselves. One page is left for each session
        that runs: to start a text and send it away at once would help nobody. A session waits for what another is
        reading, and reads on from there.
        """
        waiting = [slot for slot in self.unfinished() if slot.waits_for_pages]
        while waiting:
            running = self.running()
            if self._backend.capacity.free_pages <= len(running):
                return
            held = _pages_of_keys(running)
            slot = min(waiting, key=lambda slot: held[slot.key_name])  # the first of several
            waiting.remove(slot)
            session, known = slot.session, slot.session.transcript
            if session.prompt_logprobs is not None:  # of cached positions there are no logits
                known = known[: session.prompt_logprobs_from]
            handle = self._backend.open(known, slot.isolation)
            needed = self._backend.capacity.pages_for(_next_tokens(slot)) - handle.num_pages
            enough = needed + len(running) <= self._backend.capacity.free_pages
            if not enough or self._is_being_read(slot, handle.length, running):
                self._backend.release(handle)
                if not enough:
                    return
                continue
            slot.handle = handle
            try:
                self._grow(slot)
            except Exception:
                self._give_back(slot)
                raise
            slot.session.cached_tokens = handle.length
            self._on_start(len(slot.session.transcript), handle.length)

    def _is_being_read(self, slot: Slot, found: int, running: Sequence[Slot]) -> bool:
        """Return whether a session with no more to read is about to compute more of a text than is `found`."""
        size, mine = self._backend.capacity.page_size, slot.session.transcript
        if slot.session.prompt_logprobs is not None:
            return False  # it reads on from nowhere
        for other in running:
            if other.isolation == slot.isolation and 1 < other.num_uncomputed_tokens <= len(mine) - found:
                shared = (max(found, other.handle.length) // size + 1) * size
                if shared < len(mine) and mine[:shared] == other.session.transcript[:shared]:
                    return True
        return False

    def grow(self) -> list[Slot]:
        """Give each running session pages for its next step, in order.

        Where the pool runs dry sessions of the API key that has most pages are sent elsewhere, where their texts go on:
        those whose turns began last.

        Returns:
            Those that were sent away.
        """
        running, sent_away = self.running(), []
        for slot in list(running):
            needed = self._backend.capacity.pages_for(_next_tokens(slot))
            if needed <= slot.handle.num_pages:
                continue
            while slot in running and needed - slot.handle.num_pages > self._backend.capacity.free_pages:
                held = _pages_of_keys(running)
                last = max(reversed(running), key=lambda slot: held[slot.key_name])  # the first of several
                running.remove(last)
                sent_away.append(last)
                self.fail(last, Unavailable("the verifier has no KV pages left; resume elsewhere"))
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

    def resume(self, slot: Slot, session: VerifierSession, matcher: GrammarMatcher | None, now: float) -> None:
        """Begin the next turn of a parked slot, behind those that wait for pages."""
        self._parked.pop(slot, None)
        slot.session, slot.matcher, slot.ready_since, slot.counts = session, matcher, now, None
        slot.began = now
        self.open(self._by_key.pop(slot.key))

    def park(self, slot: Slot, now: float) -> None:
        """Keep a session whose turn has ended, if its edge wants that."""
        if slot.session.keep_s:
            self._parked[slot] = now + slot.session.keep_s
        self._give_back(slot)

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
        slot.outbox.put(Goaway(reason, epoch=slot.session.epoch))

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
            self._give_back(slot)

    def _give_back(self, slot: Slot) -> None:
        """Take a session's pages, once."""
        handle, slot.handle = slot.handle, NO_HANDLE
        if handle is not NO_HANDLE:
            self._backend.release(handle)


def _pages_of_keys(slots: Sequence[Slot]) -> Counter[str]:
    """Return how many pages the slots of each API key hold."""
    held: Counter[str] = Counter()
    for slot in slots:
        held[slot.key_name] += slot.handle.num_pages
    return held


def _next_tokens(slot: Slot) -> int:
    """Return the positions that a session's next steps fill until they commit a token, with all drafts."""
    return len(slot.session.transcript) + slot.session.max_useful_drafts

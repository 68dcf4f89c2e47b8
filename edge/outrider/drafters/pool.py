"""Several drafters at one edge, loaded on demand within a limit of memory.

A drafter is an index, as in the session's selection. Sessions say which ones they `want`; a thread loads these, and
evicts the least recently wanted ones where they need the room. An evicted drafter stays in memory for as long as a
session's state holds on to it, and is counted until then, so the limit holds for what is really there.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from outrider.drafters.packages import DrafterPackage, SteeringShape
from outrider.drafters.protocol import Drafter, steering_of
from outrider.proto.drafter_format import ON_TRIAL
from outrider.proto.errors import (
    ConfigError,
    DataLoss,
    DeadlineExceeded,
    ModelRefused,
    OutriderError,
    Unavailable,
)

MIN_LOADED_S = 10.0  # after a drafter was last wanted, since loading again and again would be slower than any
LOOK_AGAIN_S = 0.5  # after there was no room for what is wanted

BROKEN = (DataLoss, DeadlineExceeded, ModelRefused, Unavailable, OSError)
"""Errors of a drafter itself and not of the request for it: the others go on without it."""

_STATM = Path("/proc/self/statm")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Member:
    """A drafter that can be loaded.

    Attributes:
        name: name in its manifest.
        version: version in its manifest.
        bytes: size of its graphs on disk; 0: it takes no memory to speak of, and is never evicted.
        load: loads it in any thread; raises `OutriderError` or `OSError`.
        steering: shape of the steering vectors that it takes; None: none.
        package: its package, by the manifest; None: it needs none.
        by_text: whether it has another tokenizer than the target, and drafts by text.
    """

    name: str
    version: str
    bytes: int
    load: Callable[[], Drafter]
    steering: SteeringShape | None = None
    package: DrafterPackage | None = None
    by_text: bool = False


class DrafterPool:
    """The drafters of one edge, 0 to `len(pool)` - 1, shared by its sessions. Every method is for any thread."""

    def __init__(
        self,
        members: Sequence[Member],
        *,
        limit_bytes: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Load nothing yet.

        Args:
            members: in the order of their indices.
            limit_bytes: memory that drafters may hold together, without the caches of sessions.
            clock: monotonic time in seconds.

        Raises:
            ConfigError: there is no member, or two have one name.
        """
        names = tuple(member.name for member in members)
        if not names:
            raise ConfigError("names none; use `none` for no drafter", field="drafter")
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ConfigError(f"names {twice!r} twice; give each drafter once", field="drafter")
        self._members = tuple(members)
        self.by_text = tuple(member.name for member in members if member.by_text)  # with another tokenizer
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._bytes = [member.bytes for member in members]  # the most that was ever measured
        self._errors = [self._too_large(member.name, member.bytes) for member in members]
        self._loaded: dict[int, Drafter] = {}
        self._evicted: dict[int, weakref.ref[Drafter]] = {}  # perhaps still held by a session
        self._former: list[tuple[weakref.ref[Drafter], int]] = []  # likewise, of the pool before: drafter and bytes
        self._wanted: list[int] = []  # the most wanted first
        self._wanted_at = [-math.inf] * len(members)
        self._look_again_at = -math.inf
        self._lock = threading.Lock()  # of all above; held for the time that it takes to drop a drafter, 1 ms
        self._loading = threading.Lock()  # one at a time, so that what each takes can be measured
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-drafter-loader")
        self._at_work = False
        self._closed = False

    @classmethod
    def of(cls, *drafters: Drafter) -> DrafterPool:
        """Make a pool of drafters that are loaded already."""

        def member(drafter: Drafter) -> Member:
            return Member(drafter.name, drafter.version, 0, lambda: drafter, steering_of(drafter))

        pool = cls([member(drafter) for drafter in drafters], limit_bytes=0)
        pool._loaded = dict(enumerate(drafters))
        return pool

    def renewed(self, members: Sequence[Member], *, limit_bytes: float) -> DrafterPool:
        """Return a pool of `members` that goes on with what is loaded here; this one still has to be closed.

        A drafter of the same version is taken over. Another version of one that is loaded here is loaded now, in this
        thread, and where it cannot be, the one that is here stays in its place.
        """
        with self._lock:
            here = {self._members[index].name: (index, drafter) for index, drafter in self._loaded.items()}
        kept, loaded = list(members), dict[int, tuple[Drafter, int]]()
        for place, member in enumerate(members):
            if member.name not in here:
                continue
            index, drafter = here[member.name]
            size = self._bytes[index]
            if member.version != self._members[index].version:
                try:
                    drafter = member.load()
                    size = max(size, member.bytes)
                except Exception as error:  # a drafter may be anybody's code, and the old one serves
                    old = kept[place] = self._members[index]
                    log.warning("keeping version %s of the drafter %s: %s", old.version, old.name, error)
            loaded[place] = drafter, size
        pool = DrafterPool(kept, limit_bytes=limit_bytes, clock=self._clock)
        for place, (drafter, size) in loaded.items():
            pool._loaded[place], pool._bytes[place] = drafter, size
        taken_over = {id(drafter) for drafter, _ in loaded.values()}
        pool._former = [
            (weakref.ref(drafter), self._bytes[index])
            for index, drafter in here.values()
            if id(drafter) not in taken_over
        ]
        return pool

    def __len__(self) -> int:
        return len(self._members)

    @property
    def names(self) -> tuple[str, ...]:
        """Names in the manifests, [K]."""
        return tuple(member.name for member in self._members)

    @property
    def versions(self) -> tuple[str, ...]:
        """Versions in the manifests, [K]."""
        return tuple(member.version for member in self._members)

    @property
    def bytes(self) -> tuple[int, ...]:
        """Memory of each drafter in bytes, [K], measured after loading; until then the size of its graphs on disk."""
        return tuple(self._bytes)

    @property
    def errors(self) -> tuple[str, ...]:
        """Reasons why a drafter cannot be loaded and will not be tried again, [K]; empty: none is known."""
        return tuple(self._errors)

    @property
    def steered(self) -> int | None:
        """Index of the first drafter that takes steering vectors; None: there is none, or a version of it is on trial.

        Both versions draft unsteered then, so that their hits compare.
        """
        index = next((index for index, member in enumerate(self._members) if member.steering is not None), None)
        tried = any(member.steering is not None and ON_TRIAL in member.name for member in self._members)
        return None if tried else index

    @property
    def steering(self) -> SteeringShape | None:
        """Shape of that drafter's steering vectors."""
        return None if self.steered is None else self._members[self.steered].steering

    @property
    def first(self) -> Drafter | None:
        """Loaded drafter with the smallest index."""
        with self._lock:
            return self._loaded[min(self._loaded)] if self._loaded else None

    def loaded(self, index: int) -> Drafter | None:
        """Return the drafter if it is loaded; never waits, and does not ask for it."""
        return self._loaded.get(index)

    def want(self, indices: Sequence[int]) -> None:
        """Have these loaded, the most wanted first, as far as there is room; return at once.

        A drafter that is wanted again and again stays. The one that was last wanted longest ago goes first, but not
        within `MIN_LOADED_S`.
        """
        with self._lock:
            self._note(indices)
            decided = all(index in self._loaded or self._errors[index] for index in indices)
            if not (decided or self._closed or self._at_work or self._clock() < self._look_again_at):
                self._at_work = True
                self._thread.submit(self._work)

    def load(self, index: int) -> Drafter:
        """Have this one loaded now, in this thread, as the most wanted.

        Raises:
            OutriderError, OSError: it cannot be loaded.
        """
        with self._lock:
            self._note((index,))
        if not self._errors[index]:
            self._load(index)
        if self._errors[index]:
            raise ModelRefused(self._errors[index])
        drafter = self.loaded(index)
        if drafter is None:
            raise Unavailable("the pool of drafters is closed")
        return drafter

    def close(self) -> None:
        """Evict all; a load in progress ends by itself, without effect."""
        with self._lock:
            self._closed = True
            self._loaded = {}
            self._evicted = {}
        self._thread.shutdown(wait=False, cancel_futures=True)

    # --- in the loader's thread ---

    def _work(self) -> None:
        while (index := self._next()) is not None:
            try:
                self._load(index)
            except Exception as error:  # a drafter may be anybody's code, and the others go on without it
                self._fail(index, error)

    def _next(self) -> int | None:
        """Return the drafter to load next, once there is room for it; None: nothing, or not now."""
        with self._lock:
            had = len(self._loaded)
            index = None if self._closed else self._most_wanted()
            self._at_work = index is not None
            self._look_again_at = self._clock() + LOOK_AGAIN_S
            dropped = len(self._loaded) < had
        if dropped:
            give_back()
        return index

    def _most_wanted(self) -> int | None:
        """Take back wanted drafters that were evicted, make room for the first that is not loaded, and return it."""
        room, kept = self._limit_bytes, set[int]()
        for index in self._wanted:
            if self._errors[index] or self._bytes[index] > room:
                continue
            room -= self._bytes[index]
            kept.add(index)
            evicted = self._evicted.pop(index, None)
            drafter = evicted() if evicted is not None else None
            if drafter is not None:
                self._loaded[index] = drafter
            if index in self._loaded:
                continue
            return index if self._make_room(self._bytes[index], kept) else None
        return None

    def _make_room(self, needed: int, kept: set[int]) -> bool:
        """Evict what is not `kept`, the least wanted first, until `needed` bytes are free; return whether they are."""
        rested = self._clock() - MIN_LOADED_S
        lacking = self._in_memory() + needed - self._limit_bytes
        leaving: list[int] = []
        for index in self._by_need():
            if lacking > 0 and index not in kept and self._bytes[index] and self._wanted_at[index] <= rested:
                leaving.append(index)
                lacking -= self._bytes[index]
        if lacking > 0:
            return False  # and evict nothing, since it would not be enough
        for index in leaving:
            self._evict(index)
        return self._in_memory() + needed <= self._limit_bytes

    def _load(self, index: int) -> None:
        member = self._members[index]
        with self._loading:
            if self.loaded(index) is not None:
                return
            before = own_bytes()
            began = time.monotonic()
            drafter = member.load()
            after = own_bytes()
            with self._lock:
                if self._closed:
                    return
                if member.bytes and before is not None and after is not None:
                    self._bytes[index] = max(self._bytes[index], after - before)
                self._loaded[index] = drafter
                del drafter
                self._keep_to_limit(index)
        seconds = time.monotonic() - began
        log.info("drafter %s: %.1f MB, loaded in %.0f ms", member.name, self._bytes[index] / 1e6, seconds * 1000)

    def _keep_to_limit(self, index: int) -> None:
        """Evict others where a loaded drafter is larger than its file, or itself where it is the least wanted."""
        self._errors[index] = self._too_large(self._members[index].name, self._bytes[index])
        if self._errors[index]:
            log.warning("going on without a drafter: %s", self._errors[index])
            del self._loaded[index]
            return
        for candidate in self._by_need():
            if self._in_memory() <= self._limit_bytes:
                return
            if self._bytes[candidate]:
                self._evict(candidate)

    def _fail(self, index: int, error: Exception) -> None:
        known = isinstance(error, OutriderError | OSError)
        reason = str(error).splitlines()[0] if known and str(error) else type(error).__name__
        log.warning("going on without the drafter %s: %s", self._members[index].name, reason)
        with self._lock:
            self._errors[index] = reason

    # --- with the lock held ---

    def _note(self, indices: Sequence[int]) -> None:
        """Note that these are wanted now, more than any others."""
        now = self._clock()
        for index in indices:
            self._wanted_at[index] = now
        fresh = list(dict.fromkeys(indices))
        if fresh != self._wanted[: len(fresh)]:
            self._wanted = fresh + [index for index in self._wanted if index not in fresh]
            self._look_again_at = -math.inf

    def _too_large(self, name: str, size: int) -> str:
        if size <= self._limit_bytes:
            return ""
        return f"{name} takes {size / 1e6:.1f} MB; raise --drafter-memory, which is {self._limit_bytes / 1e6:g}"

    def _by_need(self) -> list[int]:
        """Return loaded drafters, the least wanted first."""
        wanted = {index: place for place, index in enumerate(self._wanted)}
        return sorted(self._loaded, key=lambda index: -wanted.get(index, len(wanted)))

    def _evict(self, index: int) -> None:
        self._evicted[index] = weakref.ref(self._loaded.pop(index))

    def _in_memory(self) -> int:
        self._evicted = {index: evicted for index, evicted in self._evicted.items() if evicted() is not None}
        self._former = [(former, size) for former, size in self._former if former() is not None]
        own = sum(self._bytes[index] for index in (*self._loaded, *self._evicted))
        return own + sum(size for _, size in self._former)


def own_bytes() -> int | None:
    """Return bytes in memory of this process alone, without libraries; None: the system does not say."""
    try:
        _, resident, shared, *_ = (int(pages) for pages in _STATM.read_text(encoding="ascii").split())
    except OSError:
        return None
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def give_back() -> None:
    """Hand freed memory back to the system, where the C library keeps it (glibc); elsewhere do nothing."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)

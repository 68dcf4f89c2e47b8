"""The drafters that one edge has, from the offer of one to the last text that drafts with it.

Drafters stand in the order in which they are wanted. A thread loads as many as fit within the limit of memory. One
that stands there no more stays in memory for as long as a text holds on to it, and is counted until then, so the limit
holds for what is really there.
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
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from outrider.drafters.packages import DrafterPackage
from outrider.drafters.proposals import ProposalRule
from outrider.drafters.protocol import Drafter, DraftState, TokenPrefix, steering_of
from outrider.proto.drafter_format import ON_TRIAL, SteeringShape
from outrider.proto.errors import ConfigError, OutriderError, Unavailable
from outrider.proto.session import DrafterName
from outrider.proto.types import DraftToken

_STATM = Path("/proc/self/statm")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Member:
    """A drafter that can be loaded.

    Attributes:
        bytes: size of its graphs on disk; 0: it takes hardly any memory, and is loaded at once.
        load: loads it in any thread.
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

    @property
    def id(self) -> DrafterName:
        return self.name, self.version


@dataclass(slots=True, eq=False)
class _Slot:
    """A drafter on the shelf.

    Attributes:
        bytes: the most memory that was ever measured; until then the size of its graphs on disk.
        drafter: None: it is not loaded.
        error: reason why it cannot be loaded and will not be tried again; empty: none is known.
        decided: set once it was loaded or could not be.
    """

    member: Member
    bytes: int
    drafter: Drafter | None = None
    error: str = ""
    decided: threading.Event = field(default_factory=threading.Event)


class DrafterShelf:
    """Drafters that texts begin with; every method is for any thread.

    Attributes:
        begun: done once the first drafter that can be loaded is there, or it is known that none can be.
        error: reason why there are none where some were requested; empty: there are some, or none were requested.

    Args:
        drafters: stand there from the beginning, loaded.
    """

    def __init__(self, *drafters: Drafter) -> None:
        self.begun: Future[None] = Future()
        self.begun.set_running_or_notify_cancel()  # nobody who waits for it can cancel it
        self.error = ""
        self._limit_bytes = math.inf
        self._slots: list[_Slot] = []
        self._left: list[tuple[weakref.ref[Drafter], int]] = []  # which texts may still hold: drafter and bytes
        self._lock = threading.Lock()  # of all above; held for the time that it takes to drop a drafter, 1 ms
        self._loading = threading.Lock()  # one at a time, so that what each takes can be measured
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-drafter-loader")
        self._at_work = False
        self._closed = False
        if drafters:
            self.offer([loaded_member(drafter) for drafter in drafters])

    def offer(self, members: Sequence[Member], limit_bytes: float = math.inf, error: str = "") -> None:
        """Give the texts to come these drafters, the most wanted first; texts that run keep theirs.

        A version that is loaded stays. Another version of a drafter that is loaded, and one that takes no memory, are
        loaded now, in this thread; where a version cannot be, the one that is here stays in its place. The others load
        in the background.

        Args:
            members: the drafters.
            limit_bytes: memory that drafters may hold together, without the caches of texts.
            error: reason why there are none.

        Raises:
            ConfigError: two have one name.
        """
        _check_names(members)
        with self._lock:
            here = {slot.member.name: slot for slot in self._slots if slot.drafter is not None}
        slots = [self._slot_of(member, here.get(member.name)) for member in members]
        with self._lock:
            if self._closed:
                return
            leaving = [slot for slot in self._slots if slot not in slots]
            self._slots, self._limit_bytes, self.error = slots, limit_bytes, error
            for slot in slots:
                if slot.drafter is None:
                    slot.error = slot.error or self._too_large(slot)
            for slot in leaving:
                self._drop(slot)
            self._note_begun()
            self._load_what_fits()
        give_back()

    def drafters(self) -> tuple[tuple[Drafter, ...], int | None]:
        """Return the drafters of a text that begins, and the index of the one that takes steering vectors.

        While the first one is being loaded it is the only one, and takes part in the text once it is there.
        """
        with self._lock:
            self._load_what_fits()
            if not self.begun.done():
                first = self._first()
                return () if first is None else (ComingDrafter(first),), None
            loaded = [slot for slot in self._slots if slot.drafter is not None]
            drafters = tuple(slot.drafter for slot in loaded if slot.drafter is not None)
            steered = self._steered()
            return drafters, loaded.index(steered) if steered in loaded else None

    def load_all(self) -> dict[str, str]:
        """Load all in this thread; return the reasons why some cannot be, by their names."""
        for slot in self._slots:
            self._load(slot)
        return {slot.member.name: slot.error for slot in self._slots if slot.error}

    def close(self) -> None:
        """Drop all; a load in progress ends by itself, without effect."""
        with self._lock:
            self._closed = True
            for slot in self._slots:
                slot.drafter = None
                slot.decided.set()
            self._note_begun()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # --- what stands here ---

    @property
    def offered(self) -> tuple[DrafterName, ...]:
        """Name and version of each drafter that texts can have, once it is loaded."""
        with self._lock:
            if not self.begun.done():
                return tuple(slot.member.id for slot in self._slots if slot is self._first())
            return tuple(slot.member.id for slot in self._slots if not slot.error)

    @property
    def names(self) -> str:
        """Names of the drafters that texts can have, with commas between; `none` without one."""
        return ",".join(name for name, _ in self.offered) or "none"

    @property
    def first(self) -> Drafter | None:
        """The most wanted drafter that is loaded; None: none is."""
        return next((drafter for slot in self._slots if (drafter := slot.drafter) is not None), None)

    @property
    def by_text(self) -> tuple[str, ...]:
        """Names of those with another tokenizer than the target."""
        return tuple(slot.member.name for slot in self._slots if slot.member.by_text)

    @property
    def bytes(self) -> int:
        """Memory of what is loaded and of what texts still hold, measured; never less than the graphs on disk."""
        with self._lock:
            return self._in_memory()

    # --- loading ---

    def _slot_of(self, member: Member, here: _Slot | None) -> _Slot:
        """Return the slot of a member, loaded if it takes no memory or another version of it is `here`, loaded."""
        if here is None and member.bytes:
            return _Slot(member, member.bytes)
        if here is not None and here.member.version == member.version:
            return here
        try:
            with self._loading:
                drafter = member.load()
        except Exception as error:  # a drafter may be anybody's code, and others serve
            if here is None:
                log.warning("going on without the drafter %s: %s", member.name, _reason(error))
                return _Slot(member, 0, error=_reason(error))
            log.warning("keeping version %s of the drafter %s: %s", here.member.version, member.name, _reason(error))
            return here
        return _Slot(member, max(member.bytes, here.bytes if here is not None else 0), drafter)

    def _work(self) -> None:
        while (slot := self._next_to_load()) is not None:
            self._load(slot)

    def _next_to_load(self) -> _Slot | None:
        with self._lock:
            slot = None if self._closed else self._lacking()
            self._at_work = slot is not None
            return slot

    def _load(self, slot: _Slot) -> None:
        with self._loading:
            if slot.drafter is not None or slot.error:
                return
            before, began = own_bytes(), time.monotonic()
            try:
                drafter = slot.member.load()
            except Exception as error:  # a drafter may be anybody's code, and the others go on without it
                self._fail(slot, _reason(error))
                return
            after = own_bytes()
            with self._lock:
                if self._closed:
                    return
                if slot.bytes and before is not None and after is not None:
                    slot.bytes = max(slot.bytes, after - before)
                too_large = self._too_large(slot)
                if not too_large:
                    slot.drafter = drafter
                    self._keep_to_limit()
                    slot.decided.set()
                    self._note_begun()
            del drafter
        if too_large:
            self._fail(slot, too_large)
        else:
            ms = 1000 * (time.monotonic() - began)
            log.info("drafter %s: %.1f MB, loaded in %.0f ms", slot.member.name, slot.bytes / 1e6, ms)

    def _fail(self, slot: _Slot, reason: str) -> None:
        log.warning("going on without the drafter %s: %s", slot.member.name, reason)
        with self._lock:
            slot.error = reason
            slot.decided.set()
            self._note_begun()
        give_back()

    # --- with the lock held ---

    def _load_what_fits(self) -> None:
        if not (self._at_work or self._closed) and self._lacking() is not None:
            self._at_work = True
            self._thread.submit(self._work)

    def _lacking(self) -> _Slot | None:
        """Return the most wanted drafter that is not loaded and has room; None: there is none, or not now."""
        room = self._limit_bytes
        for slot in self._slots:
            if slot.error or slot.bytes > room:
                continue
            room -= slot.bytes
            if slot.drafter is None:
                return slot if self._in_memory() + slot.bytes <= self._limit_bytes else None
        return None

    def _keep_to_limit(self) -> None:
        """Drop the least wanted where drafters are larger than their files."""
        excess = self._in_memory() - self._limit_bytes
        for slot in reversed(self._slots):
            if excess > 0 and slot.bytes and slot.drafter is not None:
                excess -= slot.bytes
                self._drop(slot)

    def _drop(self, slot: _Slot) -> None:
        if slot.drafter is not None:
            self._left.append((weakref.ref(slot.drafter), slot.bytes))
            slot.drafter = None

    def _in_memory(self) -> int:
        self._left = [(left, size) for left, size in self._left if left() is not None]
        return sum(slot.bytes for slot in self._slots if slot.drafter) + sum(size for _, size in self._left)

    def _too_large(self, slot: _Slot) -> str:
        if slot.bytes <= self._limit_bytes:
            return ""
        taken = f"{slot.member.name} takes {slot.bytes / 1e6:.1f} MB"
        return f"{taken}; raise --drafter-memory, which is {self._limit_bytes / 1e6:g}"

    def _first(self) -> _Slot | None:
        return next((slot for slot in self._slots if not slot.error), None)

    def _steered(self) -> _Slot | None:
        """Return the first drafter that takes steering vectors; None: there is none, or a version of it is on trial.

        Both versions draft unsteered then, so that their hits compare.
        """
        taking = [slot for slot in self._slots if slot.member.steering is not None]
        tried = any(ON_TRIAL in slot.member.name for slot in taking)
        return taking[0] if taking and not tried else None

    def _note_begun(self) -> None:
        first = self._first()
        if first is None and self._slots:
            self.error = self._slots[-1].error
        if not self.begun.done() and (self._closed or first is None or first.drafter is not None):
            self.begun.set_result(None)


class ComingDrafter:
    """Drafter that is being loaded, unsteered: nobody asks for vectors before it is there."""

    steering: SteeringShape | None = None

    def __init__(self, slot: _Slot) -> None:
        self.name, self.version = slot.member.id
        self._slot = slot

    def open(self, rule: ProposalRule) -> ComingPrefix:
        return ComingPrefix(self._slot, rule)


class ComingPrefix(TokenPrefix):
    """Prefix of a drafter that may still load; proposes nothing."""

    def __init__(self, slot: _Slot, rule: ProposalRule) -> None:
        super().__init__()
        self._slot = slot
        self._rule = rule

    def follow(self, rule: ProposalRule) -> None:
        self._rule = rule

    def propose(self, n: int) -> tuple[DraftToken, ...]:  # noqa: ARG002 - nothing to propose yet
        return ()

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        return self.read(wait=True).score(tokens)

    def read(self, *, wait: bool) -> DraftState:
        """Return the state of the drafter, which has read this prefix; itself while it loads, unless told to `wait`.

        Raises:
            Unavailable: it cannot be loaded.
        """
        if not wait and not self._slot.decided.is_set():
            return self
        self._slot.decided.wait()
        drafter = self._slot.drafter
        if drafter is None:
            raise Unavailable(self._slot.error or f"the drafter {self._slot.member.name} is gone")
        state = drafter.open(self._rule)
        state.extend(self.tokens)
        if self.tokens:
            state.propose(1)
            state.truncate(self.length)
        return state


def loaded_member(drafter: Drafter) -> Member:
    """Return a drafter that is loaded already as one to offer."""
    return Member(drafter.name, drafter.version, 0, lambda: drafter, steering_of(drafter))


def _check_names(members: Sequence[Member]) -> None:
    names = [member.name for member in members]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"names {twice!r} twice; give each drafter once", field="drafter")


def _reason(error: Exception) -> str:
    """Return why a drafter cannot be loaded; a foreign error's message may hold a secret of the user's."""
    known = isinstance(error, OutriderError | OSError)
    return str(error).splitlines()[0] if known and str(error) else type(error).__name__


def own_bytes() -> int | None:
    """Return the resident bytes that this process shares with no other; None: the system does not say."""
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

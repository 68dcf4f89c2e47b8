"""API keys and their limits, as a coordinator counts their use.

A session counts from its lease until its edge reports its end, and while any verifier says that its text goes on.
Tokens count as reported. Verifiers hold each key to its sessions and its tokens too, which catches an edge that reports
too few.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from outrider.coordinator.cluster import SendAway, VerifierInfo, VerifierState
from outrider.proto.address import is_local_peer
from outrider.proto.errors import PermissionDenied, ResourceExhausted, Unauthenticated
from outrider.proto.lease import text_name
from outrider.proto.plumbing.access import Key, Keys, Limits, all_taken
from outrider.proto.types import SessionReport

AUTHORIZATION = "authorization"
MAX_LEASED_OF_KEY = 4096  # sessions whose reports count
RESUME_S = 60.0  # for which an edge tries to open a stream, so that its text keeps the slot meanwhile
ENDING_S = 1.0  # from an edge's report until its verifier has noticed

Text = tuple[str, str]  # names of API key and session


@dataclass(frozen=True, slots=True)
class Caller:
    """The origin of a call.

    Attributes:
        key: API key; None: the coordinator asks for none.
        local: whether the call comes from this machine.
    """

    key: Key | None = None
    local: bool = True

    @property
    def tenant(self) -> str:
        """Name of the key, whose texts share KV pages; empty: none is asked for."""
        return self.key.name if self.key is not None else ""


class CallerAdmission:
    """Checks callers and counts their sessions and tokens, in one event loop; without `keys` anybody may call."""

    def __init__(self, keys: Keys | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = keys
        self._clock = clock
        self._limits = Limits()
        self._slots = KeySlots()
        self._once_known: set[str] = set()
        self._leased: dict[str, OrderedDict[str, None]] = {}  # by key, the newest lease last

    def identify(self, metadata: Iterable[tuple[str, str | bytes]], peer: str) -> Caller:
        """Return the caller with this metadata from `peer`, in gRPC's notation; raises `Unauthenticated`."""
        local = is_local_peer(peer)
        if self._keys is None:
            return Caller(None, local)
        header = next((value for name, value in metadata if name == AUTHORIZATION), "")
        if isinstance(header, bytes):
            raise Unauthenticated("must be text", field="api_key")
        return Caller(self._keys.check_header(header), local)

    def learning_keys(self) -> tuple[str, ...] | None:
        """Return the names of the keys that allow learning from their texts now; None: there are no keys to ask."""
        return tuple(key.name for key in self._keys.current() if key.learning) if self._keys is not None else None

    def check_still_known(self, caller: Caller) -> None:
        """Raise `Unauthenticated` where the caller's key has been taken away since it was checked."""
        if caller.key is not None and self._keys is not None and not self._keys.still_has(caller.key):
            raise Unauthenticated("has been revoked; ask the operator for another", field="api_key", code="OUT-201")

    def check_status(self, caller: Caller) -> None:
        """Raise `PermissionDenied` unless the caller may see the status of the fleet."""
        if caller.key is not None and not caller.key.admin:
            raise PermissionDenied(
                f"key {caller.key.name!r} may not; its table in the keys file needs `admin = true`", field="api_key"
            )

    def check_drain(self, caller: Caller) -> None:
        """Raise `PermissionDenied` unless the caller may drain verifiers."""
        self.check_status(caller)
        if caller.key is None and not caller.local:
            raise PermissionDenied(
                "comes from another machine; use it there, or give the coordinator --api-keys",
                field="drain",
            )

    def has_slot(self, caller: Caller, session: str) -> bool:
        return caller.key is not None and self._slots.is_leased(caller.key.name, session, self._clock())

    def room(self, name: str) -> float:
        """Return the sessions that a key may have beside those it has, by its name; infinite: any number."""
        most = {key.name: key.max_sessions for key in self._keys.current()} if self._keys is not None else {}
        limit = most.get(name)
        return math.inf if limit is None else limit - len(self._slots.held(name, self._clock()))

    def explained(self, full: ResourceExhausted, caller: Caller, session: str) -> ResourceExhausted:
        """Return the error of a session that has to wait, which names its key's limit where that is why."""
        key = caller.key
        if key is None or self.has_slot(caller, session) or self.room(key.name) > 0:
            return full
        taken = all_taken(key)
        return ResourceExhausted(taken.message, field=taken.field, retry_after_s=full.retry_after_s)

    def votes_as(self, caller: Caller) -> str:
        """Return the name of the caller's key if other keys may have texts too; else each of its edges votes alone."""
        keys = self._keys.current() if self._keys is not None else ()
        return caller.tenant if sum(not key.admin for key in keys) > 1 else ""

    def check_tokens(self, caller: Caller) -> None:
        """Raise `ResourceExhausted`, with `retry_after_s`, where the tokens of the caller's key are used up."""
        if caller.key is not None:
            self._limits.check_tokens(caller.key, self._clock())

    def grant(self, caller: Caller, session: str, lease_seconds: float, verifier: str) -> None:
        """Count a session that gets a lease, once however many leases it gets; a refused one keeps the slot it has.

        Raises:
            ResourceExhausted: the key's sessions or tokens are used up; has `retry_after_s`.
        """
        key, now_s = caller.key, self._clock()
        if key is None:
            self._note_lease("", session)
            return
        if key.max_sessions is not None and not self._slots.is_leased(key.name, session, now_s):
            others = self._slots.held(key.name, now_s) - {session}
            if len(others) >= key.max_sessions:
                raise all_taken(key)
        self._limits.check_tokens(key, now_s)
        if key.max_sessions is not None:
            self._slots.take(key.name, session, verifier, now_s, now_s + lease_seconds)
        self._note_lease(key.name, session)

    def had_lease(self, caller: Caller, session: str) -> bool:
        """Return whether a session is among the newest `MAX_LEASED_OF_KEY` that got leases by the caller's key."""
        return session in self._leased.get(caller.tenant, ())

    def _note_lease(self, tenant: str, session: str) -> None:
        leased = self._leased.setdefault(tenant, OrderedDict())
        leased[session] = None
        leased.move_to_end(session)
        if len(leased) > MAX_LEASED_OF_KEY:
            leased.popitem(last=False)

    def settle(self, caller: Caller, report: SessionReport) -> None:
        """Count the tokens of a session that has ended, and free its slot."""
        if caller.key is None:
            return
        now_s = self._clock()
        self._slots.free(caller.key.name, report.session, now_s)
        self._limits.spend(caller.key, report.committed_tokens, now_s)

    def observe(self, verifiers: Iterable[VerifierInfo], asked_s: float) -> SendAway:
        """Take in what verifiers, asked at `asked_s`, say of the texts that go on; return which must not.

        Those are the texts of keys that have been taken away, and what a key has beyond its limit.
        """
        limits = {key.name: key.max_sessions for key in self._keys.current()} if self._keys is not None else None
        if limits is None:
            return self._slots.observe(verifiers, asked_s, lambda _: None)
        self._once_known |= limits.keys()
        revoked = self._once_known - limits.keys()  # others may be new, and known to another coordinator already
        return self._slots.observe(verifiers, asked_s, lambda name: 0 if name in revoked else limits.get(name))

    def running(self) -> dict[str, int]:
        now_s = self._clock()
        counts = {name: len(self._slots.held(name, now_s)) for name in sorted(self._slots.keys)}
        return {name: count for name, count in counts.items() if count}


ANYBODY = Caller()


@dataclass(slots=True)
class _Leased:
    verifier: str
    until_s: float
    seen_s: float  # when it was granted or was last known to go on


@dataclass(frozen=True, slots=True)
class _Listed:
    verifier: str
    age_s: float
    name: str  # by which its verifier ends it


class KeySlots:
    """The slots of API keys over all verifiers: leases that may become texts, and the texts that go on.

    A slot lives as long as its text. Edges report an end at once; verifiers say what goes on, whatever edges report.
    What one coordinator forgets, or another has granted, counts as soon as a verifier says so. Times are seconds of a
    monotonic clock.
    """

    def __init__(self) -> None:
        self._leased: dict[str, dict[str, _Leased]] = {}  # by key and session: a lease looks at its key's alone
        self._listed: dict[str, dict[str, _Listed]] = {}  # by key and session
        self._ended: dict[Text, float] = {}
        self._asked_s = float("-inf")
        self._suspected: frozenset[str] = frozenset()

    def held(self, key: str, now_s: float) -> frozenset[str]:
        """Return the sessions that have a slot of `key`."""
        leased = self._leased.get(key, {})
        for session in [session for session, lease in leased.items() if lease.until_s < now_s]:
            self._forget(key, session)
        believed = key not in self._suspected  # in its reports of ends
        return frozenset(leased) | {
            session for session in self._listed.get(key, ()) if not (believed and self._is_ending(key, session))
        }

    def is_leased(self, key: str, session: str, now_s: float) -> bool:
        lease = self._leased.get(key, {}).get(session)
        return lease is not None and lease.until_s >= now_s

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(self._leased) | self._listed.keys()

    def take(self, key: str, session: str, verifier: str, now_s: float, until_s: float) -> None:
        """Give a session that has a lease for `verifier` a slot until it ends, or until `until_s`."""
        self._ended.pop((key, session), None)
        self._leased.setdefault(key, {})[session] = _Leased(verifier, until_s, now_s)

    def free(self, key: str, session: str, now_s: float) -> None:
        """Free the slot of a session whose edge says that its text has ended."""
        self._forget(key, session)
        self._ended[key, session] = now_s
        for text in [text for text, at_s in self._ended.items() if at_s < self._asked_s - ENDING_S]:
            del self._ended[text]

    def observe(
        self, verifiers: Iterable[VerifierInfo], asked_s: float, limit: Callable[[str], int | None]
    ) -> SendAway:
        """Take in what verifiers say of their texts, and return which of these must not go on.

        A key that had too many texts at the last poll as well loses the youngest beyond its limit. Once may be
        chance, since verifiers answer one after the other. `limit` returns how many texts a key may have at once, by
        its name; None: any number.
        """
        answered = {v.name: v for v in verifiers if v.state is not VerifierState.DOWN}
        self._listed, self._asked_s = {}, asked_s
        for key, session, listed in _texts(answered.values()):
            before = self._listed.get(key, {}).get(session)
            if before is None or listed.age_s < before.age_s:  # it goes on in the younger stream
                self._listed.setdefault(key, {})[session] = listed
        for key, session, lease in [(key, *each) for key, of_key in self._leased.items() for each in of_key.items()]:
            if session in self._listed.get(key, ()):
                lease.seen_s = asked_s
            elif lease.verifier in answered and lease.seen_s < asked_s - RESUME_S:
                self._forget(key, session)
        return self._excess(limit)

    def _excess(self, limit: Callable[[str], int | None]) -> SendAway:
        limits = {key: limit(key) for key in self._listed}
        suspected, self._suspected = (
            self._suspected,
            frozenset(key for key, most in limits.items() if most is not None and len(self._listed[key]) > most),
        )
        away: dict[str, frozenset[str]] = {}
        for key in suspected & self._suspected:
            texts = sorted(self._listed[key].items(), key=lambda text: (text[1].age_s, text[0]))
            for session, listed in texts[: len(texts) - (limits[key] or 0)]:
                away[listed.verifier] = away.get(listed.verifier, frozenset()) | {listed.name}
                self._forget(key, session)  # it comes back where there is a slot, with another lease
        return away

    def _is_ending(self, key: str, session: str) -> bool:
        """Return whether the edge has reported its end, and the verifier may not have noticed yet."""
        return self._ended.get((key, session), float("-inf")) > self._asked_s - ENDING_S

    def _forget(self, key: str, session: str) -> None:
        leased = self._leased.get(key, {})
        leased.pop(session, None)
        if not leased:
            self._leased.pop(key, None)


def _texts(verifiers: Iterable[VerifierInfo]) -> Iterator[tuple[str, str, _Listed]]:
    for verifier in verifiers:
        for key, ages in verifier.texts_of_keys.items():
            for session, age_s in ages.items():
                yield key, session, _Listed(verifier.name, age_s, text_name(key, session))

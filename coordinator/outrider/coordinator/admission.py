"""API keys and their limits, as a coordinator counts their use.

A session counts from its lease until its report, or until its lease expires; tokens count as reported. Verifiers hold
each key to its sessions and its tokens too, which catches an edge that reports too early or too few.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from outrider.proto.address import is_local_peer
from outrider.proto.errors import PermissionDenied, Unauthenticated
from outrider.proto.plumbing.access import Key, Keys, Limits, Ticket
from outrider.proto.types import SessionReport

AUTHORIZATION = "authorization"


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


@dataclass(slots=True)
class _Running:
    ticket: Ticket
    until_s: float


class CallerAdmission:
    """Checks callers and counts their sessions and tokens, in one event loop.

    Args:
        keys: API keys that callers must have; None: anybody may call.
        remote_drain: whether other machines may drain verifiers if there are no keys.
        clock: monotonic time in seconds.
    """

    def __init__(
        self, keys: Keys | None, *, remote_drain: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keys = keys
        self._remote_drain = remote_drain
        self._clock = clock
        self._limits = Limits()
        self._running: dict[tuple[str, str], _Running] = {}  # by key and session

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

    def allows_learning(self, caller: Caller) -> bool:
        """Return whether the caller has a key that is still valid, and allows learning from its texts now."""
        now = self._keys.current() if self._keys is not None else ()
        known = caller.key
        return known is not None and any((key.sha256, key.learning) == (known.sha256, True) for key in now)

    def check_still_known(self, caller: Caller) -> None:
        """Raise `Unauthenticated` where the caller's key has been taken away since it was checked."""
        if caller.key is not None and self._keys is not None and not self._keys.still_has(caller.key):
            raise Unauthenticated("has been revoked; ask the operator for another", field="api_key")

    def check_status(self, caller: Caller) -> None:
        """Raise `PermissionDenied` unless the caller may see the status of the fleet."""
        if caller.key is not None and not caller.key.admin:
            raise PermissionDenied(
                f"key {caller.key.name!r} may not; its table in the keys file needs `admin = true`", field="api_key"
            )

    def check_drain(self, caller: Caller) -> None:
        """Raise `PermissionDenied` unless the caller may drain verifiers."""
        self.check_status(caller)
        if caller.key is None and not caller.local and not self._remote_drain:
            raise PermissionDenied(
                "comes from another machine; use it there, or give the coordinator --api-keys or --remote-drain",
                field="drain",
            )

    def grant(self, caller: Caller, session: str, lease_seconds: float) -> None:
        """Count a session that gets a lease, once however many leases it gets; a refused one keeps the place it has.

        Raises:
            ResourceExhausted: the key's sessions or tokens are used up; has `retry_after_s`.
        """
        key, now_s = caller.key, self._clock()
        if key is None:
            return
        self._expire(now_s)
        before = self._running.get((key.name, session))
        if before is not None:
            self._limits.check_tokens(key, now_s)
            before.until_s = now_s + lease_seconds
            return
        ticket = self._limits.admit(key, now_s)
        if key.max_sessions is None:
            ticket.close()  # nothing to count
            return
        self._running[key.name, session] = _Running(ticket, now_s + lease_seconds)

    def settle(self, caller: Caller, report: SessionReport) -> None:
        """Count the tokens of a session that has ended, and free its place."""
        if caller.key is None:
            return
        running = self._running.pop((caller.key.name, report.session), None)
        if running is not None:
            running.ticket.close()
        self._limits.spend(caller.key, report.committed_tokens, self._clock())

    def running(self) -> dict[str, int]:
        """Return the number of sessions by name of key, for keys with a limit on sessions."""
        self._expire(self._clock())
        names = [name for name, _ in self._running]
        return {name: names.count(name) for name in sorted(set(names))}

    def _expire(self, now_s: float) -> None:
        for which, running in list(self._running.items()):
            if running.until_s < now_s:
                running.ticket.close()
                del self._running[which]


ANYBODY = Caller()

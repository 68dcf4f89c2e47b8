"""Who may ask the coordinator for what, and how much of it.

What a coordinator sees of a key's use: the leases that it grants, and the reports that edges hand in when their texts
end. So it counts a session from its lease until its report, or until its lease expires where none comes; and tokens as
reported. An edge that reports too little is not caught here: verifiers count what they generate for each key
themselves, by what the signed lease says, and send sessions away once its tokens are spent.
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
    """Who makes a call: with which API key (None: none is asked for), and whether from this machine."""

    key: Key | None = None
    local: bool = True


@dataclass(slots=True)
class _Running:
    ticket: Ticket
    until_s: float


class Admission:
    """One coordinator's. One event loop.

    Args:
        keys: that callers must have; None: none is asked for.
        remote_drain: without keys, other machines may drain verifiers too.
        clock: monotonic, in seconds.
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
        """Who calls with this metadata from `peer`, as gRPC names it; raises `Unauthenticated`."""
        local = is_local_peer(peer)
        if self._keys is None:
            return Caller(None, local)
        header = next((value for name, value in metadata if name == AUTHORIZATION), "")
        if isinstance(header, bytes):
            raise Unauthenticated("must be text", field="api_key")
        return Caller(self._keys.check_header(header), local)

    def check_status(self, caller: Caller) -> None:
        """Raises `PermissionDenied` where the caller may not see the whole view."""
        if caller.key is not None and not caller.key.admin:
            raise PermissionDenied(
                f"key {caller.key.name!r} may not; its table in the keys file needs `admin = true`", field="api_key"
            )

    def check_drain(self, caller: Caller) -> None:
        """Raises `PermissionDenied` where the caller may not drain verifiers."""
        self.check_status(caller)
        if caller.key is None and not caller.local and not self._remote_drain:
            raise PermissionDenied(
                "comes from another machine; use it there, or give the coordinator --api-keys or --remote-drain",
                field="drain",
            )

    def grant(self, caller: Caller, session: str, lease_seconds: float) -> None:
        """Room for a session that gets a lease now; one that has its room already keeps it.

        Raises:
            ResourceExhausted: the key's sessions or tokens are used up; has `retry_after_s`.
        """
        key, now_s = caller.key, self._clock()
        if key is None:
            return
        self._expire(now_s)
        before = self._running.pop((key.name, session), None)
        if before is not None:
            before.ticket.close()
        ticket = self._limits.admit(key, now_s)
        if key.max_sessions is None:
            ticket.close()  # nothing to count, and nothing to remember
            return
        self._running[key.name, session] = _Running(ticket, now_s + lease_seconds)

    def settle(self, caller: Caller, report: SessionReport) -> None:
        """A session has ended: its room is free, and its tokens are counted."""
        if caller.key is None:
            return
        running = self._running.pop((caller.key.name, report.session), None)
        if running is not None:
            running.ticket.close()
        self._limits.spend(caller.key, report.committed_tokens, self._clock())

    def running(self) -> dict[str, int]:
        """Sessions by name of those keys that have a limit to them."""
        self._expire(self._clock())
        names = [name for name, _ in self._running]
        return {name: names.count(name) for name in sorted(set(names))}

    def _expire(self, now_s: float) -> None:
        for which, running in list(self._running.items()):
            if running.until_s < now_s:
                running.ticket.close()
                del self._running[which]


ANYBODY = Caller()

"""Decoding streams whose sessions are not admitted yet: few of each lease, of each API key and of each peer.

Such a stream costs its client nothing. Whoever opens many at once must not keep others out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager

from outrider.proto.errors import InvalidArgument, ResourceExhausted
from outrider.proto.lease import LEASE_METADATA, LeaseClaim, read_lease
from outrider.proto.plumbing.connections import discount, network_of_peer

OPEN_WITHIN_S = 10.0
MAX_OF_SESSION = 2  # an edge that comes back may be faster than the news that its old stream is gone
RETRY_S = 1.0


class HalfOpenStreams:
    """Counts of streams that are not admitted, in one event loop.

    Args:
        max_of_peer: most streams of one address, or of an IPv6 network of 64 bits, whatever their leases.
        refused: called whenever one is refused.
    """

    def __init__(self, max_of_peer: int, refused: Callable[[], None]) -> None:
        self._max_of_peer = max_of_peer
        self._refused = refused
        self._of_peer: Counter[Hashable] = Counter()
        self._of_session: Counter[Hashable] = Counter()  # by key, too: another key may lease the same name
        self._of_key: Counter[Hashable] = Counter()

    @contextmanager
    def hold(self, peer: str, session: str = "", key: str = "", max_of_key: int = 0) -> Iterator[None]:
        """Count a stream until its session is admitted.

        Args:
            peer: its client, in gRPC's notation.
            session: session of its lease, if it has one.
            key: API key of its lease, if it has one.
            max_of_key: most sessions of that key, and of its streams that wait; 0: any number.

        Raises:
            ResourceExhausted: the session, the key or the peer has too many already.
        """
        network, of_key = network_of_peer(peer), max(max_of_key, MAX_OF_SESSION)
        if session and self._of_session[key, session] >= MAX_OF_SESSION:
            raise self._refusal(f"the session has {MAX_OF_SESSION} streams that are not admitted")
        if key and max_of_key and self._of_key[key] >= of_key:
            raise self._refusal(f"key {key!r} has {of_key} streams that are not admitted")
        if self._of_peer[network] >= self._max_of_peer:
            raise self._refusal(f"{self._max_of_peer} streams from your address are not admitted")
        held = (self._of_peer, network), (self._of_session, (key, session)), (self._of_key, key)
        for counts, name in held:
            counts[name] += 1
        try:
            yield
        finally:
            for counts, name in held:
                discount(counts, name)

    def __len__(self) -> int:
        return self._of_peer.total()

    def _refusal(self, why: str) -> ResourceExhausted:
        self._refused()
        return ResourceExhausted(f"{why}; send Open on them and wait, or end them", retry_after_s=RETRY_S)


def lease_in(metadata: Iterable[tuple[str, str | bytes]], secret: bytes, now_s: float) -> LeaseClaim:
    """Return the claim of the lease in a call's metadata; whose Open it fits is for the verifier to check.

    Raises:
        InvalidArgument: it is text.
        Unauthenticated, LeaseExpired: as `read_lease` does.
    """
    return read_lease(token_in(metadata), secret, now_s=now_s)


def token_in(metadata: Iterable[tuple[str, str | bytes]]) -> bytes:
    """Return the token in a call's metadata; empty: there is none. Raises `InvalidArgument` where it is text."""
    token = next((value for name, value in metadata if name == LEASE_METADATA), b"")
    if not isinstance(token, bytes):
        raise InvalidArgument("must be bytes", field=LEASE_METADATA)
    return token

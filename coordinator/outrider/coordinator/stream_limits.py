"""Limits of the streams that a coordinator answers, in all and for each address."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from outrider.proto.errors import ResourceExhausted
from outrider.proto.plumbing.connections import discount, network_of_peer

RETRY_S = 1.0


class StreamLimits:
    """The running streams of one kind.

    Args:
        kind: what they are, for errors.
        most: streams that may work at once.
        most_of_peer: streams that one address, or IPv6 network of 64 bits, may have, working or not.
        unread_s: time for which an answer may stay unread; then the stream works no more, and goes with its client.
    """

    def __init__(self, kind: str, most: int, most_of_peer: int, unread_s: float) -> None:
        self.unread_s = unread_s
        self._kind = kind
        self._most = most
        self._most_of_peer = most_of_peer
        self.working = 0
        self._by_network: Counter[str] = Counter()

    @contextmanager
    def of_peer(self, peer: str) -> Iterator[None]:
        """Count a stream of `peer`, in gRPC's notation; raises `ResourceExhausted` where it has too many."""
        network = network_of_peer(peer)
        if self._by_network[network] >= self._most_of_peer:
            raise self._refusal(f"your address has {self._most_of_peer}")
        self._by_network[network] += 1
        try:
            yield
        finally:
            discount(self._by_network, network)

    @contextmanager
    def work(self) -> Iterator[None]:
        """Count a stream that works; raises `ResourceExhausted` where there are too many."""
        if self.working >= self._most:
            raise self._refusal(f"the coordinator has {self._most}")
        self.working += 1
        try:
            yield
        finally:
            self.working -= 1

    def _refusal(self, who: str) -> ResourceExhausted:
        return ResourceExhausted(f"{who} {self._kind} under way, which is the limit; try again", retry_after_s=RETRY_S)

"""A TCP server that sends everything back, and connections to it or to a link before it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def echo_server() -> Iterator[str]:
    """Start the server on loopback, and yield its address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(peer: socket.socket) -> None:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with peer:
            try:
                while data := peer.recv(65536):
                    peer.sendall(data)
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(peer,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield f"127.0.0.1:{listener.getsockname()[1]}"
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def connected(address: str, silence_s: float) -> socket.socket:
    """Return a connection that waits for `silence_s` seconds at most."""
    host, _, port = address.rpartition(":")
    edge = socket.create_connection((host, int(port)), timeout=silence_s)
    edge.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return edge

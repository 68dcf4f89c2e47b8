"""Nothing that the daemon has to say waits: no bytes held back by TCP, no pieces by the daemon."""

from __future__ import annotations

import http.client
import json
import socket
import ssl

import pytest
from self_signed import certify

from outrider.edge.daemon.http_server import HttpProtocol
from outrider.proto.errors import Unavailable
from outrider.proto.plumbing.tls import ServerTls


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0"])
@pytest.mark.parametrize("encrypted", [False, True])
def test_accepted_sockets_send_without_waiting_for_acknowledgements(
    start, scripted, tmp_path, monkeypatch, listen, encrypted
) -> None:
    options = []

    def connection_made(protocol, transport) -> None:
        accepted = transport.get_extra_info("socket")
        options.append(accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(protocol, transport)

    made = HttpProtocol.connection_made
    monkeypatch.setattr(HttpProtocol, "connection_made", connection_made)
    client = scripted()
    client.away = Unavailable("not looked for")
    cert, key = certify(tmp_path, "server", 1)
    with start(client, listen=listen, **({"tls": ServerTls(cert, key)} if encrypted else {})) as live:
        host = listen.rpartition(":")[0].strip("[]")
        connection: socket.socket = socket.create_connection((host, live.port), timeout=20)
        if encrypted:
            connection = ssl._create_unverified_context().wrap_socket(connection)
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        connection.close()
    assert options
    assert all(options)


def test_each_piece_of_a_stream_is_sent_before_the_next_is_there(live) -> None:
    live.client.hold = True  # the text does not end before its pieces were read
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=20)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    deltas = []
    while len(deltas) < 1 + len(live.client.pieces):
        if line := answer.readline().strip():
            deltas.append(json.loads(line.removeprefix(b"data: "))["choices"][0]["delta"])
    assert deltas == [{"role": "assistant", "content": ""}, *({"content": piece} for piece in live.client.pieces)]
    assert live.client.running == 1
    connection.close()
    live.until(lambda: live.client.running == 0)

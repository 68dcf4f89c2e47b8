"""What is no HTTP request is refused in the same shape as everything else, and nobody waits for ever for its rest."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from outrider.edge.daemon.errors import ApiError, json_bytes

MOST_HEADER_BYTES = 64 << 10
HEAD_WITHIN_S = 60.0
LINGER_S = 2.0  # that a refused client may still write for: cut off at once, it would never see why
NO_REQUEST = ApiError(
    400, f"this is no HTTP/1.1 request, or its head has more than {MOST_HEADER_BYTES} bytes", code="invalid_http"
)
TOO_SLOW = ApiError(408, f"the head of the request did not come within {HEAD_WITHIN_S:g} s", code="request_timeout")


class HttpProtocol(H11Protocol):
    """Uvicorn's protocol of one connection, with a limit on the time for a request's head, and OpenAI's errors."""

    _head_timer: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected, and owes a request."""
        super().connection_made(transport)
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        """More of a request; of one that was refused, nothing more is wanted."""
        if not self._refused:
            super().data_received(data)
            self._watch_head()

    def on_response_complete(self) -> None:
        """The connection waits for another request; for how long, Uvicorn watches until its first byte comes."""
        super().on_response_complete()
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self._forget_head()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - Uvicorn's words are replaced
        """Refuse what cannot be parsed."""
        self._refuse(NO_REQUEST)

    def _watch_head(self) -> None:
        if self.conn.their_state is not h11.IDLE or self.timeout_keep_alive_task is not None:
            self._forget_head()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_WITHIN_S, self._refuse, TOO_SLOW)

    def _forget_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, error: ApiError) -> None:
        """Answer, if no other answer has begun, and close."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
        if self.transport.is_closing():
            return
        self._refused = True
        self._forget_head()
        if self.cycle is not None:  # its body is what is wrong: the application is to take its client for gone
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = json_bytes(error.body())
        headers: list[Any] = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            (b"x-request-id", uuid.uuid4().hex.encode()),
        ]
        answer = h11.Response(status_code=error.status, headers=headers, reason=STATUS_PHRASES[error.status])
        for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.loop.call_later(LINGER_S, self.transport.close)
        if self.transport.can_write_eof():
            self.transport.write_eof()

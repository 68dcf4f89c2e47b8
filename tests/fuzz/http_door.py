"""Bytes to the daemon's port: every request gets a text, or an error of its API's shape, and never a 5xx."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import random
import re
from collections.abc import AsyncGenerator
from typing import Any, Self

import h11
from malformed_http import CHAT, COMPLETIONS, refused_requests, request
from tokenizers import Tokenizer
from uvicorn.server import ServerState

from outrider.drafters import DrafterShelf
from outrider.drafters.token_text import TokenText
from outrider.edge.chat.template import ChatTemplate, TemplateSource
from outrider.edge.daemon import DaemonConfig
from outrider.edge.daemon.api_access import RESPONSES
from outrider.edge.daemon.cloud import Cloud, Served
from outrider.edge.daemon.http_errors import MESSAGES
from outrider.edge.daemon.http_server import Daemon, HttpProtocol, _Http
from outrider.edge.daemon.messages import COUNT_TOKENS
from outrider.edge.event_stream import Event, Finished, Tokens
from outrider.edge.link.routes import DirectRoute
from outrider.edge.preparation import Ready
from outrider.proto.session import EdgeStatistics
from outrider.proto.testing import word_tokenizer
from outrider.proto.tokenizer import tokenizer_hash
from outrider.proto.types import CommittedToken, FinishReason, Provenance, TokenFacts

MAX_LENGTH = 2048
ANSWER_WITHIN_S = 300.0
PORT = 8080
MODEL = "tiny"
_FINE = {200, 400, 401, 403, 404, 405, 408, 413, 415, 422, 431}
_STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
_PIECES = (
    b"\r\n", b"\n", b": ", b" ", b"\0", b"\xff", b"{", b"}", b"[", b"]", b'"', b"\\ud800", b"\\u0000", b"1e999",
    b"-1", b"null", b"true", b"NaN", b"[[[[[[[[", b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n",
    b"0\r\n\r\n", b"Expect: 100-continue\r\n", b"Host: localhost\r\n", b"HTTP/1.0", b"Origin: null\r\n",
    b"Connection: keep-alive\r\n", b'"n": 3, ', b'"stream": true, ', b'"stop": [""], ', b'"logprobs": 1, ',
    b'"max_tokens": 1, ', b'"echo": false, ', b'"prediction": {"type": "content", "content": "w5 w6"}, ',
    b'"logit_bias": {"5": 1}, ', b'"seed": 18446744073709551615, ',
    b'"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}, ',
    b'"metadata": {"a": 1}, ',
)  # fmt: skip


class ScriptedTexts:
    """A client of the cloud, whose every text is two words."""

    drafter_name = "none"

    def __init__(self, ready: Ready) -> None:
        self.ready = ready

    async def versions(self) -> tuple[()]:
        return ()

    async def generate(self, prompt: tuple[int, ...], sampling: Any, **options: Any) -> AsyncGenerator[Event]:
        scored = options["prompt_logprobs"] is not None
        scores = tuple(TokenFacts(-0.5, 1, ((token, -0.5),)) for token in prompt[1:]) if scored else ()
        for number, piece in enumerate(("w5", " w6")):
            top = ((5 + number, -0.5),) if options["top_logprobs"] else ()
            facts = TokenFacts(-0.5, 1, top) if options["logprobs"] else None
            token = CommittedToken(5 + number, facts and -0.5, facts)
            yield Tokens(len(prompt) + number, (token,), (Provenance.TARGET,), (piece,), scores)
        yield Finished(FinishReason.EOS, "", EdgeStatistics(), 0.1, 0.05)


class Rendering:
    """The chat template, without a process of its own."""

    async def render(self, messages: Any, **variables: Any) -> str:
        return ChatTemplate(TemplateSource(_TEMPLATE)).render(messages, variables)


class Transport(asyncio.Transport):
    """One connection's end: keeps what the server writes."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 5), "sockname": ("127.0.0.1", PORT)})
        self.written = b""
        self._closing = False

    def write(self, data: bytes | bytearray | memoryview[int]) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        raise OSError(107, "the client is gone")

    def pause_reading(self) -> None:
        """Leave what comes to the caller, who sends no more."""

    def resume_reading(self) -> None:
        """The same."""


class Door:
    """The daemon's protocol and application on an event loop, without sockets, a cloud or clocks that matter."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        text = word_tokenizer(61)
        sha256 = tokenizer_hash(text)
        tokenizer = Tokenizer.from_str(text)
        route = DirectRoute(("127.0.0.1:1",), MODEL, sha256)
        client: Any = ScriptedTexts(Ready(route, MODEL, tokenizer, sha256, DrafterShelf(), chat_template=_TEMPLATE))
        daemon = Daemon(DaemonConfig(listen=f"127.0.0.1:{PORT}"), client)
        cloud: Cloud = daemon.cloud
        cloud.served = Served(client.ready, Rendering(), TokenText(tokenizer))  # type: ignore[arg-type]
        cloud._error = None
        self._config = _Http(daemon._app, None).config
        self._config.load()
        self._empty = daemon.limiter._empty

    def talk(self, data: bytes) -> bytes:
        """Return what the server writes to one connection that sends `data`, and then no more."""
        with _Defects() as defects:
            written = self.loop.run_until_complete(self._talk(data))
        assert not defects.lines, defects.lines
        return written

    async def _talk(self, data: bytes) -> bytes:
        state, transport = ServerState(), Transport()
        protocol = HttpProtocol(self._config, state, {}, _loop=self.loop)
        protocol.connection_made(transport)
        try:
            for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
                if piece and not transport.is_closing():
                    protocol.data_received(piece)
                    await asyncio.sleep(0)
            whole = protocol.conn.their_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED, h11.SWITCHED_PROTOCOL)
            if state.tasks and whole:
                await asyncio.wait(state.tasks, timeout=ANSWER_WITHIN_S)
                assert not state.tasks, "a whole request is not answered"
        finally:
            protocol.connection_lost(None)
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=ANSWER_WITHIN_S)
            assert not state.tasks, "a request whose client is gone goes on"
        assert self._empty.is_set(), "a slot is kept"
        return transport.written


class _Defects(logging.Handler):
    """Lines of logs that tell of a defect, instead of the daemon's log, for as long as the context is entered."""

    _LOGGERS = tuple(map(logging.getLogger, ("outrider", "uvicorn.error", "asyncio")))

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def __enter__(self) -> Self:
        for logger in self._LOGGERS:
            logger.addHandler(self)
        self._LOGGERS[0].propagate = False
        return self

    def __exit__(self, *_: object) -> None:
        self._LOGGERS[0].propagate = True
        for logger in self._LOGGERS:
            logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@functools.cache
def _door() -> Door:
    return Door()


def seeds() -> list[bytes]:
    """Return requests that are right, one of each way, and some that are wrong."""
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "w5 w6"}], "max_tokens": 3}
    text = {"model": MODEL, "prompt": "w5 w6", "max_tokens": 3}
    prediction = {"type": "content", "content": [{"type": "text", "text": "w7"}]}
    bodies = (
        (CHAT, chat),
        (CHAT, chat | {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2}),
        (CHAT, chat | {"prediction": prediction, "response_format": {"type": "json_object"}}),
        (COMPLETIONS, text | {"n": 2, "stop": ["w9"], "logprobs": 1, "logit_bias": {"5": 2}}),
        (COMPLETIONS, text | {"prompt": [[5, 6], [7]], "stream": True, "temperature": 0.5, "seed": 3}),
    )
    right = [request("POST", path, json.dumps(body).encode(), PORT) for path, body in (*bodies, *_other_bodies())]
    right += [request(method, f"{RESPONSES}/resp_0/input_items", b"", PORT) for method in ("GET", "DELETE")]
    right += [request("GET", path, b"", PORT) for path in ("/health", "/v1/models", "/metrics", "/", "/drafters")]
    wrong = refused_requests(random.Random(1), MODEL, PORT)
    return right + [each for each, _ in zip(wrong, range(300), strict=False) if len(each) < MAX_LENGTH][::10]


def _other_bodies() -> list[tuple[str, dict[str, Any]]]:
    """Return requests of the Responses API and of Anthropic's, with turns of every kind."""
    part, call = {"type": "input_text", "text": "w5"}, {"call_id": "c", "name": "f", "arguments": "{}"}
    items = [
        {"role": "user", "content": [part]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "w6"}]},
        {"type": "function_call", **call},
        {"type": "function_call_output", "call_id": "c", "output": [part]},
        {"type": "reasoning", "summary": []},
    ]
    function = {"name": "f", "description": "w7"}
    respond = {"model": MODEL, "input": items, "instructions": "w8", "max_output_tokens": 3}
    blocks = [{"type": "text", "text": "w5"}]
    turns = [
        {"role": "user", "content": blocks},
        {"role": "assistant", "content": [*blocks, {"type": "tool_use", "id": "c", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": blocks, "is_error": True}]},
    ]
    say = {"model": MODEL, "max_tokens": 3, "messages": turns, "system": blocks}
    return [
        (RESPONSES, respond | {"stream": True, "text": {"format": {"type": "json_object"}}}),
        (
            RESPONSES,
            respond | {"tools": [{"type": "function", **function}], "tool_choice": {"type": "function", "name": "f"}},
        ),
        (MESSAGES, say | {"stream": True, "stop_sequences": ["w9"]}),
        (MESSAGES, say | {"tools": [{**function, "input_schema": {}}], "tool_choice": {"type": "any"}}),
        (COUNT_TOKENS, {"model": MODEL, "messages": turns}),
    ]


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Put pieces of HTTP and JSON into a request; mostly its length is mended, so that the body is read."""
    for _ in range(rng.choice((1, 1, 2, 3))):
        head, blank, body = data.partition(b"\r\n\r\n")
        part = body if body and rng.random() < 0.75 else head
        at = rng.randrange(len(part) + 1)
        end = min(len(part), at + rng.choice((0, 0, 1, 3, 12)))
        changed = part[:at] + rng.choice((rng.choice(_PIECES), part[at:end] * 2, b"")) + part[end:]
        head, body = (head, changed) if part is body else (changed, body)
        if rng.random() < 0.9:
            head = re.sub(rb"(?i)(content-length: )\d+", rb"\g<1>%d" % len(body), head, count=1)
        data = head + blank + body
    return data


def try_input(data: bytes) -> None:
    """Send one connection's bytes, and check what comes back."""
    answer = _door().talk(data)
    if not answer:
        return
    first = _STATUS.match(answer)
    assert first is not None, answer[:200]
    for status in map(int, _STATUS.findall(answer)):
        assert status in _FINE | {100}, (status, answer[:500])
    head, _, body = answer.partition(b"\r\n\r\n")
    if int(first[1]) >= 400 and body and b"application/json" in head and b"chunked" not in head:
        answered = json.JSONDecoder().raw_decode(body.decode())[0]
        error = answered["error"]
        assert set(error) - {"details"} == (
            {"message", "type"} if "request_id" in answered else {"message", "type", "param", "code"}
        )
        assert error["message"]

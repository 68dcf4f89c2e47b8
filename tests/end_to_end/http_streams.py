"""Streamed completions, read byte by byte: how each begins and ends is seen as it is on the wire."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

ANSWER_WITHIN_S = 120.0
MAX_RETRIES = 200
ERROR_FIELDS = {"message", "type", "param", "code"}


@dataclass
class Answer:
    """Outcome of one request.

    Attributes:
        status: of HTTP; 0: the connection was refused, or broke before it.
        headers: lower case.
        body: of an answer that is no stream.
        text: of a stream, as far as it came.
        error: OpenAI's error object, of the body or of the stream's last event; or why the connection broke.
        done: `[DONE]` came, and the stream ended as HTTP wants.
        refusals: answers before this one, each with a `Retry-After` that was honoured.
    """

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    text: str = ""
    error: dict[str, Any] | None = None
    done: bool = False
    refusals: list[Answer] = field(default_factory=list)


async def ask(port: int, body: dict[str, object], on_text: Callable[[str], None] = lambda _: None) -> Answer:
    """One streamed completion, asked for once."""
    payload = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode() + payload
    answer = Answer()
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(request)
                await _read(reader, answer, on_text)
            finally:
                writer.transport.abort()
    except (OSError, asyncio.IncompleteReadError) as error:
        if not answer.error:
            answer.done = False
            answer.error = {"message": f"{type(error).__name__}: {error}"}
    return answer


async def ask_patiently(port: int, body: dict[str, object], on_text: Callable[[str], None] = lambda _: None) -> Answer:
    """The same, asked again when the daemon says so: at 429 and 503, after as long as `Retry-After` tells."""
    refusals: list[Answer] = []
    answer = await ask(port, body, on_text)
    while answer.status in (429, 503) and len(refusals) < MAX_RETRIES:
        refusals.append(answer)
        await asyncio.sleep(int(answer.headers["retry-after"]))
        answer = await ask(port, body, on_text)
    answer.refusals = refusals
    return answer


async def get(port: int, path: str) -> Answer:
    """The answer to a GET."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n".encode())
    answer = Answer()
    try:
        await _read(reader, answer, lambda _: None)
    finally:
        writer.transport.abort()
    return answer


async def until_healthy(port: int) -> None:
    """Until the daemon's `/health` says that texts can be had."""
    began = time.monotonic()
    while True:
        try:
            if (await get(port, "/health")).status == 200:
                return
        except (OSError, asyncio.IncompleteReadError):
            pass
        assert time.monotonic() - began < ANSWER_WITHIN_S, "the daemon does not find the cloud"
        await asyncio.sleep(0.05)


async def metric_value(port: int, name: str) -> float:
    """A metric's value, summed over its labels, of whatever serves `/metrics` there."""
    page = (await get(port, "/metrics")).body.decode()
    lines = [line for line in page.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


async def read_answer(reader: asyncio.StreamReader) -> Answer:
    """One answer, streamed or not.

    Raises:
        asyncio.IncompleteReadError: the connection ended within it.
    """
    answer = Answer()
    await _read(reader, answer, lambda _: None)
    return answer


async def _read(reader: asyncio.StreamReader, answer: Answer, on_text: Callable[[str], None]) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    status_line, *lines = head[:-4].split("\r\n")
    answer.status = int(status_line.split()[1])
    answer.headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        await _read_events(reader, answer, on_text)
        return
    if "content-length" in answer.headers:
        answer.body = await reader.readexactly(int(answer.headers["content-length"]))
    elif answer.headers.get("transfer-encoding") == "chunked":
        async with aclosing(_chunks(reader)) as chunks:
            answer.body = b"".join([chunk async for chunk in chunks])
    else:
        answer.body = await reader.read()
    if answer.status >= 400 and answer.headers.get("content-type") == "application/json":
        answer.error = json.loads(answer.body).get("error")


async def _read_events(reader: asyncio.StreamReader, answer: Answer, on_text: Callable[[str], None]) -> None:
    pending = b""
    done = False
    async with aclosing(_chunks(reader)) as chunks:
        async for chunk in chunks:
            *events, pending = (pending + chunk).split(b"\n\n")
            for event in events:
                assert event.startswith(b"data: "), event
                assert not done, "nothing follows [DONE]"
                done = event == b"data: [DONE]"
                if not done:
                    _take(json.loads(event[6:]), answer, on_text)
    assert not pending
    answer.done = done  # only now: the connection ended as it should


def _take(event: dict[str, Any], answer: Answer, on_text: Callable[[str], None]) -> None:
    if "error" in event:
        answer.error = event["error"]
        assert set(event["error"]) == ERROR_FIELDS
        return
    for choice in event["choices"]:
        answer.text += choice["text"]
        on_text(choice["text"])


async def _chunks(reader: asyncio.StreamReader) -> Any:
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
    await reader.readexactly(2)

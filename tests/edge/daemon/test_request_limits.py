"""Limits of one request: what is at a limit is taken, and one more is refused by its name."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.edge import prompts
from outrider.edge.daemon.body_reading import MAX_BYTES, checked
from outrider.edge.daemon.http_errors import ApiError
from outrider.edge.daemon.http_server import MAX_HEADER_BYTES
from outrider.edge.daemon.responses import MAX_METADATA, ResponsesRequest
from outrider.edge.daemon.schema import (
    MAX_CHOICES,
    MAX_MESSAGES,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    MAX_TOOLS,
    MAX_WORDS,
    ChatRequest,
    CompletionRequest,
)
from outrider.edge.prompts import indexed_prediction
from outrider.proto.errors import InvalidArgument
from outrider.proto.types import MAX_GRAMMAR_BYTES, MAX_STOP_TOKENS, Grammar, GrammarKind, Sampling

MESSAGE = {"role": "user", "content": "x"}
BODIES: dict[type, dict[str, Any]] = {
    ChatRequest: {"model": "m", "messages": [MESSAGE]},
    CompletionRequest: {"model": "m", "prompt": "x"},
    ResponsesRequest: {"model": "m", "input": "x"},
}


def tool(number: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{number}", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("kind", "field", "value_of", "limit"),
    [
        (CompletionRequest, "n", int, MAX_CHOICES),
        (CompletionRequest, "prompt", lambda size: ["x"] * size, MAX_CHOICES),
        (CompletionRequest, "stop", lambda size: ["x"] * size, MAX_STOPS),
        (CompletionRequest, "stop", lambda size: "x" * size, MAX_STOP_CHARACTERS),
        (CompletionRequest, "guided_choice", lambda size: [str(word) for word in range(size)], MAX_WORDS),
        (ChatRequest, "messages", lambda size: [MESSAGE] * size, MAX_MESSAGES),
        (ChatRequest, "tools", lambda size: [tool(number) for number in range(size)], MAX_TOOLS),
        (ResponsesRequest, "metadata", lambda size: {str(key): "x" for key in range(size)}, MAX_METADATA),
    ],
)
def test_one_more_than_a_request_may_have_is_refused_by_name(kind, field, value_of, limit) -> None:
    checked(kind, BODIES[kind] | {field: value_of(limit)})
    with pytest.raises(ApiError) as caught:
        checked(kind, BODIES[kind] | {field: value_of(limit + 1)})
    assert (caught.value.status, (caught.value.param or "").partition("[")[0]) == (400, field)


def test_a_body_and_a_head_have_their_bytes_at_most(live) -> None:
    body = b'{"model":"tiny","prompt":"x","user":"' + b"x" * (MAX_BYTES - 40) + b'"}'
    assert live.post("/v1/completions", body + b" " * (MAX_BYTES - len(body))).status == 200
    assert live.post("/v1/completions", body + b" " * (MAX_BYTES + 1 - len(body))).status == 413
    for size, status in ((MAX_HEADER_BYTES // 2, 200), (8 * MAX_HEADER_BYTES, 400)):  # one that came at once is read
        with socket.create_connection(("127.0.0.1", live.port), timeout=60) as connection:
            connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * size + b"\r\n\r\n")
            assert connection.recv(12) == b"HTTP/1.1 %d" % status


def test_a_grammar_and_stop_tokens_have_their_size_at_most() -> None:
    Grammar(GrammarKind.REGEX, "x" * MAX_GRAMMAR_BYTES)
    Sampling(stop_tokens=tuple(range(MAX_STOP_TOKENS)))
    with pytest.raises(InvalidArgument, match="make it smaller") as caught:
        Grammar(GrammarKind.REGEX, "x" * (MAX_GRAMMAR_BYTES + 1))
    assert caught.value.field == "sampling.grammar"
    with pytest.raises(InvalidArgument) as caught:
        Sampling(stop_tokens=tuple(range(MAX_STOP_TOKENS + 1)))
    assert caught.value.field == "sampling.stop_tokens"


@pytest.mark.parametrize(
    ("unit", "limit"), [("x", prompts.MAX_PREDICTED_CHARACTERS), ((3,), prompts.MAX_PREDICTED_TOKENS)]
)
def test_a_prediction_is_as_long_as_it_may_be(unit, limit) -> None:
    encoding = SimpleNamespace(ids=[3])
    tokenizer: Any = SimpleNamespace(get_vocab_size=lambda: 8, encode_batch_fast=lambda *_, **__: [encoding])
    assert asyncio.run(indexed_prediction(tokenizer, unit * limit)) is not None
    with pytest.raises(InvalidArgument, match=f"{limit} at most") as caught:
        asyncio.run(indexed_prediction(tokenizer, unit * (limit + 1)))
    assert caught.value.field == "prediction"

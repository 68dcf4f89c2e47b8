"""Requests that the daemon must refuse: for what they say, for how they say it, or since they are none."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_DEEP = 100_000
NEVER: dict[str, list[Any]] = {  # values that a field never has
    "model": [None, 7, [], {}, "", "another", "x" * 10_000],
    "stream": ["yes", 1, [], {}],
    "stream_options": [3, [], {"include_usage": 1}],
    "n": [0, -1, 129, 1.5, "2", True, [], 10**30],
    "max_tokens": [0, -5, 2.5, "many", True, 10**30, {}],
    "temperature": [-0.1, 2.1, "hot", "1", [], {}, True, 10**400, 5e-324],
    "top_p": [0, -1, 1.1, "x", [], 1e-300],
    "top_k": [-2, 1.5, "x", 10**30],
    "min_p": [-0.1, 1.1, "x"],
    "seed": [1.5, "x", 1 << 64, -(1 << 64), []],
    "stop": [7, [7], [""], ["a"] * 5, {}, "x" * 5000],
    "presence_penalty": [-2.1, 2.1, "x", 1e308],
    "frequency_penalty": [-3, 3, [], -1e308],
    "repetition_penalty": [0, -1, 2.5, "x", 1e-300],
    "logit_bias": [[], {"x": 1}, {"-1": 1}, {"5": 101}, {"5": "x"}, {"5": 1, "05": 1}, 3],
    "response_format": [
        3,
        {},
        {"type": "xml"},
        {"type": "json_schema"},
        {"type": "json_object", "json_schema": {}},
        "json",
    ],
    "stop_token_ids": [3, [-1], ["x"], ["1"], [1.5], [1 << 40]],
    "no_repeat_ngram_size": [-1, 65, 2.5],
    "ignore_eos": ["x", 2, []],
    "min_tokens": [-1, 1 << 31, "x"],
    "guided_grammar": ['root ::= "a"', 3],
    "structured_outputs": [3, {"regex": 3}, {"choice": []}],
}
_NEVER_COMPLETION: dict[str, list[Any]] = {
    "prompt": [None, 7, {}, [], [[]], [["x"]], [1, "x"], [-1], [1.5], [True], [60_000], [1 << 40], "", "w5 " * 3000],
    "logprobs": [6, -1, "x", True],
    "echo": [1, "x"],
    "suffix": ["x", 3],
    "best_of": [3, "x"],
}
_NEVER_CHAT: dict[str, list[Any]] = {
    "messages": [None, [], "hi", {}, [3], [{}], [{"role": "user"}], [{"role": "king", "content": "x"}]],
    "top_logprobs": [21, -1, "x", 3],
    "tools": [[{"type": "function"}], 3],
    "modalities": [["audio"]],
}
_DEEP_BODIES = (b"[" * _DEEP, b'{"prompt":' * _DEEP, b'{"prompt":' + b"[" * _DEEP + b"]" * _DEEP + b"}")
_NO_OBJECTS = (b"", b"null", b"3", b'"x"', b"[]", b"{", b"}", b"{]", b"\xff\xfe{}", b'{"a":NaN}', b'{"a":1e999}', b"\0")
_SURROGATES = (b'{"model":"\\ud800","prompt":"x"}', b'{"model":"m","prompt":"\xed\xa0\x80"}')


def refused_requests(rng: random.Random, model: str, port: int) -> Iterator[bytes]:
    """Whole requests of right framing that are wrong in what they say, without end."""
    bodies = list(_refused_bodies(model))
    while True:
        for path, body in rng.sample(bodies, len(bodies)):
            yield request("POST", path, body, port)
        for path, body in rng.sample(bodies, 40):
            yield request("POST", path, body[: rng.randrange(1 + len(body) // 2)], port)  # truncated
            yield request("POST", path, rng.randbytes(rng.randrange(1, 200)), port)
        for path in (COMPLETIONS, CHAT):
            yield from _refused_heads(path, {"model": model, "prompt": "w5", "max_tokens": 1}, port)


def _refused_bodies(model: str) -> Iterator[tuple[str, bytes]]:
    asked = {
        COMPLETIONS: {"model": model, "prompt": "w5 w6", "max_tokens": 2},
        CHAT: {"model": model, "messages": [{"role": "user", "content": "w5"}], "max_tokens": 2},
    }
    for path, own in ((COMPLETIONS, _NEVER_COMPLETION), (CHAT, _NEVER_CHAT)):
        for field, values in (NEVER | own).items():
            for value in values:
                yield path, json.dumps(asked[path] | {field: value}).encode()
        for needed in asked[path].keys() - {"max_tokens"}:
            yield path, json.dumps({key: value for key, value in asked[path].items() if key != needed}).encode()
        for body in (*_DEEP_BODIES, *_NO_OBJECTS, *_SURROGATES):
            yield path, body


def _refused_heads(path: str, asked: dict[str, Any], port: int) -> Iterator[bytes]:
    body = json.dumps(asked).encode()
    for method in ("GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "NONSENSE"):
        yield request(method, path, body, port)
    for elsewhere in ("/v2/completions", "/v1/completions/", "/v1//completions", "/v1/models/none", "/../etc/passwd"):
        yield request("POST" if "models" not in elsewhere else "GET", elsewhere, body, port)
    for kind in ("text/plain", "multipart/form-data", "", "application/jsonp", "x" * 500):
        yield request("POST", path, body, port, Content_Type=kind)
    yield request("POST", path, body, port, Origin="https://elsewhere.example")
    yield request("POST", path, body, port, Sec_Fetch_Site="cross-site")
    yield request("POST", path, body, port, Host="rebound.example")


def request(method: str, path: str, body: bytes, port: int, **headers: str) -> bytes:
    """One request as bytes; the connection ends with its answer."""
    named = {"Host": f"127.0.0.1:{port}", "Content-Type": "application/json", "Connection": "close"}
    named |= {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in named.items())]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def bad_framing(rng: random.Random, port: int) -> Iterator[bytes]:
    """Bytes that are no HTTP/1.1, without end."""
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n".encode()
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    fixed = (
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /he\xffalth HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nbad header\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n: nameless\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\na\0b: 1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nx: " + b"a" * 600_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 600_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        head + b"Content-Length: -1\r\n\r\n",
        head + b"Content-Length: many\r\n\r\n",
        head + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        head + b"Transfer-Encoding: rot13\r\n\r\n",
        chunked + b"zz\r\nabc\r\n",
        chunked + b"-5\r\nabc\r\n",
        chunked + b"3\r\nabcdef\r\n",
        chunked.replace(b"/completions", b"/nowhere") + b"zz\r\nabc\r\n",
        chunked + b"f" * 100 + b"\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + bytes(range(160)) + b"\r\n\r\n",
    )
    while True:
        yield from fixed
        for _ in range(10):
            yield rng.randbytes(rng.randrange(1, 400)) + b"\r\n\r\n"

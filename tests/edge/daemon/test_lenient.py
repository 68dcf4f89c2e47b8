"""Fields that the daemon does not know or need: ignored by name in a header and the log, or refused with --strict."""

from __future__ import annotations

import pytest

from outrider.edge.daemon.body_reading import MAX_LOGGED, IgnoreUnknown
from outrider.edge.daemon.schema import ChatRequest

HEADER = "X-Outrider-Ignored"


@pytest.mark.parametrize("stream", [False, True])
def test_unknown_fields_at_any_level_are_ignored_and_named_in_a_header(live, stream) -> None:
    messages = [{"role": "user", "content": "hi", "mood": 1}, {"role": "user", "content": "ho", "mood": 2}]
    reply = live.chat(messages=messages, temprature=1, stream=stream, stream_options={"include_magic": True})
    assert reply.status == 200
    assert reply.headers[HEADER].split(", ") == ["stream_options.include_magic", "messages[].mood", "temprature"]
    prompt = live.client.asked[-1][0]
    assert live.client.ready.tokenizer.decode(prompt) == "user: hi\nuser: ho\n"
    assert HEADER not in live.chat(messages=[{"role": "user", "content": "hi"}], stream=stream).headers


def test_an_unknown_field_does_not_hide_what_is_wrong_beside_it(live) -> None:
    reply = live.complete(nonsense=1, temperature=9)
    assert (reply.status, reply.error["param"]) == (400, "temperature")


def test_a_name_that_fits_no_header_is_not_repeated_there(live) -> None:
    odd = {"a\r\nSet-Cookie: x": 1, "ключ": 1, "x" * 500: 1, "": 1}
    reply = live.complete(**odd)
    assert (reply.status, reply.headers[HEADER]) == (200, "(a field with an odd name)")
    assert "Set-Cookie" not in reply.headers
    many = live.complete(**{f"field_{i}": i for i in range(1000)})
    assert many.headers[HEADER].endswith("and 992 more")


def test_each_ignored_name_is_logged_once_and_only_so_many_are(caplog) -> None:
    unknown = IgnoreUnknown()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    for _ in range(3):
        unknown.check(ChatRequest, body | {"temprature": 1})
    assert [record.message for record in caplog.records] == [
        "ignored fields of a request: temprature; --strict refuses them"
    ]
    for i in range(2 * MAX_LOGGED):
        unknown.check(ChatRequest, body | {f"field_{i}": 1})
    assert len(caplog.records) == MAX_LOGGED


def test_strict_refuses_unknown_fields_by_name(start) -> None:
    with start(strict=True) as live:
        reply = live.complete(temprature=1)
        assert (reply.status, reply.error["param"], reply.error["code"]) == (400, "temprature", "unknown_field")
        assert live.complete().status == 200

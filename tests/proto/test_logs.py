"""Logs: one line a record, with the session that it is about, as text or as JSON; nobody can forge a line."""

from __future__ import annotations

import json
import logging
from datetime import datetime

import pytest

from outrider.proto.errors import ConfigError, Unavailable
from outrider.proto.plumbing.logs import JsonLines, LineLimit, TextLines, about, configure


def record(message: str, *args: object, extra: dict[str, str] | None = None, exc_info=None) -> logging.LogRecord:
    made = logging.getLogger("outrider.test").makeRecord(
        "outrider.test", logging.WARNING, __file__, 1, message, args, exc_info, extra=extra
    )
    made.created = 1_770_000_000.25
    return made


def test_a_json_line_says_when_who_what_and_about_which_session() -> None:
    extra = about("s-1", "verifier-0", Unavailable("gone"))
    line = JsonLines().format(record("lost %s of %d", "one", 3, extra=extra))
    assert json.loads(line) == {
        "time": "2026-02-02T02:40:00.250Z",
        "level": "warning",
        "logger": "outrider.test",
        "message": "lost one of 3",
        "session": "s-1",
        "verifier": "verifier-0",
        "error": "Unavailable",
    }
    assert datetime.fromisoformat(json.loads(line)["time"]).timestamp() == 1_770_000_000.25


def test_a_line_about_no_session_has_no_empty_fields() -> None:
    assert set(json.loads(JsonLines().format(record("hello")))) == {"time", "level", "logger", "message"}
    assert TextLines().format(record("hello")) == "2026-02-02T02:40:00.250Z WARNING outrider.test: hello"


def test_a_text_line_ends_with_the_session() -> None:
    line = TextLines().format(record("hello", extra=about("s-1", "v")))
    assert line.endswith("hello session=s-1 verifier=v")


@pytest.mark.parametrize("lines", [TextLines(), JsonLines()])
def test_what_others_said_cannot_begin_a_line_of_its_own(lines) -> None:
    nasty = "x\n2026-01-01T00:00:00.000Z ERROR outrider: forged\r\x1b[31m\u2028"
    formatted = lines.format(record("they said %s", nasty, extra={"session": nasty, "verifier": "", "error": ""}))
    assert len(formatted.splitlines()) == 1
    assert "\x1b" not in formatted


@pytest.mark.parametrize("lines", [TextLines(), JsonLines()])
def test_an_exception_comes_with_its_kind_and_its_traceback(lines) -> None:
    try:
        raise Unavailable("gone")
    except Unavailable as error:
        formatted = lines.format(record("failed", exc_info=(type(error), error, error.__traceback__)))
    assert "Unavailable" in formatted
    assert "Traceback" in formatted
    if isinstance(lines, JsonLines):
        assert json.loads(formatted)["error"] == "Unavailable"


def test_configuring_sets_level_and_format_of_the_whole_process(capsys) -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level
    root.handlers.clear()
    try:
        configure("info", "json")
        logging.getLogger("outrider.x").info("seen", extra=about("s"))
        logging.getLogger("outrider.x").debug("unseen")
        lines = capsys.readouterr().err.splitlines()
        assert [json.loads(line)["message"] for line in lines] == ["seen"]
    finally:
        root.handlers[:], root.level = before


def test_logging_that_is_set_up_already_stays(capsys) -> None:
    assert logging.getLogger().handlers  # of the tests
    before = logging.getLogger().handlers[:]
    configure("warning", "json")
    assert logging.getLogger().handlers == before


@pytest.mark.parametrize(("level", "style", "field"), [("loud", "json", "log_level"), ("info", "xml", "log_format")])
def test_a_wrong_level_or_format_is_named(level, style, field) -> None:
    with pytest.raises(ConfigError) as caught:
        configure(level, style)
    assert caught.value.field == field


def test_a_limited_line_comes_once_a_second_and_counts_those_left_out() -> None:
    now_s = 0.0
    limit = LineLimit(lambda: now_s)
    assert [limit.next_line() for _ in range(4)] == [0, None, None, None]
    now_s = 0.9
    assert limit.next_line() is None
    now_s = 1.0
    assert [limit.next_line(), limit.next_line()] == [4, None]
    now_s = 5.0
    assert limit.next_line() == 1

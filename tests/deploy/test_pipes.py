"""Standard output of the commands that decode: the text alone, byte for byte, where it is no terminal."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from scripted_texts import ScriptedTexts

from outrider.deploy import decode
from outrider.deploy.cli import main
from outrider.deploy.show import LiveText, Marks
from outrider.edge import Provenance, Tokens
from outrider.proto.types import CommittedToken

TEXT = "\tone [bold]two[/] \x1b[31m\r\n  " + "very long " * 30 + "数\n\n"
RUN = ["run", "--coordinator", "127.0.0.1:1"]


@pytest.fixture
def decoded(monkeypatch, capfdbinary):
    def run(texts: list[str], *words: str) -> tuple[int, bytes, bytes]:
        monkeypatch.setattr(decode, "_remote_client", ScriptedTexts(texts, sizes=(3,) * 400).opening())
        status = main([*RUN, "--max-tokens", "4000", *words])
        captured = capfdbinary.readouterr()
        return status, captured.out, captured.err

    return run


def test_a_pipe_gets_the_text_alone_byte_for_byte_and_one_newline(decoded) -> None:
    status, out, err = decoded([TEXT], "a prompt")
    assert status == 0
    assert out == f"{TEXT}\n".encode()
    assert b"target steps per token" in err


def test_several_texts_follow_each_other_in_a_pipe(decoded, tmp_path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n")
    _, out, err = decoded(["first", "second"], "--prompts", str(prompts))
    assert out == b"first\nsecond\n"
    assert err.count(b"target steps per token") == 2


def test_marks_come_into_a_pipe_where_they_are_asked_for(decoded) -> None:
    _, out, _ = decoded(["one two three"], "--marks", "on", "a prompt")
    assert "⟦" in out.decode()
    assert out.decode().replace("⟦", "").replace("⟧", "") == "one two three\n"


def test_json_is_all_that_stands_on_standard_output(decoded) -> None:
    _, out, _ = decoded(["one"], "--json", "a prompt")
    assert json.loads(out)["text"] == "one"


def test_text_is_utf_8_whatever_the_locale(decoded, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    _, out, _ = decoded(["数"], "a prompt")
    assert out == "数\n".encode()


def test_standard_input_that_is_no_utf_8_is_a_mistake(decoded, monkeypatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    status, _, err = decoded([], "-")
    assert status == 1
    assert err == b"outrider run: prompt: cannot read standard input: it is not UTF-8\n"


@pytest.mark.parametrize(
    ("variables", "terminal", "marks"),
    [
        ({"TERM": "xterm-256color"}, True, Marks.COLOUR),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, True, Marks.BOLD),
        ({"TERM": "dumb"}, True, Marks.BRACKETS),
        ({"TERM": "xterm-256color"}, False, Marks.NONE),
        ({"TERM": "xterm-256color", "FORCE_COLOR": "1"}, False, Marks.COLOUR),
    ],
)
def test_a_terminal_gets_the_marks_that_it_can_show(variables, terminal, marks, monkeypatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    file = io.StringIO()
    file.isatty = lambda: terminal
    assert LiveText(Console(file=file)).marks is marks


def test_a_terminal_shows_drafts_and_the_targets_own_tokens_apart() -> None:
    file = io.StringIO()
    live = LiveText(Console(file=file, force_terminal=True, color_system="standard"))
    provenance = (Provenance.DRAFT, Provenance.TARGET)
    live.show(Tokens(0, (CommittedToken(5), CommittedToken(6)), provenance, ("ab", "cd")))
    assert file.getvalue() == "\x1b[32mab\x1b[0m\x1b[1mcd\x1b[0m"

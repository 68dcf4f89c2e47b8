"""`outrider chat`: turns that continue each other, its commands, lines from pipes and terminals."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from scripted_texts import ScriptedTexts

from outrider.deploy import chat as chat_module
from outrider.deploy.chat import MAX_HISTORY, LoopBeside, read_message
from outrider.deploy.cli import main

CHAT = ["chat", "--coordinator", "127.0.0.1:1", "--max-tokens", "200"]


@pytest.fixture
def chat(monkeypatch, capfdbinary):
    """Chat by these lines of a pipe with a cloud of these answers; return its status, outputs, prompts and seeds."""

    def run(
        answers: list[str], *lines: str, words: tuple[str, ...] = (), **config: Any
    ) -> tuple[int, str, str, list[str]]:
        texts = ScriptedTexts(answers, template=True, **config)
        monkeypatch.setattr(chat_module, "_client", texts.make_client)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("".join(f"{line}\n" for line in lines).encode())))
        status = main([*CHAT, *words])
        captured = capfdbinary.readouterr()
        return status, captured.out.decode(), captured.err.decode(), texts.opened

    return run


def asked(opened: list[tuple[str, int]]) -> list[str]:
    return [prompt.partition("<|user|>")[2].removesuffix("<|assistant|>") for prompt, _ in opened]


def test_each_line_of_a_pipe_is_a_turn_and_the_answers_alone_are_on_standard_output(chat) -> None:
    status, out, err, _ = chat(["one", "two\n"], "first", "", "second")
    assert status == 0
    assert out == "one\ntwo\n\n"
    assert err.count("steps a token") == 2


def test_a_turn_continues_the_conversation_and_keeps_its_tokens(chat) -> None:
    _, _, err, opened = chat(["one", "two"], "first", "second")
    assert asked(opened) == ["first", "first<|assistant|>one<|end|><|user|>second"]
    assert "tokens kept" not in err.splitlines()[0]
    assert "tokens kept" in err.splitlines()[1]


def test_a_service_that_was_asked_for_is_said_to_be_kept_or_missed(chat) -> None:
    _, _, err, _ = chat(["one"], "first", service="batch")
    assert "; service kept: " in err
    _, _, err, _ = chat(["one"], "first")
    assert "service" not in err


def test_what_the_conversation_does_not_begin_with_is_sent_whole(chat) -> None:
    _, _, err, opened = chat(["one", "two", "zwei"], "first", "second", "/retry")
    assert asked(opened)[2] == asked(opened)[1] == "first<|assistant|>one<|end|><|user|>second"
    assert "tokens kept" not in err.splitlines()[-1]


def test_commands_retry_and_begin_again(chat) -> None:
    _, out, _, opened = chat(["one", "uno", "two"], "first", "/retry", "/new", "second")
    assert out == "one\nuno\ntwo\n"
    assert asked(opened) == ["first", "first", "second"]
    assert [seed for _, seed in opened] == [0, 1, 0]


def test_a_system_prompt_is_an_option_and_stays_in_a_new_chat(chat) -> None:
    _, _, _, opened = chat(["one", "two"], "first", "/new", "second", words=("--system", "be brief"))
    assert asked(opened) == ["be brief<|user|>first", "be brief<|user|>second"]


def test_a_chat_is_saved_for_its_owner_alone_and_over_nothing(chat, tmp_path) -> None:
    file = tmp_path / "chat.json"
    _, _, err, _ = chat(["one"], "first", f"/save {file}", f"/save {file}", f"/save {tmp_path / 'chat.md'}")
    assert json.loads(file.read_text())["messages"] == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "one"},
    ]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert "exists; give another name" in err
    assert (tmp_path / "chat.md").read_text() == "## user\n\nfirst\n\n## assistant\n\none\n"


def test_an_unknown_command_names_a_near_one_and_two_slashes_are_text(chat) -> None:
    _, out, err, opened = chat(["one"], "/hlep", "//etc is a folder", "/quit", "never asked")
    assert "there is no /hlep; did you mean /help?" in err
    assert asked(opened) == ["/etc is a folder"]
    assert out == "one\n"


def test_a_target_without_a_template_is_refused_with_the_remedy(monkeypatch, capfd) -> None:
    monkeypatch.setattr(chat_module, "_client", ScriptedTexts([]).make_client)
    assert main(CHAT) == 1
    assert "chat-template: tiny has none; give its file, or use `outrider run`" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["one"], "one"),
        (["one\\", "two\\", "three"], "one\ntwo\nthree"),
        (['"""', "one", "", "two", '"""'], "one\n\ntwo"),
        (['"""one', 'two"""'], "one\ntwo"),
        (['"""one"""'], "one"),
    ],
)
def test_a_message_may_have_several_lines(lines, message) -> None:
    left = iter(lines)
    assert read_message(lambda _: next(left)) == message
    assert not list(left)


class ChatInTerminal:
    """`outrider chat` in a terminal of its own, whose model answers `slow` without an end."""

    PROGRAM = """
import asyncio, sys
sys.path[:0] = {paths!r}
from scripted_texts import ScriptedTexts
from outrider.deploy import chat
chat._client = ScriptedTexts(["an answer", "another"], template=True).make_client
say = chat.ChatTurns.say
async def slow(turns, content, **options):
    if content != "slow":
        async for event in say(turns, content, **options):
            yield event
        return
    print("endless", flush=True)
    await asyncio.Event().wait()
chat.ChatTurns.say = slow
sys.argv = ["outrider", *{words!r}]
from outrider.deploy.__main__ import main
main()
"""

    def __init__(self, state: Path) -> None:
        tests = Path(__file__).parent
        program = self.PROGRAM.format(paths=[str(tests), str(tests.parent / "edge")], words=CHAT)
        self.terminal, inner = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "XDG_STATE_HOME": str(state)},
            preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
        )
        os.close(inner)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def until(self, text: str) -> str:
        """Read until this is shown, and return all that is shown up to there."""
        while text not in self.shown:
            try:
                self.shown += os.read(self.terminal, 4096).decode(errors="replace")
            except OSError as error:
                raise AssertionError(f"the chat has ended: {self.shown}") from error
        before, _, self.shown = self.shown.partition(text)
        return before

    def interrupt_line(self, line: str) -> None:
        """Type a line, and Ctrl-C once the chat sleeps until the next key.

        Python's readline does not see a signal that comes between what it shows and its wait for a key.
        """
        self.type(line)
        self.until(line)
        stat = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0.001)
        self.type("\x03")


@pytest.fixture
def terminal(tmp_path):
    chat = ChatInTerminal(tmp_path)
    yield chat
    chat.process.kill()
    chat.process.wait()
    os.close(chat.terminal)


def test_ctrl_c_stops_an_answer_and_a_line_but_not_the_chat_and_ctrl_d_ends_it(terminal, tmp_path) -> None:
    terminal.until("> ")
    terminal.type("hello\n")
    assert "\x1b[1man" in terminal.until("steps a token")  # marked
    terminal.until("> ")
    terminal.type("slow\n")
    terminal.until("endless")
    terminal.type("\x03")
    terminal.until("(stopped)")
    terminal.until("> ")
    terminal.interrupt_line("half a line")
    terminal.until("> ")
    terminal.type("again\n")
    assert "other" in terminal.until("steps a token")
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0
    history = tmp_path / "outrider" / "chat_history"
    assert history.read_text() == "hello\nslow\nagain\n"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert stat.S_IMODE(history.parent.stat().st_mode) == 0o700


def test_ctrl_c_stops_an_answer_that_has_only_just_begun(monkeypatch) -> None:
    begun, closed = threading.Event(), threading.Event()
    really = asyncio.run_coroutine_threadsafe

    async def answer() -> AsyncGenerator[Any]:
        try:
            begun.set()
            await asyncio.Event().wait()
            yield
        finally:
            closed.set()

    def interrupted(*given: Any) -> Any:
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", really)
        really(*given)
        begun.wait()
        raise KeyboardInterrupt

    with LoopBeside() as loop:
        monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(loop.each(answer()))
    assert closed.is_set()


def test_sigterm_ends_a_chat_that_waits_for_a_line(terminal) -> None:
    terminal.until("> ")
    terminal.process.send_signal(signal.SIGTERM)
    terminal.until("outrider chat: ended by SIGTERM")
    assert terminal.process.wait(60) == 143


def test_the_history_is_bounded_and_not_readable_by_others(tmp_path) -> None:
    history = tmp_path / "outrider" / "chat_history"
    history.parent.mkdir()
    history.write_text("".join(f"line {n}\n" for n in range(2 * MAX_HISTORY)))
    history.chmod(0o644)
    chat = ChatInTerminal(tmp_path)
    chat.until("> ")
    chat.type("\x04")
    assert chat.process.wait(60) == 0
    os.close(chat.terminal)
    lines = history.read_text().splitlines()
    assert (len(lines), lines[-1]) == (MAX_HISTORY, f"line {2 * MAX_HISTORY - 1}")
    assert stat.S_IMODE(history.stat().st_mode) == 0o600

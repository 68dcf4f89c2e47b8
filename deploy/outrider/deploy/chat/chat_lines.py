"""Messages to a chat: typed, with editing and a history, or read from a pipe."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

BLOCK = '"""'
PROMPT, MORE = "> ", ". "
MAX_HISTORY = 1000  # lines


def read_message(line_after: Callable[[str], str]) -> str:
    r'''Read one message by `line_after(prompt)`, which raises `EOFError` at the end.

    A line that ends in a backslash goes on in the next one, and lines between """ and """ are one message.
    '''
    line = line_after(PROMPT)
    if line.strip().startswith(BLOCK):
        return _block(line.strip().removeprefix(BLOCK), line_after)
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(line_after(MORE))
    return "\n".join(lines)


def _block(first: str, line_after: Callable[[str], str]) -> str:
    lines = [first] if first else []
    while not (lines and lines[-1].rstrip().endswith(BLOCK)):
        lines.append(line_after(MORE))
    lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
    return "\n".join(lines if lines[-1] else lines[:-1])


class PipedLines:
    """Lines of standard input that is no terminal."""

    def line_after(self, _: str) -> str:
        """Return the next line; raises `EOFError` at the end, and `UnicodeDecodeError`."""
        line = sys.stdin.buffer.readline().decode()
        if not line:
            raise EOFError
        return line.rstrip("\r\n")


class TypedLines:
    """Lines that are typed in a terminal, with the editing and the history of readline where Python has it.

    Args:
        history: file of what was typed before, which only this user can read; None: nothing is kept.
        words: words that the tab key completes at the beginning of a line.
    """

    def __init__(self, history: Path | None, words: Sequence[str]) -> None:
        self._history = history
        self._readline = _readline()
        if self._readline is None:
            return
        self._readline.set_auto_history(False)
        self._readline.set_completer(lambda text, n: ([word for word in words if word.startswith(text)] + [None])[n])
        self._readline.set_completer_delims(" ")
        self._readline.parse_and_bind("tab: complete")
        if history is not None:
            with contextlib.suppress(OSError):  # a history is no reason not to chat
                self._load(self._readline, history)

    def line_after(self, prompt: str, draft: str = "") -> str:
        """Return the line that is typed after a prompt, over a `draft` to edit; raises `EOFError` at Ctrl-D."""
        readline = self._readline
        if readline is None:
            print(prompt, end="", file=sys.stderr, flush=True)  # standard output may be a file of answers
            return input()
        readline.set_startup_hook(lambda: readline.insert_text(draft))
        try:
            line = input(prompt)
        finally:
            readline.set_startup_hook(None)
        self._remember(line)
        return line

    def _remember(self, line: str) -> None:
        if self._readline is None or not line.strip():
            return
        self._readline.add_history(line)
        if self._history is not None:
            with contextlib.suppress(OSError):
                self._readline.append_history_file(1, str(self._history))

    @staticmethod
    def _load(readline: ModuleType, history: Path) -> None:
        history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(history, os.O_RDWR | os.O_CREAT, 0o600))
        history.chmod(0o600)
        readline.read_history_file(str(history))
        readline.set_history_length(MAX_HISTORY)
        readline.write_history_file(str(history))  # without the oldest


def history_file() -> Path:
    """Return the file of what was typed in chats, in XDG_STATE_HOME if that is set."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path("~/.local/state").expanduser()) / "outrider" / "chat_history"


def _readline() -> ModuleType | None:
    """Return readline; None where Python lacks it, or would not use it, since output is no terminal."""
    if not sys.stdout.isatty():
        return None
    try:
        import readline
    except ImportError:
        return None
    return readline

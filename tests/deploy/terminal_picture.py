"""A picture of a terminal session, as SVG: `python tests/deploy/terminal_picture.py docs/figures/terminal.svg`.

It shows what `outrider run` and `outrider chat` print in terminals of their own, on a cluster that runs.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

WIDTH = 100
CONTINUED = "Once upon a time, a fox"
CHAT = ("What is the capital of Italy, and what is it famous for?", "List five fruits.", "/stats")
# What moves the cursor or switches a mode of the terminal, and so is no part of a still picture.
MODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-ln-z]|\x1b[>=]|\x1b\][^\x07]*\x07|\r(?!\n)|\x07")


class RecordedCommand:
    """An `outrider` in a terminal of its own; `shown` is all that it has printed."""

    def __init__(self, words: Sequence[str], state: str) -> None:
        self.terminal, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 40, WIDTH, 0, 0))
        rules = Path(state) / "inputrc"
        rules.write_text("set enable-bracketed-paste off\n")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "outrider.deploy", *words],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm", "XDG_STATE_HOME": state, "INPUTRC": str(rules)},
        )
        os.close(inner)
        self.shown = ""

    def until(self, text: str) -> None:
        """Read until a text has been printed after what was read before."""
        seen = len(self.shown)
        while text not in self.shown[seen:] and self._read():
            pass

    def rest(self) -> str:
        """Read to the end, and return all that was printed."""
        while self._read():
            pass
        self.process.wait()
        os.close(self.terminal)
        return self.shown

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def _read(self) -> bool:
        try:
            piece = os.read(self.terminal, 65536)
        except OSError:
            return False
        self.shown += piece.decode(errors="replace")
        return bool(piece)


def record(state: str, address: str) -> list[tuple[str, str]]:
    """Return commands and what they printed."""
    where = ["--coordinator", address]
    run = ["run", *where, "--max-tokens", "48"]
    generated = RecordedCommand([*run, CONTINUED], state).rest()
    chat = RecordedCommand(["chat", *where], state)
    for line in CHAT:
        chat.until("> ")
        chat.type(f"{line}\n")
    chat.until("> ")
    chat.type("\x04")
    return [(f"outrider {' '.join(run)} '{CONTINUED}'", generated), (f"outrider chat {' '.join(where)}", chat.rest())]


def _last_of_each_line(shown: str) -> str:
    """Return what stays of each line where progress was written over it, or erased."""
    shown = re.sub(r"[^\n]*\n(?:\x1b\[\?25h)?\x1b\[1A\x1b\[2K", "", shown)
    return "\n".join(re.split(r"\r|\x1b\[2K", line)[-1] for line in shown.replace("\r\n", "\n").split("\n"))


def main() -> None:
    """Record the session and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--coordinator", default="127.0.0.1:50050", help="address of a running cluster")
    options = parser.parse_args()
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    with tempfile.TemporaryDirectory() as state:
        for command, shown in record(state, options.coordinator):
            console.print(f"[bold blue]$[/] {command}", highlight=False)
            console.print(Text.from_ansi(MODES.sub("", _last_of_each_line(shown)).rstrip()), soft_wrap=False)
            console.print()
    console.save_svg(str(options.file), title="outrider")


if __name__ == "__main__":
    main()

"""Record `outrider chat` in a terminal, as an SVG that plays in real time and needs no script:

outrider up --target smollm2 --link 30 &
python tests/deploy/terminal_recording.py docs/figures/terminal.svg
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from select import select

QUESTIONS = (
    "What is the capital of Italy, and what is it famous for?",
    "Write a Python function that says whether a number is even.",
)
COLUMNS, CHARACTER, LINE, MARGIN, HOLD_S = 58, 10.8, 25, 18, 5
PIECE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b[>=]|\x1b\][^\x07]*\x07|([\s\S])")
Cell = tuple[str, str, float]  # a character, the classes of its style, and when it came


def record(state: Path, address: str) -> list[tuple[float, str]]:
    """Chat as a person would, and return what was printed from the first prompt on, with seconds since then."""
    (state / "inputrc").write_text("set enable-bracketed-paste off\n")
    terminal, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 400, 0, 0))  # lines are broken in `drawn`
    surroundings = os.environ | {"TERM": "xterm", "XDG_STATE_HOME": str(state), "INPUTRC": str(state / "inputrc")}
    command = [sys.executable, "-m", "outrider.deploy", "chat", "--coordinator", address]
    chat = subprocess.Popen(command, stdin=inner, stdout=inner, stderr=inner, env=surroundings, start_new_session=True)
    os.close(inner)
    pieces: list[tuple[float, str]] = []

    def read(seconds: float, until: str = "") -> None:
        end, shown = time.monotonic() + seconds, ""
        while (left := end - time.monotonic()) > 0 and not (until and shown.endswith(until)):
            if select([terminal], [], [], left)[0]:
                piece = os.read(terminal, 65536).decode(errors="replace")
                pieces.append((time.monotonic(), piece))
                shown += piece

    read(120, "> ")
    start = time.monotonic()
    for question in QUESTIONS:
        read(1)
        for letter in question:
            os.write(terminal, letter.encode())
            read(0.05)
        os.write(terminal, b"\n")
        read(120, "> ")
    os.write(terminal, b"\x04")
    chat.wait(20)
    os.close(terminal)
    return [(max(0.0, at - start), piece) for at, piece in pieces]


def screen(pieces: list[tuple[float, str]]) -> list[list[Cell]]:
    """Return the lines that stay on a terminal of endless width."""
    lines: list[list[Cell]] = [[]]
    row, column, style = 0, 0, ""
    for at, piece in pieces:
        for values, action, character in PIECE.findall(piece):
            line = lines[row]
            if action == "m":
                style = " ".join(f"s{value}" for value in values.split(";") if value not in ("", "0"))
            elif action == "A":
                row -= int(values or 1)
            elif action == "K":
                lines[row] = [] if values == "2" else line[:column]
            elif character == "\n":
                row, column = row + 1, 0
                lines += [[] for _ in range(row + 1 - len(lines))]
            elif character in ("\r", "\b"):
                column = 0 if character == "\r" else column - 1
            elif character.isprintable():
                line[column : column + 1] = [(character, style, at)]
                column += 1
    return lines[:-1]  # the last is a prompt


def wrapped(line: list[Cell]) -> Iterator[list[Cell]]:
    """Yield a line in parts that fit, broken at spaces."""
    while len(line) > COLUMNS:
        cut = max((i + 1 for i in range(COLUMNS) if line[i][0] == " "), default=COLUMNS)
        yield line[:cut]
        line = line[cut:]
    yield line


def drawn(lines: list[list[Cell]]) -> str:
    """Return the SVG: each moment's text appears together, all stays for a while, and it begins again."""
    rows = [part for line in lines for part in wrapped(line)]
    shown: dict[float, str] = dict.fromkeys(sorted({at for row in rows for *_, at in row}), "")
    whole = max(shown) + HOLD_S
    for number, row in enumerate(rows):
        column, y = 0, MARGIN + LINE * (number + 1) - 7
        for (style, at), run in itertools.groupby(row, key=lambda cell: cell[1:]):
            text = "".join(cell[0] for cell in run)
            begins, letters = column + len(text) - len(text.lstrip()), text.strip()
            place = f'x="{MARGIN + begins * CHARACTER:.1f}" y="{y}" textLength="{len(letters) * CHARACTER:.1f}"'
            shown[at] += f'<text {place} class="{style}">{escape(letters)}</text>' if letters else ""
            column += len(text)
    width, height = int(COLUMNS * CHARACTER + 2 * MARGIN), len(rows) * LINE + 2 * MARGIN
    frames = [
        f"@keyframes k{i}{{0%{{opacity:0}}{100 * at / whole:.2f}%,to{{opacity:1}}}}" for i, at in enumerate(shown)
    ]
    groups = [f'<g style="animation-name:k{i}">{texts}</g>' for i, texts in enumerate(shown.values())]
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">
<title>outrider chat: accepted drafts in green, the target's own tokens in bold</title>
<style>text{{font:18px "DejaVu Sans Mono",Menlo,Consolas,monospace;fill:#d7dadf}}
.s2{{fill:#9aa1ab}}.s1{{font-weight:bold;fill:#fff}}.s32{{fill:#7fd962}}
g{{animation:{whole:.2f}s step-end infinite}}@media(prefers-reduced-motion:reduce){{g{{animation:none}}}}
{"".join(frames[1:])}</style>
<rect x="1" y="1" width="{width - 2}" height="{height - 2}" rx="10" fill="#16191d" stroke="#5b626c"/>
{"".join(groups)}</svg>
"""


def main() -> None:
    """Record the chat and write the SVG."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--coordinator", default="127.0.0.1:50050", help="address of a running cluster")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as state:
        given.file.write_text(drawn(screen(record(Path(state), given.coordinator))), encoding="utf-8")


if __name__ == "__main__":
    main()

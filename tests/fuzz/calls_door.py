"""Texts of strangers' models that may call functions: the same calls however a text is cut, for work that is linear.

An input is a beginning, a middle that is repeated until the text is long, and an end, of pieces of the formats. Work is
counted in characters that the readers' functions are given, so that no clock decides.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from written_answer import WrittenAnswer

from outrider.edge import tool_calls
from outrider.edge.tool_calls.formats import FORMATS

MAX_LENGTH = 64
LENGTH = 1024  # characters of the repeated middle; it is read at LONGER times that length, too
LONGER = 4
MOST_WORK = 1.5 * LONGER  # times that of the shorter text; the square would be LONGER times as much again
_SIZES = (4, 16, 64)  # characters that come at a time
_NAMES = ("add", "look_up")
_FOLDER = str(Path(tool_calls.__file__ or "").parent)
_PIECES = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>"),
    *('{"name": "add", ', '"arguments": ', '"parameters": ', '{"id": ', '{"type": "', "{}", "add", "look_up"),
    *("{", "}", "[", "]", ",", ";", ":", '"', "\\", " ", "\n", "\u2003", "a", "_", "5", "!", "\u00e9", "<", "[TOOL"),
)
_BETWEEN = len(_PIECES)  # ends the beginning, and the middle


def seeds() -> list[bytes]:
    """Return texts with calls in every format, and words between them."""
    texts = (
        ("hermes", '<tool_call>~{"name": "add", ~"arguments": ~{}~}~</tool_call>', "!"),
        ("llama3", '<|python_tag|>~{"name": "add", ~"parameters": ~{}~}', ";"),
        ("mistral", '[TOOL_CALLS]~[~{"name": "add", ~"arguments": ~{}~}~,~ ', "]"),
        ("mistral", "[TOOL_CALLS]~add~[CALL_ID]~a~5~[ARGS]~{}", "!"),
    )
    return [written(form, size, begin, "a~ ", end) for form, begin, end in texts for size in range(len(_SIZES))]


def written(form: str, size: int, *parts: str) -> bytes:
    """Return the input for a format, one of the sizes, and a beginning, middle and end of pieces with ~ between."""
    numbers = [[_PIECES.index(piece) for piece in part.split("~") if piece] for part in parts]
    return bytes([sorted(FORMATS).index(form), size, *numbers[0], _BETWEEN, *numbers[1], _BETWEEN, *numbers[2]])


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Change, add or remove pieces, or move the middle."""
    numbers = list(data[2:])
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(numbers) + 1)
        piece = rng.choice((rng.randrange(len(_PIECES)), rng.randrange(len(_PIECES)), _BETWEEN))
        numbers[at : at + rng.choice((0, 1, 1, 2))] = rng.choice(([piece], [piece], []))
    return bytes([rng.randrange(len(FORMATS)), rng.randrange(len(_SIZES)), *numbers])


def try_input(data: bytes) -> None:
    """Read a text whole and in pieces, and one whose middle is several times as long."""
    form, size = (sorted(FORMATS)[data[0] % len(FORMATS)], data[1] % len(_SIZES)) if len(data) > 1 else ("hermes", 0)
    parts = [""]
    for number in data[2:]:
        if number % (_BETWEEN + 1) == _BETWEEN:
            parts.append("")
        else:
            parts[-1] += _PIECES[number % (_BETWEEN + 1)]
    begin, middle, end = parts[0], parts[1] if len(parts) > 1 else "", "".join(parts[2:])
    work = []
    for length in (LENGTH, LONGER * LENGTH):
        text = begin + (middle * length)[:length] + end
        answer, read = _read(form, text, _SIZES[size])
        work.append(read)
        assert answer == _read(form, text, len(text) or 1)[0], "a text means the same however it is cut"
    assert work[1] <= MOST_WORK * work[0], f"work grows faster than the text: {work} characters are read"


def _read(form: str, text: str, size: int) -> tuple[WrittenAnswer, int]:
    """Return a text's answer, and how many characters were read for it."""
    parser, answer = FORMATS[form].parser(_NAMES), WrittenAnswer()
    with _counted() as work:
        for start in range(0, len(text), size):
            answer.add(parser.take(text[start : start + size]))
        answer.add(parser.end())
    return answer, sum(work)


@contextmanager
def _counted() -> Iterator[list[int]]:
    """Note how many characters each function of the readers is given: of its text, and not read yet of its reader's."""
    work: list[int] = []

    def called(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_FOLDER):
            given: dict[str, Any] = frame.f_locals
            work.append(
                len(getattr(given.get("self"), "_rest", "")) + max(0, len(given.get("text", "")) - given.get("at", 0))
            )

    sys.setprofile(called)
    try:
        yield work
    finally:
        sys.setprofile(None)

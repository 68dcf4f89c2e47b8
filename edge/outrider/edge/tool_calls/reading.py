"""Parser of calls in a text that comes in any pieces; the formats say what begins a call and what follows it.

What turns out to be no call stays text, down to the last character. Once the arguments of a call have begun, they go
out as they come, so that what the model writes there is the call's, also where it breaks off or is no JSON. White space
around calls belongs to the format, not to the text, up to `MAX_HEAD` characters of it.

What is read again with each piece has at most `MAX_HEAD` characters, so that work grows with the length of the text,
whatever it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import ClassVar

from outrider.edge.tool_calls.json_text import Head, ObjectEnd, Unread, call_of, read_first_key, read_head, skip_space

MAX_HEAD = 256  # characters of a call before its arguments, and of white space around it
_SLICE = 4096  # characters read at a time


@dataclass(frozen=True, slots=True)
class Said:
    """Text for people."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """Beginning of the `index`-th call, which is one of the function `name`; parsers give it no id."""

    index: int
    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments of the `index`-th call, which are a JSON object in the end."""

    index: int
    text: str


Part = Said | CallBegun | CallArguments


def merged(parts: Iterable[Part]) -> list[Part]:
    """Return parts without neighbours that go on with the same text or arguments."""
    made: list[Part] = []
    for part in parts:
        match made[-1:], part:
            case [Said(before)], Said(text):
                made[-1] = Said(before + text)
            case [CallArguments(last, before)], CallArguments(index, text) if last == index:
                made[-1] = CallArguments(index, before + text)
            case _:
                made.append(part)
    return made


class CallParser(ABC):
    """Parser of one text; a state returns whether another can go on with what has come.

    Args:
        names: names of the functions.
    """

    _marker: ClassVar[str]  # begins calls wherever it stands

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._rest = ""  # text that has come and was not read yet,
        self._held = ""  # and before it what is text after all unless a call follows
        self._ended = False
        self._calls = 0
        self._just_called = False  # nothing was said since
        self._end = ObjectEnd()
        self._object_parts: list[str] = []  # of an object that is read as a whole
        self._parts: list[Part] = []
        self._state: Callable[[], bool] = self._text
        self._then: Callable[[], bool] = self._closing

    def take(self, text: str) -> list[Part]:
        """Return what is certain now that `text` has come."""
        self._parts = []
        for start in range(0, max(1, len(text)), _SLICE):
            self._rest += text[start : start + _SLICE]
            while self._state():
                pass
        return self._parts

    def end(self) -> list[Part]:
        """Return the rest, since nothing more comes."""
        self._ended = True
        return self.take("")

    # --- what a format adds ---

    @abstractmethod
    def _opened(self) -> bool:
        """Read on after the marker."""

    @abstractmethod
    def _after(self) -> bool:
        """Read on after the object of a call."""

    def _accepts(self, name: str) -> bool:  # noqa: ARG002 - for formats whose calls look like other text
        """Return whether an object with this name is a call."""
        return True

    # --- states ---

    def _text(self) -> bool:
        at = self._rest.find(self._marker)
        if at >= 0:
            said = _before_space(self._rest[:at])
            self._say(said)
            self._hold(at + len(self._marker), said)
            self._state = self._opened
            return True
        if self._ended:
            if self._rest.strip() or not self._just_called:
                self._say(self._rest)
            self._rest = ""
        else:
            certain = len(self._rest) - _overlap(self._rest, self._marker)
            said = _before_space(self._rest[:certain])
            self._say(said)
            self._rest = self._rest[len(said) :]
        return False

    def _object(self) -> bool:
        """Read a call's object as far as its arguments; one with keys in another order is read as a whole."""
        written = self._rest[:MAX_HEAD]
        head = read_head(written, 0)
        if isinstance(head, Head):
            if not self._accepts(head.name):
                return self._give_up()
            self._rest = self._rest[head.at :]
            self._begin(head.name, self._closing)
            return True
        key = read_first_key(written, 0)
        if Unread.WAIT in (head, key) and not self._head_ends:
            return False
        if isinstance(key, Unread):
            return self._give_up()
        self._end, self._object_parts = ObjectEnd(), []
        self._state = self._whole_object
        return True

    def _whole_object(self) -> bool:
        """Read an object to its end; one that is no call is text, with all that is in it."""
        length = self._end.find(self._rest)
        self._object_parts.append(self._rest if length is None else self._rest[:length])
        self._rest = "" if length is None else self._rest[length:]
        if length is None and not self._ended:
            return False
        written = "".join(self._object_parts)
        call = None if length is None else call_of(written)
        if call is None or not self._accepts(call[0]):
            self._held += written
            return self._give_up()
        name, arguments = call
        self._begin(name, self._after)
        self._parts.append(CallArguments(self._calls - 1, arguments))
        self._state = self._after
        return True

    def _arguments(self) -> bool:
        length = self._end.find(self._rest)
        written = self._rest if length is None else self._rest[:length]
        if written:
            self._parts.append(CallArguments(self._calls - 1, written))
        self._rest = self._rest[len(written) :]
        if length is None:
            return False
        self._state = self._then
        return True

    def _closing(self) -> bool:
        """Read the end of the object around the arguments, and further keys, which say nothing that is needed."""
        at = skip_space(self._rest, 0)
        self._rest = self._rest[at:]
        if not self._rest:
            return False
        if self._rest[0] == ",":
            self._end, self._state = ObjectEnd(1), self._skipping
            return True
        self._rest = self._rest[self._rest[0] == "}" :]
        self._state = self._after
        return True

    def _skipping(self) -> bool:
        length = self._end.find(self._rest)
        self._rest = "" if length is None else self._rest[length:]
        if length is None:
            return False
        self._state = self._after
        return True

    # --- steps ---

    @property
    def _head_ends(self) -> bool:
        """Whether what has come of a call's head is all that may."""
        return self._ended or len(self._rest) >= MAX_HEAD

    def _wait(self) -> bool:
        """Wait for more of what follows a call; at the end of the text it is the format's own, and no text."""
        if self._ended:
            self._rest = ""
        return False

    def _begin(self, name: str, then: Callable[[], bool]) -> None:
        """Begin a call: its arguments are read next, and `then` reads what follows them."""
        self._parts.append(CallBegun(self._calls, name))
        self._calls += 1
        self._held = ""
        self._just_called = True
        self._end = ObjectEnd()
        self._state, self._then = self._arguments, then

    def _hold(self, length: int, said: str = "") -> None:
        """Take the first `length` characters of the rest, whose beginning was `said`, and hold back the others."""
        self._held += self._rest[len(said) : length]
        self._rest = self._rest[length:]

    def _give_up(self) -> bool:
        """Take what was held back, and what follows it, for text."""
        self._say(self._held)
        self._held = ""
        self._state = self._text
        return True

    def _say(self, text: str) -> None:
        if text:
            self._just_called = False
            self._parts.append(Said(text))


def _before_space(text: str) -> str:
    """Return a text without the white space at its end, of which a call takes `MAX_HEAD` characters at most."""
    return text[: max(len(text.rstrip()), len(text) - MAX_HEAD)]


def _overlap(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that begins `marker`."""
    return next((n for n in range(min(len(text), len(marker) - 1), 0, -1) if text.endswith(marker[:n])), 0)

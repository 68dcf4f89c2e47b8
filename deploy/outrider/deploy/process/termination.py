"""The end of a process that a signal asks to end: in order if that takes a moment, else at once, with all it started.

SIGTERM is what a stopped job gets; Ctrl-C and a closed terminal count as well.

Python runs the handler of a signal between two steps of the main thread, which may be in a long call into C: torch that
is imported, Ray that starts, weights that are read. So a thread beside it sees each signal too, through the file
descriptor that Python writes them to, and ends the process where the main thread has not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from outrider.deploy.process.descendants import end_descendants

if TYPE_CHECKING:
    import asyncio

GRACE_S = 0.6  # for an end in order
NOTED_WITHIN_S = 0.2
FAILED = 1  # status of a command that says on standard error why
WORDS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "ended by SIGTERM",
    signal.SIGHUP: "ended, since its terminal is gone",
}
_SHOW_CURSOR = "\x1b[?25h"


class EndWatch:
    """The watch over signals in the process of a command; before `begin` it does nothing.

    Attributes:
        number: first signal that asked the process to end; 0: none has.
        command: words before the line that says why the process has ended.
    """

    def __init__(self) -> None:
        self.number = 0
        self.command = "outrider"
        self._left_to_command = False
        self._own: frozenset[int] = frozenset()
        self._at_end: list[Callable[[], object]] = []
        self._noted = threading.Event()  # a signal has been, by the thread
        self._ending = threading.Lock()
        self._errors: int | None = None  # standard error, once nobody else is to write to it

    def begin(self) -> None:
        """Watch the signals of this process; to be called once, in the main thread, before anything else."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=_forget)  # or a child's signals would be taken for ours
        for number in (signal.SIGTERM, signal.SIGHUP):
            if not stays_ignored(number):
                signal.signal(number, _like_ctrl_c)
        threading.Thread(target=self._read, args=(reading,), name="outrider-signals", daemon=True).start()

    def leave_to_command(self) -> None:
        """From now on have the command itself end in order at the first signal; after another it has only a moment."""
        self._left_to_command = True

    def leave_alone(self, *numbers: int) -> None:
        """From now on take no notice of these signals, by which the command means something else than its end."""
        self._own |= set(numbers)

    def at_end(self, clean: Callable[[], object]) -> None:
        """Have `clean`, which must be quick, called where the process ends by a signal."""
        self._at_end.append(clean)

    def noted(self) -> bool:
        """Return whether a signal asks the process to end; the thread may note it later than a handler acts on it."""
        return self._noted.wait(NOTED_WITHIN_S)

    def end_if_asked(self, status: int) -> None:
        """End the process of a command that has ended with `status`, and has said why, if a signal asked it to."""
        if self.number:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            unheard = status == FAILED and self._errors is not None  # an interrupted import can look like a missing one
            self._end(None if unheard else status)

    def end(self) -> NoReturn:
        """End the process after a signal, with a line that says so."""
        self._end(None)

    def _end(self, status: int | None) -> NoReturn:
        self.noted()
        self._ending.acquire()  # for good
        if status is None:
            self._say(WORDS.get(signal.Signals(self.number or signal.SIGINT), "ended"))
            status = 128 + (self.number or signal.SIGINT)
        for clean in self._at_end:
            with contextlib.suppress(Exception):
                clean()
        end_descendants()
        os._exit(status)

    def _read(self, reading: int) -> None:
        while numbers := os.read(reading, 64):
            for number in numbers:
                if number in WORDS and number not in self._own:
                    self._seen(number)
                    self._noted.set()

    def _seen(self, number: int) -> None:
        if self._errors is not None:
            self.end()
        first, self.number = not self.number, self.number or number
        if first and self._left_to_command:
            if os.isatty(2):
                _write(2, f"\n{self.command}: ending in order; Ctrl-C ends it at once\n")
            return
        # What is torn down in the middle may complain; that is nobody's concern now.
        self._errors = os.dup(2)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
        timer = threading.Timer(GRACE_S, self.end)
        timer.daemon = True
        timer.start()

    def _say(self, words: str) -> None:
        errors = 2 if self._errors is None else self._errors
        terminal = os.isatty(errors)
        _write(errors, f"{_SHOW_CURSOR if terminal else ''}{chr(10) if terminal else ''}{self.command}: {words}\n")


WATCH = EndWatch()
"""The watch of this process."""


def stays_ignored(number: int) -> bool:
    """Return whether whoever started this process has it ignore a signal, as `nohup` does, and `&` in a script.

    SIGTERM always ends a process, or it could only be killed.
    """
    return number != signal.SIGTERM and signal.getsignal(number) is signal.SIG_IGN


def _write(file: int, text: str) -> None:
    with contextlib.suppress(OSError):  # the terminal may be gone
        os.write(file, text.encode())


def _like_ctrl_c(_: int, frame: FrameType | None) -> None:
    handler = signal.getsignal(signal.SIGINT)  # asyncio's own in a loop, which cancels what runs there
    if callable(handler):
        handler(signal.SIGINT, frame)
    else:
        raise KeyboardInterrupt


def _forget() -> None:
    with contextlib.suppress(ValueError):
        signal.set_wakeup_fd(-1)


def set_when_asked_to_end() -> asyncio.Event:
    """Return an event that SIGINT, SIGTERM and a closed terminal set from now on; the caller ends in order then.

    A server calls it before it says that it serves.
    """
    import asyncio  # here, since every command imports this module, and `outrider --help` is to be quick

    stop = asyncio.Event()
    WATCH.leave_to_command()
    on_signals(stop.set, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return stop


def on_signals(act: Callable[[], object], *numbers: int) -> None:
    """Call `act` in the running event loop at each of these signals, except one that stays ignored.

    The loop's own way to do so would take the signals from `EndWatch`.
    """
    import asyncio

    loop = asyncio.get_running_loop()

    def tell(*_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has been closed
            loop.call_soon_threadsafe(act)

    for number in numbers:
        if not stays_ignored(number):
            signal.signal(number, tell)


@contextmanager
def temporary_folder(prefix: str) -> Iterator[Path]:
    """Make a folder for the `with` block, which is also removed where a signal ends the process in the middle."""
    import shutil
    import tempfile

    with tempfile.TemporaryDirectory(prefix=prefix) as folder:
        WATCH.at_end(lambda: shutil.rmtree(folder, ignore_errors=True))
        yield Path(folder)


@contextmanager
def handlers_restored() -> Iterator[None]:
    """Restore the handlers of signals after the `with` block, which may not be all of the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class StopAtStep:
    """Signals that end work between two of its steps.

    Before the first step there is nothing to keep, so SIGTERM and Ctrl-C end the work at once. Later they only make
    `stopping` true, for the work to end itself.
    """

    def __init__(self) -> None:
        self._stopping = False
        self._has_stepped = False

    def stopping(self) -> bool:
        return self._stopping

    def stepped(self, _: int) -> None:
        self._has_stepped = True
        WATCH.leave_to_command()

    @contextmanager
    def listening(self) -> Iterator[StopAtStep]:
        with handlers_restored():
            if threading.current_thread() is threading.main_thread():  # no other one can
                for number in (signal.SIGTERM, signal.SIGINT):
                    if not stays_ignored(number):
                        signal.signal(number, self._take)
            yield self

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        if self._has_stepped:
            self._stopping = True
        else:
            raise KeyboardInterrupt


def has_terminal() -> bool:
    """Return whether a terminal controls this process, as one does that was started in it, until it is closed."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True

"""Default actions of signals for the processes that a test starts, whoever started the tests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

STARTED_WITHOUT = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)  # by `nohup`, and by `&` in a script


@contextmanager
def default_signals_for_children() -> Iterator[None]:
    """Have programs that are started in the `with` block heed signals that this process was started to ignore.

    This process ignores them as before, but by a handler: a program gets the default action in a handler's place, but
    inherits an ignored signal.
    """
    ignored = [number for number in STARTED_WITHOUT if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)

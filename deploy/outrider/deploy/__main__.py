"""The process of the command line, `outrider` or `python -m outrider.deploy`."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn

from outrider.deploy.process.termination import WATCH
from outrider.proto.plumbing.cores import limit_spinning

if TYPE_CHECKING:
    from outrider.deploy.cli import Program

PIPE_CLOSED = 141  # as of a program that SIGPIPE ends
ENDED_BY_RAY = (signal.SIGTERM, 1)  # statuses with which Ray's own handlers of SIGTERM exit


def main(program: Program | None = None) -> NoReturn:
    """Run one command, of `outrider` unless another program is given, and end the process with its status."""
    WATCH.begin()  # before the imports below: Ctrl-C may come during them
    limit_spinning()
    try:
        status = _status(program)
    except KeyboardInterrupt:
        WATCH.end()
    except BrokenPipeError:  # whoever read standard output has seen enough
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        status = PIPE_CLOSED
    WATCH.end_if_asked(status)
    sys.exit(status)


def _status(program: Program | None) -> int:
    from outrider.deploy.cli import OUTRIDER
    from outrider.deploy.cli import main as run

    try:
        status = run(program=program or OUTRIDER)
    except SystemExit as ended:
        if ended.code in ENDED_BY_RAY and WATCH.noted():
            WATCH.end()
        status = int(ended.code or 0)
    sys.stdout.flush()
    return status


if __name__ == "__main__":
    main()

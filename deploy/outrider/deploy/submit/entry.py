"""A job on its node: runs the command in a folder of its own, whose files go to the output place."""

from __future__ import annotations

import argparse
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from outrider.deploy.submit.place import Mirror, Place
from outrider.proto.errors import ConfigError

SYNC_EVERY_S = 30.0


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status in a shell's form."""
    parser = argparse.ArgumentParser(prog="python -m outrider.deploy.submit.entry", description=__doc__)
    parser.add_argument("--inputs", action="store_true", help="the current folder holds the job's inputs")
    parser.add_argument("--output", required=True, metavar="PLACE", help="absolute path or URL")
    parser.add_argument("--mark", default="", metavar="ID", help="mark in the output place, left by the submitter")
    parser.add_argument("--probe", default="", metavar="ID", help="mark that the submitter could not leave")
    parser.add_argument("--resume", action="append", default=[], metavar="NAME", help="taken from the output place")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="command of outrider")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    work = Path(tempfile.mkdtemp(prefix="outrider-job-"))
    try:
        if options.inputs:  # jobs with the same inputs share the folder that Ray unpacks them to, so copy them
            shutil.copytree(Path.cwd(), work, dirs_exist_ok=True)
        place = Place(options.output)
        if options.probe:
            place.leave_mark(options.probe)
        if mark := options.probe or options.mark:
            place.take_mark(mark)
        mirror = Mirror(work, place)
        mirror.fetch(options.resume)
    except ConfigError as error:
        shutil.rmtree(work)
        _complain(error.message)
        return 2
    return run(command, work, mirror)


def run(command: list[str], work: Path, mirror: Mirror) -> int:
    """Run the command and return its exit status, or 1 if it succeeds but its files cannot be copied to the place.

    Files are copied while it runs and at its end, even if it fails or is stopped.
    """
    process = subprocess.Popen([sys.executable, "-m", "outrider.deploy.cli", *command], cwd=work)  # noqa: S603
    for number in (signal.SIGTERM, signal.SIGINT):  # Ray signals the command too
        signal.signal(number, lambda *_: None)
    ended = False
    while not ended:
        with suppress(subprocess.TimeoutExpired):
            process.wait(SYNC_EVERY_S)
        ended = process.poll() is not None
        failed = _sync_fails(mirror)  # no reason to end a command that runs
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    if failed:
        _complain(f"what is missing there is in {work} on {socket.gethostname()}")
        return status or 1
    print(mirror.summary, end="", flush=True)
    shutil.rmtree(work)
    return status


def _sync_fails(mirror: Mirror) -> bool:
    try:
        mirror.sync()
    except ConfigError as error:
        _complain(error.message)
        return True
    return False


def _complain(text: str) -> None:
    print(f"outrider submit: output: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""What a submitted job runs on the cluster: the command in a folder of its own, then the packing of its artefacts."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from outrider.deploy.submit.artefacts import FOLDER
from outrider.deploy.submit.packer import Packer

JOB_LOG = "job-driver-"
JOBS = "outrider-jobs"  # in the session's folder


def main(arguments: list[str] | None = None) -> int:
    """Run it; the command's exit status, as a shell would give it."""
    parser = argparse.ArgumentParser(prog="python -m outrider.deploy.submit.entry", description=__doc__)
    parser.add_argument("--input", action="append", default=[], metavar="PATH", help="given to it; repeatable")
    parser.add_argument("--fetch", action="append", default=[], metavar="PATH", help="to hand back; repeatable")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="of `outrider`")
    options = parser.parse_args(arguments)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    log = job_log(Path("/proc/self/fd/1"))
    if log is None:
        print("outrider: this runs in jobs of Ray's job server only; see outrider submit --help", file=sys.stderr)
        return 2
    work = log.parent.parent / JOBS / log.stem.removeprefix(JOB_LOG)
    give(options.input, Path.cwd(), work)
    return run(command, options.fetch, work=work, artefacts=log.parent / FOLDER / work.name)


def job_log(standard_output: Path) -> Path | None:
    """The log of this job, which is its standard output; None where that is something else.

    The folder of that file is the one whose files the job server hands out. No call of Ray names it to a process
    that has not joined the cluster, and joining takes seconds.
    """
    try:
        log = Path(os.readlink(standard_output))
    except OSError:
        return None
    return log if log.name.startswith(JOB_LOG) and log.suffix == ".log" else None


def give(inputs: list[str], folder: Path, work: Path) -> None:
    """Make the job's own folder, with copies: jobs with the same inputs share the folder that Ray unpacks them to."""
    work.mkdir(parents=True)
    for name in inputs:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        if (folder / name).is_dir():
            shutil.copytree(folder / name, work / name)
        else:
            shutil.copyfile(folder / name, work / name)


def run(command: list[str], wanted: list[str], *, work: Path, artefacts: Path) -> int:
    """Run `outrider COMMAND` in `work`, and have packed what is wanted of it, also of one that fails or is stopped."""
    packer = Packer(work, artefacts, wanted)
    status = _run_command(command, work, packer.alive)
    packer.finish()
    return status


def _run_command(command: list[str], work: Path, alive: int) -> int:
    call = [sys.executable, "-m", "outrider.deploy.cli", *command]
    process = subprocess.Popen(call, cwd=work, pass_fds=(alive,))  # noqa: S603 - the job's

    def pass_on(number: int, _: FrameType | None) -> None:
        process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, pass_on)
    status = process.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())

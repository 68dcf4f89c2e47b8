"""A job of `outrider submit` on its node: runs the command in a folder of its own, and copies what it writes."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

SYNC_EVERY_S = 30.0


class Mirror:
    """A copy, in a folder or at a URL of fsspec, of what a command writes, without the inputs that were there first."""

    def __init__(self, folder: Path, task: dict[str, Any]) -> None:
        from fsspec.core import url_to_fs

        self._files: Any
        self._files, self._root = url_to_fs(task["output"])
        self._folder = folder
        inputs = self._modified()
        if mark := task["mark"] and f"{self._root}/{task['mark']}":
            if task["marked"] and not self._files.exists(mark):
                raise OSError("not the folder where the job was submitted; name one that all nodes share, or a URL")
            self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(mark, b"")
            self._files.rm_file(mark)
        for name in task["resume"]:
            if self._files.exists(f"{self._root}/{name}"):
                self._files.get(f"{self._root}/{name}", str(folder / name), recursive=True)
        self._seen = self._modified()
        self._copied = self._seen.keys() - inputs

    def sync(self) -> int:
        """Copy what is new or changed, delete what the command deleted, and return how many files are there."""
        found = self._modified()
        for name in sorted(found, key=found.__getitem__):  # the last file of a checkpoint, which makes it one, is last
            if found[name] != self._seen.get(name):
                self._files.makedirs(f"{self._root}/{name}".rpartition("/")[0], exist_ok=True)
                self._files.put_file(str(self._folder / name), f"{self._root}/{name}")
                self._seen[name] = found[name]
                self._copied.add(name)
        for name in self._copied - found.keys():
            self._copied.remove(name)
            self._files.rm_file(f"{self._root}/{name}")
        return len(self._copied)

    def _modified(self) -> dict[str, int]:
        """Return when each file in the folder was modified, in ns, by its relative path."""
        paths = [path for path in self._folder.rglob("*") if path.is_file()]
        return {path.relative_to(self._folder).as_posix(): path.stat().st_mtime_ns for path in paths}


def main(task: dict[str, Any], command: list[str]) -> int:
    """Run the command, copy its files meanwhile and at its end, and return its exit status in a shell's form."""
    place = f"{task['output']} on {socket.gethostname()}"
    work = Path(tempfile.mkdtemp(prefix="outrider-job-"))
    try:
        shutil.copytree(Path.cwd(), work, dirs_exist_ok=True)  # jobs with the same inputs share Ray's copy of them
        mirror = Mirror(work, task)
    except Exception as error:  # each file system has errors of its own, and the user can mend all of them
        python = f" in {sys.executable}, the first python3 of Ray's PATH" if isinstance(error, ImportError) else ""
        print(f"outrider submit: output: {place}: {error}{python}", file=sys.stderr)
        shutil.rmtree(work)
        return 2
    process = subprocess.Popen([sys.executable, "-m", "outrider.deploy", *command], cwd=work)  # noqa: S603
    for number in (signal.SIGTERM, signal.SIGINT):  # Ray signals the command too
        signal.signal(number, lambda *_: None)
    while process.poll() is None:
        try:
            process.wait(SYNC_EVERY_S)
        except subprocess.TimeoutExpired:
            with suppress(Exception):  # no reason to end a command that runs; the last copy says so
                mirror.sync()
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    try:
        if copied := mirror.sync():
            print(f"output: {copied} files in {place}")
    except Exception as error:
        print(f"outrider submit: output: {place}: {error}; what is missing is in {work}", file=sys.stderr)
        return status or 1
    shutil.rmtree(work)
    return status


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))

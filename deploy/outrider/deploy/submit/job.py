"""A job on its node: runs the command in a folder of its own, whose files go to the output place."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from outrider.proto.errors import ConfigError

SYNC_EVERY_S = 30.0


class Place:
    """A folder by its absolute path, or by a URL of any file system that fsspec knows.

    Every method raises `ConfigError`, whose message names the place and what its file system says.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        with self._translated("reached"):
            from fsspec.core import url_to_fs
            from fsspec.implementations.local import LocalFileSystem

            self._files: Any
            self._files, self._root = url_to_fs(url)
        self._is_local = isinstance(self._files, LocalFileSystem)

    def leave_mark(self, job_id: str) -> None:
        """Create the folder, with a file by which the job recognises it."""
        with self._translated("written"):
            self._files.makedirs(self._root, exist_ok=True)
            self._files.pipe_file(self._mark(job_id), job_id.encode())

    def take_mark(self, job_id: str) -> None:
        """Remove that file, and fail if it is missing: then this is another folder of the same name."""
        with self._translated("written"):
            if not self._files.exists(self._mark(job_id)):
                raise ConfigError(
                    f"{self.url} on {socket.gethostname()} is not {self.url} where the job was submitted; "
                    "name a folder that all nodes share, or a URL such as s3://BUCKET/FOLDER",
                    field="output",
                )
            self._files.rm_file(self._mark(job_id))

    def get(self, name: str, folder: Path) -> None:
        """Copy the file or folder `name`, if it is there, into `folder`."""
        with self._translated("read"):
            if self._files.exists(f"{self._root}/{name}"):
                self._files.get(f"{self._root}/{name}", str(folder / name), recursive=True)

    def put(self, source: Path, name: str) -> None:
        """Copy one file to `name`, where it appears whole: object stores ensure that, disks do not."""
        target = f"{self._root}/{name}"
        with self._translated("written"):
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(source), f"{target}.part" if self._is_local else target)
            if self._is_local:
                os.replace(f"{target}.part", target)

    def remove(self, name: str) -> None:
        """Delete a file, if it is there, and the folders that are empty then."""
        with self._translated("written"), suppress(OSError):
            self._files.rm_file(f"{self._root}/{name}")
            for folder in PurePosixPath(name).parents[:-1]:
                self._files.rmdir(f"{self._root}/{folder}")

    def _mark(self, job_id: str) -> str:
        return f"{self._root}/.{job_id}.submitted"

    @contextmanager
    def _translated(self, done: str) -> Iterator[None]:
        try:
            yield
        except ConfigError:
            raise
        except ImportError as error:
            raise ConfigError(f"{self.url} needs a package: {error}", field="output") from error
        except Exception as error:  # each file system has errors of its own, and the user can mend all of them
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"{self.url} cannot be {done}: {reason}", field="output") from error


class Mirror:
    """A copy in a place of what a command writes in its folder, without its inputs, which lie there at first."""

    def __init__(self, folder: Path, place: Place) -> None:
        self._folder = folder
        self._place = place
        self._seen = self._stamps()
        self._copied: set[str] = set()

    @property
    def summary(self) -> str:
        """One line on the files of this job in the place; empty without any."""
        size = sum(self._seen[name][1] for name in self._copied)
        return f"{len(self._copied)} files, {size / 1e6:.1f} MB, in {self._place.url}\n" if self._copied else ""

    def fetch(self, names: Iterable[str]) -> None:
        """Copy what an earlier job left in the place under these names, for this one to resume."""
        inputs = self._seen.keys()
        for name in names:
            self._place.get(name, self._folder)
        self._seen = self._stamps()
        self._copied = self._seen.keys() - inputs

    def sync(self) -> None:
        """Copy what is new or changed, and delete what the command deleted; raises `ConfigError`.

        The oldest file goes first: the last file of a checkpoint, which makes it one, arrives last.
        """
        found = self._stamps()
        for name in sorted(found, key=found.__getitem__):
            if self._seen.get(name) != found[name]:
                try:
                    self._place.put(self._folder / name, name)
                except ConfigError:
                    if (self._folder / name).exists():
                        raise
                    continue  # deleted meanwhile, which the next round sees
                self._seen[name] = found[name]
                self._copied.add(name)
        for name in self._copied - found.keys():
            self._place.remove(name)
            self._copied.remove(name)
            del self._seen[name]

    def _stamps(self) -> dict[str, tuple[int, int]]:
        """Return when each file in the folder was modified, in ns, and its size in bytes, by relative path."""
        found = {}
        for path in self._folder.rglob("*"):
            with suppress(FileNotFoundError):
                if not path.is_dir():
                    state = path.stat()
                    found[path.relative_to(self._folder).as_posix()] = (state.st_mtime_ns, state.st_size)
        return found


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status in a shell's form."""
    parser = argparse.ArgumentParser(prog="python -m outrider.deploy.submit.job", description=__doc__)
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
    process = subprocess.Popen([sys.executable, "-m", "outrider.deploy", *command], cwd=work)  # noqa: S603
    for number in (signal.SIGTERM, signal.SIGINT):  # Ray signals the command too
        signal.signal(number, lambda *_: None)
    ended = failed = False
    while not ended:
        with suppress(subprocess.TimeoutExpired):
            process.wait(SYNC_EVERY_S)
        ended = process.returncode is not None
        try:
            mirror.sync()
            failed = False
        except ConfigError as error:  # no reason to end a command that runs
            _complain(error.message)
            failed = True
    status = process.returncode if process.returncode >= 0 else 128 - process.returncode
    if failed:
        _complain(f"what is missing there is in {work} on {socket.gethostname()}")
        return status or 1
    print(mirror.summary, end="", flush=True)
    shutil.rmtree(work)
    return status


def _complain(text: str) -> None:
    print(f"outrider submit: output: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

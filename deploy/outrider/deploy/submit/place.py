"""The output place of a job, and the copying of a job's files into it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from outrider.proto.errors import ConfigError

Stamp = tuple[int, int] | None  # modification time in ns and bytes of a file; None for a folder


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

    def remove(self, name: str, *, is_folder: bool) -> None:
        """Delete a file or an empty folder, if it is there; leave a folder that is not empty."""
        with self._translated("written"), suppress(OSError):
            (self._files.rmdir if is_folder else self._files.rm_file)(f"{self._root}/{name}")

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
        self._inputs = _stamps(folder)
        self._copied: dict[str, Stamp] = {}

    @property
    def summary(self) -> str:
        """One line on the files of this job in the place; empty without any."""
        sizes = [stamp[1] for stamp in self._copied.values() if stamp is not None]
        return f"{len(sizes)} files, {sum(sizes) / 1e6:.1f} MB, in {self._place.url}\n" if sizes else ""

    def fetch(self, names: Iterable[str]) -> None:
        """Copy what an earlier job left in the place under these names, for this one to resume."""
        for name in names:
            self._place.get(name, self._folder)
        self._copied = {name: stamp for name, stamp in _stamps(self._folder).items() if name not in self._inputs}

    def sync(self) -> None:
        """Copy what is new or changed, and delete what the command deleted; raises `ConfigError`.

        The oldest file goes first: the last file of a checkpoint, which makes it one, arrives last.
        """
        found = {name: stamp for name, stamp in _stamps(self._folder).items() if self._inputs.get(name, ()) != stamp}
        for name, stamp in sorted(found.items(), key=lambda item: item[1] or (0, 0)):
            if stamp is not None and self._copied.get(name) != stamp:
                try:
                    self._place.put(self._folder / name, name)
                except ConfigError:
                    if (self._folder / name).exists():
                        raise
                    continue  # deleted meanwhile, which the next round sees
            self._copied[name] = stamp
        for name in sorted(self._copied.keys() - found.keys(), reverse=True):
            self._place.remove(name, is_folder=self._copied.pop(name) is None)


def _stamps(folder: Path) -> dict[str, Stamp]:
    """Return what lies below a folder, by relative path."""
    found: dict[str, Stamp] = {}
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            state = path.stat()
            stamp = None if path.is_dir() else (state.st_mtime_ns, state.st_size)
            found[path.relative_to(folder).as_posix()] = stamp
    return found

"""The files that a job is given: one zip with exactly what was named, and the names that they have there."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.proto.errors import ConfigError

MOST_BYTES = 500 << 20  # Ray refuses more than 512 MiB in one package
LONG_AGO = (1980, 1, 1, 0, 0, 0)  # the same content is then the same zip, which Ray stores once


@dataclass(frozen=True, slots=True)
class Input:
    """A file or folder here, how the user spelled it, and its name in the job's folder."""

    spelled: str
    path: Path
    name: str


def find_inputs(spelled: Iterable[str], folder: Path) -> tuple[Input, ...]:
    """The inputs: what lies in `folder` keeps its relative path, anything else its last name.

    Raises:
        ConfigError: one is not there, or two would have the same name.
    """
    inputs: dict[str, Input] = {}
    for text in spelled:
        path = folder / Path(text).expanduser()
        if not path.exists():
            raise ConfigError(f"there is no {text}", field="input")
        inside = path.resolve().is_relative_to(folder.resolve())
        name = path.resolve().relative_to(folder.resolve()).as_posix() if inside else path.resolve().name
        if name in inputs and inputs[name].path.resolve() != path.resolve():
            raise ConfigError(f"{text} and {inputs[name].spelled} would both be {name} in the job", field="input")
        if name == ".":
            raise ConfigError("names the whole folder; name what the job needs of it", field="input")
        inputs[name] = Input(text, path, name)
    return tuple(inputs.values())


def renamed(arguments: Sequence[str], inputs: Iterable[Input]) -> list[str]:
    """The command's arguments, with inputs called what they are called in the job."""
    names = {given.spelled: given.name for given in inputs}
    return [names.get(argument, argument) for argument in arguments]


def write_zip(inputs: Iterable[Input], target: Path) -> None:
    """All files of the inputs; raises `ConfigError` where Ray would refuse the size."""
    files = {name: path for given in inputs for name, path in _files_of(given)}
    size = sum(path.stat().st_size for path in files.values())
    if size > MOST_BYTES:
        message = f"{size / 1e6:.0f} MB are more than the {MOST_BYTES / 1e6:.0f} MB that Ray takes; use a shared store"
        raise ConfigError(message, field="input")
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, path in sorted(files.items()):
            entry = zipfile.ZipInfo(name, LONG_AGO)
            entry.external_attr = (path.stat().st_mode & 0o777) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            with path.open("rb") as reader, archive.open(entry, "w") as writer:
                while block := reader.read(1 << 20):
                    writer.write(block)


def _files_of(given: Input) -> Iterator[tuple[str, Path]]:
    if given.path.is_file():
        yield given.name, given.path
        return
    for path in given.path.rglob("*"):
        if path.is_file():
            yield f"{given.name}/{path.relative_to(given.path).as_posix()}", path

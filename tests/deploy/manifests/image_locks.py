"""The locks of the images: every package that is installed, with its version and the hashes of its files."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires

from manifest_documents import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LOCKS = ROOT / "deploy" / "docker" / "locks"
OF_IMAGE = {
    "edge": ("edge",),
    "coordinator": ("coordinator",),
    "cloud": ("cloud", "torch-cpu"),
    "cloud, cuda": ("cloud", "torch-cuda"),
}
PIN = re.compile(r"([\w.-]+)(?:\[[\w,.-]+\])?==([^ ;]+)(?: ; [^-]+)?((?: --hash=sha256:[0-9a-f]{64})*)")
PYTHON = {"python_version": "3.11", "python_full_version": "3.11.0", "extra": ""}
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Pin:
    """One package of a lock."""

    name: str
    version: str
    hashes: tuple[str, ...]


def pins(text: str) -> list[Pin]:
    """Return the packages of a lock.

    Raises:
        ValueError: a line is neither a pinned package nor a hash.

    """
    found = []
    for line in re.sub(r" *\\\n *", " ", text).splitlines():
        entry = PIN.fullmatch(line.strip())
        if entry is None:
            raise ValueError(f"no pinned package: {line}")
        found.append(Pin(canonicalize_name(entry[1]), entry[2], tuple(entry[3].split())))
    return found


def complaints(locked: list[Pin], wanted: list[str], constrained: dict[str, str]) -> list[str]:
    """Return what is wrong with a lock: packages missing, unhashed, twice, or at other versions than asked for."""
    by_name = {pin.name: pin for pin in locked}
    needed = closure(wanted)
    wrong = [f"{pin.name} has no hash" for pin in locked if not pin.hashes]
    wrong += [f"{name} is missing" for name in sorted(needed - by_name.keys() - {"outrider"})]
    for pin in by_name.values():
        asked = constrained.get(pin.name)
        if asked is not None and pin.version.partition("+")[0] != asked:
            wrong.append(f"{pin.name} is {pin.version}, constraints.txt has {asked}")
    for requirement in map(Requirement, wanted):
        pin = by_name.get(canonicalize_name(requirement.name))
        if pin is not None and pin.version not in requirement.specifier:
            wrong.append(f"{pin.name} is {pin.version}, not {requirement.specifier}")
    return wrong


def closure(wanted: list[str]) -> set[str]:
    """Return the names of requirements and all that they require, in the environment of the images' Python."""
    queue, seen, found = list(wanted), set[str](), set[str]()
    while queue:
        requirement = Requirement(queue.pop())
        name = canonicalize_name(requirement.name)
        if f"{name}{sorted(requirement.extras)}" in seen:
            continue
        seen.add(f"{name}{sorted(requirement.extras)}")
        found.add(name)
        for line in _requires(name, requirement.extras):
            inner = Requirement(line)
            extras = [*requirement.extras, ""]
            if inner.marker is None or any(inner.marker.evaluate({**PYTHON, "extra": extra}) for extra in extras):
                queue.append(f"{inner.name}[{','.join(inner.extras)}]" if inner.extras else inner.name)
    return found


def _requires(name: str, extras: set[str]) -> list[str]:
    if name == "outrider":
        project = PYPROJECT["project"]
        return [*project["dependencies"], *(r for extra in extras for r in project["optional-dependencies"][extra])]
    try:
        return requires(name) or []
    except PackageNotFoundError:
        return []

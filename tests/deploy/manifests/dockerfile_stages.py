"""The stages of the Dockerfile, with what each copies, runs and starts."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from manifest_documents import ROOT

DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
IMAGES = ("edge", "coordinator", "cloud")
BIN = "/opt/outrider/bin/"


@dataclass
class Stage:
    """One `FROM … AS name`, with its instructions in order."""

    name: str
    base: str
    instructions: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        """Return the arguments of every such instruction."""
        return [arguments for name, arguments in self.instructions if name == instruction]

    def last(self, instruction: str) -> str:
        """Return the arguments of the last such instruction; empty: there is none."""
        return (self.all(instruction) or [""])[-1]

    def copies(self) -> Iterator[tuple[str, list[str], str]]:
        """Return the stage (empty: the checkout), the sources and the target of each COPY."""
        for arguments in self.all("COPY"):
            words = shlex.split(arguments)
            source = next((word.partition("=")[2] for word in words if word.startswith("--from=")), "")
            *sources, target = (word for word in words if not word.startswith("--"))
            yield source, sources, target


def stages(text: str) -> dict[str, Stage]:
    """Return the stages by name."""
    found: dict[str, Stage] = {}
    current: Stage | None = None
    for instruction, arguments in _instructions(text):
        if instruction == "FROM":
            base, _, name = arguments.partition(" AS ")
            current = found[name] = Stage(name, base)
        elif current is not None:
            current.instructions.append((instruction, arguments))
    return found


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    for line in re.sub(r"\\\n", " ", "\n".join(lines)).splitlines():
        instruction, _, arguments = line.strip().partition(" ")
        yield instruction, " ".join(arguments.split())


def chain(all_stages: dict[str, Stage], name: str) -> list[Stage]:
    """Return a stage and those that it is made from, the nearest first."""
    own = all_stages[name]
    return [own, *(chain(all_stages, own.base) if own.base in all_stages else [])]


def setting(all_stages: dict[str, Stage], name: str, instruction: str) -> str:
    """Return an instruction's value in an image, from the nearest stage that has it."""
    return next((s.last(instruction) for s in chain(all_stages, name) if s.last(instruction)), "")


def exec_form(arguments: str) -> list[str]:
    """Return the words of `["a", "b"]`."""
    words = json.loads(arguments)
    assert isinstance(words, list)
    return [str(word) for word in words]


def programs(all_stages: dict[str, Stage], image: str) -> dict[str, str]:
    """Return our programs in an image: files in the checkout by their names on the path."""
    environments = [source for source, _, target in all_stages[image].copies() if source and target == "/opt/outrider"]
    return {
        target.removeprefix(BIN): sources[0]
        for name in environments
        for stage in chain(all_stages, name)
        for source, sources, target in stage.copies()
        if not source and target.startswith(BIN)
    }


def extras(all_stages: dict[str, Stage], image: str) -> set[str]:
    """Return the extras with which an image installs the wheel."""
    (environment,) = (s for s, _, target in all_stages[image].copies() if s and target == "/opt/outrider")
    runs = [run for stage in chain(all_stages, environment) for run in stage.all("RUN")]
    return {extra for run in runs for found in re.findall(r"whl\)\[([\w,]+)]", run) for extra in found.split(",")}


def ignored(path: str, rules: str) -> bool:
    """Return whether the last rule of `.dockerignore` that fits keeps a file out of the build context."""
    verdict = False
    for line in rules.splitlines():
        rule = line.strip()
        if not rule or rule.startswith("#"):
            continue
        pattern = rule.removeprefix("!").rstrip("/")
        parts = Path(path).parts
        heads = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        tails = [part for part in parts if pattern.startswith("**/")]
        fits = any(fnmatch.fnmatchcase(head, pattern) for head in heads) or any(
            fnmatch.fnmatchcase(tail, pattern.removeprefix("**/")) for tail in tails
        )
        if fits:
            verdict = not rule.startswith("!")
    return verdict

"""Machine, versions and command of a measurement."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from outrider.bench.record import RECORD
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto.plumbing.cores import available_cores

PACKAGES = ("outrider", "torch", "transformers", "onnxruntime", "grpcio", "ray")


@dataclass(frozen=True, slots=True, config=RECORD)
class Environment:
    """Machine, versions, models and options of a measurement.

    `date` is ISO 8601, in UTC; `dtype` the type in which the target computed, with what else decides its rounding.
    """

    date: str
    command: str
    python: str
    platform: str
    cpu: str | None
    cores: int | None
    packages: Mapping[str, str | None]
    target: str
    dtype: str
    drafter: str
    drafter_version: str | None
    target_threads: int | None
    drafter_threads: int | None
    prompts: int
    max_tokens: int
    seed: int
    revision: str | None = None


def environment(verifier: VerifierConfig, dtype: str, **options: Any) -> Environment:
    """Return the environment of the running command on a target that was loaded in `dtype`, which "auto" has chosen.

    `options` are further fields of `Environment`.
    """
    threads = verifier.threads or None
    return Environment(**machine(), target=verifier.target, dtype=dtype, target_threads=threads, **options)


def machine() -> dict[str, Any]:
    """Return the fields of `Environment` that name no model: date, command, machine, versions and revision."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "cores": available_cores(),
        "packages": {name: _version(name) for name in PACKAGES},
        "revision": _revision(),
    }


def command_line() -> str:
    """Return the running command in the form that one would type."""
    spec = sys.modules["__main__"].__spec__  # None, where a script runs
    program = f"python -m {spec.parent}" if spec and spec.parent != "outrider.deploy" else "outrider"
    return f"{program} {shlex.join(sys.argv[1:])}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or None)


def _revision() -> str | None:
    """Return the commit of the checkout that holds this file, `-dirty` where it was changed; None if there is none."""
    here = Path(__file__)

    def git(*arguments: str) -> str:
        command = ("git", "-C", str(here.parent), *arguments)
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()  # noqa: S603

    try:
        git("ls-files", "--error-unmatch", here.name)  # an installed copy may lie in somebody else's checkout
        return git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") or None
    except (OSError, subprocess.CalledProcessError):
        return None

"""Uploads of a job: the files that it is given, and the wheel that it runs."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from outrider.proto.errors import ConfigError

CHECKOUT = Path(__file__).resolve().parents[4]
ERROR_LINES = 3


def link_inputs(spelled: Iterable[str], folder: Path, into: Path) -> dict[str, str]:
    """Lay links to the inputs into the folder that Ray is to pack, and map the user's spelling to their names there.

    What lies in `folder` keeps its relative path, anything else its last name.

    Raises:
        ConfigError: one is not there, or two would have the same name.
    """
    paths = {text: (folder / Path(text).expanduser()).resolve() for text in spelled}
    names = {}
    for text, path in paths.items():
        if not path.exists():
            raise ConfigError(f"there is no {text}", field="input")
        inside = path.is_relative_to(folder.resolve())
        names[text] = path.relative_to(folder.resolve()).as_posix() if inside else path.name
        if names[text] == ".":
            raise ConfigError("names the whole folder; name what the job needs of it", field="input")
    for text, name in sorted(names.items(), key=lambda item: item[1]):  # a folder before what lies in it
        if not (into / name).exists():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            (into / name).symlink_to(paths[text])
        elif (into / name).resolve() != paths[text]:
            raise ConfigError(f"{text} and another input would both be {name} in the job", field="input")
    return names


def find_wheel(wanted: str, folder: Path) -> Path:
    """Put the wheel into `folder` under a name that depends on its content, and return its path.

    Ray keeps wheels by file name, and would otherwise run the first one of a version for ever. The build number of
    the name (PEP 427) is free for that.

    Args:
        wanted: a file, or `auto`: built from the checkout.
        folder: to put it into.

    Raises:
        ConfigError: there is none, or it cannot be built.
    """
    wheel = _build(folder) if wanted == "auto" else Path(wanted).expanduser()
    if not wheel.is_file() or wheel.suffix != ".whl" or wheel.name.count("-") < 4:
        raise ConfigError(f"{wanted} is no wheel of Outrider", field="wheel")
    name, version, *_, python, abi, platform = wheel.name.split("-")
    build = f"0x{hashlib.sha256(wheel.read_bytes()).hexdigest()[:16]}"
    tagged = folder / "-".join((name, version, build, python, abi, platform))
    shutil.copyfile(wheel, tagged)
    return tagged


def _build(folder: Path) -> Path:
    if not (CHECKOUT / "pyproject.toml").is_file():
        raise ConfigError(
            "must be named, since this is no checkout from which one could be built; "
            "`pip download --no-deps outrider` fetches one, and `none` uses what the cluster has installed",
            field="wheel",
        )
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder / "built"), str(CHECKOUT)]
    if importlib.util.find_spec("hatchling") is not None:
        command.insert(4, "--no-isolation")  # seconds rather than a fresh environment
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - a fixed program
    if done.returncode:
        reason = " ".join((done.stderr or done.stdout).strip().splitlines()[-ERROR_LINES:])
        raise ConfigError(f"cannot be built: {reason}", field="wheel")
    (wheel,) = (folder / "built").glob("outrider-*.whl")
    return wheel

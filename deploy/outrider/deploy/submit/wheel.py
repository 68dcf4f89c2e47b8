"""The wheel that a job runs: a given one, or one built from the checkout that this process runs from."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

from outrider.proto.errors import ConfigError

CHECKOUT = Path(__file__).resolve().parents[4]
SAID_LINES = 3


def find_wheel(asked: str, folder: Path) -> Path:
    """The wheel, in `folder`, under a name that tells its content.

    Ray keeps wheels by file name, and would otherwise run the first one of a version for ever. The build number of
    the name (PEP 427) is free for that.

    Args:
        asked: a file, or `auto`: built from the checkout.
        folder: to put it into.

    Raises:
        ConfigError: there is none, or it cannot be built.
    """
    wheel = _build(folder) if asked == "auto" else Path(asked).expanduser()
    if not wheel.is_file() or wheel.suffix != ".whl" or wheel.name.count("-") < 4:
        raise ConfigError(f"{asked} is no wheel of Outrider", field="wheel")
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
        said = " ".join((done.stderr or done.stdout).strip().splitlines()[-SAID_LINES:])
        raise ConfigError(f"cannot be built: {said}", field="wheel")
    (wheel,) = (folder / "built").glob("outrider-*.whl")
    return wheel

"""A store of images without a registry or a daemon: a base by debootstrap, and ours by buildah in a chroot."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
BASE = "localhost/outrider-base"
DEBIAN = "bookworm"  # its Python is 3.11, as that of the image which the Dockerfile names
PACKAGES = "ca-certificates,python3,python3-pip,python3-venv"
TOOLS = ("buildah", "debootstrap", "unshare")
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class MissingTool(Exception):
    """Something that images need and this machine lacks; the message says what to do."""


def check_tools() -> None:
    """Raise `MissingTool` unless this is root on a machine with buildah, debootstrap and unshare."""
    if os.geteuid() != 0:
        raise MissingTool(
            "needs root: debootstrap and chroot do; try sudo, or build with Docker (deploy/docker/Dockerfile)"
        )
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise MissingTool(f"needs {', '.join(missing)}; Debian: apt-get install buildah debootstrap util-linux")


@dataclass
class Container:
    """A container by buildah's id, with the folder that is its root."""

    name: str
    folder: Path
    config: dict[str, Any]


@dataclass
class ImageStore:
    """Images and containers in a folder of their own; driver `overlay`, or `vfs`, which is slow and works anywhere."""

    folder: Path
    driver: str = "overlay"

    def __post_init__(self) -> None:
        """Create the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)

    def command(self, *words: str) -> list[str]:
        """Return a command of buildah on this store."""
        own = ["--root", str(self.folder / "store"), "--runroot", str(self.folder / "run")]
        return ["buildah", *own, "--storage-driver", self.driver, *words]

    def buildah(self, *words: str) -> str:
        """Run buildah and return what it prints; raises `CalledProcessError`."""
        done = subprocess.run(self.command(*words), check=True, stdout=subprocess.PIPE, text=True)
        return done.stdout.strip()

    def has(self, image: str) -> bool:
        """Return whether the store has an image."""
        return bool(self.buildah("images", "--quiet", "--filter", f"reference={image}"))

    def make_base(self) -> None:
        """Make the base unless it is there: Debian's smallest system with its Python, as `python` and `pip`."""
        if self.has(BASE):
            return
        container = self.buildah("from", "scratch")
        root = Path(self.buildah("mount", container))
        run = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", DEBIAN, str(root)]
        subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
        (root / "usr/bin/python").symlink_to("python3")
        for marker in (root / "usr/lib").glob("python3*/EXTERNALLY-MANAGED"):
            marker.unlink()  # the image's Python is for us alone
        for file in (root / "var/cache/apt/archives").glob("*.deb"):
            file.unlink()
        self.buildah("config", "--env", PATH, container)
        self.buildah("umount", container)
        self.buildah("commit", "--rm", container, BASE)

    def build(self, image: str, arguments: dict[str, str]) -> None:
        """Build one image of the Dockerfile on the base, with this machine's settings of pip."""
        words = ["build", "--layers", "--isolation=chroot", "--format=docker", "--pull-never"]
        words += [word for mount in self.pip_mounts() for word in ("--volume", f"{mount}:ro")]
        for name, value in {"PYTHON_IMAGE": BASE, **arguments}.items():
            words += ["--build-arg", f"{name}={value}"]
        words += ["--file", str(DOCKERFILE), "--target", image, "--tag", f"outrider-{image}", str(ROOT)]
        subprocess.run(self.command(*words), check=True)

    def bytes_of(self, image: str) -> int:
        """Return the size of all files of an image, those of its base among them."""
        container = self.start(image)
        listed = subprocess.run(["du", "-sb", str(container.folder)], check=True, stdout=subprocess.PIPE, text=True)
        self.buildah("rm", container.name)
        return int(listed.stdout.split()[0])

    def remove(self) -> None:
        """Delete all images and containers, and the folder."""
        self.buildah("rm", "--all")
        self.buildah("rmi", "--all", "--force")
        shutil.rmtree(self.folder)

    def start(self, image: str) -> Container:
        """Make a container of an image, with its root mounted at a folder."""
        name = self.buildah("from", "--pull-never", image)
        folder = Path(self.buildah("mount", name))
        inspected = json.loads(self.buildah("inspect", "--type", "image", image))
        return Container(name, folder, inspected["Docker"]["config"])

    def pip_mounts(self) -> list[str]:
        """Write a pip.conf of all settings that pip has here, and return it and the local places that it names."""
        listed = subprocess.run(
            ["python3", "-m", "pip", "config", "list"], check=True, stdout=subprocess.PIPE, text=True
        )
        settings: dict[str, str] = {}
        for line in sorted(listed.stdout.splitlines(), key=lambda line: line.startswith(":env:")):  # which wins
            name, _, value = line.partition("=")
            settings[name.rpartition(".")[2]] = value.strip("'\"")
        conf = self.folder / "pip.conf"
        conf.write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in settings.items()))
        words = {word for value in settings.values() for word in value.split()}
        places = {Path(word) for word in words if word.startswith("/")}
        places |= {Path(word.removeprefix("file://")).parent for word in words if word.startswith("file://")}
        there = sorted(str(place) for place in places if place.exists())  # an index's files lie beside it
        return [f"{conf}:/etc/pip.conf", *(f"{place}:{place}" for place in there)]

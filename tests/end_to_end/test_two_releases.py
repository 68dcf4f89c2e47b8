"""An edge of the last release beside a cluster of today, and the other way round: the same text, by accepted drafts."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import pytest
from command_processes import Command, free_port

pytestmark = [pytest.mark.ray, pytest.mark.soak, pytest.mark.timeout(500)]

PROMPT = "def main(argv):\n"
ROOMS = ("proto", "edge", "cloud", "coordinator", "deploy")


@pytest.fixture(scope="module")
def tagged(root, tmp_path_factory) -> tuple[str, str]:
    """Paths of the newest release before this commit, and its command that decodes prompts on a running cluster."""
    earlier = ["git", "tag", "--list", "v[0-9]*", "experiments-1", "--no-contains=HEAD", "--sort=-version:refname"]
    tags = subprocess.run(earlier, cwd=root, capture_output=True, text=True, check=False).stdout.split()
    if not tags:
        pytest.skip("this clone has no tag of an earlier release: git fetch --tags")
    packed = subprocess.run(["git", "archive", tags[0], *ROOMS], cwd=root, capture_output=True, check=True)
    folder = tmp_path_factory.mktemp("tagged")
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return os.pathsep.join(str(folder / room) for room in ROOMS), "generate" if tags[0] == "experiments-1" else "run"


def decoded(command: str, address: str, cache: Path) -> tuple[str, str]:
    """Return the text that an edge prints, and its report."""
    options = ["--coordinator", address, "--cache", str(cache), "--max-tokens", "60", "--temperature", "0.5"]
    words = [sys.executable, "-m", "outrider.deploy", command, *options, PROMPT]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.parametrize("older", ["edge", "cluster"])
def test_a_release_writes_the_same_with_the_one_before(older, tagged, tmp_path, monkeypatch) -> None:
    paths, decode = tagged
    address = f"127.0.0.1:{free_port()}"
    cluster = Command("up", "--target", "reference", "--listen", address, log=tmp_path / "up.log")
    with monkeypatch.context() as patch:
        if older == "cluster":
            patch.setitem(os.environ, "PYTHONPATH", paths)
        cluster.start()
    try:
        assert cluster.line().startswith(f"coordinator on {address}")
        today = decoded("run", address, tmp_path / "today")
        with monkeypatch.context() as patch:
            patch.setitem(os.environ, "PYTHONPATH", paths)
            before = decoded(decode, address, tmp_path / "before")
        assert today[0] == before[0] != ""
        assert all("accepted drafts" in said and " 0 of them" not in said for _, said in (today, before))
        assert cluster.terminate() == 0
    finally:
        cluster.end()

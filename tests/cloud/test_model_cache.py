"""Folders of models: whole or not at all, whatever happens while they are made."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.cloud.models.model_cache import SUMS, cached, check_sums, made_once
from outrider.proto.errors import DataLoss, Unavailable

SLOW = """
import sys, time
from pathlib import Path
from outrider.cloud.models.model_cache import made_once

def fill(folder):
    with open(sys.argv[1], "a") as log:
        log.write("made\\n")
    time.sleep(1)
    (folder / "a").write_text("content")

print((made_once("model", fill) / "a").read_text())
"""
KILLED = """
import os, signal
from outrider.cloud.models.model_cache import made_once

def fill(folder):
    (folder / "a").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)

made_once("model", fill)
"""


@pytest.fixture(autouse=True)
def targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "outrider" / "targets"


def fill(folder: Path) -> None:
    (folder / "a").write_text("content")


def left(targets: Path) -> list[str]:
    return sorted(path.name for path in targets.glob("*") if path.name != ".lock")


def test_without_a_setting_the_cache_is_where_drafters_are_kept(monkeypatch) -> None:
    from outrider.edge import EdgeConfig

    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cached("model") == EdgeConfig(coordinator="127.0.0.1:1").cache.expanduser() / "targets" / "model"


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_what_fails_leaves_nothing_and_can_be_tried_again(error, targets) -> None:
    def fails(folder: Path) -> None:
        fill(folder)
        raise error

    with pytest.raises(type(error)):
        made_once("model", fails)
    assert left(targets) == []
    assert (made_once("model", fill) / "a").read_text() == "content"
    assert left(targets) == ["model"]


def test_a_full_disk_is_one_line_with_the_remedy_and_leaves_nothing(targets) -> None:
    def full(folder: Path) -> None:
        fill(folder)
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(Unavailable, match=r"No space left on device; make room, .* XDG_CACHE_HOME"):
        made_once("model", full)
    assert left(targets) == []


def test_a_cache_that_cannot_be_written_is_one_line_with_the_remedy(tmp_path, monkeypatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(Unavailable, match=r"cannot make .*XDG_CACHE_HOME"):
        made_once("model", fill)


def test_what_a_killed_process_has_begun_goes_with_the_next_one(targets) -> None:
    killed = subprocess.run([sys.executable, "-c", KILLED], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert left(targets) == ["model.part"]
    made_once("other", fill)
    assert left(targets) == ["other"]


def test_of_two_processes_at_once_one_makes_the_model_and_both_have_it(tmp_path, targets) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", SLOW, str(log)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in both] == ["content", "content"]
    assert log.read_text() == "made\n"
    assert left(targets) == ["model"]


def test_a_copied_folder_is_checked_by_the_hashes_that_it_brings(tmp_path) -> None:
    folder = made_once("model", fill)
    check_sums(folder)
    summed = subprocess.run(["sha256sum", "--check", "--quiet", SUMS], cwd=folder, check=False)
    assert summed.returncode == 0
    (folder / "a").write_text("changed")
    with pytest.raises(DataLoss, match=r"is damaged \(a\); copy it again"):
        check_sums(folder)
    (folder / "a").unlink()
    with pytest.raises(DataLoss, match="is not whole"):
        check_sums(folder)

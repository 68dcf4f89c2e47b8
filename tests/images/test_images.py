"""The parts of `make images` that need neither root nor buildah: what it asks for, merges and refuses to accept."""

from __future__ import annotations

import os
import shutil

import pytest
from compose_in_chroot import merged
from image_store import ImageStore, MissingTool, check_tools
from run_images import broken_promises
from run_services import COMPOSE

FINE = {
    "same_text_without_drafts": True,
    "accepted_drafts": 86,
    "chat": "Four.",
    "verifiers": ["verifier-0"],
    "users": {"edge": "10001:10001"},
    "read_only_roots": ["edge"],
}


def test_without_root_or_a_tool_it_says_what_is_missing(monkeypatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(MissingTool, match="needs root"):
        check_tools()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "buildah" else f"/usr/bin/{tool}")
    with pytest.raises(MissingTool, match="needs buildah; Debian: apt-get install buildah"):
        check_tools()


@pytest.mark.parametrize(
    "change",
    [
        {"same_text_without_drafts": False},
        {"accepted_drafts": 0},
        {"chat": ""},
        {"verifiers": []},
        {"users": {"edge": "0:0"}},
        {"read_only_roots": []},
    ],
)
def test_every_promise_that_the_images_break_is_named(change) -> None:
    assert broken_promises(FINE) == []
    assert len(broken_promises(FINE | change)) == 1


def test_compose_files_are_merged_as_compose_does_it() -> None:
    services = merged(COMPOSE)
    assert services["coordinator"]["environment"]["OUTRIDER_COORDINATOR_INSECURE_LISTEN"] == "false"
    assert services["coordinator"]["environment"]["RAY_ADDRESS"] == "ray-head:6379"
    assert services["coordinator"]["volumes"] == ["secrets:/etc/outrider/secrets:ro", "tls:/etc/outrider/tls:ro"]
    assert services["ray-head"]["depends_on"].keys() == {"secrets", "certs"}


def test_pips_own_settings_go_into_a_build_with_the_folders_that_they_name(monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/usr/share")  # pip takes no path with a space from a variable
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "file:///usr/lib/simple")
    store = ImageStore(tmp_path / "store")
    mounts = store.pip_mounts()
    assert mounts[0] == f"{tmp_path}/store/pip.conf:/etc/pip.conf"
    assert {"/usr/share:/usr/share", "/usr/lib:/usr/lib"} <= set(mounts)
    assert "find-links = /usr/share\n" in (tmp_path / "store" / "pip.conf").read_text()

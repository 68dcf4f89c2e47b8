"""Hooks and workflows run what the Makefile has, owners own what is there, and the changelog follows the tags."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from research import lines


def recipe(root: Path, target: str) -> list[str]:
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    [found] = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in found.splitlines()]


def workflows(root: Path) -> dict[str, dict]:
    return {path.name: yaml.safe_load(path.read_text("utf-8")) for path in (root / ".github/workflows").glob("*.yml")}


def test_the_hooks_before_a_commit_are_the_commands_of_make_lint(root) -> None:
    [local] = yaml.safe_load((root / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert [hook["entry"] for hook in local["hooks"]] == recipe(root, "lint")
    assert all(hook["language"] == "system" and not hook["pass_filenames"] for hook in local["hooks"])


def test_every_target_that_workflows_and_contributing_name_is_in_the_makefile(root) -> None:
    code = re.findall(r"`([^`]+)`|^    (.+)$", (root / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.MULTILINE)
    steps = [step for flow in workflows(root).values() for job in flow["jobs"].values() for step in job["steps"]]
    runs = [*map("".join, code), *(step.get("run", "") for step in steps)]
    named = {target for run in runs for target in re.findall(r"^make ([\w-]+)", run, re.MULTILINE)}
    assert {"lint", "test", "docs", "soak", "real"} <= named
    defined = re.findall(r"^([\w-]+):(?!=)", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert named - set(defined) == set()


def test_the_tests_run_on_the_pythons_that_the_package_names(root) -> None:
    classifiers = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["classifiers"]
    named = [entry.rpartition(" ")[2] for entry in classifiers if re.search(r"Python :: 3\.\d+$", entry)]
    assert workflows(root)["ci.yml"]["jobs"]["test"]["strategy"]["matrix"]["python-version"] == named


def test_every_path_that_has_owners_exists_and_every_room_has_some(root) -> None:
    owners = (root / ".github/CODEOWNERS").read_text(encoding="utf-8")
    paths = re.findall(r"^/(\S+) +@", owners, re.MULTILINE)
    assert [path for path in paths if not (root / path).exists()] == []
    assert [room for room in lines.ROOMS.values() if not f"{room}/".startswith(tuple(paths))] == []


def test_the_changelog_begins_with_unreleased_and_its_versions_are_tags(root) -> None:
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    first, *versions = re.findall(r"^## \[(.+?)\]", changelog, re.MULTILINE)
    assert first == "Unreleased"
    tags = subprocess.run(["git", "tag"], cwd=root, capture_output=True, text=True, check=True).stdout.split()
    if not tags:
        pytest.skip("needs the repository's tags: git fetch --tags")
    newest, *older = (f"v{version}" if version[0].isdigit() else version for version in versions)
    assert set(older) <= set(tags) <= {newest, *older}, "the newest version alone may be without its tag yet"


def test_both_distributions_take_one_version_from_the_tag(root) -> None:
    code, models = (tomllib.loads((root / at / "pyproject.toml").read_text("utf-8")) for at in (".", "deploy/models"))
    assert all(each["project"]["dynamic"] == ["version"] for each in (code, models))
    source = code["tool"]["hatch"]["version"]
    source["raw-options"] |= {"root": "../..", "fallback_root": "../.."}
    assert models["tool"]["hatch"]["version"] == source

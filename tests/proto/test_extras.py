"""Errors about what is not installed name it, and a remedy that holds for a checkout and for a wheel."""

from __future__ import annotations

import importlib.metadata
import json

import pytest

from outrider.proto.plumbing import extras

REQUIRES = [
    "grpcio>=1",
    'torch>=2.8; extra == "cloud"',
    "ray[default]>=2.52 ; extra == 'cloud'",
    'nowhere-at-all>=1; extra == "edge"',
    'numpy; extra == "edge"',
    'outrider[cloud,edge]; extra == "all"',
]


@pytest.fixture
def installed(monkeypatch):
    """Have only these packages installed, and this package from that URL."""

    def install(*names: str, url: str = "") -> None:
        class Installed:
            def read_text(self, _: str) -> str | None:
                return json.dumps({"url": url}) if url else None

        def distribution(name: str) -> Installed:
            if name not in (*names, "outrider"):
                raise importlib.metadata.PackageNotFoundError(name)
            return Installed()

        monkeypatch.setattr(importlib.metadata, "requires", lambda _: REQUIRES)
        monkeypatch.setattr(importlib.metadata, "distribution", distribution)

    return install


def test_what_is_missing_of_an_extra_is_named_and_what_is_there_is_not(installed) -> None:
    installed("torch", "numpy")
    assert extras.missing_packages("cloud") == ["ray"]
    assert extras.missing_packages("edge") == ["nowhere-at-all"]
    assert extras.missing_packages("all") == ["nowhere-at-all", "ray"]


def test_source_files_that_were_never_installed_name_what_could_not_be_imported(monkeypatch) -> None:
    monkeypatch.setattr(extras, "PACKAGE", "never-installed")
    assert "needs the extra [cloud], which is not all installed here (missing: torch)" in extras.lacking(
        "cloud", "torch"
    )


@pytest.mark.parametrize(
    ("url", "remedy"),
    [
        ("file:///home/me/my%20outrider", "pip install '/home/me/my outrider[cloud]'"),
        ("file:///dist/outrider-0.1.0-py3-none-any.whl", "pip install '/dist/outrider-0.1.0-py3-none-any.whl[cloud]'"),
        ("", "install the wheel or checkout that outrider came from with it: pip install '.[cloud]'"),
    ],
    ids=["checkout", "wheel", "not known"],
)
def test_the_remedy_is_where_this_installation_came_from(url, remedy, installed) -> None:
    installed("torch", url=url)
    message = extras.lacking("cloud", "ray")
    assert message == f"needs the extra [cloud], which is not all installed here (missing: ray); {remedy} (OUT-501)"


def test_every_extra_that_an_error_names_exists(root) -> None:
    known = set(importlib.metadata.metadata("outrider").get_all("Provides-Extra"))
    named = set()
    for path in (*root.glob("*/outrider/**/*.py"), *root.glob("docs/*.md"), *root.glob("deploy/systemd/*")):
        text = path.read_text(encoding="utf-8")
        assert "pip install 'outrider[" not in text, f"{path}: no package index has outrider"
        named |= {part for found in extras.re.findall(r'lacking\("([\w,]+)"', text) for part in found.split(",")}
    assert named
    assert named <= known

"""Tests against an installed vLLM, which `make vllm` runs in an environment of its own; elsewhere none is collected."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from conformance_oracle import Oracle, save_conformance_target

HERE = Path(__file__).parent
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Loading vLLM takes a minute on a busy machine."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target of the conformance suite."""
    return save_conformance_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def oracle(folder: Path) -> Oracle:
    """The plain model of that target."""
    return Oracle(folder)

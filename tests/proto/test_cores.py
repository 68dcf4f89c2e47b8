"""The cores that a process may use."""

from __future__ import annotations

import os

import pytest

from outrider.proto.plumbing import cores
from outrider.proto.plumbing.cores import available_cores, computing_cores, limit_spinning


@pytest.mark.parametrize(
    ("cpu_max", "expected"),
    [
        ("max 100000", 8),
        ("300000 100000", 3),
        ("250000 100000", 2),
        ("50000 100000", 1),
        ("1600000 100000", 8),
        ("", 8),
    ],
)
def test_a_container_has_no_more_cores_than_its_quota(tmp_path, monkeypatch, cpu_max, expected) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    (tmp_path / "cpu.max").write_text(cpu_max)
    assert available_cores(tmp_path / "cpu.max") == expected
    assert available_cores(tmp_path / "nowhere") == 8


@pytest.mark.parametrize(("available", "processes", "each"), [(1, 1, 1), (2, 1, 1), (8, 1, 7), (8, 2, 3), (4, 9, 1)])
def test_what_computes_leaves_a_core_to_the_rest(monkeypatch, available, processes, each) -> None:
    monkeypatch.setattr(cores, "available_cores", lambda: available)
    assert computing_cores(processes) == each


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ({}, {"GOMP_SPINCOUNT": "30000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "passive"}, {"OMP_WAIT_POLICY": "passive"}),
    ],
)
def test_idle_threads_spin_briefly_unless_the_environment_says_otherwise(monkeypatch, given, left) -> None:
    environment = dict(given)
    monkeypatch.setattr(os, "environ", environment)
    limit_spinning()
    assert environment == left

"""The Ray that `outrider up` starts for itself."""

from __future__ import annotations

import os
from typing import Any

import pytest

from outrider.deploy.cluster import _start_local_ray


def test_it_asks_for_a_token_whatever_this_version_of_ray_does_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    modes: list[str | None] = []

    def init(**options: Any) -> None:
        assert options["include_dashboard"] is False
        modes.append(os.environ.get("RAY_AUTH_MODE"))

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    _start_local_ray()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # an operator's own choice
    _start_local_ray()
    assert modes == ["token", "disabled"]

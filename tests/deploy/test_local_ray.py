"""The Ray that `outrider up` starts for itself."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from outrider.deploy.cluster import STARTS, _start_local_ray
from outrider.proto.errors import Unavailable


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


@pytest.mark.parametrize("imported", ["import ray", ""])
def test_this_process_has_the_token_too_whenever_it_imported_ray(imported: str) -> None:
    pytest.importorskip("ray")
    code = f"""
{imported}
from outrider.deploy.cluster import _ask_for_token
_ask_for_token()
from ray._raylet import AuthenticationMode, get_authentication_mode
assert get_authentication_mode() == AuthenticationMode.TOKEN
"""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


@pytest.mark.parametrize("failures", [1, 5])
def test_one_that_starts_too_slowly_is_started_again_and_then_given_up(failures: int, monkeypatch, caplog) -> None:
    ray = pytest.importorskip("ray")
    starts: list[int] = []

    def init(**_: Any) -> None:
        starts.append(1)
        if len(starts) <= failures:
            raise Exception("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", init)
    if failures == 1:
        _start_local_ray()
        assert "trying again" in caplog.text
    else:
        with pytest.raises(Unavailable, match="timed out") as error:
            _start_local_ray()
        assert error.value.field == "ray"
    assert len(starts) == min(failures + 1, STARTS)

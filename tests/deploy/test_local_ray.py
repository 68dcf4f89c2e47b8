"""The Ray that `outrider up` starts for itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from outrider.deploy.local.local_cluster import STARTS, _start_local_ray
from outrider.proto.address import is_loopback
from outrider.proto.errors import Unavailable

LISTENING = r"""
import json, subprocess, sys
import psutil
from outrider.deploy.local.local_cluster import _start_local_ray
_start_local_ray()
import ray

@ray.remote
class Counter:
    def add(self, n):
        return n + 1

counter = Counter.options(name="counter").remote()
assert ray.get(counter.add.remote(1)) == 2
join = (
    "from outrider.coordinator.ray_cluster import connect_ray; import ray; connect_ray('auto');"
    "assert ray.get(ray.get_actor('counter', namespace='outrider').add.remote(2)) == 3"
)
subprocess.run([sys.executable, "-c", join], check=True)
here = psutil.Process()
print(json.dumps([
    (process.name(), connection.laddr.ip)
    for process in [here, *here.children(recursive=True)]
    for connection in process.net_connections(kind="inet")
    if connection.status == psutil.CONN_LISTEN
]))
ray.shutdown()
"""


@pytest.fixture(autouse=True)
def _ray_forgets_its_mode() -> Iterator[None]:
    """Leave Ray's way to authenticate as it was; where Ray is imported, its process has it beside the environment."""
    before = os.environ.get("RAY_AUTH_MODE")
    yield
    if before is None:
        os.environ.pop("RAY_AUTH_MODE", None)
    else:
        os.environ["RAY_AUTH_MODE"] = before
    if "ray" in sys.modules:
        from ray._raylet import Config

        Config.initialize("")


@pytest.mark.ray
def test_its_processes_listen_on_loopback_alone_and_others_here_can_join() -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install --editable '.[all]'")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", LISTENING], env=environment, check=True, timeout=220, stdout=subprocess.PIPE, text=True
    )
    listening = json.loads(done.stdout.splitlines()[-1])
    assert {"gcs_server", "raylet", "ray::Counter"} <= {name for name, _ in listening}, "actors' processes listen, too"
    assert [(name, ip) for name, ip in listening if not is_loopback(ip.removeprefix("::ffff:"))] == []


def test_it_asks_for_a_token_whatever_this_version_of_ray_does_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="needs Ray: pip install --editable '.[all]'")
    modes: list[str | None] = []

    def init(**options: Any) -> None:
        assert options["include_dashboard"] is False
        modes.append(os.environ.get("RAY_AUTH_MODE"))

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv("RAY_AUTH_MODE", "")  # or else what is set below would stay
    monkeypatch.delenv("RAY_AUTH_MODE")
    _start_local_ray()
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # an operator's own choice
    _start_local_ray()
    assert modes == ["token", "disabled"]


@pytest.mark.parametrize("imported", ["import ray", ""])
def test_this_process_has_the_token_too_whenever_it_imported_ray(imported: str) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install --editable '.[all]'")
    code = f"""
{imported}
from outrider.deploy.local.local_cluster import _ask_for_token
_ask_for_token()
from ray._raylet import AuthenticationMode, get_authentication_mode
assert get_authentication_mode() == AuthenticationMode.TOKEN
"""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


LATE = (Exception("The current node timed out during startup."), RuntimeError("Timed out waiting for file x"))
NEVER = ValueError("no such resource")


@pytest.mark.parametrize(("error", "failures"), [*((late, n) for late in LATE for n in (1, 5)), (NEVER, 1)], ids=str)
def test_one_that_starts_too_slowly_is_started_again_and_then_given_up(
    failures: int, error: Exception, monkeypatch, caplog
) -> None:
    ray = pytest.importorskip("ray", reason="needs Ray: pip install --editable '.[all]'")
    starts: list[int] = []

    def init(**_: Any) -> None:
        starts.append(1)
        if len(starts) <= failures:
            raise error

    monkeypatch.setattr(ray, "init", init)
    if failures == 1 and error is not NEVER:
        _start_local_ray()
        assert "trying again" in caplog.text
    else:
        with pytest.raises(Unavailable, match=str(NEVER) if error is NEVER else r"(?i)timed out") as refused:
            _start_local_ray()
        assert refused.value.field == "ray"
    assert len(starts) == (1 if error is NEVER else min(failures + 1, STARTS))

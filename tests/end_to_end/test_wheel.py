"""The built wheel with `[edge]` alone: it installs without torch, decodes against a verifier, and stays small."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from fleets import fleet
from run_packages import MAX_EDGE_BYTES, MAX_WHEEL_BYTES, environment, size_of

from outrider.drafters.packages import FAMILY

pytestmark = [pytest.mark.wheel, pytest.mark.soak, pytest.mark.timeout(500)]

MAX_MEGABYTES = 250

EDGE_PROGRAM = r"""
import importlib.util, re, sys
absent = [name for name in ("torch", "transformers", "ray") if importlib.util.find_spec(name) is None]
from outrider.deploy.cli import main
status = main(sys.argv[1:])
peak_kb = re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]  # of this program alone
print(status, int(peak_kb) // 1024, *absent)
"""


@pytest.fixture(scope="module")
def edge_python(tmp_path_factory, root, request) -> Path:
    """The interpreter of a fresh environment in which only the wheel with [edge] is installed."""
    folder = tmp_path_factory.mktemp("edge")
    run = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder), str(root)]
    subprocess.run(run, check=True, capture_output=True)
    (wheel,) = folder.glob("outrider-*.whl")
    size = wheel.stat().st_size
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{wheel.name}: {size / 1e6:.1f} MB")
    assert size < MAX_WHEEL_BYTES
    packages = {name.rpartition("/")[0] for name in ZipFile(wheel).namelist() if name.endswith(".py")}
    assert {name.split("/")[0] for name in packages} == {"outrider"}, "what measures the project stays at home"
    return environment(folder / "venv", f"{wheel}[edge]") / "bin/python"


async def test_the_edge_of_the_wheel_decodes_in_little_memory_without_torch(edge_python, tmp_path) -> None:
    options = ["--cache", str(tmp_path / "cache"), "--json", "--max-tokens", "200"]
    async with fleet("verifier", drafters=(FAMILY,)) as found:
        words = ["run", "--coordinator", found.address, *options, "def main(argv):\n" * 40]
        process = await asyncio.create_subprocess_exec(
            str(edge_python), "-c", EDGE_PROGRAM, *words, stdout=asyncio.subprocess.PIPE, cwd=tmp_path
        )
        out = (await process.communicate())[0].decode().splitlines()
    record = json.loads(out[0])
    status, megabytes, *absent = out[-1].split()
    assert status == "0"
    assert absent == ["torch", "transformers", "ray"]
    assert int(megabytes) < MAX_MEGABYTES
    assert len(record["tokens"]) == 200
    assert record["accepted"] > 0
    print(f"peak memory of the edge: {megabytes} MB")


def test_the_environment_of_an_edge_stays_small_on_disk(edge_python) -> None:
    size = size_of(edge_python.parents[1])
    print(f"environment of the edge: {size / 1e6:.0f} MB")
    assert 10_000_000 < size < MAX_EDGE_BYTES

"""The packages, installed alone: `make dist` builds and checks them, and runs this in empty environments.

Prints the size of each environment. A cluster of the [cloud] environment then serves an edge of the [edge] environment,
which holds neither torch nor a model. Fails where anything else comes out.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PROMPT = "def main(argv):\n" * 20
MAX_WHEEL_BYTES, MAX_EDGE_BYTES = 12_000_000, 330_000_000
EXTRAS = ("edge", "coordinator", "server", "bench", "jobs", "tracing", "cloud,coordinator")
# The first command of an extra that needs no cluster; those of [edge] and [cloud] are below.
FIRST = {"server": ["doctor", "--server", "http://127.0.0.1:9"], "bench": ["bench", "--help"]}


def run(*words: str | Path, timeout_s: float = 300.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in words], text=True, capture_output=True, timeout=timeout_s)


def environment(folder: Path, *wheels: str) -> Path:
    """Make an environment of `wheels` alone, with what pip finds for them or its further arguments, and return it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--python", str(folder / "bin/python")]
    subprocess.run([*pip, "install", *wheels], check=True)
    return folder


def size_of(folder: Path) -> int:
    """Return the bytes that a folder takes on disk, those of hard links once."""
    files = [path.lstat() for path in folder.rglob("*")]
    return 512 * sum(file.st_blocks for file in {(file.st_dev, file.st_ino): file for file in files}.values())


def main(dist: Path, root: Path) -> None:
    """Try the wheels in `dist`."""
    [code], [models] = dist.glob("outrider-*.whl"), dist.glob("outrider_models-*.whl")
    for wheel in (code, models):
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    assert code.stat().st_size <= MAX_WHEEL_BYTES
    [version] = {wheel.name.split("-")[1] for wheel in (code, models)}
    with tempfile.TemporaryDirectory() as place:
        commands = {}
        for extra in EXTRAS:
            wheels = [f"{code}[{extra}]", *([str(models)] if "cloud" in extra else [])]
            folder = environment(Path(place) / extra, "--constraint", str(root / "constraints.txt"), *wheels)
            commands[extra] = folder / "bin/outrider"
            size = size_of(folder)
            assert run(commands[extra], "--version").stdout == f"outrider {version}\n"
            print(f"[{extra}]: {size / 1e6:.0f} MB", flush=True)
            assert extra != "edge" or size <= MAX_EDGE_BYTES
            if extra in FIRST:
                said = run(commands[extra], *FIRST[extra])
                assert "Traceback" not in said.stderr, said.stderr
            if extra not in ("edge", "cloud,coordinator"):
                shutil.rmtree(folder)
        serve(commands["cloud,coordinator"], commands["edge"], Path(place))


def serve(cloud: Path, edge: Path, place: Path) -> None:
    """Let an edge of its own environment decode against a cluster, and check what it says."""
    up = [str(cloud), "up", "--target", "reference", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(up, stdout=subprocess.PIPE, text=True, cwd=place) as cluster:
        try:
            assert cluster.stdout is not None
            found = (re.search(r"coordinator on (\S+),", line) for line in cluster.stdout)
            address = next((match[1] for match in found if match), "")
            assert address, "the cluster has ended"
            options = ["--coordinator", address, "--cache", place / "cache"]
            said = run(edge, "run", *options, "--max-tokens", "64", PROMPT)
            assert said.returncode == 0, said.stderr
            assert said.stdout.strip()
            print("outrider run:", " ".join(said.stderr.split()))
            said = run(edge, "doctor", *options)
            assert said.returncode == 0, said.stdout + said.stderr
            print(f"outrider doctor: {said.stdout.strip().splitlines()[-1]}")
            assert run(edge, "explain", "OUT-101").stdout.startswith("OUT-101: "), "the wheel lacks docs/errors.md"
        finally:
            cluster.terminate()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(__file__).resolve().parents[2])

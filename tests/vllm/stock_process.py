"""A stock `vllm serve` on loopback, as an operator starts it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from command_processes import free_port

BLOCK = 32
START_WITHIN_S = 400.0


@contextmanager
def stock_vllm(model: Path, scratch: Path, *flags: str, v2: bool = False) -> Iterator[str]:
    """Its URL; in float32, on Model Runner V1 or V2, with what it writes in a file in `scratch`."""
    port = free_port()
    info = (
        scratch / "vllm-0.32.0+cpu.dist-info"
    )  # by which vLLM knows its kind, and its wheel for CPUs has another name
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    paths = os.pathsep.join([str(scratch), str(Path(__file__).parent / "v2"), os.environ.get("PYTHONPATH", "")])
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": paths}
    environment |= {"TRITON_INTERPRET": "1"} if v2 else {}
    environment |= {"VLLM_USE_V2_MODEL_RUNNER": str(int(v2))}
    command = [sys.executable, str(Path(__file__).parent / "stock_server.py"), "serve", str(model)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--block-size", str(BLOCK), *flags]
    log = scratch / "log"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=scratch)
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        workers = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.terminate()
        process.wait(60)
        assert psutil.wait_procs(workers, timeout=30)[1] == []


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START_WITHIN_S
    while time.monotonic() < until and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
    raise AssertionError(log.read_text()[-3000:])

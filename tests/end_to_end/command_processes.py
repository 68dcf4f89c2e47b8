"""Outrider's commands as processes of their own, which tests kill and start again."""

from __future__ import annotations

import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import psutil

PORTS = range(20_000, 30_000)  # below those that Linux gives to connections
_OWNED: list[socket.socket] = []

START_WITHIN_S = 180.0  # it may have to import torch on a machine that is busy
END_WITHIN_S = 60.0


def free_port() -> int:
    """A port that is this process's own until it ends, so that a server can come back to it.

    Neither the kernel gives it to a connection nor this function to another process meanwhile.
    """
    first = random.SystemRandom().randrange(len(PORTS))
    for port in (*PORTS[first:], *PORTS[:first]):
        owned = socket.socket(socket.AF_UNIX)
        try:
            owned.bind(f"\0outrider-test-port-{port}")
            with socket.create_server(("127.0.0.1", port)):
                _OWNED.append(owned)
                return port
        except OSError:
            owned.close()
    raise AssertionError("all ports are taken")


def without_progress(errors: str) -> list[str]:
    """Lines on standard error but for those by which a slow command says what it waits for."""
    return [line for line in errors.strip().splitlines() if not line.endswith(" …")]


class Command:
    """`outrider ARGUMENTS…`, not started yet.

    Args:
        arguments: of the command line.
        log: file for what it writes to standard error, of all its starts.
        program: what Python runs with these arguments.
    """

    def __init__(self, *arguments: str, log: Path, program: Sequence[str] = ("-m", "outrider.deploy")) -> None:
        self._arguments = arguments
        self._program = program
        self._log = log
        self._lines: queue.Queue[str] = queue.Queue()
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Begin; `line` says when it serves."""
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, *self._program, *self._arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
        self._lines = queue.Queue()
        threading.Thread(target=self._read, args=(self.process, self._lines), daemon=True).start()

    @property
    def process(self) -> subprocess.Popen[str]:
        """Process of the newest start."""
        assert self._process is not None
        return self._process

    def line(self) -> str:
        """The next line that it prints; waited for."""
        try:
            line = self._lines.get(timeout=START_WITHIN_S)
        except queue.Empty:
            raise AssertionError(f"{self._arguments[0]} says nothing; {self.errors}") from None
        assert line, f"{self._arguments[0]} has ended; {self.errors}"
        return line.rstrip("\n")

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.put(line)
        lines.put("")

    @property
    def runs(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    @property
    def errors(self) -> str:
        """Lines that it wrote to standard error, at every start."""
        return self._log.read_text()

    @property
    def resident_mib(self) -> float:
        """Memory that it holds."""
        return psutil.Process(self.process.pid).memory_info().rss / (1 << 20)

    def kill(self) -> None:
        """End it as a crash or the kernel would."""
        self.process.kill()
        self.process.wait()

    def terminate(self) -> int:
        """Tell it to go, and wait; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self._arguments[0]} does not end; {self.errors}") from None

    def end(self) -> None:
        """Terminate it where it runs."""
        if self._process is not None and self.runs:
            self.terminate()

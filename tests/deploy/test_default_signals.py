"""Programs that tests start heed signals, also where the tests themselves were started to ignore them."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from default_signals import STARTED_WITHOUT

IGNORING = """
import signal, subprocess, sys
for number in map(int, sys.argv[1].split()):
    signal.signal(number, signal.SIG_IGN)
sys.exit(subprocess.run([sys.executable, *sys.argv[2:]]).returncode)
"""


def ends(number: int) -> list[str]:
    """Return arguments of a Python that sends itself a signal, and ends with 0 if it ignores that."""
    return ["-c", f"import os; os.kill(os.getpid(), {number})"]


def started_ignoring(*arguments: str, folder: Path) -> int:
    """Return the status of a Python that was started to ignore signals."""
    numbers = " ".join(str(int(number)) for number in STARTED_WITHOUT)
    command = [sys.executable, "-c", IGNORING, numbers, *arguments]
    return subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=False, timeout=300).returncode


@pytest.mark.parametrize("number", STARTED_WITHOUT)
def test_what_a_test_starts_ends_by_a_signal(number: signal.Signals) -> None:
    ended = subprocess.run([sys.executable, *ends(number)], stderr=subprocess.DEVNULL, check=False)
    assert ended.returncode == -number


def test_so_it_does_where_tests_are_started_to_ignore_signals(root: Path) -> None:
    assert started_ignoring(*ends(signal.SIGINT), folder=root) == 0, "or nothing is ignored"
    chosen = f"{Path(__file__).relative_to(root)}::{test_what_a_test_starts_ends_by_a_signal.__name__}"
    assert started_ignoring("-m", "pytest", "-q", "-p", "no:cacheprovider", chosen, folder=root) == 0

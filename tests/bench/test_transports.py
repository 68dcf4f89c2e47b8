"""The comparison of transports over a lossy link, at a small size."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.usefixtures("_tun_links")
def test_every_transport_has_every_commit_in_the_end() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "outrider.bench.transports", "2/0", "2/5:10", "--seconds", "0.9"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()[2:]
    assert [line for line in lines if "lost" in line] == ["2 ms, 0 % lost", "2 ms, 5:10 % lost"]
    rows = [line for line in lines if "lost" not in line]
    assert [row[:14].strip() for row in rows] == ["one TCP", "drafts apart", "two TCP", "datagrams"] * 2
    assert all(int(row[14:20]) == 30 for row in rows if not row.startswith("datagrams"))
    assert int(rows[3][14:20]) == 30, "the link without loss loses no datagram"

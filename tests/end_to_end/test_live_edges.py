"""A fleet of live edges against real coordinator processes: leases, watches, a new version, a kill and a restart."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.timeout(400)]

EDGES, BACK = 200, 100
PATIENCE_MS = 2000.0  # of a machine that has other work


def test_a_fleet_is_served_through_a_new_version_a_lost_coordinator_and_a_restart(root, tmp_path, capsys) -> None:
    record = tmp_path / "crowd.json"
    options = ["--edges", str(EDGES), "--back", str(BACK), "--rates", "20", "--json", str(record)]
    words = [sys.executable, "-m", "research", "crowd", *options, "--folder", str(tmp_path / "crowd")]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    with capsys.disabled():
        print(done.stdout)
    rows = {row["what"]: row for row in json.loads(record.read_text())["rows"]}
    assert all(row["failed"] == 0 for row in rows.values()), "no text is lost, whatever happens"
    texts, version = rows["20 texts/s"], rows["a new version"]
    assert texts["watching"] == texts["edges"] == EDGES
    assert texts["leases"] >= 0.9 * texts["due"] > 100
    assert texts["lease_p99_ms"] < PATIENCE_MS
    assert version["back_s"] < 5.0, "every watch has the news"
    killed, back = rows["one of two is killed"], rows[f"{BACK} come back"]
    assert killed["watching"] == EDGES
    assert killed["leases"] > 0
    assert back["watching"] == BACK <= back["leases"]

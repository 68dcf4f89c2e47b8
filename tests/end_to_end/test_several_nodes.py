"""A Ray cluster of several nodes in namespaces of this machine: texts through faults of nodes and networks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from outrider.proto.errors import Unavailable
from research.cluster.hosts import check_rights

pytestmark = [pytest.mark.ray, pytest.mark.soak, pytest.mark.timeout(580)]


def test_texts_survive_faults_of_nodes_and_edges_that_move(root, tmp_path, capsys) -> None:
    try:
        check_rights()
    except Unavailable as error:
        pytest.skip(str(error))
    record = tmp_path / "cluster.json"
    options = ["--short", "--folder", str(tmp_path / "cluster"), "--json", str(record)]
    words = [sys.executable, "-m", "research", "cluster", *options]
    done = subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    with capsys.disabled():
        print(done.stdout)
    rows = json.loads(record.read_text())["rows"]
    assert "three verifiers on 3 nodes" in rows[0]["said"]
    assert all(row["right"] == row["texts"] > 0 == row["lost"] for row in rows)
    assert len(rows) == 5

"""aiperf: NVIDIA's load tool."""

# /// script
# dependencies = ["aiperf==0.13.0"]
# ///

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from cases import BASE_URL, MODEL, case, run

reports: list[dict[str, Any]] = []


@case("30 of 30 requests")
def _load() -> None:
    folder = tempfile.mkdtemp()
    command = ["aiperf", "profile", "--model", MODEL, "--url", BASE_URL.removesuffix("/v1"), "--endpoint-type", "chat"]
    command += ["--streaming", "--tokenizer", os.environ["TOKENIZER"], "--request-count", "30", "--concurrency", "2"]
    command += ["--synthetic-input-tokens-mean", "40", "--output-tokens-mean", "24", "--ui", "none"]
    command += ["--extra-inputs", "ignore_eos:true", "--artifact-dir", folder]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (report,) = Path(folder).rglob("profile_export_aiperf.json")
    reports.append(json.loads(report.read_text()))
    assert reports[0]["request_count"]["avg"] == 30, reports[0]["request_count"]


@case("its table of speculative decoding")
def _speculation() -> None:
    assert any("accept" in name for name in reports[0]), sorted(reports[0])


if __name__ == "__main__":
    run("aiperf")

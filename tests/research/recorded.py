"""Recordings in files, and the command that replays them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from outrider.bench.links import BenchLink, LinkRecord
from outrider.bench.record import save
from outrider.deploy.link.shape import LinkShape
from research.commands import main
from research.traces.recordings import Recording, costs_path, save_traces


def written(recording: Recording, folder: Path) -> Path:
    path = folder / "t.jsonl"
    save_traces([trace for own in recording.traces.values() for trace in own], path)
    save(recording.costs, costs_path(path, "output"))
    return path


def link_of(rtt_ms: float = 20) -> BenchLink:
    return BenchLink(LinkShape.of(rtt_ms=rtt_ms), None, LinkRecord(rtt_ms))


def run_command(arguments: Sequence[str], capfd: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Run `python -m research traces`; return its status and what it wrote."""
    try:
        status = main(["traces", *arguments])
    except SystemExit as ended:
        status = int(ended.code or 0)
    out, err = capfd.readouterr()
    return status, out, err

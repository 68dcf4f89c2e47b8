"""`python -m research costs`: the cloud's work for a thousand tokens, by the record of a benchmark."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outrider.bench.benchmark.bench_record import Benchmark, BenchmarkRun
from outrider.bench.environment import environment
from outrider.bench.links import LinkRecord
from outrider.bench.record import save
from outrider.cloud.verifier_config import VerifierConfig
from research.commands import main
from research.costs import core_s, cost_grids, step_s

LINK = LinkRecord(30.0)
CLOUD = BenchmarkRun("cloud", LINK, 30.0, tokens_per_second=33.0, steps_per_token=1.0, rows_per_token=1.0)
BOTH = replace(
    CLOUD,
    mode="outrider",
    tokens_per_second=80.0,
    steps_per_token=0.4,
    rows_per_token=2.0,
    cloud_drafting_ms_per_token=1.8,
    edge_drafting_ms_per_token=2.5,
)


def record_of(*runs: BenchmarkRun, threads: int = 2) -> Benchmark:
    named = {"max_tokens": 8, "seed": 0, "drafter": "d", "drafter_version": "1", "drafter_threads": 1, "prompts": 1}
    return Benchmark(environment(VerifierConfig(threads=threads), "float32", **named), runs)


def test_core_seconds_are_those_of_steps_on_their_cores_and_of_drafting_on_one() -> None:
    (grid,) = cost_grids(record_of(CLOUD, BOTH), 2)
    ((cloud, both),) = grid.blocks
    assert cloud == ("30 ms", "cloud", "1000", "1000", "60.00", "-", "60.00", "1.00", "-")
    assert both == ("", "outrider", "400", "2000", "24.00", "1.80", "25.80", "0.43", "2.50")


def test_a_step_lasts_as_long_as_its_work_but_never_less_than_the_shortest() -> None:
    worked = replace(CLOUD, forward_ms_p50=35.0, sample_ms_p50=4.0, overhead_ms_p50=1.0)
    assert step_s(worked) == pytest.approx(0.04)
    assert step_s(replace(worked, min_step_ms=100.0)) == pytest.approx(0.1)
    assert core_s(worked, 1) == pytest.approx(0.04)


def test_the_command_takes_the_cores_of_the_record_or_asks_for_them(tmp_path: Path, capsys) -> None:
    save(record_of(CLOUD, BOTH), tmp_path / "known.json")
    assert main(["costs", str(tmp_path / "known.json")]) == 0
    assert "25.80" in capsys.readouterr().out
    assert main(["costs", str(tmp_path / "known.json"), "--step-cores", "1"]) == 0
    assert "13.80" in capsys.readouterr().out
    save(record_of(CLOUD, threads=0), tmp_path / "unknown.json")
    assert main(["costs", str(tmp_path / "unknown.json")]) == 1
    assert "step-cores: is not in the record" in capsys.readouterr().err

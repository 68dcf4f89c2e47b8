"""`python -m research traces ends`: who drafts, replayed with emulated times of a drafted token."""

from __future__ import annotations

import itertools
import random
from dataclasses import asdict

import pytest

from outrider.bench.benchmark.bench_record import Benchmark
from outrider.bench.environment import environment
from outrider.bench.record import from_json, save
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.arguments import read_text
from research.commands import main
from research.recording import CostSheet, DrafterCosts, TargetCosts
from research.replay.hit_traces import HitTrace, save_traces
from research.simulator.clock import Costs

HERE_MS, EDGE_MS, STEP_MS = 8.0, 2.0, 30.0


def trace(seed: int) -> HitTrace:
    rng = random.Random(seed)
    text = tuple(rng.randrange(5, 500) for _ in range(60))
    hits = tuple(rng.random() < 0.8 for _ in text)
    return HitTrace(str(seed), "", "general", "1", 0.0, 20, text, hits, (0.8,) * len(text))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Return the paths of a recording, and of one whose environment is unknown."""
    folder = tmp_path_factory.mktemp("ends")
    named = {"max_tokens": 8, "seed": 0, "drafter": "d", "drafter_version": "1", "drafter_threads": 1, "prompts": 1}
    known = asdict(environment(VerifierConfig(), "float32", **named))
    for name, found in (("known", known), ("unknown", {})):
        save_traces([trace(1), trace(2)], folder / f"{name}.jsonl")
        drafters = {"general": DrafterCosts(0.0001, 0.00001)}
        save(CostSheet(TargetCosts(0.003, 0.0, 0.0), drafters, found), folder / f"{name}.costs.json")
    return folder / "known.jsonl", folder / "unknown.jsonl"


@pytest.fixture(scope="module")
def replayed(recorded, tmp_path_factory):
    """Return the path of a record, over a short link and a long one."""
    path = tmp_path_factory.mktemp("replayed") / "ends.json"
    arguments = ["--rtt", "2,200", "--drafting", f"{HERE_MS}:{EDGE_MS}", "--json", str(path)]
    assert main(["traces", "ends", str(recorded[0]), *arguments]) == 0
    return path


def runs_of(path) -> dict:
    runs = from_json(Benchmark, read_text(path, "json"), "json").runs
    return {(run.link.rtt_ms, run.mode, run.goal): run for run in runs}


def test_each_mode_is_replayed_over_each_link_and_for_each_goal(replayed) -> None:
    runs = runs_of(replayed)
    ways = {("cloud", None), ("colocated", None), *itertools.product(("edge", "outrider"), ("latency", "efficiency"))}
    assert set(runs) == {(rtt, *way) for rtt in (2.0, 200.0) for way in ways}
    for run in runs.values():
        assert run.replayed
        assert (run.drafting_here_ms, run.drafting_ms, run.min_step_ms) == (HERE_MS, EDGE_MS, STEP_MS)
        assert run.token_gaps_ms is None


def test_a_drafted_token_takes_the_emulated_time_at_each_end(replayed) -> None:
    runs = runs_of(replayed)
    colocated = runs[2.0, "colocated", None]
    made = colocated.rows_per_token - colocated.steps_per_token
    assert colocated.cloud_drafting_ms_per_token == pytest.approx(HERE_MS * made, rel=0.15)
    assert colocated.edge_drafting_ms_per_token == 0
    step_ms = STEP_MS + HERE_MS * colocated.drafts_here
    assert 1e3 / colocated.tokens_per_second == pytest.approx(colocated.steps_per_token * step_ms, rel=0.1)
    edge = runs[2.0, "edge", "latency"]
    assert edge.cloud_drafting_ms_per_token == 0
    assert edge.edge_drafting_ms_per_token > EDGE_MS * (edge.rows_per_token - edge.steps_per_token)
    assert edge.tokens_per_second > colocated.tokens_per_second, "its drafts take a quarter of the time"


def test_the_record_gives_the_clouds_work_for_each_goal(replayed, capsys) -> None:
    assert main(["costs", str(replayed), "--step-cores", "1"]) == 0
    shown = capsys.readouterr().out
    assert "a draft 8 ms in the cloud, 2 at the edge" in shown
    names = [line.split("  ")[1:] for line in shown.splitlines()]
    assert sum("outrider eff.*" in name for line in names for name in line) == 2
    assert "A step occupies 1 core while" in shown


def test_reading_becomes_as_much_slower_as_drafting() -> None:
    costs = Costs(drafting_s=0.001, catch_up_s=0.0002)
    emulated = costs.with_drafting(0.002, 0.008)
    assert (emulated.drafting_s, emulated.catch_up_s) == pytest.approx((0.002, 0.0004))
    assert (emulated.here.drafting_s, emulated.here.catch_up_s) == pytest.approx((0.008, 0.0016))
    assert costs.here == costs


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--drafting", "8:2,8:2"], "drafting: names '8:2' twice"),
        (["--goal", ""], "goal: is empty"),
        (["--drafter", "other"], "drafter: 'other' was not recorded"),
    ],
)
def test_a_wrong_option_is_one_clear_line(arguments, says, recorded, capfd) -> None:
    assert main(["traces", "ends", str(recorded[0]), *arguments]) == 1
    assert says in capfd.readouterr().err


@pytest.mark.parametrize("times", ["8", "8:2:1", "0:2", "8:inf", "8:x"])
def test_times_of_a_draft_are_two_numbers_above_0(times, recorded, capfd) -> None:
    with pytest.raises(SystemExit):
        main(["traces", "ends", str(recorded[0]), "--drafting", times])
    assert f"'{times}' is not CLOUD:EDGE in ms, such as 8:2" in capfd.readouterr().err


def test_a_recording_without_its_environment_is_refused(recorded, capfd) -> None:
    assert main(["traces", "ends", str(recorded[1])]) == 1
    assert "python: is missing; record again" in capfd.readouterr().err

"""`outrider traces overhead`: time of the edge's rules, and the stopwatch that takes it."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

from outrider.bench.record import save
from outrider.bench.recording import CostSheet, DrafterCosts, TargetCosts, costs_path
from outrider.bench.replay.traces import HitTrace, save_traces
from outrider.bench.traces import overhead
from outrider.bench.traces.overhead import CALIBRATION, LENGTH, PARTS, SELECTOR, SESSION, Stopwatch
from outrider.deploy.cli import main


@pytest.fixture
def recording(tmp_path):
    rng = np.random.default_rng(0)
    traces = []
    for name, prompt in itertools.product(("a", "b"), range(2)):
        text = tuple(range(5 + 40 * prompt, 45 + 40 * prompt))
        hits = tuple(bool(hit) for hit in rng.random(40) < 0.7)
        traces.append(HitTrace(f"p{prompt}", "d", name, "1", 1.0, 9, text, hits, (0.5,) * 40))
    path = tmp_path / "t.jsonl"
    save_traces(traces, path)
    costs = CostSheet(TargetCosts(0.01, 0.001, 0.0005), {name: DrafterCosts(0.001, 0.0001) for name in "ab"})
    save(costs, costs_path(path, "output"))
    return path


def test_every_way_of_drafting_has_a_row_with_its_share_of_the_first_drafters_time(recording, tmp_path, capfd) -> None:
    methods = [getattr(owner, name) for own in PARTS.values() for owner, name in own]
    arguments = [str(recording), "--rtt", "2,60", "--selector", "leader,random", "--runs", "1"]
    assert main(["traces", "overhead", *arguments, "--json", str(tmp_path / "o.json")]) == 0
    out = capfd.readouterr().out
    assert max(map(len, out.splitlines())) <= 100
    assert "(one drafter)" in out
    record = json.loads((tmp_path / "o.json").read_text())
    assert [(row["link"]["rtt_ms"], row["selector"]) for row in record["rows"]] == [
        (rtt, way) for rtt in (2, 60) for way in (None, "leader", "random")
    ]
    for row in record["rows"]:
        us = row["part_us"]
        assert set(us) == {LENGTH, SELECTOR, CALIBRATION, SESSION}
        assert min(us[LENGTH], us[SESSION]) > 0
        assert row["drafted"] >= 40
        assert 0 < row["share_of_work"] <= row["share"] * 1.001, "a draft takes 1 ms, and more is drafted than counted"
        assert row["share"] == pytest.approx((us[LENGTH] + us[SELECTOR]) / 1000, rel=1e-3), "a draft takes 1 ms"
    assert [getattr(owner, name) for own in PARTS.values() for owner, name in own] == methods, "nothing is timed now"


def test_the_time_of_a_part_is_without_that_of_the_parts_within_it(monkeypatch) -> None:
    now = 0.0
    monkeypatch.setattr(overhead.time, "perf_counter", lambda: now)
    stopwatch = Stopwatch()

    def work(seconds: float) -> None:
        nonlocal now
        now += seconds

    rule = stopwatch.timed(LENGTH, lambda: work(2))
    calibration = stopwatch.timed(CALIBRATION, lambda: work(8))

    def fails() -> None:
        work(16)
        raise KeyError

    broken = stopwatch.timed(SELECTOR, fails)

    def session() -> None:
        work(1)
        rule()
        calibration()
        with pytest.raises(KeyError):
            broken()
        rule()
        work(64)

    stopwatch.timed(SESSION, session)()
    work(128)
    rule()
    [lap] = stopwatch.laps
    assert lap.spent_s == {LENGTH: 6, SELECTOR: 16, CALIBRATION: 8, SESSION: 65}
    assert lap.calls == {LENGTH: 3, SELECTOR: 1, CALIBRATION: 1, SESSION: 1}
    assert lap.inner[SESSION] == 4

"""A simulated fleet: capacities, deadlines, arrivals and placement."""

from __future__ import annotations

import itertools
import json
import pickle
import random
from dataclasses import fields, replace

import pytest
from recorded import written
from test_crowd import PRICES, TRACES, crowd, speed, trace

from outrider.bench.bench_results import Benchmark, BenchmarkRun
from outrider.bench.environment import environment
from outrider.bench.links import LinkRecord
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.link.link_traces import find_trace
from outrider.deploy.link.shape import LinkShape
from outrider.proto.errors import ConfigError
from research.commands import main
from research.fleet.benchmark_again import SIMULATED, simulated_again
from research.fleet.capacity import Bounds, Held, best_length, capacity, most_sessions, sizes_to
from research.fleet.fleet_plots import LINES, plot
from research.fleet.many_sessions import WARM_UP_S
from research.fleet.prices import DEVICES, VERIFIERS
from research.fleet.schemes import (
    LENGTHS,
    both_ends,
    by_deadline,
    centralised,
    cloud_streaming,
    edges_alone,
    in_rounds,
)
from research.fleet.whole_fleet import MAX_TOKENS, Fleet, FleetPlan, read_arrivals
from research.research_settings import DEVICE_NAMES, PRICE_NAMES
from research.simulator.clock import Costs
from research.traces.recordings import CostSheet, DrafterCosts, Recording, TargetCosts

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BOUNDS = Bounds(gap_s=0.075, pace_s=0.025, max_sessions=64, session_seconds=12.0)


def shape_at(_: float) -> LinkShape:
    return LinkShape(0.01)


def test_sizes_that_are_tried_grow_by_an_eighth() -> None:
    sizes = sizes_to(100)
    assert sizes[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert sizes[-1] == 100
    assert all(b - a <= max(1, a // 8) for a, b in itertools.pairwise(sizes))


@pytest.mark.parametrize("guess", [1, 7, 40, 64])
@pytest.mark.parametrize("limit", [0, 1, 5, 23, 64])
def test_the_search_finds_the_most_that_are_held_from_any_guess(limit: int, guess: int) -> None:
    tried = []

    def held(sessions: int) -> bool:
        tried.append(sessions)
        return sessions <= limit

    assert most_sessions(held, 64, guess) == max((size for size in sizes_to(64) if size <= limit), default=0)
    assert len(tried) < 24


def test_the_best_length_is_that_of_most_sessions() -> None:
    held = {1: 3, 2: 9, 4: 4, 8: 4}
    guesses = []

    def found(scheme, guess: int) -> Held:
        guesses.append(guess)
        return Held(held[scheme.length], scheme, None)

    best = best_length(found, in_rounds, LENGTHS)
    assert (best.sessions, best.scheme.length) == (9, 2)
    assert guesses == [1, 3, 9, 9]
    held |= {4: 4, 6: 4, 8: 99}
    assert best_length(found, in_rounds, (1, 2, 4, 6, 8)).sessions == 9, "two in turn that hold fewer end the search"


def test_capacity_counts_what_the_bounds_hold() -> None:
    """Cloud streaming gives a token in 30.6 ms: at any pace it holds all, at 25 ms nobody."""
    of = {"devices": (DEVICES[1],), "links": (shape_at,)}
    free = capacity(TRACES, cloud_streaming(), PRICES, replace(BOUNDS, pace_s=float("inf")), **of)
    assert free.sessions == 64
    assert free.load is not None
    assert free.load.gap_p99_s < 0.04
    assert capacity(TRACES, cloud_streaming(), PRICES, BOUNDS, **of).sessions == 0
    assert capacity(TRACES, edges_alone(), PRICES, BOUNDS, **of).sessions > 0


def test_a_drafter_on_the_targets_device_takes_time_of_every_step() -> None:
    prices = replace(PRICES, pass_s=0.005)
    found = crowd(centralised(prices, 2), 4, prices=prices)
    free = crowd(centralised(prices, 2), 4, prices=replace(PRICES, pass_s=1e-9))
    assert found.cloud_drafting_s == 0.0, "no core drafts"
    assert found.steps_per_token < 0.6
    assert speed(found) < speed(free)


def test_batches_by_deadline_keep_a_gap_that_steps_of_all_break() -> None:
    """Rows so dear that a step of all takes longer than the gap: by deadline fewer take part in each."""
    prices = replace(PRICES, step_s=0.005, row_s=0.002)
    together, by = (crowd(scheme, 24, prices=prices, seconds=4.0) for scheme in (in_rounds(2), by_deadline(2, 0.1)))
    assert together.gap_p99_s > 0.1
    assert by.gap_p99_s < 0.1
    assert by.tokens_per_second > 0.9 * together.tokens_per_second
    assert min(by.tokens) > 0.5 * sorted(by.tokens)[12], "nobody is passed over"


def test_goodput_counts_the_tokens_of_sessions_that_keep_both_bounds() -> None:
    found = crowd(edges_alone(), 3)
    assert found.goodput(1.0, 1.0) == pytest.approx(found.tokens_per_second)
    assert found.goodput(0.001, 1.0) == 0.0
    assert found.goodput(1.0, 0.001) == 0.0


def arrivals_file(tmp_path, rows: str):
    path = tmp_path / "arrivals.csv"
    path.write_text("\ufeff" + rows, encoding="utf-8")
    return path


def test_arrivals_are_read_from_azures_trace(tmp_path) -> None:
    rows = "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,9999\n"
    first, second = read_arrivals(arrivals_file(tmp_path, HEADER + rows))
    assert (first.at_s, first.tokens) == (0.0, 44)
    assert second.at_s == pytest.approx(4.314579, abs=1e-5)
    assert second.tokens == MAX_TOKENS


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("a,b\n1,2\n", "columns"),
        (HEADER, "no requests"),
        (HEADER + "soon,1,2\n", "line 2"),
        (HEADER + "\n1\n", "line 3"),
    ],
)
def test_another_file_of_arrivals_is_refused_by_name(tmp_path, rows: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        read_arrivals(arrivals_file(tmp_path, rows))
    assert refused.value.field == "arrivals"


def fleet(tmp_path, scheme, **of_plan) -> Fleet:
    rng = random.Random(1)
    times = sorted(rng.uniform(0, 59.9) for _ in range(400))
    rows = [f"2023-11-16 18:15:{at:010.7f},100,{rng.randrange(20, 120)}\n" for at in times]
    arrivals = read_arrivals(arrivals_file(tmp_path, HEADER + "".join(rows)))
    plan = FleetPlan(**({"edges": 60, "verifiers": 2, "texts": 16, "seconds": 2.0} | of_plan))
    links = [find_trace(name) for name in ("fibre", "wifi")]
    return Fleet([trace(seed) for seed in range(4)], arrivals, scheme, VERIFIERS["70b"], plan, DEVICES, links)


@pytest.mark.parametrize("scheme", [cloud_streaming(), both_ends(VERIFIERS["70b"])], ids=["cloud", "both"])
def test_texts_of_a_fleet_come_and_go(tmp_path, scheme) -> None:
    run = fleet(tmp_path, scheme)
    found = run.run()
    assert run.refused == 0
    assert len(found.tokens) > 20, "more texts than went on at once"
    assert sum(found.tokens) > 0.5 * 16 * 2.0 / 0.025
    assert found.bytes_per_token > 0
    again = fleet(tmp_path, scheme).run()
    assert again == found, "a virtual clock gives the same again"


def test_texts_without_an_edge_or_a_slot_are_counted(tmp_path) -> None:
    run = fleet(tmp_path, cloud_streaming(), edges=4)
    run.run()
    assert run.refused > 0
    run = fleet(tmp_path, cloud_streaming(), max_sessions=2)
    found = run.run()
    assert run.refused > 0
    assert sum(found.rates) <= 4 / VERIFIERS["70b"].step_s * len(found.rates)


def test_the_command_runs_all_schemes_with_as_many_texts_for_each_verifier(tmp_path, capfd) -> None:
    name = trace(0).drafter
    sheet = CostSheet(TargetCosts(0.010, 0.001, 0.0005), {name: DrafterCosts(0.001, 0.0001)})
    traces = written(Recording({name: [trace(seed) for seed in range(2)]}, sheet), tmp_path)
    rows = "".join(f"2023-11-16 18:15:{at:02}.0000000,100,{20 + at}\n" for at in range(60))
    record, size = tmp_path / "fleet.json", ["--edges", "40", "--verifiers", "1,2", "--texts", "3", "--seconds", "1"]
    files = ["--arrivals", str(arrivals_file(tmp_path, HEADER + rows)), "--json", str(record)]
    assert main(["fleet", "edges", str(traces), *files, *size]) == 0
    saved = json.loads(record.read_text())
    assert [row["texts"] for row in saved["rows"]] == [3] * 6 + [6] * 6
    assert len({row["scheme"] for row in saved["rows"]}) == 6
    assert all(row["tokens_per_second"] > 0 for row in saved["rows"])
    assert (saved["run"]["edges"], saved["prices"]["name"]) == (40, "70b")
    assert "Outrider, both ends" in capfd.readouterr().out


def test_results_of_all_schemes_come_back_from_other_processes() -> None:
    for scheme in (in_rounds(2), by_deadline(2, 0.1), both_ends(PRICES)):
        found = pickle.loads(pickle.dumps(Held(3, scheme, None)))
        assert (found.scheme.name, found.sessions) == (scheme.name, 3)
        assert type(found.scheme.new_batching()) is type(scheme.new_batching())


def test_the_warm_up_is_not_counted(tmp_path) -> None:
    found = fleet(tmp_path, cloud_streaming(), seconds=1.0).run()
    assert found.seconds == 1.0
    assert WARM_UP_S > 1.0
    assert sum(found.tokens) / 16 < 1.6 / VERIFIERS["70b"].step_s


def benchmark_of(mode: str, sessions: int) -> Benchmark:
    """Return a benchmark with one run whose figures are all 1."""
    numbers = {field.name: 1.0 for field in fields(BenchmarkRun) if field.name not in ("mode", "link", "length")}
    link = LinkRecord(rtt_ms=10.0, jitter_ms=0.0, up_mbit=None, down_mbit=None, trace=None)
    length = 2 if mode == "sync" else None
    numbers |= {"tokens": 1, "identical_to_cloud": True}
    run = BenchmarkRun(mode=mode, link=link, length=length, **numbers)
    drawn = {"drafter": "d", "drafter_version": None, "drafter_threads": 1, "prompts": 3, "seed": 0}
    made_in = environment(VerifierConfig(), "float32", max_tokens=40, **drawn)
    return Benchmark(made_in, 30.0, 0.0, sessions, (run,))


@pytest.mark.parametrize("mode", SIMULATED)
def test_a_benchmark_is_simulated_with_its_own_sessions_and_link(mode: str) -> None:
    costs = Costs(step_s=0.012, row_s=0.0, min_step_s=0.03, commit_s=0.0)
    benchmark = benchmark_of(mode, 3)
    again = simulated_again(benchmark.runs[0], benchmark, TRACES, costs)
    assert (again["sessions"], again["rtt_ms"]) == (3, 10.0)
    found = {row["figure"]: row["simulated"] for row in again["figures"]}
    assert {row["measured"] for row in again["figures"]} == {1.0}
    assert found.keys() <= {field.name for field in fields(BenchmarkRun)}
    with pytest.raises(ConfigError, match="run all at once"):
        simulated_again(benchmark.runs[0], benchmark_of(mode, 4), TRACES, costs)
    if mode == "cloud":
        assert found["steps_per_token"] == 1.0
        # The run has an overhead of 1 ms a step.
        assert found["tokens_per_second"] == pytest.approx(3 / 0.031, rel=0.15)
        assert found["token_gap_ms_p99"] == pytest.approx(31.0, rel=0.05)
    else:
        assert found["steps_per_token"] < 0.8
        assert found["uplink_bytes_per_token"] > 5


def test_names_of_the_command_line_are_those_of_prices_and_devices() -> None:
    assert tuple(VERIFIERS) == PRICE_NAMES
    assert tuple(device.name for device in DEVICES) == DEVICE_NAMES
    assert all(prices.source for prices in VERIFIERS.values())


@pytest.mark.parametrize("by_sessions", [False, True])
def test_a_picture_has_a_panel_for_each_verifier_and_a_line_for_each_scheme(tmp_path, by_sessions: bool) -> None:
    rows = [
        {
            "prices": prices,
            "device": "laptop",
            "scheme": scheme,
            "rtt_ms": rtt,
            "sessions": n,
            "tokens_per_card_second": n,
        }
        for prices in ("here", "70b")
        for scheme in LINES
        for rtt in ((0.0,) if scheme in tuple(LINES)[:2] else (2.0, 60.0))
        for n in ((1, 16) if by_sessions else (16,))
    ]
    plot(rows, tmp_path / "held.svg", by_sessions=by_sessions)
    drawn = (tmp_path / "held.svg").read_text()
    assert drawn.count('id="axes_') == 2
    assert drawn.count("<svg") == 1

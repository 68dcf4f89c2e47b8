"""Tables, plots and the page of a benchmark, from synthetic numbers: from formulas, not measured."""

from __future__ import annotations

import io
import re
import struct
import sys
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rich.console import Console

from outrider.bench.benchmark.bench_record import Benchmark, BenchmarkRun, Span
from outrider.bench.benchmark.bench_table import LEGEND, by_condition, fastest, ratios, results, tables, work
from outrider.bench.benchmark.html_report import write_report
from outrider.bench.benchmark.plots import draw, speed_over_time
from outrider.bench.environment import Environment
from outrider.bench.links import LinkRecord
from outrider.bench.record import from_json
from outrider.bench.table import Grid
from outrider.deploy.arguments import read_text
from outrider.proto.errors import ConfigError

STEP_MS, DRAFT_MS = 30.0, 2.0

ENVIRONMENT = Environment(
    date="2001-02-03T04:05:06+00:00",
    command="outrider bench --synthetic <not a real run>",
    python="3.0",
    platform="synthetic",
    cpu="an imagined processor",
    cores=2,
    packages={"outrider": "0.0", "ray": None},
    target="synthetic-target",
    dtype="float32",
    drafter="synthetic-drafter",
    drafter_version="0",
    target_threads=1,
    drafter_threads=1,
    prompts=8,
    max_tokens=48,
    seed=1,
)


def gaps(share_at_once: float, pause_ms: float) -> tuple[float, ...]:
    """Return [101] quantiles: a share of the tokens comes at once, the rest after about `pause_ms`."""
    return tuple(0.05 if n / 100 < share_at_once else pause_ms * (0.8 + 0.006 * n) for n in range(101))


def timeline(mode: str, rtt_ms: float) -> tuple[Span, ...]:
    """Return two seconds of made-up work."""
    way, step, draft = rtt_ms / 2e3, STEP_MS / 1e3, DRAFT_MS / 1e3
    spans, at_s = [], 0.0
    while at_s < 2:
        if mode == "sync":
            drafted = at_s + 8 * draft
            verified = drafted + way + step
            spans += [Span("draft", at_s, drafted), Span("up", drafted, drafted + way)]
            spans += [Span("verify", drafted + way, verified), Span("down", verified, verified + way)]
            spans += [Span("idle", drafted, verified + way)]
            at_s = verified + way
        else:
            spans += [Span("verify", at_s, at_s + step), Span("down", at_s + step, at_s + step + way)]
            if mode == "outrider":
                spans += [Span("draft", at_s, at_s + 4 * draft)]
                spans += [Span("up", at_s + n * draft, at_s + n * draft + way) for n in range(4)]
            at_s += step
    return tuple(spans)


def run(mode: str, rtt_ms: float, per_token_ms: float, **more: object) -> BenchmarkRun:
    return BenchmarkRun(
        **{
            "mode": mode,
            "link": LinkRecord(rtt_ms),
            "tokens": 384,
            "seconds": 384 * per_token_ms / 1e3,
            "tokens_per_second": 1e3 / per_token_ms,
            "ttft_ms_p50": rtt_ms + STEP_MS,
            "token_gap_ms_p50": per_token_ms,
            "token_gap_ms_p99": 4 * per_token_ms + rtt_ms,
            "identical_to_cloud": True,
        }
        | more
    )


def over_link(rtt_ms: float) -> list[BenchmarkRun]:
    runs = [
        run("cloud", rtt_ms, 30, steps_per_token=1.0, token_gaps_ms=gaps(0, 30), timeline=timeline("cloud", rtt_ms)),
        run("colocated", rtt_ms, 11, drafts_here=8, cloud_drafting_ms_per_token=4.0, edge_drafting_ms_per_token=0.0),
        run("edge", rtt_ms, 11 + 0.1 * rtt_ms, goal="latency", cloud_drafting_ms_per_token=0.0),
    ]
    runs[0] = replace(runs[0], uplink_bytes_per_token=1.2, downlink_bytes_per_token=39.0)
    for length, factor in ((4, 1.1), (8, 1.0)):
        runs.append(
            run(
                "sync",
                rtt_ms,
                (11 + 0.22 * rtt_ms) * factor,
                sync_length=length,
                goal="latency",
                acceptance=0.8,
                steps_per_token=0.27,
                uplink_bytes_per_token=31.0,
                downlink_bytes_per_token=14.0,
                token_gaps_ms=gaps(0.7, 40 + rtt_ms),
                timeline=timeline("sync", rtt_ms),
            )
        )
    for goal, factor in (("latency", 1.0), ("efficiency", 1.2)):
        runs.append(
            run(
                "outrider",
                rtt_ms,
                (11 + 0.08 * rtt_ms) * factor,
                goal=goal,
                acceptance=0.797,
                steps_per_token=0.37,
                window_mean=6.0,
                rows_per_token=1.25,
                cloud_drafting_ms_per_token=0.5 + 0.01 * rtt_ms,
                edge_drafting_ms_per_token=62.5,  # far more than the cloud's, on the same axis
                uplink_bytes_per_token=75.1,
                downlink_bytes_per_token=29.2,
                token_gaps_ms=gaps(0.55, 28),
                timeline=timeline("outrider", rtt_ms),
            )
        )
    return runs


@pytest.fixture(scope="module")
def synthetic() -> Benchmark:
    """Return a made-up benchmark with two conditions and several links."""
    runs = [entry for rtt_ms in (200, 2, 30, 60, 120) for entry in over_link(rtt_ms)]
    limited = LinkRecord(60, up_mbit=1, down_mbit=10, jitter_ms=10, trace="lte-drive")
    runs += [replace(entry, link=limited) for entry in over_link(60)]
    bare = {"min_step_ms": 100.0, "token_gaps_ms": None, "timeline": None}
    slow = [replace(entry, **bare) for rtt_ms in (0, 30) for entry in over_link(rtt_ms)]
    return Benchmark(ENVIRONMENT, (*runs, *slow))


def rows_of(grid: Grid) -> list[Sequence[str]]:
    return [row for block in grid.blocks for row in block]


def printed(benchmark: Benchmark) -> str:
    output = io.StringIO()
    Console(file=output, width=100).print(tables(benchmark))
    return output.getvalue()


def test_a_table_has_one_row_a_run_in_order_of_round_trip_time(synthetic) -> None:
    condition, runs = next(iter(by_condition(synthetic).items()))
    rows = rows_of(results(condition, runs))
    assert len(rows) == len(runs) == 42
    links = [row[0] for row in rows if row[0]]
    assert links == ["2 ms", "30 ms", "60 ms", "60±10 ms", "1/10 Mbit/s", "lte-drive", "120 ms", "200 ms"]
    modes = [row[1] for row in rows[:7]]
    assert modes == ["cloud", "sync 4", "sync 8", "colocated 8", "edge", "outrider", "outrider eff."]


def test_the_work_of_a_token_is_that_of_either_end_beside_the_steps(synthetic) -> None:
    runs = next(iter(by_condition(synthetic).values()))
    by_mode = {row[1]: row for row in rows_of(work([entry for entry in runs if entry.link.rtt_ms == 30]))}
    assert by_mode["colocated 8"] == ("", "colocated 8", "-", "-", "4.00", "0.00", "-", "-", "-")
    assert by_mode["outrider"] == ("", "outrider", "0.370", "1.25", "0.80", "62.50", "75.1", "29.2", "-")


def test_ratios_are_to_the_best_of_each_other_mode_on_the_same_link(synthetic) -> None:
    runs = next(iter(by_condition(synthetic).values()))
    grid = ratios(runs)
    assert grid is not None
    block = next(block for block in grid.blocks if block[0][0] == "30 ms")
    sync = 11 + 0.22 * 30
    for row, mode, ours, share in (
        (block[0], "edge", 11 + 0.1 * 30, "0 %"),
        (block[1], "outrider", 11 + 0.08 * 30, "20 %"),
    ):
        others = [f"{other / ours:.2f}" for other in (30, sync, 11)]
        assert row[1:] == (mode, *others, "8", share)


def test_conditions_are_never_mixed(synthetic) -> None:
    found = by_condition(synthetic)
    assert [str(condition) for condition in found] == [
        "T = 0, 1 session, target at its own speed",
        "T = 0, 1 session, target step at least 100 ms",
    ]
    assert sum(len(runs) for runs in found.values()) == len(synthetic.runs)


def test_the_tables_fit_a_hundred_columns_and_lose_nothing(synthetic) -> None:
    text = printed(synthetic)
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "…" not in text
    assert "lte-drive" in text
    flat = " ".join(text.split())
    assert LEGEND in flat
    assert "every step takes at least 100 ms" in flat


def test_the_table_shows_different_texts_and_unknown_metrics() -> None:
    bare = BenchmarkRun("cloud", LinkRecord(5))
    text = printed(Benchmark(ENVIRONMENT, (bare, replace(bare, mode="sync", identical_to_cloud=False))))
    assert re.search(r"sync( +-){6} +NO", text)
    assert re.search(r"sync( +-){7}\s", text)


def test_a_report_is_a_page_with_plots_tables_and_record(synthetic, tmp_path) -> None:
    page = write_report(synthetic, tmp_path / "report")
    text = page.read_text(encoding="utf-8")
    pictures = sorted(path.name for path in page.parent.glob("*.png"))
    kinds = {1: ("bytes", "drafting", "gaps", "speed", "timeline"), 2: ("bytes", "drafting", "speed")}
    assert pictures == [f"condition-{number}-{kind}.png" for number in kinds for kind in kinds[number]]
    assert sorted(re.findall(r'src="([^"]+)"', text)) == pictures
    assert from_json(Benchmark, read_text(page.parent / "benchmark.json", "benchmark"), "benchmark") == synthetic
    assert text.count("<table>") == 6
    assert "outrider bench --synthetic &lt;not a real run&gt;" in text
    assert "$" not in text
    assert not re.search(r"https?://|<script|<link", text)
    for name in pictures:
        header = (page.parent / name).read_bytes()[:24]
        width, height = struct.unpack(">II", header[16:24])
        assert header.startswith(b"\x89PNG")
        assert 800 <= width <= 1400
        assert 400 <= height <= 1000


def test_plots_without_metrics_are_left_out(tmp_path) -> None:
    bare = (run("cloud", 5, 30), run("outrider", 5, 15))
    condition = next(iter(by_condition(Benchmark(ENVIRONMENT, bare))))
    assert draw(condition, bare, tmp_path, "bare") == []
    further = (*bare, run("outrider", 9, 15))
    assert [picture.path.name for picture in draw(condition, further, tmp_path, "bare")] == ["bare-speed.png"]


def traced(trace: str) -> list[BenchmarkRun]:
    """Return runs of the same text in three modes on a link that changes."""
    link = LinkRecord(105, trace=trace)
    speeds = {"cloud": 30, "sync": 45, "outrider": 60}
    return [
        replace(run(mode, 105, 1e3 / speed), link=link, arrivals_s=tuple((n + 1) / speed for n in range(400)))
        for mode, speed in speeds.items()
    ]


def test_a_link_that_changes_has_a_plot_over_time_with_the_link_below_it(tmp_path) -> None:
    runs = [*traced("step"), *traced("uplink-cut"), run("cloud", 5, 30)]
    condition = next(iter(by_condition(Benchmark(ENVIRONMENT, tuple(runs)))))
    pictures = draw(condition, runs, tmp_path, "c")
    assert [picture.path.name for picture in pictures] == ["c-trace-1.png", "c-trace-2.png"]
    assert [picture.title for picture in pictures] == [
        "Speed on a link that changes, step",
        "Speed on a link that changes, uplink-cut",
    ]
    assert all(picture.path.read_bytes().startswith(b"\x89PNG") for picture in pictures)


def test_speed_over_time_is_counted_in_a_window_around_each_moment() -> None:
    arrivals_s = [0.01 * (n + 1) for n in range(200)] + [2 + 0.05 * (n + 1) for n in range(40)]
    at_s, speeds = speed_over_time(arrivals_s)
    assert at_s[-1] == pytest.approx(4)
    assert len(at_s) == len(speeds) == 81
    by_moment = {round(at, 2): speed for at, speed in zip(at_s, speeds, strict=True)}
    assert by_moment[0.0] == pytest.approx(100, abs=5)  # the time before the beginning does not count
    assert by_moment[1.0] == pytest.approx(100, abs=5)
    assert by_moment[2.0] == pytest.approx(60, abs=5)
    assert by_moment[3.0] == pytest.approx(20, abs=5)
    assert by_moment[4.0] == pytest.approx(20, abs=5)
    assert speed_over_time([0.0]) == ([0.0], [0.0])


def test_an_empty_benchmark_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="runs: holds no run"):
        write_report(Benchmark(ENVIRONMENT), tmp_path)


def test_a_folder_that_cannot_be_written_is_named(synthetic, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"report: cannot write .*file"):
        write_report(synthetic, tmp_path / "file")


def test_a_missing_matplotlib_is_named_with_its_extra(synthetic, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"the extra \[bench\]"):
        write_report(synthetic, tmp_path)


def test_runs_for_latency_are_preferred() -> None:
    saving = run("outrider", 5, 10, goal="efficiency")
    for_speed = run("outrider", 5, 12, goal="latency")
    assert fastest([saving, for_speed], "outrider") is for_speed
    assert fastest([saving], "outrider") is saving
    assert fastest([saving], "sync") is None

"""Tables and plot of a benchmark, from made-up numbers."""

from __future__ import annotations

import io
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from outrider.bench.bench_results import (
    LEGEND,
    Benchmark,
    BenchmarkRun,
    by_link,
    check_drawing,
    fastest,
    plot,
    ratios,
    speed,
    tables,
    work,
)
from outrider.bench.environment import Environment
from outrider.bench.links import LinkRecord
from outrider.proto.errors import ConfigError

ENVIRONMENT = Environment(
    date="2001-02-03T04:05:06+00:00",
    command="outrider bench",
    python="3.0",
    platform="imagined",
    cpu="an imagined processor",
    cores=2,
    packages={"outrider": "0.0", "ray": None},
    target="imagined-target",
    dtype="float32",
    drafter="imagined-drafter",
    drafter_version="0",
    target_threads=1,
    drafter_threads=1,
    prompts=8,
    max_tokens=48,
    seed=1,
)


def run(mode: str, rtt_ms: float, per_token_ms: float, **more: object) -> BenchmarkRun:
    return BenchmarkRun(
        **{
            "mode": mode,
            "link": LinkRecord(rtt_ms),
            "length": None,
            "tokens": 384,
            "seconds": 384 * per_token_ms / 1e3,
            "tokens_per_second": 1e3 / per_token_ms,
            "steps_per_token": 0.37,
            "rows_per_token": 1.25,
            "cloud_drafting_ms_per_token": 0.0,
            "edge_drafting_ms_per_token": 62.5,
            "acceptance": None,
            "ttft_ms_p50": rtt_ms + 30,
            "token_gap_ms_p50": per_token_ms,
            "token_gap_ms_p99": 4 * per_token_ms + rtt_ms,
            "uplink_bytes_per_token": 75.1,
            "downlink_bytes_per_token": 29.2,
            "overhead_ms_p50": None,
            "identical_to_cloud": True,
        }
        | more
    )


def over_link(rtt_ms: float) -> list[BenchmarkRun]:
    return [
        run("outrider", rtt_ms, 11 + 0.08 * rtt_ms, acceptance=0.797, cloud_drafting_ms_per_token=0.5 + 0.01 * rtt_ms),
        run("cloud", rtt_ms, 30),
        run("sync", rtt_ms, 11 + 0.22 * rtt_ms, length=8),
        run("sync", rtt_ms, 1.1 * (11 + 0.22 * rtt_ms), length=4),
        run("colocated", rtt_ms, 11, length=8, cloud_drafting_ms_per_token=4.0, edge_drafting_ms_per_token=0.0),
        run("edge", rtt_ms, 11 + 0.1 * rtt_ms),
    ]


@pytest.fixture(scope="module")
def benchmark() -> Benchmark:
    runs = [each for rtt_ms in (200, 2, 30, 60, 120) for each in over_link(rtt_ms)]
    limited = LinkRecord(60, up_mbit=1, down_mbit=10, jitter_ms=10, trace="lte-drive")
    return Benchmark(ENVIRONMENT, 100.0, 0.0, 1, (*runs, *(replace(each, link=limited) for each in over_link(60))))


def test_a_table_has_one_row_a_run_in_order_of_round_trip_time(benchmark) -> None:
    rows = [row for block in speed(benchmark).blocks for row in block]
    assert len(rows) == len(benchmark.runs) == 36
    links = [row[0] for row in rows if row[0]]
    assert links == ["2 ms", "30 ms", "60 ms", "60±10 ms", "1/10 Mbit/s", "lte-drive", "120 ms", "200 ms"]
    assert [row[1] for row in rows[:6]] == ["cloud", "sync 4", "sync 8", "colocated 8", "edge", "outrider"]


def test_the_work_of_a_token_is_that_of_either_end_beside_the_steps(benchmark) -> None:
    block = next(block for block in work(benchmark).blocks if block[0][0] == "30 ms")
    by_mode = {row[1]: row for row in block}
    assert by_mode["colocated 8"][2:] == ("0.370", "1.25", "4.00", "0.00", "75.1", "29.2", "-")
    assert by_mode["outrider"][2:] == ("0.370", "1.25", "0.80", "62.50", "75.1", "29.2", "-")


def test_ratios_are_to_the_best_of_each_other_mode_on_the_same_link(benchmark) -> None:
    block = next(block for block in ratios(benchmark).blocks if block[0][0] == "30 ms")
    sync = 11 + 0.22 * 30
    for row, mode, ours, share in (
        (block[0], "edge", 11 + 0.1 * 30, "0 %"),
        (block[1], "outrider", 11 + 0.08 * 30, "20 %"),
    ):
        others = [f"{other / ours:.2f}" for other in (30, sync, 11)]
        assert row[1:] == (mode, *others, "8", share)


def test_the_tables_fit_a_hundred_columns_and_lose_nothing(benchmark) -> None:
    output = io.StringIO()
    Console(file=output, width=100).print(tables(benchmark))
    text = output.getvalue()
    assert max(len(line) for line in text.splitlines()) <= 100
    assert "…" not in text
    assert "lte-drive" in text
    assert "T = 0, 1 session, target step at least 100 ms" in text
    assert LEGEND in " ".join(text.split())


def test_the_table_shows_different_texts_and_what_there_is_nothing_to_compare_with() -> None:
    (block,) = speed(Benchmark(ENVIRONMENT, 0, 0, 1, (run("sync", 5, 20, length=4, identical_to_cloud=False),))).blocks
    assert block == [("5 ms", "sync 4", "50.0", "-", "-", "35.0", "20.0", "85.0", "NO")]


def test_the_best_length_of_a_mode_is_its_fastest() -> None:
    runs = over_link(30)
    best = fastest(runs, "sync")
    assert best is not None
    assert best.length == 8
    assert fastest(runs[:2], "sync") is None


@pytest.mark.parametrize("name", ["speed.png", "folder/speed.svg"])
def test_the_plot_has_a_line_for_each_mode_over_links_that_do_not_change(
    benchmark, tmp_path, name, monkeypatch
) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install --editable '.[bench]'")
    from matplotlib.axes import Axes

    lines = []
    real = Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda *points, **style: lines.append(points[1]) or real(*points, **style))
    plot(benchmark, tmp_path / name)
    start = (tmp_path / name).read_bytes()[:8]
    assert start.startswith(b"\x89PNG") if name.endswith("png") else b"<?xml" in start
    assert lines == [(2, 30, 60, 120, 200)] * 5
    assert [link.trace for link in by_link(benchmark)].count("lte-drive") == 1


def test_a_plot_that_cannot_be_written_or_drawn_names_the_option(benchmark, tmp_path, monkeypatch) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ConfigError, match="cannot write") as caught:
        plot(benchmark, tmp_path / "folder.png")
    assert caught.value.field == "plot"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"the extra \[bench\]"):
        check_drawing("plot")

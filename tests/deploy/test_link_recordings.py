"""Traces from recordings of links in the forms of others, on files made here."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.deploy.cli import main
from outrider.deploy.link.recordings import trace_of
from outrider.deploy.link.traces import LinkTrace, read_trace
from outrider.proto.errors import ConfigError


def written(path: Path, *lines: object) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def rates(trace: LinkTrace) -> list[tuple[float, float]]:
    return [(point.up_mbit, point.down_mbit) for point in trace.points]


def test_each_millisecond_of_mahimahi_is_one_packet(tmp_path) -> None:
    # 100 packets in the first 100 ms, none in the second, ten in one millisecond of the third.
    down = written(tmp_path / "lte.down", *range(1, 101), *[300] * 10)
    trace = trace_of(down, None, rtt_ms=40, step_ms=100)
    assert trace.name == "lte"
    assert [point.time_s for point in trace.points] == [0.0, 0.1, 0.2]
    assert {point.rtt_ms for point in trace.points} == {40}
    assert rates(trace) == [(12.0, 12.0), (0.0, 0.0), (pytest.approx(1.2), pytest.approx(1.2))]
    assert trace.duration_s == pytest.approx(0.3)


def test_no_packet_is_lost_between_steps(tmp_path) -> None:
    times = sorted((i * 7919) % 1000 + 1 for i in range(500))
    trace = trace_of(written(tmp_path / "a", *times), None, rtt_ms=1, step_ms=50)
    last_ms = times[-1] - 950
    lengths_s = [0.05] * (len(trace.points) - 1) + [last_ms / 1e3]
    carried = sum(point.down_mbit * s for point, s in zip(trace.points, lengths_s, strict=True))
    assert carried * 1e6 / 8 == pytest.approx(500 * 1500)


def test_the_shorter_recording_repeats(tmp_path) -> None:
    down = written(tmp_path / "d", 100, 200, 300, 400)
    up = written(tmp_path / "u", 100, 100, 200)
    assert rates(trace_of(down, up, rtt_ms=1, step_ms=100)) == [
        (pytest.approx(up_mbit), pytest.approx(0.12)) for up_mbit in (0.24, 0.12, 0.24, 0.12)
    ]


def test_each_line_of_nyu_mets_is_a_second_with_its_unit(tmp_path) -> None:
    down = written(tmp_path / "bus.csv", "13.9,Mbits/sec", "791,Kbits/sec", "0,bits/sec", "43.3,Kbits/sec")
    trace = trace_of(down, None, rtt_ms=50, step_ms=500)
    expected = [13.9, 13.9, 0.791, 0.791, 0.0, 0.0, 0.0433, 0.0433]
    assert [point.down_mbit for point in trace.points] == [pytest.approx(mbit) for mbit in expected]
    assert trace.duration_s == 4.0


def test_the_command_writes_a_trace_that_links_play(tmp_path, capfd) -> None:
    down = written(tmp_path / "lte.down", *range(1, 60, 3))
    output = tmp_path / "lte.csv"
    assert main(["import-trace", str(down), "--rtt", "40", "--step", "20", "--output", str(output)]) == 0
    assert capfd.readouterr().out == f"{output}: 0.06 s in 3 points\n"
    trace = read_trace(output)
    assert [point.time_s for point in trace.points] == [0.0, 0.02, 0.04]
    assert trace.points[0].down_mbit == pytest.approx(7 * 1500 * 8 / 20e3, abs=1e-3)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "has no lines"),
        ([5, "six"], "line 2: 'six' is no millisecond"),
        ([5, 4], "line 2: '4' is no millisecond, or is earlier"),
        ([-5], "line 1"),
        ([0, 0], "ends at 0 ms"),
        (["13.9,Mbits/sec", "13.9"], "line 2: '13.9' is not RATE,UNIT"),
        (["13.9,parsecs"], "line 1"),
        (["nan,Mbits/sec"], "line 1"),
    ],
)
def test_what_is_wrong_with_a_recording_is_said_with_its_line(lines, says, tmp_path) -> None:
    with pytest.raises(ConfigError) as refused:
        trace_of(written(tmp_path / "bad", *lines), None, rtt_ms=1, step_ms=100)
    assert says in refused.value.message
    assert refused.value.field == "down"


def test_a_place_that_cannot_be_written_is_named(tmp_path, capfd) -> None:
    down = written(tmp_path / "d", 1, 2)
    assert main(["import-trace", str(down), "--rtt", "1", "--output", str(tmp_path / "no" / "t.csv")]) == 1
    assert "output: cannot write" in capfd.readouterr().err

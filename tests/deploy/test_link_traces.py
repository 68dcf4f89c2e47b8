"""Traces: their shapes over time, mistakes in files, and the shipped ones."""

from __future__ import annotations

import math

import pytest

from outrider.deploy.link.link_traces import LinkTrace, TracePoint, built_in_traces, find_trace, read_trace
from outrider.proto.errors import ConfigError

BUILT_IN = ("5g-handover", "fibre", "lte-motion", "satellite", "step", "uplink-cut", "wifi")


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_trace_lasts_half_a_minute_to_a_minute_in_tenths_of_a_second(name) -> None:
    assert built_in_traces() == BUILT_IN
    trace = find_trace(name)
    assert 30 <= trace.duration_s <= 60
    assert [point.time_s for point in trace.points] == [round(i / 10, 1) for i in range(len(trace.points))]
    assert any(point.up_mbit > 0 for point in trace.points)


def test_the_step_goes_up_and_down_every_five_seconds() -> None:
    step = find_trace("step")
    assert [round(1e3 * step.at(t).rtt_s) for t in (0, 4.95, 5.05, 9.95, 10.05, 15.05)] == [10, 10, 200, 200, 10, 200]


def test_the_uplink_cut_leaves_the_downlink_alone() -> None:
    trace = find_trace("uplink-cut")
    assert [trace.at(t).up_bytes_per_s * 8 / 1e6 for t in (1, 11, 21)] == pytest.approx([20, 0.2, 20])
    assert {point.down_mbit for point in trace.points} == {50.0}


def test_a_trace_repeats() -> None:
    trace = LinkTrace("t", (TracePoint(0.0, 10, 1, 1), TracePoint(2.0, 20, 0, math.inf)))
    assert trace.duration_s == 4.0
    assert [trace.at(t).rtt_s for t in (0, 1.9, 2.0, 3.9, 4.0, 6.5)] == [0.01, 0.01, 0.02, 0.02, 0.01, 0.02]
    assert [trace.next_time(t) for t in (0, 2.0, 3.9, 4.0, 7.0)] == [2.0, 4.0, 4.0, 6.0, 8.0]
    assert trace.at(2).up_bytes_per_s == 0
    assert trace.at(2).down_bytes_per_s == math.inf


def test_a_file_with_comments_is_read(tmp_path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("# from the train\ntime_s,rtt_ms,up_mbit,down_mbit\n0,10,1,2\n\n0.5,20,0,inf\n")
    trace = find_trace(str(path))
    assert trace == LinkTrace("mine", (TracePoint(0, 10, 1, 2), TracePoint(0.5, 20, 0, math.inf)))


HEADER = "time_s,rtt_ms,up_mbit,down_mbit\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "line 1: the header must be time_s,rtt_ms,up_mbit,down_mbit"),
        ("# note\ntime,rtt\n", "line 2: the header must be"),
        (HEADER, "has no points"),
        (HEADER + "0,10,1\n", "line 2: has 3 fields, not 4"),
        (HEADER + "0,10,1,1\n1,ten,1,1\n", "line 3: rtt_ms: 'ten' is not a number"),
        (HEADER + "0,10,-1,1\n", "line 2: up_mbit: -1 is not possible"),
        (HEADER + "0,10,1,nan\n", "line 2: down_mbit: nan is not possible"),
        (HEADER + "0,inf,1,1\n", "line 2: rtt_ms: inf is not possible"),
        (HEADER + "1,10,1,1\n", "line 2: time_s: must rise from 0"),
        (HEADER + "0,10,1,1\n0,10,1,1\n", "line 3: time_s: must rise from 0"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_line_and_field(text, says, tmp_path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        read_trace(path)
    assert says in refused.value.message
    assert "bad" in refused.value.message
    assert refused.value.field == "trace"

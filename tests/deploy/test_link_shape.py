"""One direction of an emulated link, on a virtual clock: every time is exact."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.deploy.link.pipe import Pipe
from outrider.deploy.link.shape import MTU_BYTES, LinkShape, WayShape
from outrider.proto.errors import ConfigError

MBIT = 1e6 / 8


def way(delay_s=0.0, jitter_s=0.0, bytes_per_s=math.inf, queue_bytes=1 << 20) -> WayShape:
    return WayShape(delay_s, jitter_s, bytes_per_s, queue_bytes)


def drain(pipe: Pipe, until: float = 1e9) -> list[tuple[object, bytes, float]]:
    """Return all arrivals up to a time, each taken at its `next_time`."""
    arrived = []
    while (when := pipe.next_time()) <= until:
        arrived += [(a.stream, a.data, a.due_s) for a in pipe.due(when)]
    return arrived


def test_a_link_that_is_not_there_adds_nothing() -> None:
    pipe = Pipe(LinkShape().up)
    pipe.push(5.0, "s", b"x" * 5000)
    assert pipe.next_time() == 5.0
    assert [(a.stream, len(a.data), a.due_s) for a in pipe.due(5.0)] == [("s", 5000, 5.0)]
    assert pipe.next_time() == math.inf


def test_each_way_takes_half_the_round_trip() -> None:
    shape = LinkShape.of(rtt_ms=50)
    for half in (shape.up, shape.down):
        pipe = Pipe(half)
        pipe.push(1.0, 0, b"x")
        assert pipe.due(1.0249) == []
        assert [a.due_s for a in pipe.due(1.0251)] == [pytest.approx(1.025)]


def test_a_rate_spreads_segments_and_a_small_frame_waits_only_for_what_is_before_it() -> None:
    pipe = Pipe(way(delay_s=0.1, bytes_per_s=1 * MBIT))
    pipe.push(0.0, "big", b"x" * 2 * MTU_BYTES)
    pipe.push(0.0, "small", b"y" * 25)
    segment_s = MTU_BYTES / MBIT
    expected = [("big", segment_s + 0.1), ("big", 2 * segment_s + 0.1), ("small", 2 * segment_s + 25 / MBIT + 0.1)]
    assert [(stream, due_s) for stream, _, due_s in drain(pipe)] == [(s, pytest.approx(t)) for s, t in expected]


@pytest.mark.parametrize("mbit", [0.2, 1.0, 20.0, 100.0])
@pytest.mark.parametrize("pause_s", [0.0001, 0.0137])
def test_the_rate_is_exact_however_late_and_seldom_the_pipe_is_asked(mbit, pause_s) -> None:
    pipe = Pipe(way(delay_s=0.02, bytes_per_s=mbit * MBIT))
    pipe.push(0.0, 0, b"x" * 100_000)
    now, arrived = 0.0, []
    while pipe.next_time() < math.inf:
        now += pause_s
        arrived += pipe.due(now)
    assert arrived[-1].due_s == pytest.approx(0.02 + 100_000 / (mbit * MBIT))


def test_a_late_reader_may_say_when_the_bytes_really_came() -> None:
    pipe = Pipe(way(delay_s=0.01))
    assert pipe.due(1.003) == []
    pipe.push(1.0, 0, b"x")
    assert pipe.next_time() == pytest.approx(1.01)


def test_jitter_is_uniform_each_way_and_never_reorders() -> None:
    shape = LinkShape.of(rtt_ms=40, jitter_ms=10)
    pipe = Pipe(shape.up, seed=3)
    delays = []
    for i in range(2000):
        pipe.push(float(i), i, b"x")
        ((stream, _, due_s),) = drain(pipe)
        assert stream == i
        delays.append(due_s - i - 0.02)
    assert min(delays) >= -1e-9
    assert max(delays) <= 0.01 + 1e-9
    assert sum(delays) / len(delays) == pytest.approx(0.005, rel=0.05)

    for i in range(200):
        pipe.push(3000 + i * 1e-4, i, b"x")
    arrived = drain(pipe)
    assert [stream for stream, _, _ in arrived] == list(range(200))
    assert all(earlier[2] <= later[2] for earlier, later in itertools.pairwise(arrived))


def test_the_same_seed_gives_the_same_jitter() -> None:
    def times(seed: int) -> list[float]:
        pipe = Pipe(way(jitter_s=0.01), seed)
        for i in range(20):
            pipe.push(float(i), 0, b"x")
        return [due for _, _, due in drain(pipe)]

    assert times(1) == times(1) != times(2)


def test_a_new_delay_counts_for_what_leaves_from_then_on_and_overtakes_nothing() -> None:
    pipe = Pipe(way(delay_s=0.1))
    pipe.push(0.0, "slow", b"x")
    pipe.reshape(0.01, way(delay_s=0.001))
    pipe.push(0.02, "fast", b"y")
    pipe.push(0.2, "later", b"z")
    assert [(s, due) for s, _, due in drain(pipe)] == [
        ("slow", pytest.approx(0.1)),
        ("fast", pytest.approx(0.1)),
        ("later", pytest.approx(0.201)),
    ]


def test_a_new_rate_counts_for_the_rest_of_a_segment() -> None:
    pipe = Pipe(way(bytes_per_s=1000.0))
    pipe.push(0.0, 0, b"x" * 1000)
    pipe.reshape(0.5, way(bytes_per_s=100.0))
    assert [due for _, _, due in drain(pipe)] == [pytest.approx(0.5 + 500 / 100)]


def test_an_outage_holds_what_has_not_left_and_the_end_of_a_stream_too() -> None:
    pipe = Pipe(way(delay_s=0.05, bytes_per_s=1000.0))
    pipe.push(0.0, "left", b"x" * 10)
    pipe.reshape(0.02, way(delay_s=0.05, bytes_per_s=0.0))
    pipe.push(0.03, "held", b"y" * 10)
    pipe.push(0.03, "held", b"")
    assert [s for s, _, _ in drain(pipe)] == ["left"]
    assert pipe.next_time() == math.inf
    pipe.reshape(7.0, way(delay_s=0.05, bytes_per_s=1000.0))
    assert drain(pipe) == [("held", b"y" * 10, pytest.approx(7.06)), ("held", b"", pytest.approx(7.06))]


def test_a_stall_delivers_nothing_for_its_time_and_then_goes_on() -> None:
    pipe = Pipe(way(delay_s=0.1, bytes_per_s=1000.0))
    pipe.push(0.0, "flying", b"x" * 10)
    pipe.push(0.01, "leaving", b"x" * 100)
    pipe.stall(0.05, 2.0)
    pipe.push(0.06, "waiting", b"x" * 10)
    assert pipe.due(2.04) == []
    assert [(s, due) for s, _, due in drain(pipe)] == [
        ("flying", pytest.approx(2.11)),
        ("leaving", pytest.approx(2.21)),
        ("waiting", pytest.approx(2.22)),
    ]


def test_a_full_queue_has_no_room_until_it_has_emptied_at_the_rate() -> None:
    pipe = Pipe(way(delay_s=10.0, bytes_per_s=1000.0, queue_bytes=4000))
    assert pipe.room(0.0) == 4000
    for _ in range(4):
        pipe.push(0.0, 0, b"x" * 1000)
    assert pipe.room(0.0) == 0
    assert pipe.half_empty_time(0.0) == pytest.approx(2.0)
    assert pipe.room(2.0) == 2000, "bytes in flight are out of the queue"
    assert pipe.half_empty_time(2.0) == 2.0


def test_a_link_without_a_rate_holds_a_window_at_most() -> None:
    pipe = Pipe(way(delay_s=1.0))
    pushed = 0
    while room := pipe.room(0.0):
        pipe.push(0.0, 0, bytes(min(room, 1 << 20)))
        pushed += min(room, 1 << 20)
    assert pushed == 16 << 20
    assert pipe.half_empty_time(0.0) == 1.0


def test_what_is_cut_is_lost() -> None:
    pipe = Pipe(way(delay_s=1.0, bytes_per_s=1000.0))
    pipe.push(0.0, 0, b"x" * 3000)
    pipe.due(1.5)
    pipe.clear()
    assert pipe.next_time() == math.inf
    assert pipe.room(1.5) == 1 << 20
    pipe.push(2.0, 0, b"y")
    assert [(data, due) for _, data, due in drain(pipe)] == [(b"y", pytest.approx(3.001))]


SHAPES = st.builds(
    way,
    delay_s=st.sampled_from([0.0, 0.01, 0.3]),
    jitter_s=st.sampled_from([0.0, 0.05]),
    bytes_per_s=st.sampled_from([0.0, 500.0, 50_000.0, math.inf]),
    queue_bytes=st.just(1 << 20),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 2), st.integers(1, 5000)),
        st.tuples(st.just("wait"), st.floats(0, 2)),
        st.tuples(st.just("reshape"), SHAPES),
        st.tuples(st.just("stall"), st.floats(0, 3)),
    ),
    max_size=30,
)


@given(SHAPES, STEPS, st.integers(0, 9))
@settings(max_examples=150, deadline=None)
def test_whatever_happens_no_byte_is_lost_doubled_reordered_or_early(shape, steps, seed) -> None:
    pipe = Pipe(shape, seed)
    now, stalled_until, count = 0.0, 0.0, 0
    sent: dict[object, bytes] = {}
    got: dict[object, bytes] = {}
    last_due = -math.inf

    def take() -> None:
        nonlocal last_due
        for arrival in pipe.due(now):
            assert last_due <= arrival.due_s <= now
            assert now >= stalled_until - 1e-9
            last_due = arrival.due_s
            got[arrival.stream] = got.get(arrival.stream, b"") + arrival.data

    for step, *values in steps:
        if step == "push":
            stream, size = values
            count += 1
            sent[stream] = sent.get(stream, b"") + (count.to_bytes(2, "big") * size)[:size]
            pipe.push(now, stream, sent[stream][-size:])
        elif step == "wait":
            now += values[0]
            take()
        elif step == "reshape":
            pipe.reshape(now, values[0])
        else:
            take()  # what had arrived before the stall
            pipe.stall(now, values[0])
            stalled_until = max(stalled_until, now + values[0])
    assert all(sent[stream].startswith(data) for stream, data in got.items())
    assert pipe.room(now) <= 1 << 20
    pipe.reshape(now, way(bytes_per_s=50_000.0))
    while pipe.next_time() < math.inf:
        now = max(now, pipe.next_time())
        take()
    assert got == sent


@given(st.lists(st.tuples(st.floats(0, 0.2), st.integers(1, 4000)), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_no_window_of_time_carries_more_than_the_rate(pushes) -> None:
    rate = 20_000.0
    pipe = Pipe(way(delay_s=0.03, bytes_per_s=rate))
    now = 0.0
    for pause_s, size in pushes:
        now += pause_s
        pipe.push(now, 0, bytes(size))
    arrived = drain(pipe)
    for i in range(len(arrived)):
        carried = 0
        for _, data, due_s in arrived[i + 1 :]:
            carried += len(data)
            assert carried <= rate * (due_s - arrived[i][2]) + 1e-3


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"rtt_s": -1}, "rtt_s"),
        ({"rtt_s": math.inf}, "rtt_s"),
        ({"rtt_s": math.nan}, "rtt_s"),
        ({"jitter_s": -0.1}, "jitter_s"),
        ({"up_bytes_per_s": -1}, "up_bytes_per_s"),
        ({"down_bytes_per_s": math.nan}, "down_bytes_per_s"),
        ({"queue_bytes": 100}, "queue_bytes"),
    ],
)
def test_an_impossible_shape_is_refused_by_name(values, field) -> None:
    with pytest.raises(ConfigError) as refused:
        LinkShape(**values)
    assert refused.value.field == field


def test_units_and_mappings_round_trip() -> None:
    shape = LinkShape.of(rtt_ms=30, jitter_ms=2, up_mbit=8, queue_kib=64)
    assert shape == LinkShape(0.03, 0.002, 1e6, math.inf, 65536)
    assert LinkShape(**asdict(shape)) == shape

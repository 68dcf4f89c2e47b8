"""One direction of a link of packets, on a virtual clock, and a radio that sleeps."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.deploy.link.packets import PacketPipe
from outrider.deploy.link.radio import WAKE_S, Radio
from outrider.deploy.link.shape import PacketFaults, WayShape
from outrider.deploy.loss import PacketLoss
from outrider.proto.errors import ConfigError


def way(delay_s=0.0, jitter_s=0.0, bytes_per_s=math.inf, queue_bytes=1 << 20) -> WayShape:
    return WayShape(delay_s, jitter_s, bytes_per_s, queue_bytes)


def drain(pipe: PacketPipe, until: float = 1e9) -> list[tuple[bytes, float]]:
    """Return all arrivals up to a time, each taken at its `next_time`."""
    arrived = []
    while (when := pipe.next_time()) <= until:
        arrived += [(a.data, a.due_s) for a in pipe.due(when)]
    return arrived


def survivors(faults: PacketFaults, count: int, every_s: float, seed: int = 0) -> list[bool]:
    """Return for each of `count` packets, one every `every_s`, whether it arrived."""
    pipe = PacketPipe(way(delay_s=0.01), faults, seed)
    arrived = set()
    for i in range(count):
        pipe.push(i * every_s, None, i.to_bytes(4, "big"))
        arrived |= {int.from_bytes(arrival.data, "big") for arrival in pipe.due(i * every_s)}
    arrived |= {int.from_bytes(data, "big") for data, _ in drain(pipe)}
    assert pipe.lost == count - len(arrived)
    return [i in arrived for i in range(count)]


def test_without_faults_every_packet_arrives_after_its_delay() -> None:
    assert all(survivors(PacketFaults(), 1000, 0.001))
    pipe = PacketPipe(way(delay_s=0.03), PacketFaults())
    pipe.push(1.0, None, b"x" * 1500)
    assert drain(pipe) == [(b"x" * 1500, pytest.approx(1.03))]


def test_single_losses_have_their_share_and_no_memory() -> None:
    arrived = survivors(PacketFaults(PacketLoss(0.02)), 30_000, 0.001)
    assert arrived.count(False) / len(arrived) == pytest.approx(0.02, rel=0.1)
    after_a_loss = [later for earlier, later in itertools.pairwise(arrived) if not earlier]
    assert after_a_loss.count(False) / len(after_a_loss) < 0.05


def test_bursts_have_their_share_of_the_time_and_their_mean_length() -> None:
    arrived = survivors(PacketFaults(PacketLoss(0.02, burst_s=0.1)), 100_000, 0.02, seed=1)
    assert arrived.count(False) / len(arrived) == pytest.approx(0.02, rel=0.2)
    lengths = [len(list(run)) for came, run in itertools.groupby(arrived) if not came]
    # A burst between two packets is not seen, and what is seen of one has no memory.
    assert 0.02 * sum(lengths) / len(lengths) == pytest.approx(0.1, rel=0.15)


def test_a_retransmission_after_the_burst_gets_through() -> None:
    arrived = survivors(PacketFaults(PacketLoss(0.02, burst_s=0.05)), 40_000, 0.5, seed=2)
    after_a_loss = [later for earlier, later in itertools.pairwise(arrived) if not earlier]
    assert len(after_a_loss) > 500
    assert after_a_loss.count(False) / len(after_a_loss) < 0.05


def test_the_same_seed_loses_the_same_packets() -> None:
    faults = PacketFaults(PacketLoss(0.1, burst_s=0.02), reordered=0.2)
    assert survivors(faults, 500, 0.01, seed=3) == survivors(faults, 500, 0.01, seed=3)
    assert survivors(faults, 500, 0.01, seed=3) != survivors(faults, 500, 0.01, seed=4)


def test_later_packets_overtake_one_that_takes_twice_the_delay() -> None:
    pipe = PacketPipe(way(delay_s=0.1), PacketFaults(reordered=0.3), seed=5)
    for i in range(200):
        pipe.push(i * 0.01, None, i.to_bytes(4, "big"))
    arrived = [(int.from_bytes(data, "big"), due) for data, due in drain(pipe)]
    assert sorted(i for i, _ in arrived) == list(range(200))
    assert [i for i, _ in arrived] != list(range(200))
    assert all(earlier[1] <= later[1] for earlier, later in itertools.pairwise(arrived))
    late = [i for i, due in arrived if due == pytest.approx(i * 0.01 + 0.2)]
    assert len(late) / 200 == pytest.approx(0.3, abs=0.1)
    assert all(due == pytest.approx(i * 0.01 + 0.1) for i, due in arrived if i not in late)


def test_a_full_queue_drops_what_comes_last_and_keeps_the_rest_whole() -> None:
    pipe = PacketPipe(way(bytes_per_s=1000.0, queue_bytes=3000), PacketFaults())
    for i in range(5):
        pipe.push(0.0, None, bytes([i]) * 1000)
    assert pipe.dropped == 2
    assert drain(pipe) == [(bytes([i]) * 1000, pytest.approx(i + 1.0)) for i in range(3)]
    pipe.push(10.0, None, b"y" * 1000)
    assert drain(pipe) == [(b"y" * 1000, pytest.approx(11.0))]


@given(
    st.lists(st.tuples(st.floats(0, 0.2), st.integers(20, 1500)), min_size=1, max_size=60),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0.0, 0.05]),
    st.sampled_from([0.0, 0.5]),
    st.sampled_from([2000.0, math.inf]),
    st.integers(0, 9),
)
@settings(max_examples=100, deadline=None)
def test_every_packet_arrives_once_and_whole_or_is_counted(pushes, loss, burst_s, reordered, rate, seed) -> None:
    faults = PacketFaults(PacketLoss(loss, burst_s), reordered)
    pipe = PacketPipe(way(0.03, 0.01, rate, 4000), faults, seed)
    now, sent, got = 0.0, [], []
    for i, (pause_s, size) in enumerate(pushes):
        now += pause_s
        sent.append(bytes([i]) * size)
        pipe.push(now, None, sent[-1])
        if i % 7 == 3:
            pipe.stall(now, 0.1)
        arrived = pipe.due(now)
        assert all(arrival.due_s <= now for arrival in arrived)
        got += [arrival.data for arrival in arrived]
    got += [data for data, _ in drain(pipe)]
    assert len(set(got)) == len(got) == len(sent) - pipe.lost - pipe.dropped
    assert set(got) <= set(sent)
    if not reordered:
        assert got == [data for data in sent if data in got]


@pytest.mark.parametrize(
    ("text", "loss"),
    [("0", PacketLoss()), ("0.5", PacketLoss(0.005)), ("2:100", PacketLoss(0.02, 0.1)), ("2:0", PacketLoss(0.02))],
)
def test_a_loss_is_a_percentage_with_the_time_of_its_bursts(text, loss) -> None:
    assert PacketLoss.parse(text) == loss
    assert PacketLoss.parse(str(loss)) == loss


@pytest.mark.parametrize("text", ["much", "2:", "2:x", "-1", "100", "nan", "2:-5", "2:inf", ""])
def test_a_loss_that_cannot_be_is_refused(text) -> None:
    with pytest.raises(ConfigError) as refused:
        PacketLoss.parse(text)
    assert refused.value.field == "loss"


def test_packets_cannot_be_reordered_more_than_all_of_them() -> None:
    with pytest.raises(ConfigError, match="100 percent"):
        PacketFaults(reordered=1.5)


def test_a_radio_sleeps_after_silence_and_takes_its_time_to_wake() -> None:
    radio = Radio(idle_s=10.0, seed=1)
    wake_s = radio.use(0.0)
    assert WAKE_S[0] <= wake_s <= WAKE_S[1], "it is asleep at first"
    assert radio.use(0.1) == pytest.approx(wake_s - 0.1), "what comes meanwhile waits for the rest"
    assert radio.use(wake_s + 0.001) == 0.0
    assert radio.use(wake_s + 10.0) == 0.0, "ten seconds of silence are not over"
    again_s = radio.use(wake_s + 20.1)
    assert WAKE_S[0] <= again_s <= WAKE_S[1]
    assert again_s != wake_s


def test_the_time_awake_counts_from_when_the_radio_is_awake() -> None:
    radio = Radio(idle_s=0.1, seed=2)
    wake_s = radio.use(5.0)
    assert radio.use(5.0 + wake_s + 0.05) == 0.0


def test_the_same_seed_wakes_alike() -> None:
    def times(seed: int) -> list[float]:
        radio = Radio(1.0, seed)
        return [radio.use(10.0 * i) for i in range(5)]

    assert times(0) == times(0) != times(1)

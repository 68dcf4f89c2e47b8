"""Which vectors an edge requests: the right rate where all is known, and what it finds where it measures the link.

The simulated edge sees what a real one sees: bytes and round trips, with jitter, and the queue of a link that is full.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest

from outrider.proto import codec
from outrider.proto.errors import InvalidArgument
from outrider.proto.policy import Measurements, Smoothed
from outrider.proto.policy.measurements import Downlink, Pace, commit_bytes
from outrider.proto.policy.steering_rate import (
    ALL,
    FIRST,
    NONE,
    RAREST,
    RATES,
    FixedSteering,
    Gain,
    PricedSteering,
    SteeringRate,
    choose,
    saved_s,
)
from outrider.proto.types import Commit, CommittedToken, Steering, SteeringPrecision, TokenFacts

INT8, FLOAT16 = SteeringPrecision.INT8, SteeringPrecision.FLOAT16
MBITS = (0.05, 0.1, 0.5, 5.0, 100.0)
COMMIT_S, COMMIT_TOKENS, LOOKAHEAD = 0.04, 4.0, 3.0
HEADERS = 60  # bytes of every message, which no vector changes


def byte_s(mbit):
    return 8 / (mbit * 1e6)


class KnownByteTime(NamedTuple):
    byte_s: float
    doubt_s: float
    queued_s: float


def view(mbit, doubt_s=0.0, *, queued_s=0.0, commit_s=COMMIT_S, commit_tokens=COMMIT_TOKENS):
    downlink = Downlink(best=KnownByteTime(byte_s(mbit), doubt_s, queued_s))
    return Measurements(pace=Pace(commit_s, commit_tokens, 1.0), downlink=downlink, lookahead=Smoothed(LOOKAHEAD))


def worth_s(rate, mbit, rank, gain=()):
    """Return what a rate of vectors is worth a commit, in seconds, when everything is known."""
    by_every = Gain(gain).by_every(LOOKAHEAD, COMMIT_TOKENS)
    return saved_s(rate, view(mbit).pace, by_every) - rate.bytes_of(rank) * byte_s(mbit)


def best(mbit, rank, gain=()):
    return max(RATES, key=lambda rate: worth_s(rate, mbit, rank, gain))


@functools.cache
def missed(rate, mbit, rank):
    """Share of what vectors could save on any link that a rate loses on this one."""
    return (worth_s(best(mbit, rank), mbit, rank) - worth_s(rate, mbit, rank)) / worth_s(best(1e6, rank), 1e6, rank)


# === a drafter's gain ===========================================================================================


def test_gain_is_linear_between_known_points_and_falls_to_nothing_beyond_them():
    gain = Gain(((1, 0.2), (5, 0.1)))
    at = {age: gain.by_every(age, 0.0)[1] for age in (0, 1, 3, 5, 7.5, 10, 30)}
    assert at == pytest.approx({0: 0.2, 1: 0.2, 3: 0.15, 5: 0.1, 7.5: 0.05, 10: 0.0, 30: 0.0})


def test_without_a_measured_gain_it_is_a_tenth_at_first_and_fades_until_64():
    gain = Gain()
    assert [gain.by_every(age, 0.0)[1] for age in (1, 32.5, 64, 80)] == pytest.approx([0.1, 0.05, 0.0, 0.0])


def test_vectors_in_fewer_commits_are_older_by_the_tokens_between():
    gain = Gain(((0, 0.4), (40, 0.0)))
    assert gain.by_every(2.0, 3.0) == pytest.approx(
        {every: sum(0.4 - 0.01 * (2 + 3 * late) for late in range(every)) / every for every in (1, 2, 4, 8)}
    )


def test_vectors_older_than_any_that_steers_gain_nothing():
    assert Gain(((1, 0.1), (1000, 0.1))).by_every(60.0, 3.0) == pytest.approx({1: 0.1, 2: 0.1, 4: 0.05, 8: 0.025})


@pytest.mark.parametrize("known", [((2, 0.1), (1, 0.2)), ((1, 0.1), (1, 0.2)), ((-1, 0.1),)])
def test_gains_out_of_order_are_refused(known):
    with pytest.raises(InvalidArgument, match=r"steering\.gain"):
        Gain(known)


# === where all is known =========================================================================================


@pytest.mark.parametrize("rank", [64, 256])
@pytest.mark.parametrize("mbit", MBITS)
def test_the_choice_is_the_best_or_within_a_hair_of_it_whatever_came_before(rank, mbit):
    for now in RATES:
        rate = choose(view(mbit), now, rank, Gain())
        assert missed(rate, mbit, rank) < 0.03
        assert choose(view(mbit), rate, rank, Gain()) == rate, "it stays there"


def test_the_thinner_the_link_the_fewer_bytes_and_at_the_ends_all_or_nothing():
    chosen = [choose(view(mbit), FIRST, 256, Gain()) for mbit in (0.02, *MBITS)]
    sent = [rate.bytes_of(256) for rate in chosen]
    assert sent == sorted(sent)
    assert chosen[0] == chosen[1] == NONE
    assert chosen[-1] == SteeringRate(FLOAT16, 1)
    assert len(set(chosen)) >= 4


def test_a_gain_that_fades_fast_asks_for_fresh_vectors_or_none():
    steep, flat = Gain(((1, 0.2), (4, 0.1), (6, 0.0))), Gain(((1, 0.1), (60, 0.1)))
    assert choose(view(0.5), FIRST, 64, steep).every == 1
    assert choose(view(0.5), FIRST, 64, flat).every == 8


def test_a_drafter_that_gains_nothing_or_loses_asks_for_none():
    for gain in (((1, 0.0),), ((1, -0.05), (8, -0.02))):
        for mbit in MBITS:
            assert choose(view(mbit), FIRST, 64, Gain(gain)) == NONE


def test_what_is_not_known_changes_nothing():
    for rate in RATES:
        assert choose(view(math.inf, math.inf), rate, 64, Gain()) == rate
        assert choose(view(0.05, commit_s=0.0), rate, 64, Gain()) == rate


def test_fewer_or_more_bytes_are_requested_only_where_that_surely_pays():
    price = byte_s(0.1)
    assert choose(view(0.1, 0.1 * price), ALL, 256, Gain()) == RAREST
    assert choose(view(0.1, price), ALL, 256, Gain()) == ALL, "a byte may cost nothing"
    assert choose(view(5.0, 0.1 * byte_s(5.0)), NONE, 64, Gain()) == ALL
    assert choose(view(5.0, price), NONE, 64, Gain()) == RAREST, "more may cost too much"
    assert choose(view(5.0, 10 * price), NONE, 64, Gain()) == NONE


def test_where_commits_pile_up_doubt_is_no_reason_to_go_on():
    price = byte_s(0.1)
    assert choose(view(0.1, price, queued_s=2 * COMMIT_S), ALL, 256, Gain()) in (RAREST, NONE)
    assert choose(view(0.1, math.inf, queued_s=2 * COMMIT_S), ALL, 256, Gain()) == NONE
    assert choose(view(0.1, price, queued_s=0.5 * COMMIT_S), ALL, 256, Gain()) == ALL


def test_a_fixed_rate_is_one_vector_of_int8_in_every_commit():
    policy = FixedSteering()
    policy.after_commit(view(0.05))
    assert policy.rate == SteeringRate(INT8, 1)
    assert (policy.rate.bytes_of(64), NONE.bytes_of(64), SteeringRate(FLOAT16, 4).bytes_of(64)) == (76, 0, 35)


# === where the link must be measured ============================================================================


@dataclass
class Edge:
    """A session on a link; `rates[i]` was asked for after commit i, which takes two commits to be heard."""

    rank: int = 64
    jitter_s: float = 0.005
    tokens: Callable[[random.Random], int] = lambda rng: min(9, 1 + int(rng.expovariate(1 / 3)))
    seed: int = 0
    round_trip_s: float = 0.03

    def __post_init__(self):
        self.rng = random.Random(self.seed)
        self.measurements = Measurements(lookahead=Smoothed(LOOKAHEAD))
        self.policy = PricedSteering(self.rank)
        self.rates = []
        self.now = self.free = 0.0
        self.since = 1 << 30
        self.before = None
        self.heard = [self.policy.rate] * 3

    def decode(self, mbit, commits, jam=None):
        """Receive `commits` more over a downlink of `mbit`; commit `jam` comes half a second late."""
        rng, measurements = self.rng, self.measurements
        for index in range(commits):
            rate = self.heard.pop(0)
            tokens = self.tokens(rng)
            self.since += 1
            size = 6 * tokens
            if rate.every and self.since >= rate.every:
                size += SteeringRate(rate.precision).bytes_of(self.rank)
                self.since = 0
            self.now += COMMIT_S * rng.uniform(0.8, 1.2)
            self.free = max(self.now, self.free) + (size + HEADERS) * byte_s(mbit)
            late_s = rng.uniform(0, self.jitter_s) + rng.uniform(0, self.jitter_s) + 0.5 * (index == jam)
            before, self.before = self.before, (size, self.round_trip_s + self.free - self.now + late_s)
            if before is not None:
                measurements.downlink.add(self.before[0] - before[0], self.before[1] - before[1])
            measurements.pace.add(COMMIT_S, tokens)
            self.policy.after_commit(measurements)
            self.heard.append(self.policy.rate)
            self.rates.append(self.policy.rate)
        return self

    def until_dropped(self, mbit):
        while self.rates[-1] != NONE:
            self.decode(mbit, 1)
        return self

    @property
    def changes(self):
        return sum(a != b for a, b in itertools.pairwise(self.rates))

    def missed(self, mbit, first, end=None):
        rates = self.rates[first:end]
        return sum(missed(rate, mbit, self.rank) for rate in rates) / len(rates)


@pytest.mark.parametrize("jitter_s", [0.001, 0.005, 0.02])
@pytest.mark.parametrize("mbit", MBITS)
@pytest.mark.parametrize("rank", [64, 256])
def test_on_a_steady_link_it_finds_what_is_right_and_keeps_to_it(rank, mbit, jitter_s):
    edges = [Edge(rank, jitter_s, seed=seed).decode(mbit, 300) for seed in range(3)]
    assert sum(edge.missed(mbit, 100) for edge in edges) / 3 < 0.2
    tried_again = 4 if (rank, mbit) == (256, 0.05) else 0
    assert sum(edge.changes for edge in edges) / 3 <= 3 + tried_again


@pytest.mark.parametrize("rank", [64, 256])
@pytest.mark.parametrize(("before", "after"), [(100.0, 0.05), (100.0, 0.1), (5.0, 0.05)])
def test_a_link_that_becomes_thin_is_followed_within_thirty_commits(rank, before, after):
    for jitter_s, seed in itertools.product((0.001, 0.005, 0.02), range(2)):
        edge = Edge(rank, jitter_s, seed=seed).decode(before, 150)
        assert edge.rates[-1].every in (1, 2, 4)
        edge.decode(after, 30)
        assert edge.rates[-1].bytes_of(rank) <= 2 * RAREST.bytes_of(rank)
        edge.decode(after, 170)
        assert edge.missed(after, 230) < 0.35


@pytest.mark.parametrize(("rank", "before"), [(64, 0.05), (256, 0.1)])
@pytest.mark.parametrize("after", [5.0, 100.0])
def test_a_link_that_recovers_is_followed(rank, before, after):
    for jitter_s, seed in itertools.product((0.001, 0.005), range(2)):
        edge = Edge(rank, jitter_s, seed=seed).decode(before, 150)
        assert edge.rates[-1] == RAREST
        edge.decode(after, 60)
        assert edge.rates[-1].bytes_of(rank) >= 2 * RAREST.bytes_of(rank)
        edge.decode(after, 100)
        assert edge.missed(after, 250) < 0.15


@pytest.mark.parametrize("after", [5.0, 100.0])
@pytest.mark.parametrize("jitter_s", [0.001, 0.005, 0.02])
def test_vectors_that_were_dropped_come_back_when_the_link_recovers(jitter_s, after):
    edge = Edge(256, jitter_s).decode(0.05, 60).until_dropped(0.05)
    dropped = len(edge.rates)
    edge.decode(after, 100)
    assert edge.rates[-1] != NONE
    edge.decode(after, 100)
    assert edge.missed(after, dropped + 100) < 0.25


def test_vectors_come_back_even_where_commits_without_them_are_all_of_one_size():
    edge = Edge(256, 0.001, tokens=lambda rng: 3).decode(0.05, 60).until_dropped(0.05)
    edge.decode(100.0, 150)
    assert edge.rates[-1].every in (1, 2, 4)


def test_on_a_thin_link_they_are_tried_ever_less_often():
    edge = Edge(256, 0.001, tokens=lambda rng: 3).decode(0.05, 4000)
    begins = [i for i, (a, b) in enumerate(itertools.pairwise(edge.rates)) if a == NONE != b]
    gaps = [b - a for a, b in itertools.pairwise(begins)]
    assert len(begins) <= 8
    assert gaps == sorted(gaps)
    assert gaps[-1] > 700
    assert edge.rates.count(NONE) > 0.9 * len(edge.rates)


def test_a_link_that_cannot_carry_its_vectors_at_all_is_noticed_by_what_piles_up():
    edge = Edge(256, 0.001)
    edge.policy.rate = ALL
    edge.heard = [ALL] * 3
    edge.decode(0.05, 40)
    assert edge.rates[-1] == NONE
    assert edge.rates.count(ALL) < 20


@pytest.mark.parametrize("rank", [64, 256])
def test_one_jam_does_not_drop_vectors(rank):
    for jam in range(20, 40):
        edge = Edge(rank, 0.001, seed=jam).decode(100.0, 100, jam=jam)
        assert NONE not in edge.rates
        assert edge.missed(100.0, 0) < 0.2


# === the measures ===============================================================================================


def measured(round_trips):
    """A downlink that has seen round trips (bytes, seconds) one after the other."""
    downlink = Downlink()
    for (size, seconds), (larger, longer) in itertools.pairwise(round_trips):
        downlink.add(larger - size, longer - seconds)
    return downlink.best


def test_a_bytes_time_is_read_off_commits_of_different_sizes():
    rng = random.Random(1)
    sizes = [rng.choice((20, 40, 120)) for _ in range(64)]
    downlink = measured((size, 0.03 + 0.002 * index + 1e-4 * size) for index, size in enumerate(sizes))  # it drifts
    assert downlink.byte_s == pytest.approx(1e-4, rel=0.3)
    assert downlink.queued_s > 0.04, "and that is noticed"
    steady = measured((size, 0.03 + 1e-4 * size + rng.uniform(0, 0.004)) for size in sizes)
    assert abs(steady.byte_s - 1e-4) < 3 * steady.doubt_s < 1e-4
    assert steady.queued_s < 0.02


def test_equal_sizes_tell_nothing():
    downlink = measured((50, random.random()) for _ in range(20))
    assert (downlink.byte_s, downlink.doubt_s) == (0.0, math.inf)


def test_a_commits_size_is_known_but_for_what_all_have():
    plain = Commit(100, tuple(map(CommittedToken, (300, 301))), 1, 32)
    base = len(codec.encode_cloud_frame(plain)) - commit_bytes(plain)
    for changes in (
        {"tokens": (CommittedToken(300),) * 9},
        {"tokens": (CommittedToken(300, -0.5),) * 2},
        {"tokens": (CommittedToken(300, -0.5, TokenFacts(-1.5, 1)),) * 2},
        {"tokens": (CommittedToken(300, -0.5, TokenFacts(-0.5, 1, ((300, -0.5), (301, -2.0)))),) * 2},
        {"steering": Steering(0.5, bytes(64), INT8)},
        {"steering": Steering(0.5, bytes(512), FLOAT16)},
    ):
        commit = replace(plain, **changes)
        assert len(codec.encode_cloud_frame(commit)) == pytest.approx(commit_bytes(commit) + base, abs=11)


@pytest.mark.parametrize(
    ("known", "max_age"),
    [
        ((), 63),
        (((1, 0.03), (4, 0.01), (6, -0.01)), 4),
        (((1, 0.1), (8, 0.0), (16, 0.1)), 7),
        (((1, -0.1), (8, 0.2)), 0),
        (((1, 0.1), (40, 0.05)), 64),
    ],
)
def test_a_vector_is_of_use_up_to_the_age_where_its_gain_ends(known, max_age: int) -> None:
    assert Gain(known).max_age == PricedSteering(64, known).max_age == max_age


def test_where_drafts_come_too_late_to_be_verified_no_vector_is_asked_for() -> None:
    here = view(100.0, 1e-6, commit_tokens=1.0)
    assert saved_s(ALL, here.pace, Gain().by_every(LOOKAHEAD, 1.0)) == 0
    assert choose(here, FIRST, 64, Gain()) == NONE
    assert choose(view(100.0, 1e-6, commit_tokens=2.0), NONE, 64, Gain()) != NONE

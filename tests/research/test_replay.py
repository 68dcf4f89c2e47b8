"""Replay: cases worked out by hand, properties, and a wire that agrees with the emulator's."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outrider.deploy.link.link_traces import find_trace
from outrider.deploy.link.pipe import Pipe
from outrider.deploy.link.shape import LinkShape
from outrider.edge.selectors import default_selector
from outrider.proto import codec
from outrider.proto.errors import ConfigError
from outrider.proto.policy import Window
from outrider.proto.policy.selector import StaticSelector
from outrider.proto.types import Draft, Goal, Patience, token_ids
from research.simulator.clock import Costs
from research.simulator.wire import DOWN, FRAME_BYTES, UP, Framing, Wire
from research.traces.local_threads import drafting_beside
from research.traces.recordings import HitTrace
from research.traces.traced import DrafterArm, Policy, Replay, replay, synchronous, tokens_per_second

FREE = Costs(
    step_s=0.010,
    row_s=0.0,
    prefill_row_s=0.0,
    drafting_s=0.001,
    catch_up_s=0.0,
    job_s=0.0,
    edge_event_s=0.0,
    cloud_event_s=0.0,
    commit_s=0.0,
)
CLOUD = Policy(drafting=False)
RUN_AHEAD = Policy(patience=Patience(0.0))
LINK = LinkShape.of(rtt_ms=40)


def at(shape: LinkShape):
    return lambda _: shape


def trace_of(hits, **changes) -> HitTrace:
    hits = tuple(map(bool, hits))
    fields = {
        "id": "t",
        "domain": "",
        "drafter": "d",
        "drafter_version": "1",
        "temperature": 0.0,
        "prompt_tokens": 30,
        "tokens": tuple(range(200, 200 + len(hits))),
        "hits": hits,
        "confidence": tuple(0.9 if hit else 0.4 for hit in hits),
    }
    return HitTrace(**(fields | changes))


def random_traces(count: int, tokens: int = 60, share: float = 0.75) -> list[HitTrace]:
    rng = random.Random(7)
    return [
        trace_of(
            (hits := [rng.random() < share for _ in range(tokens)]),
            confidence=tuple(rng.betavariate(4 if hit else 2, 2) for hit in hits),
        )
        for _ in range(count)
    ]


class LoggedLink:
    """Logs frames that are sent and that arrive: (time, up or down, sent or arrived, frame)."""

    def __init__(self, link, log: list[tuple]) -> None:
        self._link, self._log = link, log

    def __getattr__(self, name: str):
        return getattr(self._link, name)

    def up(self, frame, now):
        return self._logged("up", self._link.up(frame, now), now)

    def down(self, frame, now):
        return self._logged("down", self._link.down(frame, now), now)

    def _logged(self, way, arrivals, now):
        for arrival, frame in arrivals:
            self._log += [(now, way, "sent", frame), (arrival, way, "arrived", frame)]
            yield arrival, frame


class Written(Replay):
    """A replay whose `log` holds the frames that were sent and that arrived, in the order of the times."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._log: list[tuple] = []
        new_link = self._new_link
        self._new_link = lambda now: LoggedLink(new_link(now), self._log)

    @property
    def log(self) -> list[tuple]:
        return sorted((entry for entry in self._log if entry[0] <= self.clock.now), key=lambda entry: entry[0])


# --- on a link too long for the drafter ---


def test_drafts_that_come_too_late_are_hardly_sent_and_cost_no_speed() -> None:
    traces = [replace(trace, temperature=1.0) for trace in random_traces(6, tokens=120, share=0.5)]
    costs, shape = replace(FREE, step_s=0.03), at(LinkShape.of(rtt_ms=250))
    planned, eager, cloud = (
        replay(traces, shape, costs, policy) for policy in (Policy(), Policy(patience=Patience(0.0)), CLOUD)
    )
    assert sum(o.uplink_bytes for o in planned) < 0.7 * sum(o.uplink_bytes for o in eager)
    assert tokens_per_second(planned) > 0.998 * tokens_per_second(cloud)


def test_a_drafter_that_gets_better_is_asked_again() -> None:
    rng = random.Random(3)
    bad = [rng.random() < 0.4 for _ in range(200)]
    costs, shape = replace(FREE, step_s=0.03), at(LinkShape.of(rtt_ms=250))
    [outcome] = replay([trace_of(bad + [True] * 400)], shape, costs, Policy())
    cloud_s = 600 * costs.step_s
    assert outcome.seconds < 0.75 * cloud_s, "the last two thirds go far faster than a step a token"


# --- by hand ---


def test_cloud_streaming_takes_the_opening_the_prompt_and_a_step_a_token() -> None:
    costs = Costs(prefill_row_s=0.002, edge_event_s=0.0007, cloud_event_s=0.0011, commit_s=0.0005)
    n, p = 20, 30
    [outcome] = replay([trace_of([True] * n)], at(LINK), costs, CLOUD)
    opening = LINK.rtt_s / 2 + costs.cloud_event_s
    first = opening + costs.batch_s(0, p) + costs.commit_s + LINK.rtt_s / 2 + costs.edge_event_s
    assert outcome.arrivals[0] == pytest.approx(first)
    assert outcome.seconds == pytest.approx(first + (n - 1) * (costs.batch_s(1, 0) + costs.commit_s))
    assert outcome.statistics.steps == n
    assert outcome.statistics.drafted == 0


def test_min_step_s_is_the_shortest_step() -> None:
    [outcome] = replay([trace_of([True] * 9)], at(LINK), replace(FREE, min_step_s=0.03), CLOUD)
    assert outcome.seconds == pytest.approx(LINK.rtt_s + 9 * 0.03)


def test_a_long_prompt_is_read_in_parts() -> None:
    costs = replace(FREE, prefill_row_s=0.001)
    [outcome] = replay([trace_of([True], prompt_tokens=1100)], at(LINK), costs, CLOUD)
    assert outcome.seconds == pytest.approx(LINK.rtt_s + 3 * 0.010 + 1100 * 0.001)  # 512 + 512 + 76 rows


def test_synchronous_speculation_that_hits_twice_in_three_gives_three_a_round() -> None:
    # Opened comes at 40 ms, four drafts leave at 44, are verified from 64 to 74 beside the first token that the
    # prompt's step gave at 50, and two tokens come at 94: the third draft was wrong. Then each round gives two hits and
    # one own; in the last there is room for two drafts only.
    [outcome] = replay([trace_of([1, 1, 0] * 5)], at(LINK), FREE, synchronous(4))
    rounds = [0.094 + 0.054 * i for i in range(5)]
    rounds[-1] -= 2 * FREE.drafting_s
    expected = [0.050, *[rounds[0]] * 2, *(r for r in rounds[1:] for _ in range(3))]
    assert outcome.arrivals == pytest.approx(expected)
    assert outcome.statistics.steps == 6


def test_synchronous_speculation_is_not_disturbed_by_answers_about_an_older_text() -> None:
    # A frame that the edge sent before the last token reached it must not make a verifier of infinite patience step
    # without drafts.
    [hits] = replay([trace_of([True] * 21)], at(LINK), FREE, synchronous(4))
    assert hits.statistics.steps == 6
    [misses] = replay([trace_of([False] * 9)], at(LINK), FREE, synchronous(4))
    gaps = [b - a for a, b in zip(misses.arrivals[1:-1], misses.arrivals[2:-1], strict=False)]
    assert min(gaps) > LINK.rtt_s, "one token a round"


@pytest.mark.parametrize("length", [1, 3, 4])
def test_synchronous_speculation_that_always_hits_gives_its_length_plus_one_a_round(length) -> None:
    [outcome] = replay([trace_of([True] * 31)], at(LINK), FREE, synchronous(length))
    round_s = LINK.rtt_s + FREE.step_s + length * FREE.drafting_s
    later = outcome.arrivals[1 : -length - 1]  # the last round is shorter
    assert [b - a for a, b in zip(later, later[length + 1 :], strict=False)] == pytest.approx(
        [round_s] * (len(later) - length - 1)
    )


def test_drafts_that_never_hit_save_no_step() -> None:
    for policy in (synchronous(4), RUN_AHEAD, Policy()):
        [outcome] = replay([trace_of([False] * 20)], at(LINK), FREE, policy)
        assert outcome.statistics.steps == 20
        assert outcome.statistics.accepted == outcome.statistics.hits == 0
    [cloud] = replay([trace_of([False] * 20)], at(LINK), FREE, CLOUD)
    [ahead] = replay([trace_of([False] * 20)], at(LINK), FREE, RUN_AHEAD)
    assert ahead.arrivals == pytest.approx(cloud.arrivals)


def test_a_draft_that_comes_during_a_step_is_echoed_by_it_and_verified_by_the_next() -> None:
    # Opened comes at 40 ms, eight drafts leave at 48 and come at 68, in the step from 60 to 70.
    written = Written(trace_of([True] * 12), at(LINK), FREE, RUN_AHEAD)
    written.outcome()
    commits = {round(time, 6): frame for time, way, what, frame in written.log if (way, what) == ("down", "sent")}
    assert commits[0.070].verified == 0
    assert commits[0.070].timing.echo == 1
    assert commits[0.070].timing.hold_s == pytest.approx(0.002)
    assert commits[0.080].verified > 0


# --- always ---


@given(hits=st.lists(st.booleans(), min_size=1, max_size=50), rtt_ms=st.sampled_from([1, 15, 60, 150]))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_run_ahead_is_never_slower_than_cloud_streaming_where_rows_are_free(hits, rtt_ms) -> None:
    trace, shape = trace_of(hits), LinkShape.of(rtt_ms=rtt_ms)
    for window in (None, Window(5)):
        policy = replace(RUN_AHEAD, window=window)
        [ahead], [cloud] = (replay([trace], at(shape), FREE, p) for p in (policy, CLOUD))
        assert all(mine <= theirs + 1e-9 for mine, theirs in zip(ahead.arrivals, cloud.arrivals, strict=True))


@given(
    hits=st.lists(st.booleans(), min_size=1, max_size=40),
    silent=st.lists(st.booleans(), min_size=40, max_size=40),
    ended=st.booleans(),
    known=st.booleans(),
    policy=st.sampled_from(
        [
            Policy(),
            Policy(goal=Goal.EFFICIENCY),
            RUN_AHEAD,
            synchronous(3),
            CLOUD,
            Policy(window=Window(20), max_drafts=4),
        ]
    ),
    jitter_ms=st.sampled_from([0.0, 30.0]),
)
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_text_is_the_trace_and_the_same_seed_gives_the_same_run(hits, silent, ended, known, policy, jitter_ms):
    quiet = tuple(s and not hit for s, hit in zip(silent, hits, strict=False))
    confidence = tuple(0.9 if hit else 0.5 for hit in hits) if known else (math.nan,) * len(hits)
    trace = trace_of(hits, silent=quiet, ended=ended, confidence=confidence)
    shape = LinkShape.of(rtt_ms=30, jitter_ms=jitter_ms, up_mbit=1, down_mbit=5)
    runs = [Written(trace, at(shape), Costs(), policy, seed=3) for _ in range(2)]
    first, second = (run.outcome() for run in runs)
    assert first == second
    commits = [frame for _, way, what, frame in runs[0].log if (way, what) == ("down", "sent")][1:]
    assert tuple(itertools.chain.from_iterable(token_ids(c.tokens) for c in commits)) == trace.tokens
    assert commits[-1].finish.name == ("EOS" if ended else "LENGTH")
    assert len(first.arrivals) == len(trace.tokens)
    assert list(first.arrivals) == sorted(first.arrivals)
    assert first.seconds == first.arrivals[-1]
    assert first.statistics.hits <= sum(trace.hits)


def test_another_seed_gives_another_jitter() -> None:
    traces, shape = random_traces(2), LinkShape.of(rtt_ms=30, jitter_ms=20)
    by_seed = [replay(traces, at(shape), Costs(), Policy(), seed=seed) for seed in (0, 0, 1)]
    assert by_seed[0] == by_seed[1] != by_seed[2]


def test_a_silent_drafter_drafts_nothing() -> None:
    n = 20
    trace = trace_of([False] * n, silent=(True,) * n, confidence=(math.nan,) * n)
    [outcome] = replay([trace], at(LINK), FREE, Policy())
    assert outcome.statistics.drafted == 0
    assert outcome.statistics.steps == n


def test_an_edge_drafts_beyond_an_end_that_it_cannot_see() -> None:
    hits = [True] * 20
    open_end, ending = (Written(trace_of(hits, ended=e), at(LINK), FREE, RUN_AHEAD) for e in (False, True))
    for run in (open_end, ending):
        run.outcome()
    furthest = [
        max(f.start + len(f.tokens) for _, way, _, f in run.log if way == "up" and isinstance(f, Draft))
        for run in (open_end, ending)
    ]
    assert furthest[0] < 30 + 20 < furthest[1]


def test_measurements_are_kept_from_text_to_text() -> None:
    traces = random_traces(1) * 3
    first, *others = replay(traces, at(LINK), Costs(row_s=0.004), Policy())
    assert [first] != others[:1]


# --- the wire ---


@pytest.mark.parametrize("policy", [CLOUD, Policy(), synchronous(4)], ids=["cloud", "planned", "synchronous"])
def test_bytes_are_those_of_the_codec_and_of_framing(policy) -> None:
    run = Written(random_traces(1)[0], at(LINK), Costs(), policy)
    outcome = run.outcome()
    encode = {"up": codec.encode_edge_frame, "down": codec.encode_cloud_frame}
    counted = {"up": outcome.uplink_bytes, "down": outcome.downlink_bytes}
    of_stream = {"up": outcome.statistics.uplink_bytes, "down": outcome.statistics.downlink_bytes}
    for way, other, framing in (("up", "down", UP), ("down", "up", DOWN)):
        sizes, updates, heard = [], 0, False
        for _, direction, what, frame in run.log:
            heard = heard or (direction == other and what == "arrived")
            if (direction, what) == (way, "sent"):
                sizes.append(len(encode[way](frame)))
                updates, heard = updates + heard, False
        around = framing.headers + framing.end + framing.window_update * updates
        assert counted[way] == sum(sizes) + FRAME_BYTES * len(sizes) + around
        assert of_stream[way] == sum(sizes) + 5 * len(sizes)


def test_log_probabilities_are_four_bytes_a_token() -> None:
    with_them, without = (
        replay([trace_of([True] * 50)], at(LINK), FREE, replace(CLOUD, logprobs=asked))[0] for asked in (True, False)
    )
    assert with_them.downlink_bytes - without.downlink_bytes == pytest.approx(50 * 6, abs=100)  # tag and length too


BARE = Framing(headers=0, window_update=0, end=0)


def by_emulator(messages, shape_at, changes) -> list[float]:
    """Return when the emulator's pipe delivers the last byte of each message."""
    pipe, due = Pipe(shape_at(0.0).up), []
    steps = [(time, None) for time in changes] + [(time, size) for time, size in messages]
    for time, size in sorted(steps, key=lambda step: (step[0], step[1] is not None)):
        if size is None:
            pipe.reshape(time, shape_at(time).up)
        else:
            pipe.push(time, len(due), bytes(size))
            due.append(0.0)
    for arrival in pipe.due(math.inf):
        due[arrival.stream] = arrival.due_s
    return due


@given(
    messages=st.lists(st.tuples(st.floats(0, 0.3), st.integers(1, 1200)), min_size=1, max_size=30),
    shape=st.sampled_from([LINK, LinkShape.of(rtt_ms=20, up_mbit=0.2), LinkShape.of(rtt_ms=90, up_mbit=3)]),
)
@settings(max_examples=60, deadline=None)
def test_messages_arrive_when_the_emulator_delivers_them(messages, shape) -> None:
    messages = sorted((time, FRAME_BYTES + size) for time, size in messages)
    wire = Wire(lambda _: shape.up, BARE, random.Random(0))
    arrivals = [wire.send(time, size - FRAME_BYTES) for time, size in messages]
    assert arrivals == pytest.approx(by_emulator(messages, at(shape), []), abs=1e-6)


@pytest.mark.parametrize("name", ["lte-motion", "uplink-cut"])
def test_messages_arrive_when_the_emulator_delivers_them_on_a_trace(name) -> None:
    trace, rng = find_trace(name), random.Random(5)
    messages = sorted((rng.uniform(0, 25), FRAME_BYTES + rng.randrange(20, 1000)) for _ in range(400))
    wire = Wire(lambda time: trace.at(time).up, BARE, random.Random(0))
    arrivals = [wire.send(time, size - FRAME_BYTES) for time, size in messages]
    changes = [point.time_s for point in trace.points]
    assert arrivals == pytest.approx(by_emulator(messages, trace.at, changes), abs=1e-6)


def test_a_thin_uplink_costs_what_goes_up_and_nothing_else() -> None:
    traces = random_traces(12)
    thin, wide = (LinkShape.of(rtt_ms=40, up_mbit=mbit, down_mbit=50) for mbit in (0.2, 100))
    [cloud_thin, cloud_wide], [plain_thin, plain_wide] = (
        [replay(traces, at(shape), Costs(), policy) for shape in (thin, wide)] for policy in (CLOUD, Policy())
    )
    for slow, fast in zip(cloud_thin, cloud_wide, strict=True):
        opening = (17 + FRAME_BYTES + slow.statistics.uplink_bytes) / 25_000
        assert 0 < slow.seconds - fast.seconds <= opening
        steps = [b - a for a, b in itertools.pairwise(slow.arrivals)]
        assert steps == pytest.approx([b - a for a, b in itertools.pairwise(fast.arrivals)])
    late = [
        sum(o.seconds for o in slow) - sum(o.seconds for o in fast)
        for slow, fast in ((cloud_thin, cloud_wide), (plain_thin, plain_wide))
    ]
    assert late[1] > late[0]


def test_chances_follow_the_score_under_the_noise_and_not_the_probability() -> None:
    rng = random.Random(11)
    rows = replace(Costs(), row_s=0.002)
    hits = [[rng.random() < 0.6 for _ in range(60)] for _ in range(12)]
    scores = [tuple(rng.betavariate(6 if hit else 1, 1 if hit else 6) for hit in text) for text in hits]
    same = (0.5,) * 60
    signals = {
        "score": [(same, score) for score in scores],
        "probability": [(score, same) for score in scores],
        "neither": [(same, same)] * len(hits),
    }
    seconds = {}
    for name, of_texts in signals.items():
        traces = [
            trace_of(text, confidence=confidence, perturbed_probability=score)
            for text, (confidence, score) in zip(hits, of_texts, strict=True)
        ]
        outcomes = replay(traces, at(LINK), rows, Policy(), beside=drafting_beside())
        seconds[name] = sum(outcome.seconds for outcome in outcomes)
    assert seconds["score"] < 0.97 * seconds["neither"]
    assert seconds["probability"] == pytest.approx(seconds["neither"]), "it is not asked where the score is known"


def test_an_outage_delays_and_then_the_text_goes_on() -> None:
    hits = [True, True, False] * 40

    def broken(time_s: float) -> LinkShape:
        return LinkShape(rtt_s=0.04, up_bytes_per_s=0.0, down_bytes_per_s=0.0) if 0.3 <= time_s < 1.3 else LINK

    for policy in (CLOUD, Policy(), synchronous(4)):
        [whole] = replay([trace_of(hits)], at(LINK), FREE, policy)
        [cut] = replay([trace_of(hits)], broken, FREE, policy)
        assert len(cut.arrivals) == len(hits)
        assert not [time for time in cut.arrivals if 0.33 <= time < 1.32]
        assert whole.seconds < cut.seconds <= whole.seconds + 1.0 + 0.1


def test_a_link_that_never_comes_back_is_an_error() -> None:
    dead = LinkShape(up_bytes_per_s=0.0)
    with pytest.raises(ConfigError, match=r"link: lets nothing through from 0\.0 s on"):
        replay([trace_of([True])], at(dead), FREE, CLOUD)


# --- speed ---


def test_no_texts_have_no_speed() -> None:
    with pytest.raises(ConfigError, match="traces: are none"):
        tokens_per_second([])


# --- several drafters ---


def arm_of(hits, drafter: str, **changes) -> DrafterArm:
    return DrafterArm(replace(trace_of(hits), drafter=drafter, **changes), FREE)


def test_a_drafter_that_is_always_active_is_as_fast_as_alone_but_for_the_prompt() -> None:
    good, bad = [1, 1, 1, 0] * 10, [0, 1] * 20
    [alone] = replay([trace_of(good)], at(LINK), FREE, Policy())
    [one] = replay(
        [trace_of(bad)], at(LINK), FREE, Policy(), others=[[arm_of(good, "b")]], selector=lambda: StaticSelector(1)
    )
    assert one.active == (1,) * 40
    assert one.statistics.accepted == alone.statistics.accepted
    assert one.seconds == pytest.approx(alone.seconds, rel=0.02)


def test_the_leader_soon_activates_the_better_drafter_and_beats_the_other_alone() -> None:
    good, bad = [1, 1, 1, 1, 1, 0] * 40, [0, 0, 1] * 80
    traces, others = [trace_of(bad)], [[arm_of(good, "b")]]
    for rtt_ms in (5, 20):
        shape = at(LinkShape.of(rtt_ms=rtt_ms))
        [leader] = replay(traces, shape, FREE, Policy(), others=others, selector=lambda: default_selector(2))
        [best] = replay([others[0][0].trace], shape, FREE, Policy())
        [worst] = replay(traces, shape, FREE, Policy())
        assert leader.active.index(1) < 64, "within 64 tokens"
        assert sum(leader.active) > 0.7 * len(leader.active)
        assert best.seconds * 1.3 > leader.seconds
        assert leader.seconds < 0.95 * worst.seconds


def test_the_drafter_that_fits_the_prompt_best_is_active_first() -> None:
    traces = [replace(trace_of([1] * 8), prompt_log_q=-4.0)]
    others = [[arm_of([1] * 8, "b", prompt_log_q=-3.5), arm_of([1] * 8, "c", prompt_log_q=-9.0)]]
    shape = at(LinkShape.of(rtt_ms=40))
    [outcome] = replay(traces, shape, FREE, Policy(), others=others, selector=lambda: default_selector(3))
    assert outcome.active == (1,) * 8


def test_rivals_on_another_text_or_without_a_selector_are_refused() -> None:
    trace = trace_of([1] * 4)
    with pytest.raises(ConfigError, match="others"):
        Replay(trace, at(LINK), FREE, Policy(), others=[arm_of([1] * 5, "b")], selector=StaticSelector(0))
    with pytest.raises(ConfigError, match="selector"):
        Replay(trace, at(LINK), FREE, Policy(), others=[arm_of([1] * 4, "b")])

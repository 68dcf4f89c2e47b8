"""The edge's half of steering: which vector steers a drafting job, what is requested, and that no text changes.

In the simulation every vector holds its position, which shows what the drafter has.
"""

from __future__ import annotations

import logging
import random
from dataclasses import replace

import numpy as np
import pytest
from bad_link import Faults
from checked_simulation import CheckedSimulation, CheckedVerifier, open_frame, own_text, rules
from hand_driven import HandDrivenEdge, committed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle_drafters import drafter_of, hashing_oracle

from outrider.proto.errors import Internal, InvalidArgument, Unavailable
from outrider.proto.policy import Measurements, Window
from outrider.proto.policy.steering_rate import FixedSteering, PricedSteering, SteeringRate
from outrider.proto.session import DrafterSteering, DraftJob, EdgeSession, Send
from outrider.proto.steering_vector import encode
from outrider.proto.types import (
    Commit,
    CommittedToken,
    Continue,
    Open,
    Opened,
    Report,
    Sampling,
    Steering,
    SteeringPrecision,
    SteeringRequest,
    Timing,
)

RANK = 4
REQUEST = SteeringRequest("0123456789ab")
VERIFIER = rules(projections=frozenset({REQUEST.projection}))
HALVES = SteeringRate(SteeringPrecision.FLOAT16)


def vector_of(position, precision=SteeringPrecision.FLOAT16):
    """A vector that holds its position (up to 2,047)."""
    return encode(np.array([position, 1, 0, -1], dtype=np.float32), precision)


def steered_by(job):
    """The position of the vector that a job brings; None: unchanged; "none": unsteered from now on."""
    if job.steer is None:
        return None
    return "none" if job.steer.vector is None else int(job.steer.vector[0])


# === the two halves together ====================================================================================


class Moody:
    """Changes its mind about vectors with every commit."""

    def __init__(self, seed):
        self.rate = SteeringRate()
        self.max_age = 64
        self._rng = random.Random(seed)

    def after_commit(self, view):
        self.rate = SteeringRate(self._rng.choice(list(SteeringPrecision)), self._rng.choice((0, 1, 2, 4, 8)))


class SteeringVerifier(CheckedVerifier):
    """Puts vectors into its commits where they are asked for."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.requests = []
        self.vectors_are = "right"
        self._vectors_rng = random.Random(1)

    def receive(self, stream, frame):
        if isinstance(frame, Open | Report) and frame.steering is not None:
            self.requests.append(frame.steering)
        super().receive(stream, frame)

    def send_down(self, stream, frame):
        slot = self.slot(stream)  # None where the stream is gone
        goes_on = slot is not None and isinstance(frame, Commit) and frame.finish is None
        if goes_on and slot.session.wanted_vector is not None:
            frame = replace(frame, steering=self._vector(frame.start + len(frame.tokens) - 2))
        super().send_down(stream, frame)

    def _vector(self, position):
        match self.vectors_are:
            case "right":
                return vector_of(position)
            case "noise":
                noise = np.array([self._vectors_rng.gauss(0, 1e4) for _ in range(RANK)], dtype=np.float32)
                return encode(noise, SteeringPrecision.INT8)
            case "lost":
                return vector_of(position) if self._vectors_rng.random() < 0.3 else None
            case "malformed":
                bad = Steering(1.0, b"123", SteeringPrecision.INT8), Steering(1.0, b"\0\x7e" * 4, HALVES.precision)
                return self._vectors_rng.choice((*bad, vector_of(position)))


class SteeredSimulation(CheckedSimulation):
    """A text with vectors in its commits; checks every job's steering against the vectors that came."""

    verifier_kind = SteeringVerifier

    def __init__(self, frame, oracle, drafter, *, vectors, policy, **options):
        edge = Watched(
            replace(frame, steering=REQUEST), Window(16), steering=DrafterSteering(RANK, policy), job_tokens=lambda _: 8
        )
        edge.vectors_show_position = vectors != "noise"
        super().__init__(frame, oracle, drafter, verifier=VERIFIER, edge=edge, **options)
        self.verifier.vectors_are = vectors

    @property
    def requests(self):
        return self.verifier.requests


class Watched(EdgeSession):
    """Checks what each job is steered by."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.vectors_show_position = True  # their position
        self.newest = None  # the position of the newest vector
        self.drafter_has = None
        self.ages = []

    def handle(self, event, now, measurements=None):
        before = self.statistics.vectors - self.statistics.bad_vectors
        instructions = super().handle(event, now, measurements)
        if self.statistics.vectors - self.statistics.bad_vectors > before:
            self.newest = event.start + len(event.tokens) - 2
            assert self.newest == len(self.transcript) - 2, "of the newest position that the verifier has processed"
        for instruction in instructions:
            if isinstance(instruction, DraftJob):
                self._check(instruction)
        return instructions

    def _check(self, job):
        if job.steer is not None:
            assert job.steer.since == self.prompt_length
            self.drafter_has = job.steer.vector
        if self.newest is not None and job.start - 1 - self.newest > 64:
            self.newest = None
        if self.newest is None:
            assert self.drafter_has is None
        else:
            self.ages.append(job.start - 1 - self.newest)
            assert self.drafter_has is not None
            assert not self.vectors_show_position or round(float(self.drafter_has[0])) == self.newest


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1 << 30),
    vectors=st.sampled_from(["right", "noise", "lost", "malformed"]),
    policy=st.sampled_from(
        [FixedSteering, lambda: FixedSteering(HALVES), lambda: PricedSteering(RANK), lambda: Moody(3)]
    ),
    link=st.builds(
        Faults,
        delay_s=st.sampled_from([0.03, 0.2, 0.0]),
        jitter_s=st.sampled_from([0.0, 0.05]),
        duplicated=st.sampled_from([0.0, 0.3]),
        breaks_every_s=st.sampled_from([0.0, 0.0, 0.7]),
        goaway_every_s=st.sampled_from([0.0, 2.0]),
    ),
    right=st.sampled_from([0.9, 0.5, 0.0]),
    dies_after=st.sampled_from([1 << 30, 1 << 30, 5]),
)
def test_whatever_vectors_come_the_text_is_the_targets_and_jobs_have_the_newest(
    seed, vectors, policy, link, right, dies_after
):
    frame = open_frame(sampling=Sampling(max_tokens=60))
    oracle = hashing_oracle(seed)
    drafter = drafter_of(oracle, seed, right, dies_after=dies_after)
    simulation = SteeredSimulation(frame, oracle, drafter, vectors=vectors, policy=policy(), link=link, seed=seed)
    assert simulation.run() == own_text(oracle, frame, VERIFIER)
    statistics = simulation.edge.statistics
    ages = simulation.edge.ages
    assert (statistics.steered_jobs, statistics.vector_age) == (len(ages), sum(ages))
    assert all(age >= 1 for age in ages), "no draft knows its own future"
    assert all(request.projection == REQUEST.projection for request in simulation.requests)
    assert statistics.bad_vectors == 0 or vectors == "malformed"


def test_the_simulation_sends_vectors_and_steers_by_them():
    """The test above would pass without any."""
    for vectors in ("right", "noise", "lost", "malformed"):
        frame = open_frame(sampling=Sampling(max_tokens=200))
        oracle = hashing_oracle(5, eos_odds=0)
        simulation = SteeredSimulation(
            frame, oracle, drafter_of(oracle, 5, 0.9), vectors=vectors, policy=FixedSteering(HALVES), seed=5
        )
        simulation.run()
        statistics = simulation.edge.statistics
        assert statistics.steered
        assert statistics.steps // 4 < statistics.vectors <= statistics.steps
        assert statistics.steered_jobs > 20
        assert (statistics.bad_vectors > 0) == (vectors == "malformed")
        if vectors == "right":
            assert statistics.vectors == statistics.steps - 1  # the last commit ends the text
            assert statistics.vector_bytes == 2 * RANK * statistics.vectors


# === rule by rule ===============================================================================================


def steered_edge(policy=None, window=8, measurements=None, opened=True, **changes):
    """A session that is steered, opened with the verifier's consent."""
    edge = HandDrivenEdge(
        open_frame(steering=REQUEST, **changes),
        Window(window),
        measurements=measurements,
        steering=DrafterSteering(RANK, policy or FixedSteering(HALVES)),
    )
    edge.open_frame(b"", 0.0)
    edge.on_opened(consent(steered=opened, keep_s=changes.get("keep_s", 0.0)), 0.1)
    return edge


def consent(**changes):
    said = {"committed": 0, "credit": 32, "max_tokens": 500, "verifier": "v", "context_length": 512}
    return Opened(**(said | changes))


def commit(edge, tokens, vector=None, **changes):
    start = changes.pop("start", len(edge.transcript))
    turn = edge._stream.turn
    return edge.on_commit(Commit(start, committed(*tokens), 0, 32, steering=vector, turn=turn, **changes), 1.0)


def draft(edge, most=4):
    """One job, whose tokens are 1 to `most`."""
    job = edge.next_job(most)
    edge.on_drafted(job, tuple(range(1, job.count + 1)), (0.9,) * job.count, 0.001, 1.0)
    return job


def reports(instructions):
    return [i.frame for i in instructions if isinstance(i, Send) and isinstance(i.frame, Report)]


def test_a_session_opens_with_the_policys_request_and_believes_the_verifiers_answer():
    edge = HandDrivenEdge(
        open_frame(steering=REQUEST), steering=DrafterSteering(RANK, FixedSteering(SteeringRate(HALVES.precision, 4)))
    )
    request = SteeringRequest(REQUEST.projection, SteeringPrecision.FLOAT16, 4)
    assert edge.open_frame(b"", 0.0).steering == request
    assert not edge.statistics.steered
    edge.on_opened(consent(steered=True), 0.1)
    assert edge.statistics.steered


def test_a_request_and_what_reads_its_vectors_come_together():
    with pytest.raises(InvalidArgument, match=r"open\.steering"):
        HandDrivenEdge(open_frame(steering=REQUEST))
    with pytest.raises(InvalidArgument, match=r"open\.steering"):
        HandDrivenEdge(open_frame(), steering=DrafterSteering(RANK, FixedSteering()))


def test_a_vector_that_is_too_old_steers_no_more_until_another_comes():
    edge = steered_edge(window=80, sampling=Sampling(max_tokens=500))
    commit(edge, (5,), vector_of(2))
    assert steered_by(draft(edge, 1)) == 2
    for _ in range(62):
        commit(edge, (7,))
    assert steered_by(draft(edge, 1)) is None
    assert edge.statistics.vector_age == 1 + 63
    for _ in range(2):
        commit(edge, (7,))
    assert steered_by(draft(edge, 1)) == "none"
    assert edge.statistics.steered_jobs == 2
    commit(edge, (7,), vector_of(67))
    assert steered_by(draft(edge, 1)) == 67


def test_a_vector_steers_only_as_long_as_the_drafter_gains_by_vectors_of_its_age():
    edge = steered_edge(window=80, policy=PricedSteering(RANK, ((1, 0.03), (4, 0.01), (6, -0.01))))
    commit(edge, (5,), vector_of(2))
    assert steered_by(draft(edge, 1)) == 2
    for _ in range(3):
        commit(edge, (7,))
    assert steered_by(draft(edge, 1)) is None  # four positions old: as it was
    commit(edge, (7,))
    assert steered_by(draft(edge, 1)) == "none"


def test_another_turn_begins_unsteered_and_its_vectors_count_after_its_prompt():
    edge = steered_edge(keep_s=9.0)
    commit(edge, (5, 6), vector_of(3))
    assert steered_by(draft(edge)) == 3
    edge.on_cancel()
    sent = edge.on_turn(4, (1, 2, 3), Sampling(max_tokens=40), 2.0)
    assert isinstance(sent[0].frame, Continue)
    job = draft(edge)
    assert steered_by(job) == "none"
    assert job.steer.since == 7
    commit(edge, (5,), vector_of(6))
    job = draft(edge)
    assert (steered_by(job), job.steer.since) == (6, 7)
    assert edge.statistics.steered
    assert (edge.statistics.vectors, edge.statistics.steered_jobs) == (1, 1), "of this turn"


@pytest.mark.parametrize(
    "bad",
    [
        Steering(1.0, b"", SteeringPrecision.INT8),
        Steering(1.0, bytes(RANK - 1), SteeringPrecision.INT8),
        Steering(1.0, bytes(2 * RANK + 2), SteeringPrecision.FLOAT16),
        Steering(1.0, np.array([1, np.nan, 0, 0], dtype="<f2").tobytes(), SteeringPrecision.FLOAT16),
        Steering(1.0, np.array([1, np.inf, 0, 0], dtype="<f2").tobytes(), SteeringPrecision.FLOAT16),
        Steering(3e38, bytes([127] * RANK), SteeringPrecision.INT8),
    ],
)
def test_a_malformed_vector_is_dropped_counted_and_logged_and_the_last_one_stays(bad, caplog):
    edge = steered_edge()
    commit(edge, (5,), vector_of(2))
    assert steered_by(draft(edge)) == 2
    with caplog.at_level(logging.WARNING):
        assert commit(edge, (6,), bad)[0].tokens == committed(6)
        commit(edge, (7,), bad)
    (logged,) = caplog.records
    assert logged.message.startswith("a steering vector of v was dropped: steering.")
    assert steered_by(draft(edge)) is None
    assert (edge.statistics.vectors, edge.statistics.bad_vectors, edge.statistics.steered_jobs) == (3, 2, 2)
    assert not edge.done
    commit(edge, (8,), vector_of(5))
    assert steered_by(draft(edge)) == 5


def test_a_changed_request_goes_with_a_report_once_and_an_unchanged_one_never():
    policy = FixedChoice(SteeringRate())
    edge = steered_edge(policy)
    commit(edge, (5,))
    assert all(report.steering is None for report in reports(commit(edge, (5,))))
    policy.rate = SteeringRate(every=4)
    (report,) = reports(commit(edge, (5,)))
    assert report.steering == SteeringRequest(REQUEST.projection, every=4)
    assert not reports(commit(edge, (5,)))
    policy.rate = SteeringRate(every=0)
    (report,) = reports(commit(edge, (5,)))
    assert report.steering.every == 0
    edge.on_disconnected(Unavailable("gone"), 1.0)
    assert edge.open_frame(b"", 1.1).steering == SteeringRequest(REQUEST.projection, every=0)
    edge.on_opened(consent(committed=5, steered=True), 1.2)
    assert all(report.steering is None for report in reports(commit(edge, (5,)))), "the Open has said it"


class FixedChoice:
    max_age = 64

    def __init__(self, rate):
        self.rate = rate
        self.seen = []

    def after_commit(self, measured):
        self.seen.append(measured)


def test_a_drafter_that_broke_requests_no_vectors_any_more():
    edge = steered_edge()
    (report,) = reports(edge.on_drafter_failed(Internal("broke")))
    assert (report.drafting, report.steering.every) == (False, 0)
    edge.on_disconnected(Unavailable("gone"), 1.0)
    assert edge.open_frame(b"", 1.1).steering.every == 0


def test_the_policy_sees_pace_lookahead_and_what_a_byte_takes():
    policy, measurements = FixedChoice(SteeringRate()), Measurements()
    edge = steered_edge(policy, measurements=measurements, sampling=Sampling(max_tokens=500))
    byte_s, now, rng = 1e-4, 1.0, random.Random(2)
    for index in range(60):
        job = edge.next_job(3)
        edge.on_drafted(job, (1, 2, 3)[: job.count], (0.9,) * job.count, 0.001, now)
        tokens = (7,) * rng.randint(1, 5)
        vector = vector_of(len(edge.transcript), SteeringPrecision.INT8) if index % 2 else None
        size = 6 * len(tokens) + (RANK + 12 if vector else 0)  # two bytes a token and four its log probability
        now += 0.03 + byte_s * size
        held_s = now - edge._meter._sent.echoed(edge.statistics.messages)[0] - 0.03 - byte_s * size
        answer = Commit(
            len(edge.transcript),
            tuple(map(CommittedToken, tokens, (0.0,) * len(tokens))),
            0,
            32,
            steering=vector,
            timing=Timing(echo=edge.statistics.messages, hold_s=held_s, verify_s=0.01),
        )
        edge.on_commit(answer, now)
    seen = policy.seen[-1]
    pace, downlink = seen.pace, seen.downlink.best
    assert downlink.byte_s == pytest.approx(byte_s, rel=0.1)
    assert 0 < downlink.doubt_s < 0.1 * byte_s
    assert pace.commit_s == pytest.approx(0.032, rel=0.05)
    assert pace.commit_tokens == pytest.approx(3, rel=0.3)
    assert seen.lookahead.value == pytest.approx(1), "each job follows the transcript's end"
    assert downlink.queued_s < pace.commit_s


def test_a_new_streams_first_round_trip_is_not_compared_with_the_old_ones():
    measurements = Measurements()
    edge = steered_edge(measurements=measurements)

    def answered(at):
        draft(edge, 1)
        timing = Timing(echo=edge.statistics.messages - sent_before, hold_s=0.0, verify_s=0.01)
        edge.on_commit(Commit(len(edge.transcript), committed(7), 0, 32, timing=timing), at)
        return measurements.downlink.best.weight

    sent_before = 0
    assert answered(1.03) == 0
    assert answered(1.03) == 1
    edge.on_disconnected(Unavailable("gone"), 1.1)
    edge.open_frame(b"", 1.2)
    edge.on_opened(consent(committed=2, steered=True), 1.3)
    sent_before = edge.statistics.messages
    assert answered(9.0) == 1
    assert answered(9.0) > 1

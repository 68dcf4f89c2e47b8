"""Measurements of one edge's texts pass on as snapshots, and no text changes those that another goes by."""

from __future__ import annotations

import math
import random
from dataclasses import asdict

from checked_simulation import CheckedSimulation, open_frame
from hand_driven import HandDrivenEdge, committed, drafts_of
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_drafters import drafter_of, hashing_oracle

from outrider.proto.policy import Measurements, Window
from outrider.proto.session import DraftJob, EdgeSession, Selection, SentMessages, SharedMeasurements, StreamReady
from outrider.proto.session.events import Drafted, EdgeEvent
from outrider.proto.types import Commit, Opened, Sampling, Timing


def measured_text() -> Measurements:
    """Measurements of a whole text."""
    oracle, frame = hashing_oracle(3, eos_odds=0), open_frame(sampling=Sampling(max_tokens=60))
    simulation = CheckedSimulation(frame, oracle, drafter_of(oracle, 3, 0.7, confidence="telling"))
    simulation.run()
    return simulation.edge.measurements


def test_a_copy_is_equal_and_shares_nothing_that_changes() -> None:
    original = measured_text()
    original.downlink.add(100, 0.01)
    original.lookahead.add(3)
    before, copied = asdict(original), original.copy()
    assert asdict(copied) == before
    copied.round_trip.add(40, 0.5)
    copied.step.add(3, 0.5)
    copied.pace.add(9.0, 1)
    copied.downlink.add(7, 0.5)
    copied.lookahead.add(50)
    for name in list(copied.drafters):
        copied.of(name).calibration.add(0.5, False)
        copied.of(name).drafting_s.add(9.0)
        copied.of(name).reading_s.add(9.0)
    copied.of("another")
    assert asdict(original) == before
    changed = asdict(copied)
    assert not [name for name in before if changed[name] == before[name] and name not in ("timed", "outliers")]


def events(edge: EdgeSession, seed: int) -> list[tuple[EdgeEvent, float]]:
    """Commits of a text, three tokens each."""
    rng = random.Random(seed)
    start = len(edge.transcript)
    return [
        (
            Commit(
                start + 3 * i, committed(5, 6, 7), 0, 32, verified=2, timing=Timing(verify_s=rng.uniform(0.02, 0.05))
            ),
            1.0 + 0.1 * i + rng.uniform(0, 0.05),
        )
        for i in range(10)
    ]


def opened_edge(measurements: Measurements | None) -> EdgeSession:
    edge = EdgeSession(open_frame(), Window(0), measurements=measurements)
    edge.handle(StreamReady(b""), 0.0)
    edge.handle(Opened(0, 32, 200, "v", 512), 0.1)
    return edge


def test_texts_that_take_turns_measure_as_if_they_wrote_into_one_book() -> None:
    book = Measurements()
    one_book = [opened_edge(book) for _ in range(2)]
    shared = SharedMeasurements()
    by_snapshots = []
    for _ in range(2):
        edge = opened_edge(shared.snapshot())
        shared.newest = edge.measurements
        by_snapshots.append(edge)
    queues = [events(edge, seed) for seed, edge in enumerate(one_book)]
    rng = random.Random(1)
    while any(queues):
        which = rng.choice([i for i, queue in enumerate(queues) if queue])
        event, now = queues[which].pop(0)
        one_book[which].handle(event, now)
        edge = by_snapshots[which]
        edge.handle(event, now, shared.newer_than(edge.measurements))
        shared.newest = edge.measurements
    assert asdict(shared.newest) == asdict(book)
    assert shared.newest.step.weight > 15, "both have measured"
    assert by_snapshots[0].measurements is not by_snapshots[1].measurements


def test_a_text_alone_is_given_no_copies() -> None:
    shared = SharedMeasurements()
    edge = EdgeSession(open_frame(), measurements=shared.snapshot())
    shared.newest = edge.measurements
    assert shared.newer_than(edge.measurements) is None
    edge.handle(StreamReady(b""), 0.0)
    assert edge.measurements is shared.newest


def test_a_snapshot_changes_the_next_jobs_length_and_the_worth_of_drafts_in_flight() -> None:
    edge = HandDrivenEdge(open_frame(), Window(), selection=Selection.of_one("a")).opened(
        Opened(0, 64, 200, "v", 512), 0.0, sent_at=-0.1
    )
    edge.on_commit(Commit(3, committed(1), 0, 64, timing=Timing(verify_s=0.03)), 0.1)
    edge.on_drafted(edge.next_job(2), (1, 2), (0.9, 0.9), 0.002, 0.102)
    before, allowed = edge.survival, edge.allowance()
    snapshot = edge.measurements.copy()
    for _ in range(300):
        snapshot.of("a").calibration.add(0.9, False)
    assert edge.survival == before, "a copy is nobody else's"
    assert edge.next_job(8, snapshot) is None
    assert edge.survival < 0.5 * before
    assert edge.allowance() < allowed


def test_what_this_text_has_shown_outlives_a_snapshot() -> None:
    edge = EdgeSession(open_frame(sampling=Sampling(max_tokens=200)), Window(1), job_tokens=lambda _: 1)
    edge.handle(StreamReady(b""), 0.0)
    instructions = edge.handle(Opened(0, 32, 200, "v", 512), 0.1)
    for position in range(3, 43):  # what it is sure of is wrong in this text
        (job,) = [instruction for instruction in instructions if isinstance(instruction, DraftJob)]
        edge.handle(Drafted(job, drafts_of((1,), (0.99,)), 0.001), 0.2)
        instructions = edge.handle(Commit(position, committed(2), 0, 32), 0.3)
    (job,) = [instruction for instruction in instructions if isinstance(instruction, DraftJob)]
    rosy = Measurements()
    for _ in range(300):
        rosy.of("").calibration.add(0.99, True)
    edge.handle(Drafted(job, drafts_of((1,), (0.99,)), 0.001), 0.4, rosy)
    assert edge._tree.survival(edge.drafter) < 0.3
    assert math.isclose(rosy.of("").calibration.chance(0.99), 0.995)


# === messages on their way ======================================================================================


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.just("send"), st.just("clear"), st.tuples(st.booleans(), st.integers(-1, 12)))))
def test_a_message_is_known_until_a_later_one_is_echoed(steps) -> None:
    sent, plain, oldest = SentMessages[str](), [], 1
    for step in steps:
        if step == "send":
            plain.append(f"message {len(plain) + 1}")
            sent.append(plain[-1])
        elif step == "clear":
            plain, oldest = [], 1
            sent.clear()
        else:
            once, number = step
            known = oldest <= number <= len(plain)
            got = sent.take(number) if once else sent.echoed(number)
            assert got == (plain[number - 1] if known else None)
            oldest = number + once if known else oldest
        assert len(sent) == len(plain) - oldest + 1


def test_a_long_text_keeps_no_times_of_messages_that_commits_have_echoed() -> None:
    oracle, frame = hashing_oracle(3, eos_odds=0), open_frame(sampling=Sampling(max_tokens=300))
    simulation = CheckedSimulation(frame, oracle, drafter_of(oracle, 3, 0.7, confidence="telling"))
    kept: list[int] = []
    receive = simulation.receive

    def watch(stream, received) -> None:
        receive(stream, received)
        kept.append(len(simulation.edge._meter._sent))

    simulation.receive = watch
    simulation.run()
    assert simulation.edge.statistics.messages > 30
    assert max(kept) <= 8

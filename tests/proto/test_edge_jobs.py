"""The machine issues its drafters' jobs itself, one at a time, and counts whose drafts were accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from checked_simulation import open_frame
from hand_driven import HandDrivenEdge, committed

from outrider.edge.selectors import FixedShare, Leader
from outrider.proto.errors import Internal, Unavailable
from outrider.proto.policy import Measurements, Window
from outrider.proto.policy.selector import StaticSelector
from outrider.proto.session import (
    CatchUpJob,
    CaughtUp,
    Disconnected,
    Drafted,
    DrafterFailed,
    DraftJob,
    EdgeInstruction,
    EdgeSession,
    Emit,
    Selection,
    Send,
    Started,
    StopRequested,
    StreamReady,
    TeacherForced,
)
from outrider.proto.types import Commit, CommittedToken, Draft, DraftToken, Open, Opened, Timing

OPENED = Opened(0, 16, 40, "v", 512, planned=False)


def edge(drafters: int = 1) -> EdgeSession:
    names = tuple("abc"[:drafters])
    selection = Selection(Leader(experts=FixedShare(arms=drafters)), names) if drafters > 1 else None
    return EdgeSession(open_frame(), Window(4), selection=selection, job_tokens=lambda _: 2)


def jobs(instructions: list[EdgeInstruction]) -> list[DraftJob | CatchUpJob]:
    return [instruction for instruction in instructions if isinstance(instruction, DraftJob | CatchUpJob)]


def drafted(job: DraftJob | CatchUpJob, *tokens: int) -> Drafted:
    assert isinstance(job, DraftJob)
    return Drafted(job, tuple(DraftToken(token, 0.5) for token in tokens), 0.001)


def test_opening_brings_the_first_job_and_each_answer_the_next() -> None:
    machine = edge()
    assert machine.handle(Started(), 0.0) == []
    (instruction,) = machine.handle(StreamReady(b"lease"), 0.0)
    assert isinstance(instruction, Send)
    assert isinstance(instruction.frame, Open)
    (first,) = jobs(machine.handle(OPENED, 0.1))
    assert first == DraftJob(0, (3, 1, 2), 2, 0)
    sent, second = machine.handle(drafted(first, 1, 2), 0.2)
    assert sent == Send(Draft(0, 3, tuple(map(DraftToken, (1, 2)))))
    assert second == DraftJob(5, (), 2, 0)
    assert jobs(machine.handle(drafted(second, 4, 5), 0.3)) == [], "four tokens are in flight"
    emit, _, third = machine.handle(Commit(3, (CommittedToken(1), CommittedToken(2)), 2, 16), 0.4)
    assert isinstance(emit, Emit)
    assert third == DraftJob(7, (), 2, 0)


def test_the_length_of_a_job_goes_by_the_speed_of_its_chains_drafter() -> None:
    measurements = Measurements()
    measurements.of("a").drafting_s.add(0.002)
    measurements.of("b").drafting_s.add(0.003)
    selection = Selection(StaticSelector(1), ("a", "b"))
    machine = EdgeSession(
        open_frame(),
        Window(8),
        measurements=measurements,
        selection=selection,
        job_tokens=lambda drafting_s: round(1000 * drafting_s),
    )
    machine.handle(StreamReady(b""), 0.0)
    (job,) = jobs(machine.handle(OPENED, 0.1))
    assert isinstance(job, DraftJob)
    assert (job.drafter, job.count) == (1, 3), "not two tokens, as of the drafter that was active before"


def test_drafters_read_the_prompt_once_the_open_has_left() -> None:
    machine = edge(drafters=2)
    assert machine.handle(Started(), 0.0) == []
    sent, *instructions = machine.handle(StreamReady(b""), 0.0)
    assert isinstance(sent, Send)
    assert isinstance(sent.frame, Open)
    for index in range(2):
        (job,) = jobs(instructions)
        assert isinstance(job, CatchUpJob)
        assert (job.drafter, job.tokens, job.skip, job.score) == (index, (3, 1, 2), 1, 2)
        instructions = machine.handle(CaughtUp(job, TeacherForced(log_q=(-1.0, -1.0)), 0.001), 0.01)
    assert instructions == []
    assert machine.statistics.read == 6


def test_a_failed_drafter_leaves_its_job_to_another_and_the_last_leaves_none() -> None:
    machine = edge(drafters=2)
    machine.handle(StreamReady(b""), 0.0)
    assert jobs(machine.handle(Disconnected(Unavailable("no")), 0.0)) == [], "the first one is still catching up"
    machine.handle(DrafterFailed(Internal("broken"), 0), 0.1)
    machine.handle(StreamReady(b""), 0.2)
    instructions = machine.handle(replace(OPENED, epoch=1), 0.3)
    assert jobs(instructions) == [], "the second one is catching up"
    (job,) = jobs(machine.handle(CaughtUp(CatchUpJob(1, 0, (3, 1, 2), 1, 2), TeacherForced(), 0.001), 0.4))
    assert (type(job), job.drafter) == (DraftJob, 1)
    assert jobs(machine.handle(DrafterFailed(Internal("broken"), 1), 0.5)) == []
    assert machine.handle(Commit(3, (CommittedToken(7),), 0, 16, epoch=1), 0.6)[0] == Emit(
        3, (CommittedToken(7),), (False,)
    )


def test_a_text_that_has_ended_asks_for_nothing_more() -> None:
    machine = edge()
    machine.handle(StreamReady(b""), 0.0)
    (job,) = jobs(machine.handle(OPENED, 0.1))
    assert jobs(machine.handle(StopRequested(), 0.2)) == []
    assert machine.handle(drafted(job, 1, 2), 0.3) == []


# --- counts ---


class Learning(Selection):
    """A selection that keeps the drafts that it learns of: verified, and accepted."""

    def __init__(self) -> None:
        super().__init__(StaticSelector(), ("d",))
        self.learned: list[tuple[int, int]] = []

    def learn(self, **counts) -> None:
        self.learned.append((counts["verified"], counts["accepted"]))
        super().learn(**counts)


def edge_of(selection: Selection | None = None) -> HandDrivenEdge:
    return HandDrivenEdge(open_frame(), Window(2), selection=selection).opened(
        Opened(0, 16, 40, "v", 512, planned=False, drafter_here="h@1")
    )


def test_the_verifiers_own_drafts_are_counted_apart_and_no_selector_learns_of_them():
    selection = Learning()
    edge = edge_of(selection)
    job = edge.next_job(8)
    edge.on_drafted(job, (5, 6), (0.5, 0.5), 0.001, 0.0)
    # Two drafts of the edge and two of the verifier's own, the last of which was wrong.
    commit = Commit(3, committed(5, 6, 7, 9), 3, 16, verified=4, verified_here=2, timing=Timing(drafting_s=0.25))
    edge.on_commit(commit, 1.0)
    counts = edge.statistics
    assert (counts.verified, counts.verified_cloud, counts.accepted, counts.accepted_cloud) == (4, 2, 3, 1)
    assert counts.cloud_drafting_s == 0.25
    assert counts.drafting_s == pytest.approx(0.001)
    assert counts.reading_s == 0.0
    assert selection.learned == [(2, 2)]


def test_where_the_verifier_alone_drafts_the_selector_learns_of_no_draft():
    selection = Learning()
    edge = edge_of(selection)
    edge.on_commit(Commit(3, committed(5, 6, 7), 2, 16, verified=2, verified_here=2), 1.0)
    assert selection.learned == [(0, 0)]
    assert (edge.statistics.accepted, edge.statistics.accepted_cloud) == (2, 2)


def test_a_commit_that_overlaps_the_transcript_counts_only_its_new_drafts():
    edge = edge_of()
    edge.on_commit(Commit(3, committed(5), 0, 16), 1.0)
    edge.on_commit(Commit(3, committed(5, 6, 7, 8), 3, 16, verified=3, verified_here=2), 2.0)
    assert (edge.statistics.accepted, edge.statistics.accepted_cloud) == (2, 2)


def test_a_job_that_ends_after_its_text_has_cost_its_time_too():
    edge = edge_of()
    job = edge.next_job(8)
    edge.on_cancel()
    edge.on_drafted(job, (5, 6), (0.5, 0.5), 0.125, 1.0)
    assert edge.statistics.drafting_s == 0.125
    assert edge.statistics.drafted == 0

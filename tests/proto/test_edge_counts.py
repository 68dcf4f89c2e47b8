"""An edge's counts where the verifier drafts, too: whose drafts were accepted, and who worked for how long."""

from __future__ import annotations

import pytest
from checked_simulation import open_frame
from hand_driven import HandDrivenEdge, committed

from outrider.proto.policy import Window
from outrider.proto.policy.selector import StaticSelector
from outrider.proto.session import Selection
from outrider.proto.types import Commit, Opened, Timing


class Learning(Selection):
    """A selection that keeps the drafts that it learns of: verified, and accepted."""

    def __init__(self) -> None:
        super().__init__(StaticSelector(), ("d",))
        self.learned: list[tuple[int, int]] = []

    def learn(self, **counts) -> None:
        self.learned.append((counts["verified"], counts["accepted"]))
        super().learn(**counts)


def edge_of(selection: Selection | None = None) -> HandDrivenEdge:
    edge = HandDrivenEdge(open_frame(), Window(2), selection=selection)
    edge.open_frame(b"", 0.0)
    edge.on_opened(Opened(0, 16, 40, "v", 512, planned=False, drafter_here="h@1"), 0.0)
    return edge


def test_the_verifiers_own_drafts_are_counted_apart_and_no_selector_learns_of_them():
    selection = Learning()
    edge = edge_of(selection)
    job = edge.next_job(8)
    edge.on_drafted(job, (5, 6), (0.5, 0.5), 0.001, 0.0)
    # Two drafts of the edge and two of the verifier's own, the last of which was wrong.
    commit = Commit(3, committed(5, 6, 7, 9), 3, 16, verified=4, verified_here=2, timing=Timing(drafting_s=0.25))
    edge.on_commit(commit, 1.0)
    counts = edge.statistics
    assert (counts.verified, counts.verified_here, counts.accepted, counts.accepted_here) == (4, 2, 3, 1)
    assert counts.drafting_here_s == 0.25
    assert counts.drafting_s == pytest.approx(0.001)
    assert counts.reading_s == 0.0
    assert selection.learned == [(2, 2)]


def test_where_the_verifier_alone_drafts_the_selector_learns_of_no_draft():
    selection = Learning()
    edge = edge_of(selection)
    edge.on_commit(Commit(3, committed(5, 6, 7), 2, 16, verified=2, verified_here=2), 1.0)
    assert selection.learned == [(0, 0)]
    assert (edge.statistics.accepted, edge.statistics.accepted_here) == (2, 2)


def test_a_commit_that_overlaps_the_transcript_counts_only_its_new_drafts():
    edge = edge_of()
    edge.on_commit(Commit(3, committed(5), 0, 16), 1.0)
    edge.on_commit(Commit(3, committed(5, 6, 7, 8), 3, 16, verified=3, verified_here=2), 2.0)
    assert (edge.statistics.accepted, edge.statistics.accepted_here) == (2, 2)


def test_a_job_that_ends_after_its_text_has_cost_its_time_too():
    edge = edge_of()
    job = edge.next_job(8)
    edge.on_cancel()
    edge.on_drafted(job, (5, 6), (0.5, 0.5), 0.125, 1.0)
    assert edge.statistics.drafting_s == 0.125
    assert edge.statistics.drafted == 0

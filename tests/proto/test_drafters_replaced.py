"""A turn that begins with other drafters: results of jobs for those before change nothing."""

from __future__ import annotations

import pytest
from checked_simulation import open_frame
from hand_driven import HandDrivenEdge, committed, frames

from outrider.proto.errors import Internal
from outrider.proto.policy import Window
from outrider.proto.policy.selector import StaticSelector
from outrider.proto.session import DrafterFailed, Selection, TurnBegun
from outrider.proto.types import Commit, Draft, FinishReason, Opened, Sampling

OPENED = Opened(0, 16, 40, "v", 512, vocab_size=8, keep_s=9.0)


def selection(*versions: str) -> Selection:
    names = ("general", "code")[: len(versions)]
    return Selection(StaticSelector(), names, versions=versions)


def edge_between_turns(*, job_runs: bool):
    """An edge whose first turn has ended, perhaps while a drafter was at work."""
    edge = HandDrivenEdge(open_frame(keep_s=9.0), Window(3), selection=selection("v1")).opened(OPENED)
    job = edge.next_job(3)
    assert job is not None
    if not job_runs:
        edge.on_drafted(job, (1, 2, 3), (), 0.001, 0.01)
    edge.on_commit(Commit(3, committed(7), 0, 16, finish=FinishReason.LENGTH), 0.1)
    return edge, job


def begin(edge: HandDrivenEdge, *versions: str) -> None:
    turn = TurnBegun(len(edge.transcript), (4,), Sampling(max_tokens=9), selection=selection(*versions))
    edge.handle(turn, 0.2)


@pytest.mark.parametrize("job_runs", [False, True])
def test_the_new_version_reads_all_and_the_old_ones_drafts_are_dropped(job_runs: bool) -> None:
    edge, old = edge_between_turns(job_runs=job_runs)
    begin(edge, "v2")
    assert edge.drafters == (("general", "v2"),)
    if job_runs:
        assert edge.next_job(3) is None
        assert frames(edge.on_drafted(old, (1, 2, 3), (), 0.001, 0.25), Draft) == []
    new = edge.next_job(3)
    assert new is not None
    assert (new.truncate_to, list(new.extend_with)) == (0, edge.transcript)
    (sent,) = frames(edge.on_drafted(new, (1, 2, 3), (), 0.001, 0.3), Draft)
    assert (sent.drafter, sent.drafter_version, sent.start) == ("general", "v2", len(edge.transcript))


def test_a_failure_of_the_old_version_is_not_the_new_ones() -> None:
    edge, _ = edge_between_turns(job_runs=True)
    begin(edge, "v2")
    edge.handle(DrafterFailed(Internal("broken"), 0), 0.25)
    assert edge.statistics.drafter_error == ""
    assert edge.next_job(3) is not None
    edge.handle(DrafterFailed(Internal("broken too"), 0), 0.3)
    assert "broken too" in edge.statistics.drafter_error
    assert edge.allowance() == 0


def test_a_version_that_is_broken_stays_so_among_others() -> None:
    edge, _ = edge_between_turns(job_runs=True)
    edge.handle(DrafterFailed(Internal("broken"), 0), 0.15)
    begin(edge, "v1")
    assert edge.next_job(3) is None
    edge.handle(Commit(len(edge.transcript), committed(7), 0, 16, finish=FinishReason.LENGTH, turn=1), 0.3)
    assert edge.done
    begin(edge, "v1", "v1")
    job = edge.next_job(3)
    assert job is not None
    assert job.drafter == 1

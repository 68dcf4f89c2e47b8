"""Drafts of both ends that a step verifies: as many as are worth a row that every session in it waits for."""

from __future__ import annotations

import pytest

from outrider.proto.policy.patience import Division
from outrider.proto.session import Drafted
from outrider.proto.session.both_ends import DraftingHere
from outrider.proto.session.verifier import VerifierRules, VerifierSession
from outrider.proto.types import Draft, DraftToken, Open, Sampling

RULES = VerifierRules("v", "m", "ab" * 32, 100, 400, frozenset({0}))
TOKEN_S = 0.02


def session_with(edge: int, here: int, drafts_here: int | None = None) -> VerifierSession:
    """Return a session with drafts of its edge, which the verifier's own continue, and a division."""
    frame = Open("m", "ab" * 32, (1, 2), Sampling(max_tokens=60), "s", drafts_here=drafts_here)
    session = VerifierSession(frame, RULES, 0.0, DraftingHere("own@1"))
    ends = session.ends
    assert ends is not None
    if edge:
        session.on_draft(Draft(0, 2, tuple(DraftToken(10 + i) for i in range(edge))), 0.0)
    if here:
        job = ends.propose(ends.chain(), here, 0.0)
        ends.take(Drafted(job.job, tuple(DraftToken(50 + i, 0.3) for i in range(here)), 0.001 * here))
    ends._division = Division(4, True, True, 0.0, TOKEN_S, TOKEN_S)
    return session


@pytest.mark.parametrize(("edge", "here"), [(0, 12), (4, 8)])
def test_fewer_drafts_are_verified_the_dearer_a_row(edge, here) -> None:
    session = session_with(edge, here)
    blocks = [len(session.block(0.03, row_s)) for row_s in (0.0, 0.001, 0.005, 0.01, 0.019, 0.1)]
    assert blocks[0] == edge + here, "free"
    assert blocks == sorted(blocks, reverse=True)
    assert len(set(blocks)) > 3
    assert blocks[-1] <= 1, "a probe at most"


def test_the_chances_of_the_drafts_decide() -> None:
    ends = session_with(0, 6).ends
    assert ends is not None
    survival = [ends.survival(n) for n in range(1, 7)]
    for index, chance in enumerate(survival):
        assert ends.worth_their_rows(chance * TOKEN_S * 0.999) == index + 1
        assert ends.worth_their_rows(chance * TOKEN_S * 1.001) == index


def test_co_located_drafting_verifies_what_it_was_asked_for() -> None:
    assert len(session_with(0, 6, drafts_here=6).block(0.03, 0.1)) == 6


def test_a_job_shares_its_thread_with_those_that_it_waits_for() -> None:
    here = DraftingHere("own@1")
    assert here.num_sharing == 1.0
    here.job_s.add(0.002)
    assert here.num_sharing == 1.0
    here.waiting_s.add(0.006)
    assert here.num_sharing == 4.0

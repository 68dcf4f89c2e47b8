"""Proposals of drafters that anybody may have written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from outrider.drafters.proposals import ProposalRule
from outrider.drafters.protocol import TokenPrefix
from outrider.edge.drafter_states import DrafterStates
from outrider.proto.session import CatchUpJob, DraftJob
from outrider.proto.types import DraftToken, Sampling


class AnyDrafter:
    """A drafter whose every answer is `answer`."""

    name, version, steering = "any", "1", None

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def open(self, rule: ProposalRule) -> Any:
        return _AnyState(self.answer)


class _AnyState(TokenPrefix):
    def __init__(self, answer: Any) -> None:
        super().__init__()
        self._answer = answer

    def propose(self, n: int) -> Any:
        return self._answer

    def propose_forced(self, tokens: Any) -> Any:
        return self._answer

    def score(self, tokens: Any) -> Any:
        return self._answer


def states() -> DrafterStates:
    return DrafterStates(ProposalRule(Sampling(), prompt_length=1))


WRONG = [
    None,
    5,
    "ab",
    [DraftToken(5), DraftToken(6)],
    (5, 6),
    (DraftToken(5), None),
    (DraftToken("5"), DraftToken(6)),  # type: ignore[arg-type]
    (DraftToken(5.0), DraftToken(6)),  # type: ignore[arg-type]
    (DraftToken(-2), DraftToken(6)),
    (DraftToken(1 << 40), DraftToken(6)),
    (DraftToken(5, confidence="x"), DraftToken(6)),  # type: ignore[arg-type]
    (DraftToken(5, perturbed_probability=None), DraftToken(6)),  # type: ignore[arg-type]
    (DraftToken(5, runners_up=("x",)), DraftToken(6)),  # type: ignore[arg-type]
    (DraftToken(5, runners_up=[6]), DraftToken(6)),  # type: ignore[arg-type]
    (DraftToken(5),) * 3,
]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_are_no_proposals_fails_in_the_drafters_job(wrong: Any) -> None:
    with pytest.raises(TypeError, match="the drafter"):
        states().do(DraftJob(0, (1,), 2, 0), AnyDrafter(wrong))
    with pytest.raises(TypeError, match="the drafter"):
        states().do(DraftJob(0, (1, 2, 3), 0, 0, skip=1, teacher_forced=2), AnyDrafter(wrong))
    with pytest.raises(TypeError, match="the drafter"):
        states().do(CatchUpJob(0, 0, (1, 2, 3), 1), AnyDrafter(wrong))


@pytest.mark.parametrize("scores", [np.zeros(1), np.zeros((2, 2)), np.array(["a", "b"]), np.array([None, 1.0])])
def test_scores_that_are_not_one_number_a_token_fail_in_the_drafters_job(scores: Any) -> None:
    with pytest.raises(TypeError, match="one number a token"):
        states().do(CatchUpJob(0, 0, (1, 2, 3), 1, 2), AnyDrafter(scores))


@pytest.mark.parametrize("number", [0.5, 1, np.float32(0.5), np.float64(0.5)])
def test_proposals_and_scores_may_be_numpys_numbers(number: Any) -> None:
    right = (DraftToken(np.int64(5), number, number, (6, 7)),)  # type: ignore[arg-type]
    drafted = states().do(DraftJob(0, (1,), 2, 0), AnyDrafter(right))
    assert drafted.drafts == right  # type: ignore[union-attr]
    caught_up = states().do(CatchUpJob(0, 0, (1, 2), 1, 1), AnyDrafter(np.array([number])))
    assert caught_up.teacher_forced.log_q == (number,)

"""Values of wrong types in a caller's request: each is refused by name, and none gets as far as a frame."""

from __future__ import annotations

import dataclasses
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_cloud import ScriptedStream, scripted_client

from outrider.drafters.proposals import ProposalRule
from outrider.drafters.protocol import TokenPrefix
from outrider.edge import Client
from outrider.edge.drafter_states import DrafterStates
from outrider.proto import codec
from outrider.proto.errors import InvalidArgument
from outrider.proto.session import CatchUpJob, DraftJob
from outrider.proto.types import CommittedToken, DraftToken, EdgeFrame, Sampling

WRONG = ("a\ud800b", "\udc00", 1.5, -1, 1 << 70, float("nan"), 1j, Decimal("0.5"), b"ab", [1.5], [True], ["x"], [None])
WRONG = (*WRONG, [[1]], {1: 2}, [1, 2.0], [1 << 40], [(1, "x")], [(1, 2, 3)], {5}, object(), np.array([1.5]))
NUMBERS = {field.name for field in dataclasses.fields(Sampling) if isinstance(field.default, float)}
RIGHT = {"stop": (["x"],), **dict.fromkeys(NUMBERS, (1.5, -1))}  # what a setting may have of these, or may not
SETTINGS = ["prompt", "prediction", "stop", "top_logprobs", "prompt_logprobs", "request_id"]
SETTINGS += [field.name for field in dataclasses.fields(Sampling)]
FIELDS = {"prompt": "open.prompt", "logit_bias": "sampling.bias"}  # beginnings of their names in errors


@pytest.fixture
def sent(monkeypatch) -> list[EdgeFrame]:
    """Return the list of the frames that are sent, which the wire can carry."""
    frames: list[EdgeFrame] = []
    send = ScriptedStream.send

    def encoded(self: ScriptedStream, frame: EdgeFrame) -> None:
        codec.encode_edge_frame(frame)
        frames.append(frame)
        send(self, frame)

    monkeypatch.setattr(ScriptedStream, "send", encoded)
    return frames


def client_of(tokenizer: Path) -> Client:
    client, channels = scripted_client(tokenizer, drafter="ngram")
    channels.script = lambda _: [CommittedToken(5)] * 200
    return client


@pytest.mark.parametrize("setting", SETTINGS)
async def test_a_value_that_a_setting_cannot_have_is_refused_by_its_name(tokenizer_file, sent, setting) -> None:
    async with client_of(tokenizer_file) as client:
        for value in WRONG:
            if repr(value) in map(repr, RIGHT.get(setting, ())):
                continue
            with pytest.raises(InvalidArgument) as caught:
                await client.complete(**{"prompt": [3, 4], "max_tokens": 3, setting: value})
            field = str(caught.value.field)
            assert field.startswith((setting, f"sampling.{setting}", FIELDS.get(setting, setting))), value
    assert sent == []


@pytest.mark.parametrize("tokens", [np.array([3, 4]), [np.int64(3), np.uint32(4)], range(3, 5), (3, 4)])
async def test_ids_may_be_whole_numbers_of_any_kind(tokenizer_file, sent, tokens) -> None:
    async with client_of(tokenizer_file) as client:
        whole = await client.complete(tokens, prediction=tokens, stop_tokens=(np.int64(9),), max_tokens=3)
    assert whole.ids == (5, 5, 5)
    assert sent[0].prompt == (3, 4)  # type: ignore[union-attr]


# --- proposals of drafters that anybody may have written ---


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


NO_PROPOSALS = [
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


@pytest.mark.parametrize("wrong", NO_PROPOSALS)
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

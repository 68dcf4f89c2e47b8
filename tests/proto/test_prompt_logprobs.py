"""Log probabilities of a prompt at its edge: whole before the first token, also where streams are lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from checked_simulation import open_frame
from hand_driven import HandDrivenEdge, committed

from outrider.proto.errors import InvalidArgument, Unavailable
from outrider.proto.session import Done, Emit, Reopen
from outrider.proto.types import Commit, FinishReason, Opened, PromptLogprobs, Sampling, TokenFacts

OPENED = Opened(0, 64, 40, "v", 512, vocab_size=8)
SCORES = tuple(TokenFacts(-float(i), i, ((i, -0.5),)) for i in range(1, 6))  # of a prompt of six
FIRST = Commit(6, committed(1), 0, 64)


def opened(prompt_logprobs: int | None = 1) -> HandDrivenEdge:
    edge = HandDrivenEdge(open_frame(prompt=(3, 1, 2, 4, 5, 6), prompt_logprobs=prompt_logprobs))
    assert edge.open_frame(b"", 0.0).prompt_logprobs == prompt_logprobs
    edge.on_opened(OPENED, 0.1)
    return edge


def says(edge: HandDrivenEdge, start: int, end: int) -> None:
    """The verifier tells of the tokens at `start` and before `end`."""
    frame = PromptLogprobs(start, SCORES[start - 1 : end - 1], edge._stream.epoch)
    assert edge.handle(frame, 0.2) == []


def lose(edge: HandDrivenEdge) -> int | None:
    """Lose the stream, open another, and return what that asks for."""
    (reopen,) = edge.on_disconnected(Unavailable("gone"), 0.3)
    assert isinstance(reopen, Reopen)
    asked = edge.open_frame(b"", 0.4).prompt_logprobs
    edge.on_opened(replace(OPENED, committed=len(edge.transcript) - 6), 0.5)
    return asked


def test_the_first_tokens_bring_them_and_later_ones_do_not() -> None:
    edge = opened()
    says(edge, 1, 3)
    says(edge, 3, 6)
    (first, *_) = edge.on_commit(FIRST, 0.3)
    assert first == Emit(6, committed(1), (False,), SCORES)
    (second, *_) = edge.on_commit(Commit(7, committed(2), 0, 64), 0.4)
    assert second == Emit(7, committed(2), (False,))


def test_a_later_stream_asks_for_those_that_have_not_come_and_takes_all() -> None:
    edge = opened()
    says(edge, 1, 3)
    edge.on_disconnected(Unavailable("gone"), 0.3)
    assert edge.open_frame(b"", 0.4).prompt_logprobs_from == 3
    edge.on_opened(OPENED, 0.5)
    says(edge, 1, 4)  # as an older verifier does
    says(edge, 4, 6)
    assert edge.on_commit(FIRST, 0.6)[0] == Emit(6, committed(1), (False,), SCORES)
    edge.on_disconnected(Unavailable("gone"), 0.7)
    again = edge.open_frame(b"", 0.8)
    assert (again.prompt_logprobs, again.prompt_logprobs_from) == (None, 0)


def test_tokens_that_come_before_them_end_the_text_by_name() -> None:
    for known in (1, 5):
        edge = opened()
        if known > 1:
            says(edge, 1, known)
        (done,) = edge.on_commit(FIRST, 0.3)
        assert isinstance(done, Done)
        assert isinstance(done.error, InvalidArgument)
        assert done.error.field == "open.prompt_logprobs"
    (emitted, *_) = opened(None).on_commit(FIRST, 0.3)
    assert emitted == Emit(6, committed(1), (False,)), "nobody asked"


@pytest.mark.parametrize("known", [1, 3])
def test_a_verifier_that_takes_over_amid_the_prompt_begins_again(known: int) -> None:
    edge = opened()
    if known > 1:
        says(edge, 1, known)
    assert lose(edge) == 1, "the new one is asked, too"
    says(edge, 1, 2)
    says(edge, 2, 6)
    (emitted, *_) = edge.on_commit(FIRST, 0.6)
    assert emitted.prompt == SCORES


def test_scores_of_one_prompt_come_in_one_precision() -> None:
    edge = HandDrivenEdge(open_frame(prompt=(3, 1, 2, 4, 5, 6), prompt_logprobs=1)).opened(
        replace(OPENED, precision="float32"), 0.1
    )
    assert edge.precision == "", "any may score it as yet"
    says(edge, 1, 3)
    assert edge.precision == "float32"
    edge.on_disconnected(Unavailable("cut"), 0.2)
    edge.open_frame(b"", 0.3)
    (reopen,) = edge.on_opened(replace(OPENED, precision="bfloat16"), 0.4)
    assert isinstance(reopen, Reopen)
    assert reopen.reason.field == "opened.precision"


def test_a_verifier_that_takes_over_the_text_is_not_asked_again() -> None:
    edge = opened()
    says(edge, 1, 6)
    assert lose(edge) is None, "all have come"
    (emitted, *_) = edge.on_commit(FIRST, 0.6)
    assert emitted.prompt == SCORES
    assert lose(edge) is None
    (emitted, *_) = edge.on_commit(Commit(7, committed(2), 0, 64), 0.7)
    assert emitted.prompt == ()


def test_what_repeats_leaves_a_gap_or_comes_from_a_stream_that_was_left_is_ignored() -> None:
    edge = opened()
    says(edge, 1, 3)
    says(edge, 1, 3)
    says(edge, 5, 6)
    assert edge._text.prompt == list(SCORES[:2])
    lose(edge)
    edge.handle(PromptLogprobs(3, SCORES[2:], epoch=0), 0.6)
    assert edge._text.prompt == list(SCORES[:2])
    assert edge.statistics.fenced == 1
    beyond = PromptLogprobs(2, (*SCORES[1:], *SCORES), edge._stream.epoch)
    edge.handle(beyond, 0.7)
    assert edge._text.prompt == list(SCORES), "as many as the prompt has"


def test_the_next_turn_asks_for_none() -> None:
    edge = HandDrivenEdge(
        open_frame(prompt=(3, 1), prompt_logprobs=0, keep_s=10.0, sampling=Sampling(max_tokens=1))
    ).opened(replace(OPENED, max_tokens=1, keep_s=10.0), 0.1)
    edge.handle(PromptLogprobs(1, (TokenFacts(-1.0, 1),)), 0.2)
    edge.on_commit(Commit(2, committed(1), 0, 64, finish=FinishReason.LENGTH), 0.3)
    edge.on_turn(3, (4, 5), Sampling(max_tokens=1), 0.4)
    (emitted, *_) = edge.on_commit(Commit(5, committed(2), 0, 64, turn=1, finish=FinishReason.LENGTH), 0.5)
    assert emitted.prompt == ()

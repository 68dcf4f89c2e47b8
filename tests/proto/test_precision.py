"""The precision of a text: that of the verifier which began it, wherever it goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from checked_simulation import open_frame, rules
from hand_driven import HandDrivenEdge, committed

from outrider.proto.errors import InvalidArgument, Unavailable
from outrider.proto.policy import Window
from outrider.proto.session import Done, Reopen, RetryRules, Send
from outrider.proto.session.verifier import VerifierSession
from outrider.proto.types import Commit, Continue, FinishReason, Opened, Sampling

SAMPLING = Sampling(max_tokens=8)
OPENED = Opened(0, 64, 8, "v", 512, vocab_size=8, keep_s=9.0)
FLOAT32, BFLOAT16 = replace(OPENED, precision="float32"), replace(OPENED, precision="bfloat16")


def edge_begun(opened=FLOAT32, tokens=(4, 5)):
    """An edge whose stream was cut after `tokens`, and that has asked for another one."""
    edge = HandDrivenEdge(open_frame(sampling=SAMPLING, keep_s=9.0), Window(4), RetryRules(0.05, 2.0, 60.0)).opened(
        opened, 0.1
    )
    if tokens:
        edge.on_commit(Commit(3, committed(*tokens), 0, 64), 0.2)
    edge.on_disconnected(Unavailable("cut"), 0.3)
    edge.open_frame(b"", 0.4)
    return edge


def test_a_verifier_states_its_precision():
    session = VerifierSession(open_frame(), rules(precision="vllm bfloat16"), 0.0)
    assert session.opened().precision == "vllm bfloat16"


@pytest.mark.parametrize(("begun", "resumed"), [(FLOAT32, OPENED), (OPENED, BFLOAT16), (OPENED, OPENED)])
def test_an_unknown_precision_is_any(begun, resumed):
    edge = edge_begun(begun)
    edge.on_opened(replace(resumed, committed=2), 0.5)
    assert edge.connected
    assert edge.precision == (begun.precision or resumed.precision)


def test_a_known_precision_is_kept_over_a_verifier_that_states_none():
    edge = edge_begun()
    edge.on_opened(replace(OPENED, committed=2), 0.5)
    edge.on_disconnected(Unavailable("cut"), 0.6)
    edge.open_frame(b"", 0.7)
    assert isinstance(edge.on_opened(replace(BFLOAT16, committed=2), 0.8)[0], Reopen)


def test_a_text_without_a_token_may_begin_anywhere():
    edge = edge_begun(tokens=())
    assert edge.precision == ""
    edge.on_opened(BFLOAT16, 0.5)
    assert edge.connected
    edge.on_commit(Commit(3, committed(7), 0, 64), 0.6)
    assert edge.precision == "bfloat16"


def test_retries_end_with_an_error_that_names_the_precision_and_the_remedy():
    edge = edge_begun()
    now, waits = 0.5, []
    for _ in range(100):
        (outcome,) = edge.on_opened(replace(BFLOAT16, committed=2), now)
        if isinstance(outcome, Done):
            break
        waits.append(outcome.after_s)
        edge.open_frame(b"", now := now + outcome.after_s)
    assert 60 < now - 0.3 < 64
    assert waits[:3] == [0.1, 0.2, 0.4], "the first wait was for the cut"
    assert max(waits) == 2.0
    assert outcome.error is not None
    assert outcome.error.field == "opened.precision"
    assert "is bfloat16 at verifier v, the text was begun in float32" in str(outcome.error)
    assert "--dtype" in str(outcome.error)


def test_the_last_error_tells_of_the_precision_though_another_one_was_down():
    edge = edge_begun()
    edge.on_opened(replace(BFLOAT16, committed=2), 0.5)
    edge.open_frame(b"", 0.6)
    (done,) = edge.on_disconnected(Unavailable("nobody there"), 61.0)
    assert isinstance(done, Done)
    assert "begun in float32" in str(done.error)


def test_an_error_that_no_verifier_can_heal_is_told_as_it_is():
    edge = edge_begun()
    edge.on_opened(replace(BFLOAT16, committed=2), 0.5)
    edge.open_frame(b"", 0.6)
    refused = InvalidArgument("wrong", field="open.prompt")
    (done,) = edge.on_disconnected(refused, 0.7)
    assert done == Done(None, refused)


def test_an_old_refusal_is_forgotten_when_a_verifier_has_answered():
    edge = edge_begun()
    edge.on_opened(replace(BFLOAT16, committed=2), 0.5)
    edge.open_frame(b"", 0.6)
    edge.on_opened(replace(FLOAT32, committed=2), 0.7)
    edge.on_commit(Commit(5, committed(6), 0, 64), 0.8)
    edge.on_disconnected(Unavailable("cut"), 0.9)
    gone = Unavailable("nobody there")
    assert edge.on_disconnected(gone, 99.0) == [Done(None, gone)]


def test_the_next_turn_is_a_text_of_its_own():
    edge = HandDrivenEdge(open_frame(sampling=SAMPLING, keep_s=9.0), Window(4)).opened(FLOAT32, 0.1)
    edge.on_commit(Commit(3, committed(4, 5), 0, 64, finish=FinishReason.EOS), 0.2)
    (sent,) = edge.on_turn(5, (6,), SAMPLING, 1.0)
    assert sent == Send(Continue(5, (6,), None, 0))
    assert edge.precision == "", "it has no token yet"
    edge.on_commit(Commit(6, committed(7), 0, 64, turn=1), 1.1)
    assert edge.precision == "float32", "on the stream of before"
    edge.on_disconnected(Unavailable("cut"), 1.2)
    edge.open_frame(b"", 1.3)
    assert isinstance(edge.on_opened(replace(BFLOAT16, committed=1), 1.4)[0], Reopen)

"""The positions that a text was promised: it ends where its first verifier would have ended it, wherever it goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from checked_simulation import open_frame, rules
from hand_driven import HandDrivenEdge, committed

from outrider.proto.errors import InvalidArgument, PromptTooLong, Unavailable
from outrider.proto.policy import Window
from outrider.proto.session import Done, Reopen, RetryRules, Send
from outrider.proto.session.verifier import VerifierSession
from outrider.proto.types import Commit, Continue, FinishReason, Opened, Sampling

SAMPLING = Sampling(max_tokens=40)
OPENED = Opened(0, 64, 13, "v", 16, vocab_size=8, keep_s=9.0)  # after a prompt of 3 tokens


def edge_begun(tokens=(4, 5), opened=OPENED):
    """An edge whose stream was cut after `tokens`, with the Open of its next one."""
    edge = HandDrivenEdge(open_frame(sampling=SAMPLING, keep_s=9.0), Window(4), RetryRules(0.05, 2.0, 60.0)).opened(
        opened, 0.1
    )
    if tokens:
        edge.on_commit(Commit(3, committed(*tokens), 0, 64), 0.2)
    edge.on_disconnected(Unavailable("cut"), 0.3)
    return edge, edge.open_frame(b"", 0.4)


def resumed(context_length: int, committed=(4, 5), **changes):
    return open_frame(sampling=SAMPLING, committed=committed, context_length=context_length, **changes)


def test_a_text_without_a_token_was_promised_nothing_and_needs_room_for_its_first():
    edge, frame = edge_begun(tokens=())
    assert frame.context_length == 0
    assert edge.needed_context == 4


def test_a_short_text_needs_no_more_positions_than_it_can_fill():
    edge, frame = edge_begun(opened=replace(OPENED, max_tokens=40, context_length=4096))
    assert frame.context_length == 43
    assert edge.needed_context == 43


def test_a_verifier_with_fewer_positions_sends_the_text_elsewhere():
    with pytest.raises(Unavailable, match=r"is 16 .* has 15; start another one with the --context-length") as refusal:
        VerifierSession(resumed(16), rules(context_length=15), 0.0)
    assert refusal.value.field == "open.context_length"


@pytest.mark.parametrize("frame", [resumed(0), resumed(0, prompt=(3,) * 9)])
def test_a_text_of_an_older_edge_goes_elsewhere_for_want_of_room(frame):
    with pytest.raises(Unavailable):
        VerifierSession(frame, rules(context_length=5), 0.0)


def test_a_fresh_prompt_that_does_not_fit_is_refused_for_good():
    with pytest.raises(PromptTooLong):
        VerifierSession(open_frame(prompt=(3,) * 9), rules(context_length=5), 0.0)


def test_a_text_that_fills_what_it_was_promised_cannot_go_on():
    with pytest.raises(InvalidArgument, match="nothing is left") as refusal:
        VerifierSession(resumed(5), rules(), 0.0)
    assert refusal.value.field == "open.committed"


@pytest.mark.parametrize(("max_tokens", "context_length"), [(5, 8), (40, 512)])
def test_an_edge_refuses_an_older_verifier_that_would_end_its_text_elsewhere(max_tokens, context_length):
    edge, _ = edge_begun()
    other = replace(OPENED, committed=2, max_tokens=max_tokens, context_length=context_length)
    (reopen,) = edge.on_opened(other, 0.5)
    assert isinstance(reopen, Reopen)
    assert reopen.reason.field == "opened.max_tokens"
    edge.open_frame(b"", 0.6)
    (done,) = edge.on_disconnected(Unavailable("nobody there"), 61.0)
    assert isinstance(done, Done)
    assert f"is {max_tokens} at verifier v, the text was promised 13" in str(done.error)


def test_an_edge_takes_a_verifier_that_keeps_the_promise_whatever_it_holds():
    edge, _ = edge_begun()
    edge.on_opened(replace(OPENED, committed=2, context_length=512), 0.5)
    assert edge.connected
    edge.on_disconnected(Unavailable("cut"), 0.6)
    assert edge.open_frame(b"", 0.7).context_length == 16, "the promise is that of the first"


def test_the_next_turn_of_a_kept_session_is_promised_what_its_verifier_holds():
    session = VerifierSession(resumed(16, keep_s=9.0), rules(context_length=512, keep_s=9.0), 0.0)
    session.on_cancel()
    assert session.continued(Continue(5, (6,), SAMPLING, 1), 1.0).sampling.max_tokens == 40


def test_an_edge_promises_the_next_turn_what_its_verifier_holds():
    edge, _ = edge_begun()
    edge.on_opened(replace(OPENED, committed=2, context_length=32), 0.5)
    edge.on_commit(Commit(5, committed(6), 0, 64, finish=FinishReason.EOS), 0.6)
    (sent,) = edge.on_turn(6, (7,), SAMPLING, 1.0)
    assert isinstance(sent, Send)
    assert edge.needed_context == 8, "it has no token yet"
    edge.on_commit(Commit(7, committed(1), 0, 64, turn=1), 1.1)
    edge.on_disconnected(Unavailable("cut"), 1.2)
    assert edge.open_frame(b"", 1.3).context_length == 32

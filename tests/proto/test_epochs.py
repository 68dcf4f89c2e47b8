"""A stream that was left is fenced: whatever its verifier still says when it wakes changes nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from checked_simulation import open_frame, rules
from hand_driven import HandDrivenEdge, committed

from outrider.proto.errors import Unavailable
from outrider.proto.session import EdgeSession, Emit, Reopen
from outrider.proto.session.verifier import Verified, VerifierSession
from outrider.proto.types import CloudFrame, Commit, FinishReason, Goaway, Opened, Pong

OPENED = Opened(0, 64, 40, "v", 512, vocab_size=8)


class Unfenced(HandDrivenEdge):
    """Takes every frame for one of the present stream, as before there were epochs."""

    def handle(self, event, now, measurements=None):
        ours = isinstance(event, Opened | Commit | Goaway | Pong)
        return super().handle(self._of_this_stream(event) if ours else event, now, measurements)


LATE: dict[str, CloudFrame] = {
    "the end of a text that it takes for cancelled": Commit(4, (), 0, 64, finish=FinishReason.CANCELLED),
    "tokens that it had ahead": Commit(6, committed(5), 0, 64),
    "tokens with another credit": Commit(4, committed(2), 0, 1),
    "a drain": Goaway("the verifier is draining"),
}


def resumed(kind: type[HandDrivenEdge]) -> HandDrivenEdge:
    """An edge whose first stream was lost after one token, and which goes on in a second."""
    edge = kind(open_frame())
    edge.open_frame(b"", 0.0)
    edge.on_opened(OPENED, 0.1)
    edge.on_commit(Commit(3, committed(1), 0, 64), 0.2)
    (reopen,) = edge.on_disconnected(Unavailable("silent"), 1.0)
    assert isinstance(reopen, Reopen)
    assert edge.next_epoch == 1
    assert edge.open_frame(b"", 1.1).epoch == 1
    edge.on_opened(replace(OPENED, committed=1), 1.2)
    return edge


def state(edge: EdgeSession) -> tuple[object, ...]:
    return tuple(edge.transcript), edge.done, edge.finish, edge.connected, edge._stream.credit


@pytest.mark.parametrize("name", LATE)
def test_late_frames_of_a_stream_that_was_left_change_nothing(name: str) -> None:
    edge = resumed(HandDrivenEdge)
    before = state(edge)
    assert edge.handle(LATE[name], 1.3) == []
    assert state(edge) == before
    assert edge.statistics.fenced == 1
    (emitted, *_) = edge.on_commit(Commit(4, committed(2), 0, 64), 1.4)
    assert emitted == Emit(4, committed(2), (False,)), "the new stream goes on"


@pytest.mark.parametrize("name", LATE)
def test_without_the_check_the_same_frames_disturb(name: str) -> None:
    edge = resumed(Unfenced)
    before = state(edge)
    edge.handle(LATE[name], 1.3)
    assert state(edge) != before


def test_an_answer_to_an_open_that_was_given_up_does_not_open_the_next_stream() -> None:
    edge = HandDrivenEdge(open_frame())
    edge.open_frame(b"", 0.0)
    edge.on_disconnected(Unavailable("silent"), 3.0)
    edge.open_frame(b"", 3.1)
    assert edge.handle(OPENED, 3.2) == []
    assert not edge.connected
    edge.on_opened(OPENED, 3.3)
    assert edge.connected


def test_every_frame_of_a_verifier_carries_the_epoch_of_its_open() -> None:
    session = VerifierSession(open_frame(committed=(1,), epoch=7), rules(), 0.0)
    assert session.opened().epoch == 7
    assert session.on_verified(Verified((), committed(4)), 1.0).epoch == 7
    assert session.on_cancel().epoch == 7

"""`min_tokens` between an edge and a verifier: checks, resumes, turns, and sides that do not know the field."""

from __future__ import annotations

from dataclasses import replace

import pytest
from checked_simulation import open_frame, rules
from hand_driven import HandDrivenEdge, committed

from outrider.proto import codec
from outrider.proto.errors import InvalidArgument, Unavailable
from outrider.proto.policy import Window
from outrider.proto.session import Done, Send
from outrider.proto.session.verifier import VerifierSession
from outrider.proto.types import LATER_SETTINGS, Commit, Continue, FinishReason, Opened, Sampling
from outrider.proto.v1 import decoding_pb2 as pb

HELD = Sampling(max_tokens=8, min_tokens=5)
OPENED = Opened(0, 64, 8, "v", 512, vocab_size=8, keep_s=9.0, settings=LATER_SETTINGS, eos_tokens=(0,))
OLD = replace(OPENED, settings=(), eos_tokens=())


def edge_of(sampling):
    edge = HandDrivenEdge(open_frame(sampling=sampling, keep_s=9.0), Window(4))
    edge.open_frame(b"", 0.0)
    return edge


@pytest.mark.parametrize(("fields", "words"), [({"min_tokens": -1}, "0"), ({"min_tokens": 9, "max_tokens": 8}, "8")])
def test_fewer_than_none_and_more_than_all_are_refused_by_name(fields, words):
    with pytest.raises(InvalidArgument, match=words) as raised:
        Sampling(**fields)
    assert raised.value.field == "sampling.min_tokens"
    assert Sampling(min_tokens=8, max_tokens=8).min_tokens == 8


def test_a_verifier_refuses_more_than_max_tokens_from_the_wire():
    wire = pb.EdgeFrame.FromString(codec.encode_edge_frame(open_frame(sampling=HELD)))
    wire.open.sampling.min_tokens = 9
    with pytest.raises(InvalidArgument) as raised:
        codec.decode_edge_frame(wire.SerializeToString())
    assert raised.value.field == "sampling.min_tokens"


def test_a_verifier_says_that_it_knows_the_field_and_names_its_ends():
    opened = VerifierSession(open_frame(), rules(eos_tokens=frozenset({7, 0})), 0.0).opened()
    assert (opened.settings, opened.eos_tokens) == (LATER_SETTINGS, (0, 7))


def test_a_verifier_that_does_not_know_the_field_gets_no_text():
    wire = pb.CloudFrame.FromString(codec.encode_cloud_frame(OPENED))
    wire.opened.ClearField("settings")
    wire.opened.ClearField("eos_tokens")
    old = codec.decode_cloud_frame(wire.SerializeToString())
    assert old == OLD
    edge = edge_of(HELD)
    (done,) = edge.on_opened(old, 0.1)
    assert isinstance(done, Done)
    assert isinstance(done.error, InvalidArgument)
    assert done.error.field == "sampling.min_tokens"
    assert "update it" in done.error.message
    without = edge_of(replace(HELD, min_tokens=0))
    without.on_opened(old, 0.1)
    assert without.connected, "a text without it goes on there"


def test_a_text_does_not_move_to_a_verifier_that_does_not_know_the_field():
    edge = edge_of(HELD)
    edge.on_opened(OPENED, 0.1)
    edge.on_commit(Commit(3, committed(4, 5), 0, 64), 0.2)
    edge.on_disconnected(Unavailable("cut"), 0.3)
    resumed = edge.open_frame(b"", 0.4)
    assert (resumed.committed, resumed.sampling.min_tokens) == ((4, 5), 5)
    (done,) = edge.on_opened(replace(OLD, committed=2, epoch=1), 0.5)
    assert done.error.field == "sampling.min_tokens"


def test_a_turn_is_refused_where_the_field_is_not_known_and_nothing_has_changed():
    edge = edge_of(replace(HELD, min_tokens=0))
    edge.on_opened(OLD, 0.1)
    edge.on_commit(Commit(3, committed(4, 5), 0, 64, finish=FinishReason.EOS), 0.2)
    with pytest.raises(InvalidArgument) as raised:
        edge.on_turn(5, (6,), HELD, 1.0)
    assert raised.value.field == "sampling.min_tokens"
    (sent,) = edge.on_turn(5, (6,), replace(HELD, min_tokens=0), 1.1)
    assert sent == Send(Continue(5, (6,), None, 0))


def test_each_turn_counts_from_the_end_of_its_own_prompt():
    session = VerifierSession(open_frame(sampling=HELD, keep_s=9.0), rules(), 0.0)
    session.on_cancel()
    turn = session.continued(Continue(3, (1, 2), replace(HELD, min_tokens=2)), 1.0)
    assert (turn.prompt_length, turn.sampling.min_tokens) == (5, 2)

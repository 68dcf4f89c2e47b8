"""Which noise a text is drawn with: the verifier's unless the session asks, named once, and the same to the end."""

from __future__ import annotations

from dataclasses import replace

import pytest
from checked_simulation import open_frame, rules
from hand_driven import HandDrivenEdge, committed

from outrider.proto import codec
from outrider.proto.errors import InvalidArgument, Unavailable
from outrider.proto.policy import Window
from outrider.proto.session import Done, Reopen, Send, VerifierSession
from outrider.proto.types import Commit, Continue, FinishReason, Noise, Opened, Sampling
from outrider.proto.v1 import decoding_pb2 as pb

DRAWN = Sampling(temperature=1.0, max_tokens=8)
OF_VLLM = replace(DRAWN, noise=Noise.VLLM)
OPENED = Opened(0, 64, 8, "v", 512, vocab_size=8, keep_s=9.0)


def edge_of(sampling):
    return HandDrivenEdge(open_frame(sampling=sampling, keep_s=9.0), Window(4))


# === the verifier ===============================================================================================


@pytest.mark.parametrize("of_verifier", Noise)
@pytest.mark.parametrize("asked", [None, *Noise])
def test_a_session_gets_the_noise_that_it_asks_for_or_else_the_verifiers(asked, of_verifier):
    frame = open_frame(sampling=replace(DRAWN, noise=asked))
    session = VerifierSession(frame, rules(noise=of_verifier), 0.0)
    assert session.sampling.noise is session.opened().noise is (asked or of_verifier)


def test_a_turn_keeps_the_noise_of_its_session_unless_it_names_one():
    session = VerifierSession(open_frame(sampling=OF_VLLM, keep_s=9.0), rules(), 0.0)
    session.on_cancel()
    for sampling in (None, DRAWN):
        assert session.continued(Continue(3, (1,), sampling), 1.0).sampling.noise is Noise.VLLM
    named = replace(DRAWN, noise=Noise.OUTRIDER)
    assert session.continued(Continue(3, (1,), named), 1.0).sampling.noise is Noise.OUTRIDER


def test_a_noise_that_the_verifier_does_not_know_is_refused_and_named():
    frame = codec.encode_edge_frame(open_frame(sampling=OF_VLLM))
    wire = pb.EdgeFrame.FromString(frame)
    wire.open.sampling.noise = 7
    with pytest.raises(InvalidArgument, match=r"7 is not a Noise") as raised:
        codec.decode_edge_frame(wire.SerializeToString())
    assert raised.value.field == "sampling.noise"


# === the edge ===================================================================================================


def test_a_text_is_resumed_with_the_noise_that_its_first_verifier_named():
    edge = edge_of(DRAWN)
    assert edge.open_frame(b"", 0.0).sampling.noise is None
    edge.on_opened(replace(OPENED, noise=Noise.VLLM), 0.1)
    edge.on_commit(Commit(3, committed(4, 5), 0, 64), 0.2)
    assert isinstance(edge.on_disconnected(Unavailable("cut"), 0.3)[0], Reopen)
    resumed = edge.open_frame(b"", 0.4)
    assert (resumed.committed, resumed.sampling.noise) == ((4, 5), Noise.VLLM)
    assert VerifierSession(resumed, rules(), 0.5).sampling == replace(resumed.sampling, max_tokens=8)


@pytest.mark.parametrize("noise", Noise)
def test_a_verifier_that_draws_with_another_noise_gets_no_text(noise):
    other = Noise.VLLM if noise is Noise.OUTRIDER else Noise.OUTRIDER
    edge = edge_of(replace(DRAWN, noise=noise))
    edge.open_frame(b"", 0.0)
    (done,) = edge.on_opened(replace(OPENED, noise=other), 0.1)
    assert isinstance(done, Done)
    assert isinstance(done.error, InvalidArgument)
    assert done.error.field == "opened.noise"
    assert not edge.connected


def test_the_next_turn_keeps_the_noise_wherever_it_goes():
    edge = edge_of(DRAWN)
    edge.open_frame(b"", 0.0)
    edge.on_opened(replace(OPENED, noise=Noise.VLLM), 0.1)
    edge.on_commit(Commit(3, committed(4, 5), 0, 64, finish=FinishReason.EOS), 0.2)
    (sent,) = edge.on_turn(5, (6,), DRAWN, 1.0)
    assert sent == Send(Continue(5, (6,), None, 0)), "the same settings as before"
    edge.on_disconnected(Unavailable("cut"), 1.1)
    assert edge.open_frame(b"", 1.2).sampling == OF_VLLM


def test_nothing_is_drafted_before_the_noise_is_known():
    edge = edge_of(DRAWN)
    edge.open_frame(b"", 0.0)
    assert edge.next_job(4) is None
    edge.on_opened(replace(OPENED, noise=Noise.VLLM), 0.1)
    assert edge.sampling == OF_VLLM
    assert edge.next_job(4) is not None

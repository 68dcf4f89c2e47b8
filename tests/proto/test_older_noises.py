"""Peers of older releases, which had a choice of noises: whoever names another than the one there is gets no text."""

from __future__ import annotations

import pytest
from checked_simulation import open_frame
from hand_driven import HandDrivenEdge

from outrider.proto import codec
from outrider.proto.codec import SAMPLING
from outrider.proto.errors import InvalidArgument
from outrider.proto.policy import Window
from outrider.proto.session import Done
from outrider.proto.types import CloudFrame, Continue, EdgeFrame, Opened, Sampling
from outrider.proto.v1 import decoding_pb2 as pb

DRAWN = Sampling(temperature=1.0, max_tokens=8)
# As a release that had it sent them: the Open of an edge that asks for vLLM's noise, and a verifier's answer.
OPEN = bytes.fromhex(
    "0a6b08021a017322016d2a4030313233343536373839616263646566303132333435363738396162636465663031323334353637383961626364"
    "656630313233343536373839616263646566321821000000000000f03f31000000000000f03f6080018001023a010150017001"
)
OPENED = bytes.fromhex("0a1a1040188001220276302880203880808080084001481050017002")


def refused(decode, data: bytes) -> InvalidArgument:
    with pytest.raises(InvalidArgument, match=r"is 2, .* update the other side") as raised:
        decode(data)
    return raised.value


def of_edge(frame: EdgeFrame, noise: int) -> bytes:
    wire = pb.EdgeFrame.FromString(codec.encode_edge_frame(frame))
    getattr(wire, wire.WhichOneof("body")).sampling.noise = noise
    return wire.SerializeToString()


def of_verifier(noise: int) -> tuple[CloudFrame, bytes]:
    frame = Opened(0, 64, 8, "v", 512, vocab_size=8)
    wire = pb.CloudFrame.FromString(codec.encode_cloud_frame(frame))
    wire.opened.noise = noise
    return frame, wire.SerializeToString()


def test_what_older_releases_sent_is_refused_by_name():
    assert refused(codec.decode_edge_frame, OPEN).field == "sampling.noise"
    assert refused(codec.decode_cloud_frame, OPENED).field == "opened.noise"


def test_a_turn_with_another_noise_is_refused_by_name():
    asked = Continue(3, (1,), DRAWN)
    assert refused(codec.decode_edge_frame, of_edge(asked, 2)).field == "sampling.noise"


def test_a_record_of_a_text_with_another_noise_is_refused_by_name():
    wire = SAMPLING.to_wire(DRAWN)
    wire.noise = 2
    assert refused(SAMPLING.decode, wire.SerializeToString()).field == "sampling.noise"


def test_peers_that_name_the_noise_that_there_is_are_served():
    frame = open_frame(sampling=DRAWN)
    assert codec.decode_edge_frame(of_edge(frame, 1)) == frame
    opened, data = of_verifier(1)
    assert codec.decode_cloud_frame(data) == opened


def test_an_edge_gets_no_text_from_a_verifier_that_draws_with_another_noise():
    edge = HandDrivenEdge(open_frame(sampling=DRAWN), Window(4))
    edge.open_frame(b"", 0.0)
    error = refused(codec.decode_cloud_frame, of_verifier(2)[1])
    (done,) = edge.on_disconnected(error, 0.1)
    assert done == Done(None, error)

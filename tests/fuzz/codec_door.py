"""Bytes to messages: whatever comes is refused by name, or is a message that travels back and forth unchanged."""

from __future__ import annotations

import random
from typing import Any

from frame_mutations import mutated
from golden_messages import EXAMPLES
from recorded_streams import recorded_stream
from refusals import check_refusal

from outrider.proto import codec
from outrider.proto.cluster_status import decode_status, encode_status
from outrider.proto.errors import InvalidArgument, ResourceExhausted

MAX_LENGTH = 4096
_FEW = 3000  # tokens that a verifier with a small context takes in one message
_CREDIT = 64


def _few_tokens(data: bytes) -> Any:
    return codec.decode_edge_frame(data, _FEW, _CREDIT)


_PAIRS: tuple[tuple[Any, Any], ...] = (
    (_few_tokens, codec.encode_edge_frame),
    (codec.decode_cloud_frame, codec.encode_cloud_frame),
    (codec.decode_lease_request, codec.encode_lease_request),
    (codec.decode_lease, codec.encode_lease),
    (codec.decode_report, codec.encode_report),
    (codec.decode_drafters, codec.encode_drafters),
    (decode_status, encode_status),
    (codec.decode_fetch, lambda pair: codec.encode_fetch(*pair)),
    (codec.decode_drafter_query, codec.encode_drafter_query),
    (codec.decode_chunk, codec.encode_chunk),
    (codec.decode_drain, codec.encode_drain),
    (codec.decode_drained, codec.encode_drained),
)


def seeds() -> list[bytes]:
    """Return one input for each kind of message and each way in which it is written."""
    decoders = [decode for decode, _ in _PAIRS]
    decoders[0] = codec.decode_edge_frame
    golden = [(example.encode(example.message), example.decode) for example in EXAMPLES.values()]
    sent, received = recorded_stream(1)
    recorded = [(data, decoders[0]) for data in sent] + [(data, decoders[1]) for data in received]
    return [bytes([decoders.index(decode)]) + data for data, decode in golden + recorded if decode in decoders]


def mutate(rng: random.Random, data: bytes) -> bytes:
    """Damage the message, and now and then read it as another kind."""
    kind = data[:1] if rng.random() < 0.95 else rng.randbytes(1)
    return kind + mutated(rng, data[1:])


def try_input(data: bytes) -> None:
    """Read one input; its first byte chooses the kind of message."""
    if not data:
        return
    decode, encode = _PAIRS[data[0] % len(_PAIRS)]
    try:
        message = decode(data[1:])
    except (InvalidArgument, ResourceExhausted) as error:
        check_refusal(error)
        return
    check_same(message, decode(encode(message)))


def check_same(message: Any, again: Any) -> None:
    """Compare what they show in place of themselves, since NaN differs from itself."""
    assert repr(again) == repr(message), (message, again)

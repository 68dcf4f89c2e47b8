"""Sampling and its grammar on the wire."""

from __future__ import annotations

from typing import Any

from outrider.proto import types as t
from outrider.proto.codec.fields import Field, Table, enumeration, optional
from outrider.proto.errors import InvalidArgument
from outrider.proto.v1 import decoding_pb2 as pb


def _logit_bias(_: str) -> Field:
    """Copy (token, bias) pairs as two packed lists."""

    def encode(pairs: tuple[tuple[int, float], ...]) -> dict[str, Any]:
        return {"bias_tokens": [token for token, _ in pairs], "bias_values": [bias for _, bias in pairs]}

    def decode(wire: pb.Sampling) -> tuple[tuple[int, float], ...]:
        if len(wire.bias_tokens) != len(wire.bias_values):
            raise InvalidArgument("must hold one value for each of bias_tokens", field="sampling.bias_values")
        return tuple(zip(wire.bias_tokens, wire.bias_values, strict=True))

    return Field(encode, decode)


GRAMMAR = Table(t.Grammar, pb.Grammar, kind=enumeration(t.GrammarKind, "sampling.grammar"))
SAMPLING = Table(t.Sampling, pb.Sampling, logit_bias=_logit_bias, grammar=optional(GRAMMAR))

"""Every number of the sampling settings has bounds, by which each door refuses what lies beyond and names them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from outrider.proto.codec import SAMPLING
from outrider.proto.errors import ConfigError, InvalidArgument
from outrider.proto.settings import declared
from outrider.proto.types import BOUNDS, MAX_TOKEN_ID, Grammar, GrammarKind, NumberRange, Sampling
from outrider.proto.v1 import decoding_pb2 as pb

NUMBERS = [name for name in BOUNDS if name != "logit_bias"]


def beyond(bounds: NumberRange) -> list[Any]:
    if isinstance(bounds.high, int):
        return [bounds.low - 1, bounds.high + 1, 10**400]
    outside = [math.nextafter(bounds.low, -math.inf), math.nextafter(bounds.high, math.inf), 1e308, -1e308]
    return [value for value in outside if value or not bounds.or_zero] + [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_taken_at_its_bounds_and_refused_beyond(name: str) -> None:
    bounds = BOUNDS[name]
    for value in (bounds.low, bounds.high):
        Sampling(**{"max_tokens": MAX_TOKEN_ID, name: value})
        declared(Sampling)[name].check(value)
    for value in beyond(bounds):
        with pytest.raises(InvalidArgument, match=str(bounds).replace(".", r"\.")) as caught:
            Sampling(**{name: value})
        assert caught.value.field == f"sampling.{name}"
        with pytest.raises(ConfigError):
            declared(Sampling)[name].check(value)


def test_a_setting_that_may_be_off_is_taken_at_0() -> None:
    assert Sampling(temperature=0.0, min_p=0.0, top_k=0, min_tokens=0) == Sampling()


@pytest.mark.parametrize("name", NUMBERS)
def test_the_wire_brings_no_number_beyond_its_bounds(name: str) -> None:
    for value in beyond(BOUNDS[name]):
        wire = SAMPLING.to_wire(Sampling())
        try:
            setattr(wire, name, value)
        except (ValueError, TypeError):
            continue  # it does not fit the field
        with pytest.raises(InvalidArgument) as caught:
            SAMPLING.from_wire(wire)
        assert caught.value.field == f"sampling.{name}"


@pytest.mark.parametrize("bias", [10_001.0, -10_001.0, 3e38, math.nan, math.inf])
def test_a_bias_beyond_its_bounds_is_refused_in_a_call_and_on_the_wire(bias: float) -> None:
    for make in (lambda: Sampling(logit_bias=((5, 1.0), (6, bias))), lambda: SAMPLING.from_wire(with_bias(bias))):
        with pytest.raises(InvalidArgument, match=r"-10000\.\.10000") as caught:
            make()
        assert caught.value.field == "sampling.bias_values"


def with_bias(bias: float) -> pb.Sampling:
    wire = SAMPLING.to_wire(Sampling())
    wire.bias_tokens[:], wire.bias_values[:] = [6], [bias]
    return wire


@pytest.mark.parametrize("kind", [GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.LARK])
def test_a_grammar_that_is_no_text_is_refused(kind: GrammarKind) -> None:
    with pytest.raises(InvalidArgument, match="surrogate pair at character 1") as caught:
        Grammar(kind, "a\ud800")
    assert caught.value.field == "sampling.grammar"

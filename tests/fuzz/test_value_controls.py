"""Defects are planted that extreme values must find, and found among the examples of soak."""

from __future__ import annotations

import math
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import test_values
from hypothesis import Phase

from outrider.cloud.serving import decode_streams
from outrider.edge.daemon import responses
from outrider.proto import codec, types
from outrider.proto.errors import InvalidArgument
from outrider.proto.types import NumberRange, SessionReport

Patch = pytest.MonkeyPatch


def any_finite_number(patch: Patch) -> None:
    patch.setattr(NumberRange, "allows", lambda _, value: math.isfinite(value))


def lists_of_any_length(patch: Patch) -> None:
    patch.setattr(codec, "_MAX_BYTES", {})
    patch.setattr(codec, "_check_drafts", lambda *_: None)


def large_frames_on_the_loop(patch: Patch) -> None:
    async def decoded(streams: Any, data: bytes) -> Any:
        return codec.decode_edge_frame(data, streams._max_tokens, streams._rules.max_credit)

    patch.setattr(decode_streams.DecodeStreams, "_decoded", decoded)


def chains_up_to_the_last_number(patch: Patch) -> None:
    patch.setattr(types, "MAX_CHAIN", (1 << 32) - 1)


def limits_by_their_first_digits(patch: Patch) -> None:
    class FirstDigits:
        def fullmatch(self, limit: str) -> bool:
            return limit.isascii() and limit.isdecimal() and 1 <= int(limit[:4]) <= test_values.MAX_PAGE_ITEMS

    patch.setattr(responses, "_LIMIT", FirstDigits())
    patch.setattr(responses, "MAX_PAGE_ITEMS", 10**9)


def rates_as_whole_numbers(patch: Patch) -> None:
    right = codec.decode_report

    def decode(data: bytes) -> SessionReport:
        report = right(data)
        [int(value) for value in astuple(report) if isinstance(value, float)]
        return report

    patch.setattr(codec, "decode_report", decode)


def refusals_without_a_field(patch: Patch) -> None:
    def require(holds: bool, field: str, message: str) -> None:
        if not holds:
            raise InvalidArgument(f"{field} {message}")

    patch.setattr("outrider.proto.types.require", require)


PLANTED = [
    (any_finite_number, "codec", "is taken"),
    (any_finite_number, "sampling", "is taken"),
    (any_finite_number, "verifier", "NaN is answered|the step failed"),
    (any_finite_number, "client", "NaN is answered|out of range|the step failed"),
    (lists_of_any_length, "codec", "bytes are taken as one"),
    (large_frames_on_the_loop, "verifier", "all others wait"),
    (chains_up_to_the_last_number, "machine", "out of range"),
    (limits_by_their_first_digits, "pages", "a request failed|a page has"),
    (rates_as_whole_numbers, "coordinator", "the coordinator failed"),
    (refusals_without_a_field, "sampling", "names no field"),
]


@pytest.mark.parametrize(("plant", "door", "found"), PLANTED)
def test_a_planted_defect_is_found(plant, door: str, found: str, tmp_path: Path, monkeypatch: Patch) -> None:
    fire, _, many = test_values.DOORS[door]
    monkeypatch.setattr(test_values, "PHASES", (Phase.generate,))
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError), match=found):
        fire(many, tmp_path)


@pytest.mark.soak
def test_a_planted_text_that_is_none_is_found(tmp_path: Path, monkeypatch: Patch) -> None:
    fire, _, many = test_values.DOORS["client"]
    monkeypatch.setattr("outrider.edge.prompts.require_text", lambda *_: None)
    with pytest.raises(TypeError, match="TextEncodeInput"):
        fire(4 * many, tmp_path)  # a prompt that is no string is one of many ways to be wrong

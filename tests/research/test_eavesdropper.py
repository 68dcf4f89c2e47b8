"""The eavesdropper names prompts whose records differ, and guesses among those that are alike."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from research.eavesdropper.guessing import accuracy, features
from research.eavesdropper.tap import HEADER_BYTES, Note, Records

PROMPTS, RUNS, TEST_FROM = 12, 5, 4


@given(st.lists(st.binary(max_size=60), max_size=20), st.lists(st.integers(1, 30), min_size=1, max_size=20))
def test_each_record_is_noted_once_however_its_bytes_come(contents: list[bytes], pieces: list[int]) -> None:
    stream = b"".join(b"\x17\x03\x03" + len(content).to_bytes(2, "big") + content for content in contents)
    records, sizes, at = Records(), list[int](), 0
    while at < len(stream):
        piece = pieces[at % len(pieces)]
        sizes += records.take(stream[at : at + piece])
        at += piece
    assert sizes == [HEADER_BYTES + len(content) for content in contents]


def test_features_are_as_many_for_any_trace() -> None:
    assert (
        len(features([]))
        == len(features([(1.0, 500), (1.1, -60)]))
        == len(features([(0.1 * i, -60) for i in range(999)]))
    )


def guessed(trace: Callable[[random.Random, int], list[Note]]) -> float:
    pytest.importorskip("sklearn", reason="needs scikit-learn: pip install scikit-learn")
    dice = random.Random(1)
    traces = [(prompt, run, trace(dice, prompt)) for run in range(RUNS) for prompt in range(PROMPTS)]
    return accuracy(traces, TEST_FROM)


def frames(dice: random.Random, prompt: int) -> list[Note]:
    """Steps of as many tokens as the prompt's text has there, with a network's jitter."""
    tokens = random.Random(prompt)
    return [(0.03 * i + dice.random() / 100, -60 - 6 * tokens.randrange(5)) for i in range(24)]


def cells(dice: random.Random, _: int) -> list[Note]:
    return [(0.03 * i + dice.random() / 100, -60) for i in range(32)]


def test_frames_name_the_prompt_and_cells_do_not() -> None:
    assert guessed(frames) > 0.8
    assert guessed(cells) < 0.5

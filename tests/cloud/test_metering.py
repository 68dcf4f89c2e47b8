"""When a text waits for the tokens of its API key. What it takes of them the chaos test counts for each schedule."""

from __future__ import annotations

import pytest

from outrider.cloud.serving.metering import TextMeter
from outrider.proto.errors import ResourceExhausted
from outrider.proto.plumbing.access import Bucket
from outrider.proto.types import Commit, CommittedToken


class Scene:
    """A key of 60 tokens a minute, so one a second, and its streams."""

    def __init__(self):
        self.now_s = 0.0
        self.bucket = Bucket(60, 0.0)

    def stream(self):
        return TextMeter("alice", self.bucket, lambda: self.now_s)


def commit(start, tokens):
    return Commit(start, tuple(CommittedToken(7, -1.0) for _ in range(tokens)), 0, 8)


def test_a_text_whose_key_has_no_tokens_left_is_sent_away_until_it_has():
    scene = Scene()
    stream = scene.stream()
    stream.begin_turn(50)
    assert stream.charge(commit(50, 60), 3) is None
    goaway = stream.charge(commit(110, 1), 3)
    assert (goaway.retry_after_s, goaway.epoch) == (57.0, 3), "from -51 to a tenth of a minute's"


def test_a_long_prompt_delays_the_keys_next_texts_and_not_its_own():
    scene = Scene()
    long, other = scene.stream(), scene.stream()
    long.begin_turn(200)
    long.spend(commit(200, 59))
    assert long.wait_s == 0
    with pytest.raises(ResourceExhausted, match="'alice' has spent its 60 tokens a minute") as refused:
        other.begin_turn(1)
    assert refused.value.retry_after_s == 200, "from -199 to 1"
    with pytest.raises(ResourceExhausted):
        long.begin_turn(1)
    long.spend(commit(259, 2))
    assert long.wait_s > 0
    scene.now_s = 203.0
    other.begin_turn(1)


def test_tokens_that_others_of_the_key_read_count_against_a_text():
    scene = Scene()
    first, second = scene.stream(), scene.stream()
    first.begin_turn(5)
    second.begin_turn(100)
    first.spend(commit(5, 1))
    assert first.wait_s > 0
    assert second.wait_s == 0

"""Tokens of API keys: what a text reads counts once, is known before it is read, and never cuts the text itself off."""

from __future__ import annotations

import pytest

from outrider.cloud.serving.metering import TextMeter
from outrider.proto.errors import ResourceExhausted
from outrider.proto.plumbing.access import Bucket
from outrider.proto.types import Commit, CommittedToken, FinishReason


class Scene:
    """A key of 60 tokens a minute, so one a second, and its streams."""

    def __init__(self):
        self.now_s = 0.0
        self.bucket = Bucket(60, 0.0)

    def stream(self):
        return TextMeter("alice", self.bucket, lambda: self.now_s)

    @property
    def level(self):
        return self.bucket.level(self.now_s)


def commit(start, tokens, cached=0, turn=0):
    finish = None if tokens else FinishReason.CANCELLED
    texts = tuple(CommittedToken(7, -1.0) for _ in range(tokens))
    return Commit(start, texts, 0, 8, finish=finish, cached_tokens=cached, turn=turn)


def test_a_prompt_counts_before_it_is_read_and_cached_tokens_are_given_back():
    scene = Scene()
    stream = scene.stream()
    stream.begin_turn(40)
    assert scene.level == 20
    stream.spend(commit(40, 3, cached=32))
    assert scene.level == 60 - 8 - 3
    stream.spend(commit(43, 2))
    assert scene.level == 60 - 8 - 5


def test_a_prompt_that_nobody_waits_for_counts_too():
    scene = Scene()
    stream = scene.stream()
    stream.begin_turn(50)
    stream.spend(commit(50, 0))  # cancelled
    assert scene.level == 10


def test_a_turn_counts_what_it_brings_and_what_had_to_be_read_again():
    scene = Scene()
    stream = scene.stream()
    stream.begin_turn(10)
    stream.spend(commit(10, 4))
    stream.begin_turn(3)
    stream.spend(commit(17, 1, cached=16, turn=1))
    assert scene.level == 60 - 14 - 2
    stream.begin_turn(2)
    stream.spend(commit(20, 1, cached=0, turn=2))  # its pages were needed elsewhere
    assert scene.level == 60 - 16 - 21


def test_commits_of_a_turn_that_was_left_count_for_that_turn():
    scene = Scene()
    stream = scene.stream()
    stream.begin_turn(30)
    stream.begin_turn(5)  # the user has cancelled, and the first commit was on its way
    stream.spend(commit(30, 1))
    stream.spend(commit(36, 2, cached=28, turn=1))
    assert scene.level == 60 - 30 - 1 - (36 - 28) - 2


def test_a_refused_session_costs_nothing():
    scene = Scene()
    refused = scene.stream()
    refused.begin_turn(40)
    refused.give_back()
    assert scene.level == 60


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

"""Goals of service: their one notation, how they travel, and what both sides count of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from outrider.proto import codec
from outrider.proto.errors import ConfigError, InvalidArgument
from outrider.proto.plumbing.access import Key, Keys, secret_sha256
from outrider.proto.session.service_record import KEPT_SHARE, ServiceRecord
from outrider.proto.session.stream import EdgeText
from outrider.proto.types import (
    Commit,
    CommittedToken,
    Open,
    Sampling,
    ServiceClass,
    ServiceGoal,
    Timing,
    class_of,
)

HASH = "0" * 64
FIGURES = ServiceGoal(gap_s=0.075, first_token_s=0.5)


@pytest.mark.parametrize(
    ("given", "goal", "text"),
    [
        ("interactive", ServiceGoal(), "interactive"),
        ("batch", ServiceGoal(batch=True), "batch"),
        ({"gap_ms": 75}, ServiceGoal(gap_s=0.075), '{"gap_ms": 75}'),
        ({"gap_ms": 75, "first_token_ms": 500.0}, FIGURES, '{"gap_ms": 75, "first_token_ms": 500}'),
        (' {"first_token_ms": 12.5}', ServiceGoal(first_token_s=0.0125), '{"first_token_ms": 12.5}'),
        (FIGURES, FIGURES, '{"gap_ms": 75, "first_token_ms": 500}'),
    ],
)
def test_a_goal_has_one_notation_which_it_is_shown_in_too(given, goal, text) -> None:
    assert ServiceGoal.parse(given) == goal
    assert str(goal) == text
    assert ServiceGoal.parse(text) == goal


@pytest.mark.parametrize(
    ("given", "words"),
    [
        *((each, '"interactive", "batch" or figures') for each in ("slow", "", {}, 75, ["batch"], None, "{")),
        ({"gap": 75}, "has 'gap'; its figures are gap_ms, first_token_ms"),
        ({"gap_ms": 0}, "gap_ms = 0; give milliseconds in 1..600000, or leave it out"),
        ({"gap_ms": "75"}, "gap_ms = 75"),
        ({"gap_ms": True}, "gap_ms = True"),
        ({"gap_ms": math.nan}, "gap_ms = nan"),
        ({"gap_ms": 75, "first_token_ms": 1e9}, "first_token_ms = 1000000000.0"),
        ("[" * 100_000, "figures"),
        ("{" * 100_000, "no JSON"),
    ],
)
def test_what_is_no_goal_is_refused_by_the_name_of_the_figure_and_the_remedy(given, words) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        ServiceGoal.parse(given)
    assert refusal.value.field == "service"
    assert words in refusal.value.message


@pytest.mark.parametrize(
    "wrong", [{"batch": True, "gap_s": 0.1}, {"gap_s": -0.1}, {"gap_s": math.nan}, {"first_token_s": math.inf}]
)
def test_a_strangers_goal_is_checked_when_it_comes(wrong) -> None:
    with pytest.raises(InvalidArgument):
        ServiceGoal(**wrong)


def test_an_open_without_a_goal_is_what_it_was_and_one_with_it_keeps_it() -> None:
    plain = Open("m", HASH, (1,), Sampling(), "s")
    for goal in (ServiceGoal(), ServiceGoal(batch=True), FIGURES):
        asking = Open("m", HASH, (1,), Sampling(), "s", service=goal)
        data = codec.encode_edge_frame(asking)
        assert len(data) > len(codec.encode_edge_frame(plain))
        assert codec.decode_edge_frame(data) == asking
    assert codec.decode_edge_frame(codec.encode_edge_frame(plain)).service is None


def test_the_order_of_worth_is_figures_interactive_batch() -> None:
    classes = [class_of(each) for each in (FIGURES, ServiceGoal(), None, ServiceGoal(batch=True))]
    assert classes == sorted(classes, reverse=True)
    assert class_of(None) is ServiceClass.INTERACTIVE


def commit(gap_s: float) -> Commit:
    return Commit(1, (CommittedToken(5),), 0, 0, timing=Timing(queue_s=gap_s / 2, verify_s=gap_s / 2))


def test_a_record_counts_gaps_and_the_first_token_by_the_verifiers_times() -> None:
    record = ServiceRecord(FIGURES)
    record.take(commit(0.4), first=True)
    for _ in range(19):
        record.take(commit(0.07), first=False)
    record.take(commit(0.2), first=False)
    assert (record.gaps, record.kept, record.missed) == (20, 19, False)
    assert record.first_token_s == pytest.approx(0.4)
    record.take(commit(0.2), first=False)
    assert record.kept < KEPT_SHARE * record.gaps
    assert record.missed
    late = ServiceRecord(FIGURES)
    late.take(commit(0.6), first=True)
    assert late.missed
    batch = ServiceRecord(ServiceGoal(batch=True))
    for first in (True, False):
        batch.take(commit(100.0), first=first)
    assert not batch.missed, "it asked for no figure"


def test_a_text_takes_the_goal_of_a_lease_unless_it_has_one() -> None:
    def text(goal: ServiceGoal | None) -> EdgeText:
        return EdgeText(Open("m", HASH, (1,), Sampling(), "s", service=goal))

    asking, silent = text(FIGURES), text(None)
    for each in (asking, silent):
        each.take_service(ServiceGoal(batch=True), unkept=True)
    assert asking.frame.service == FIGURES
    assert asking.statistics.service == ServiceRecord(FIGURES, unlikely=True)
    assert silent.frame.service == ServiceGoal(batch=True)
    neither = text(None)
    neither.take_service(None, unkept=False)
    assert neither.statistics.service is None


def keys_file(tmp_path: Any, service: str) -> Any:
    path = tmp_path / "keys.toml"
    path.write_text(f'[keys.alice]\nsha256 = "{secret_sha256("a")}"\nservice = {service}\n')
    path.chmod(0o600)
    return path


def test_a_key_may_have_a_goal_for_texts_that_ask_for_none(tmp_path) -> None:
    for service, goal in (('"batch"', ServiceGoal(batch=True)), ("{ gap_ms = 75 }", ServiceGoal(gap_s=0.075))):
        [key] = Keys.from_file(keys_file(tmp_path, service)).current()
        assert key.service == goal
        path = tmp_path / "written.toml"
        path.write_text(Key("bob", secret_sha256("b"), service=goal).toml())
        path.chmod(0o600)
        assert [each.service for each in Keys.from_file(path).current()] == [goal]
    with pytest.raises(ConfigError, match="gap_ms = 0") as refusal:
        Keys.from_file(keys_file(tmp_path, "{ gap_ms = 0 }"))
    assert refusal.value.field == "keys.alice.service"

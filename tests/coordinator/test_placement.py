"""Placement of sessions: every rule of `place`, and its refusals."""

from __future__ import annotations

import pytest

from outrider.coordinator.cluster import VerifierState
from outrider.coordinator.placement import place
from outrider.coordinator.testing import TOKENIZER_SHA256, ready
from outrider.proto.errors import NotFound, ResourceExhausted, TokenizerMismatch, Unavailable

DOWN, DRAINING = VerifierState.DOWN, VerifierState.DRAINING


def test_the_fewest_sessions_win() -> None:
    assert place([ready("a", sessions=2), ready("b", sessions=1)], "tiny", TOKENIZER_SHA256).name == "b"


def test_of_equally_many_sessions_the_faster_step_wins() -> None:
    assert place([ready("a", step_s=0.2), ready("b", step_s=0.1)], "tiny", "").name == "b"


def test_of_equals_the_name_decides_so_that_placement_is_reproducible() -> None:
    assert place([ready("b"), ready("a")], "tiny", "").name == "a"


def test_leases_not_yet_seen_as_sessions_count_as_load() -> None:
    assert place([ready("a"), ready("b", step_s=1.0)], "tiny", "", pending={"a": 1}).name == "b"


def test_leases_not_yet_seen_do_not_make_a_verifier_full() -> None:
    assert place([ready("a", max_sessions=1)], "tiny", "", pending={"a": 5}).name == "a"


@pytest.mark.parametrize("state", [DOWN, DRAINING])
def test_only_a_ready_verifier_is_chosen(state: VerifierState) -> None:
    assert place([ready("a", state=state), ready("b", sessions=3)], "tiny", "").name == "b"


def test_a_full_verifier_is_passed_over_however_fast() -> None:
    assert place([ready("a", sessions=4, step_s=0.0), ready("b", sessions=3, step_s=9.0)], "tiny", "").name == "b"


def test_another_model_is_never_chosen() -> None:
    assert place([ready("a", model="big"), ready("b", sessions=3)], "tiny", "").name == "b"


def test_an_empty_model_takes_the_first_there_is() -> None:
    assert place([ready("a", model="big"), ready("b", model="tiny")], "", "").model == "big"


def test_what_to_avoid_loses_to_any_other_with_room() -> None:
    assert place([ready("a"), ready("b", sessions=3)], "tiny", "", avoid={"a"}).name == "b"


@pytest.mark.parametrize("other", [ready("b", state=DOWN), ready("b", sessions=4), ready("b", model="big")])
def test_what_to_avoid_is_taken_when_nothing_else_is_left(other: object) -> None:
    assert place([ready("a"), other], "tiny", "", avoid={"a"}).name == "a"  # type: ignore[list-item]


def test_an_unknown_model_is_not_found_and_the_message_lists_those_there_are() -> None:
    with pytest.raises(NotFound, match=r"'huge'; there is big, tiny") as refusal:
        place([ready("a"), ready("b", model="big")], "huge", "")
    assert refusal.value.field == "lease_request.model"


def test_an_unknown_model_may_be_that_of_a_verifier_which_never_answered() -> None:
    with pytest.raises(Unavailable) as refusal:
        place([ready("a"), ready("b", model="", state=DOWN)], "huge", "")
    assert refusal.value.retry_after_s > 0


def test_an_empty_fleet_is_unavailable_with_a_retry_time() -> None:
    with pytest.raises(Unavailable) as refusal:
        place([], "", "")
    assert refusal.value.retry_after_s > 0


def test_another_tokenizer_is_a_mismatch_even_while_the_verifier_is_down() -> None:
    with pytest.raises(TokenizerMismatch) as refusal:
        place([ready("a", state=DOWN)], "tiny", "f" * 64)
    assert refusal.value.field == "lease_request.tokenizer_sha256"


def test_of_two_tokenizers_of_one_model_the_matching_verifier_is_chosen() -> None:
    assert place([ready("a", tokenizer_sha256="e" * 64), ready("b", sessions=3)], "tiny", TOKENIZER_SHA256).name == "b"


def test_all_full_is_exhausted_with_a_retry_time() -> None:
    with pytest.raises(ResourceExhausted, match="all 1 verifiers") as refusal:
        place([ready("a", sessions=4), ready("b", state=DOWN)], "tiny", "")
    assert refusal.value.retry_after_s > 0


def test_all_down_or_draining_is_unavailable_with_their_states_and_a_retry_time() -> None:
    with pytest.raises(Unavailable, match=r"a \(draining\), b \(down\)") as refusal:
        place([ready("a", state=DRAINING), ready("b", state=DOWN)], "tiny", "")
    assert refusal.value.retry_after_s > 0


def test_a_verifier_that_is_short_of_pages_loses_to_any_other_with_room() -> None:
    short, busy = ready("a", kv_pages=160, kv_pages_free=9), ready("b", sessions=3, kv_pages=160, kv_pages_free=10)
    assert place([short, busy], "tiny", "").name == "b"
    assert place([short, ready("b", sessions=3, kv_pages=160)], "tiny", "").name == "a", "both are"
    assert place([ready("a"), busy], "tiny", "").name == "a", "it does not say how many it has"

"""Placement of sessions: every rule of `place`, its refusals, and the memory of texts' beginnings."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from fake_cluster import TOKENIZER_SHA256, ready

from outrider.coordinator.cluster import VerifierInfo, VerifierState
from outrider.coordinator.fleet_view import RETRY_WHEN_DOWN_S, PrefixMemory, place
from outrider.proto.errors import NotFound, OutriderError, ResourceExhausted, TokenizerMismatch, Unavailable
from outrider.proto.types import ServiceGoal

DOWN, DRAINING, SICK = VerifierState.DOWN, VerifierState.DRAINING, VerifierState.SICK
BUSY = ready("b", sessions=3)


CHOSEN: dict[str, tuple[list[VerifierInfo], dict[str, Any], str]] = {
    "the fewest sessions": ([ready("a", sessions=2), ready("b", sessions=1)], {}, "b"),
    "of equally many the faster step": ([ready("a", step_s=0.2), ready("b", step_s=0.1)], {}, "b"),
    "of equals the first name": ([ready("b"), ready("a")], {}, "a"),
    "leases count that are no sessions yet": ([ready("a"), ready("b", step_s=1.0)], {"pending": {"a": 1}}, "b"),
    "but make none full": ([ready("a", max_sessions=1)], {"pending": {"a": 5}}, "a"),
    **{
        f"not one that is {state.value}": ([ready("a", state=state), BUSY], {}, "b") for state in (DOWN, DRAINING, SICK)
    },
    "no full one however fast": ([ready("a", sessions=4, step_s=0.0), ready("b", sessions=3, step_s=9.0)], {}, "b"),
    "no other model": ([ready("a", model="big"), BUSY], {}, "b"),
    "what to avoid loses": ([ready("a"), BUSY], {"avoid": {"a"}}, "b"),
    "unless the other is down": ([ready("a"), ready("b", state=DOWN)], {"avoid": {"a"}}, "a"),
    "or full": ([ready("a"), ready("b", sessions=4)], {"avoid": {"a"}}, "a"),
    "or has another model": ([ready("a"), ready("b", model="big")], {"avoid": {"a"}}, "a"),
    "of what to avoid the one lost longest ago": ([ready("a"), BUSY, ready("c")], {"avoid": ("b", "a", "c")}, "b"),
    "any precision of one that states none": ([ready("a", precision="bfloat16"), BUSY], {"precision": "float32"}, "b"),
    "the tokenizer of two of a model": ([ready("a", tokenizer_sha256="e" * 64), BUSY], {}, "b"),
}


GAP = ServiceGoal(gap_s=0.1)
CHOSEN |= {
    "one that keeps the gap however busy": (
        [ready("a", gap_s=0.2), ready("b", sessions=3, gap_s=0.1)], {"service": GAP}, "b"
    ),
    "of these the fewest sessions": (
        [ready("a", sessions=2, gap_s=0.01), ready("b", sessions=1, gap_s=0.1)], {"service": GAP}, "b"
    ),
    "by its step where it says no gap": (
        [ready("a", step_s=0.095), ready("b", sessions=3, step_s=0.08)], {"service": GAP}, "b"
    ),
    "one that has measured nothing": ([ready("a", gap_s=0.2), BUSY], {"service": GAP}, "b"),
    "no full one though it keeps the gap": (
        [ready("a", gap_s=0.2), ready("b", sessions=4, gap_s=0.01)], {"service": GAP}, "a"
    ),
    "none that was just lost though it keeps the gap": (
        [ready("a", gap_s=0.2), ready("b", gap_s=0.01)], {"service": GAP, "avoid": {"b"}}, "a"
    ),
    "as ever for a batch": ([ready("a", gap_s=9.0), BUSY], {"service": ServiceGoal(batch=True)}, "a"),
}  # fmt: skip


@pytest.mark.parametrize("rule", CHOSEN)
def test_the_verifier_of_a_text_is(rule: str) -> None:
    fleet, options, name = CHOSEN[rule]
    assert place(fleet, "tiny", TOKENIZER_SHA256, **options).name == name


def test_an_empty_model_takes_the_first_there_is() -> None:
    assert place([ready("a", model="big"), ready("b", model="tiny")], "", "").model == "big"


def test_a_text_goes_on_in_its_precision_alone_however_busy_its_verifier_is() -> None:
    fleet = [ready("a", precision="bfloat16"), ready("b", sessions=3, precision="float32")]
    assert place(fleet, "tiny", "", precision="float32").name == "b"
    assert place(fleet, "tiny", "", avoid={"b"}, precision="float32").name == "b"
    assert place(fleet, "tiny", "").name == "a", "a text without a token has none"


def test_a_text_goes_where_there_is_the_context_that_it_needs_however_busy_that_is() -> None:
    fleet = [ready("a", context_length=64), ready("b", sessions=3, context_length=128)]
    assert place(fleet, "tiny", "", context_length=65).name == "b"
    assert place(fleet, "tiny", "", context_length=64).name == "a"
    with pytest.raises(ResourceExhausted):
        place([fleet[0], replace(fleet[1], sessions=4)], "tiny", "", context_length=65)


def test_a_text_that_has_tokens_goes_only_where_its_promised_positions_are() -> None:
    fleet = [ready("a", context_length=64), ready("b", context_length=128, state=DOWN)]
    with pytest.raises(Unavailable, match="is ready"):
        place(fleet, "tiny", "", precision="float32", context_length=128)
    with pytest.raises(Unavailable, match=r"promised 128 positions.*a \(64\)") as refused:
        place(fleet[:1], "tiny", "", precision="float32", context_length=128)
    assert refused.value.field == "lease_request.context_length"
    assert refused.value.retry_after_s == RETRY_WHEN_DOWN_S
    assert place(fleet[:1], "tiny", "", precision="float32").name == "a", "older edges do not say what they need"


def test_where_no_verifier_has_the_context_any_is_chosen_and_says_so_itself() -> None:
    fleet = [ready("a", context_length=64), ready("b", sessions=3)]
    assert place(fleet, "tiny", "", context_length=65).name == "b", "it states none, and may have it"
    assert place(fleet[:1], "tiny", "", context_length=65).name == "a"


BIG, NEVER_ANSWERED = ready("b", model="big"), ready("b", model="", state=DOWN)
BEGUN = {"precision": "float32"}
REFUSED: dict[str, tuple[list[VerifierInfo], tuple[str, str], dict[str, Any], type[OutriderError], str]] = {
    "an unknown model": ([ready("a"), BIG], ("huge", ""), {}, NotFound, r"'huge'; there is big, tiny"),
    "perhaps the model of one that never answered": ([ready("a"), NEVER_ANSWERED], ("huge", ""), {}, Unavailable, ""),
    "an empty fleet": ([], ("", ""), {}, Unavailable, ""),
    "another tokenizer, though its verifier is down": (
        [ready("a", state=DOWN)],
        ("tiny", "f" * 64),
        {},
        TokenizerMismatch,
        "",
    ),
    "all are full": (
        [ready("a", sessions=4), ready("b", state=DOWN)],
        ("tiny", ""),
        {},
        ResourceExhausted,
        "all 1 verifiers",
    ),
    "all are down or draining": (
        [ready("a", state=DRAINING), ready("b", state=DOWN)],
        ("tiny", ""),
        {},
        Unavailable,
        r"a \(draining\), b \(down\)",
    ),
    "no verifier of its precision": (
        [ready("a", precision="bfloat16")],
        ("tiny", ""),
        BEGUN,
        Unavailable,
        r"begun in float32 .* there is a \(bfloat16\); start one with .*--dtype",
    ),
    "the verifier of its precision is down": (
        [ready("a", precision="bfloat16"), ready("b", precision="float32", state=DOWN)],
        ("tiny", ""),
        BEGUN,
        Unavailable,
        r"is ready: b \(down\)",
    ),
}
FIELDS = {NotFound: "lease_request.model", TokenizerMismatch: "lease_request.tokenizer_sha256"}


@pytest.mark.parametrize("why", REFUSED)
def test_a_text_is_refused_with_the_field_or_a_time_to_come_again(why: str) -> None:
    fleet, wanted, options, error, says = REFUSED[why]
    with pytest.raises(error, match=says) as refusal:
        place(fleet, *wanted, **options)
    assert refusal.value.retry_after_s > 0 if error not in FIELDS else refusal.value.field == FIELDS[error]


def test_a_verifier_that_is_short_of_pages_loses_to_any_other_with_room() -> None:
    short, busy = ready("a", kv_pages=160, kv_pages_free=9), ready("b", sessions=3, kv_pages=160, kv_pages_free=10)
    assert place([short, busy], "tiny", "").name == "b"
    assert place([short, ready("b", sessions=3, kv_pages=160)], "tiny", "").name == "a", "both are"
    assert place([ready("a"), busy], "tiny", "").name == "a", "it does not say how many it has"


# --- beginnings of texts ---


def test_of_equal_loads_the_verifier_that_took_the_most_of_the_text_wins() -> None:
    three = [ready("a", step_s=0.1), ready("b", step_s=0.2), ready("c", step_s=0.15)]
    assert place(three, "tiny", "").name == "a"
    assert place(three, "tiny", "", prefixes={"b": 1}).name == "b", "16 tokens decide between equals"
    assert place(three, "tiny", "", prefixes={"b": 1, "c": 2}).name == "c"
    assert place(three, "tiny", "", prefixes={"gone": 9}).name == "a"


@pytest.mark.parametrize(("prefixes", "more"), [(3, 0), (4, 0), (5, 1), (9, 2), (24, 5)])
def test_a_longer_beginning_outweighs_more_sessions_and_load_wins_in_the_end(prefixes: int, more: int) -> None:
    for sessions in range(12):
        pair = [ready("a", sessions=2, max_sessions=64), ready("b", sessions=2 + sessions, max_sessions=64)]
        chosen = place(pair, "tiny", "", prefixes={"b": prefixes}).name
        assert chosen == ("b" if sessions <= more else "a"), f"{prefixes} beginnings against {sessions} sessions"


def test_a_beginning_outweighs_no_more_than_a_quarter_of_a_verifiers_sessions() -> None:
    for sessions in range(8):
        pair = [ready("a", max_sessions=8), ready("b", sessions=sessions, max_sessions=8)]
        chosen = place(pair, "tiny", "", prefixes={"b": 24}).name
        assert chosen == ("b" if sessions < 2 else "a")


def test_a_beginning_is_worth_nothing_where_pending_leases_may_fill_the_verifier() -> None:
    pair = [ready("a", sessions=3), ready("b", sessions=2)]
    assert place(pair, "tiny", "", pending={"b": 1}, prefixes={"b": 9}).name == "b"
    assert place(pair, "tiny", "", pending={"b": 2}, prefixes={"b": 9}).name == "a"


def test_a_beginning_never_leads_to_a_slow_short_avoided_full_or_absent_verifier() -> None:
    def chosen(held: VerifierInfo, avoid: tuple[str, ...] = ()) -> str:
        return place(
            [ready("a", step_s=0.1, kv_pages=160, kv_pages_free=99), held], "tiny", "", avoid, {}, {"b": 9}
        ).name

    fine = ready("b", step_s=0.19, kv_pages=160, kv_pages_free=99)
    assert chosen(fine) == "b"
    assert chosen(replace(fine, step_s=0.0)) == "b", "it has not stepped yet"
    assert chosen(replace(fine, step_s=0.21)) == "a"
    assert chosen(replace(fine, kv_pages_free=9)) == "a"
    assert chosen(fine, ("b",)) == "a"
    assert chosen(replace(fine, sessions=4)) == "a"
    assert chosen(replace(fine, state=DRAINING)) == "a"
    assert chosen(replace(fine, model="big")) == "a"


def test_many_texts_of_one_beginning_at_once_are_spread_and_all_get_room() -> None:
    memory, pending, fleet = PrefixMemory(), Counter[str](), [ready("a", max_sessions=8), ready("b", max_sessions=8)]
    text = tuple(range(24))
    for _ in range(16):
        known = memory.find("", text, fleet)
        chosen = place(fleet, "tiny", "", (), pending, known)
        memory.note("", text, chosen)
        pending[chosen.name] += 1
        assert abs(pending["a"] - pending["b"]) <= 3
    assert pending == {"a": 8, "b": 8}


def test_the_memory_knows_for_each_verifier_how_much_of_a_text_it_took() -> None:
    memory, a, b = PrefixMemory(), ready("a"), ready("b")
    memory.note("", (1, 2, 3), a)
    memory.note("", (1, 2, 30, 40), b)
    assert memory.find("", (1, 2, 30, 41), [a, b]) == {"a": 2, "b": 3}
    assert memory.find("", (1, 2, 3, 4, 5), [a, b]) == {"a": 3, "b": 2}
    assert memory.find("", (2, 3), [a]) == {"a": 2}
    assert memory.find("", (9, 1, 2, 3), [a, b]) == {}, "a text that begins otherwise has nothing in common"
    assert memory.find("", (), [a, b]) == {}


def test_what_a_verifier_took_is_forgotten_when_it_restarts() -> None:
    memory, a = PrefixMemory(), ready("a")
    memory.note("", (1, 2), a)
    assert memory.find("", (1, 2), [replace(a, restarts=1)]) == {}
    assert memory.find("", (1, 2), [replace(a, address="127.0.0.1:2")]) == {}, "another of the same name"
    assert memory.find("", (1, 2), [replace(a, sessions=3, step_s=0.2)]) == {"a": 2}


def test_the_memory_is_bounded_and_the_least_recent_beginnings_go_first() -> None:
    memory, a = PrefixMemory(max_remembered=6), ready("a")
    memory.note("", (1, 2, 3), a)
    memory.note("", (4, 5, 6), a)
    memory.note("", (1, 2, 3), a)
    memory.note("", (7,), a)
    assert len(memory) == 6
    assert memory.find("", (4, 5, 6), [a]) == {"a": 2}, "the longest of the least recent one is gone"
    assert memory.find("", (1, 2, 3), [a]) == {"a": 3}
    for i in range(100):
        memory.note("", range(100 * i, 100 * i + 24), a)
    assert len(memory) == 6
    for i in range(100):
        memory.note("", (1,), ready(f"v{i}"))
    assert len(memory.find("", (1,), [ready(f"v{i}") for i in range(100)])) == 4, "holders of one are bounded too"

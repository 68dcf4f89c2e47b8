"""The store of responses keeps whole conversations, within limits of number, size and age, for one owner each."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.edge.daemon.http_errors import ApiError
from outrider.edge.daemon.response_store import ResponseStore
from outrider.edge.daemon.responses import KeptItem, message


def said(role: str, text: str) -> KeptItem:
    return message(role, [{"type": "input_text", "text": text}])


def keep(store: ResponseStore, name: str, previous: str | None = None, owner: str = "me", now: float = 0.0) -> None:
    body: dict[str, Any] = {"id": name, "previous_response_id": previous, "output": [said("assistant", f"{name}!")]}
    store.keep(owner, body, [said("user", f"{name}?")], now)


def texts(store: ResponseStore, name: str, owner: str = "me", now: float = 0.0) -> list[str]:
    return [item["content"][0]["text"] for item in store.history(owner, name, now)]


def has(store: ResponseStore, name: str, owner: str = "me", now: float = 0.0) -> bool:
    try:
        store.find(owner, name, now)
    except ApiError:
        return False
    return True


def test_a_history_is_the_conversation_in_order_and_branches_share_its_beginning() -> None:
    store = ResponseStore()
    for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("d", "b")):
        keep(store, name, previous)
    assert texts(store, "c") == ["a?", "a!", "b?", "b!", "c?", "c!"]
    assert texts(store, "d") == ["a?", "a!", "b?", "b!", "d?", "d!"]


def test_a_conversation_without_its_beginning_is_refused_by_name() -> None:
    store = ResponseStore()
    keep(store, "a")
    keep(store, "b", "a")
    store.delete("me", "a", 0.0)
    with pytest.raises(ApiError, match="no response 'a' here"):
        store.history("me", "b", 0.0)


def test_the_least_recently_used_go_first_and_no_conversation_loses_its_beginning() -> None:
    store = ResponseStore(max_responses=4)
    for name, previous in (("a", None), ("x", None), ("b", "a"), ("c", "b"), ("y", "x")):
        keep(store, name, previous)
    assert len(store) == 4
    assert not has(store, "c"), "the end of the conversation that was used longest ago"
    assert texts(store, "y") == ["x?", "x!", "y?", "y!"]
    assert texts(store, "b") == ["a?", "a!", "b?", "b!"]
    keep(store, "z")
    assert has(store, "b")
    assert not has(store, "y")
    assert has(store, "x")


def test_the_owner_with_the_most_bytes_makes_room() -> None:
    store = ResponseStore(max_responses=5)
    keep(store, "mine")
    for at in range(20):
        keep(store, f"r{at}", owner="greedy")
    assert has(store, "mine")
    assert len(store) == 5
    assert has(store, "r19", owner="greedy")


def test_bytes_are_bounded_and_come_back() -> None:
    store = ResponseStore()
    keep(store, "a")
    one = store.num_bytes
    bounded = ResponseStore(max_bytes=3 * one)
    for at in range(10):
        keep(bounded, str(at))
        assert bounded.num_bytes <= 3 * one
    assert len(bounded) == 3
    for at in range(7, 10):
        bounded.delete("me", str(at), 0.0)
    assert (len(bounded), bounded.num_bytes) == (0, 0)
    keep(ResponseStore(max_bytes=1), "a")  # which is larger than all there may be


def test_what_was_not_used_for_long_is_forgotten_and_use_counts_for_all_before_it() -> None:
    store = ResponseStore(max_age_s=10)
    keep(store, "a")
    keep(store, "old")
    keep(store, "b", "a", now=8)
    assert texts(store, "b", now=17) == ["a?", "a!", "b?", "b!"]
    assert not has(store, "old", now=17)
    assert has(store, "a", now=26)
    assert not has(store, "a", now=28)
    assert len(store) == 0


def test_a_conversation_that_no_request_could_send_is_refused(monkeypatch) -> None:
    store = ResponseStore()
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        keep(store, name, previous)
    monkeypatch.setattr("outrider.edge.daemon.response_store.MAX_HISTORY_BYTES", store.num_bytes - 1)
    assert len(texts(store, "b")) == 4
    with pytest.raises(ApiError, match="begin another") as caught:
        store.history("me", "c", 0.0)
    assert (caught.value.status, caught.value.param) == (400, "previous_response_id")


def test_an_owner_finds_nothing_of_another() -> None:
    store = ResponseStore()
    keep(store, "a")
    keep(store, "a", owner="other")
    assert not has(store, "a", owner="third")
    keep(store, "b", "a", owner="third")
    with pytest.raises(ApiError):
        store.history("third", "b", 0.0)
    store.delete("me", "a", 0.0)
    assert has(store, "a", owner="other")

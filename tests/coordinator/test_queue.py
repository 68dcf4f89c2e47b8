"""The line of waiting texts: order, shares, bounds and times, as rules of their own and over whole schedules."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
from waiting_world import Shape, WaitingWorld, by_luck, in_order

from outrider.coordinator import queue
from outrider.coordinator.cluster import VerifierInfo
from outrider.coordinator.fleet_view import FleetView
from outrider.coordinator.queue import (
    FORGET_S,
    GRACE_S,
    MAX_TICKETS,
    MAX_TICKETS_OF_KEY,
    QUESTIONS_PER_S,
    RETRY_WHEN_FULL_S,
    SOON_S,
    PlaceQueue,
    PlaceTicket,
)
from outrider.coordinator.testing import TOKENIZER_SHA256, ready
from outrider.proto.errors import ResourceExhausted
from outrider.proto.types import LeaseRequest


class Line:
    """A queue before one verifier, and its questions."""

    def __init__(self, **held: int) -> None:
        self.queue, self.now_s, self.free, self.held = PlaceQueue(), 0.0, 0, held
        self.room: dict[str, float] = {}

    def ask(self, session: str, key: str = "", *, has_place: bool = False) -> bool:
        """Whether a text gets a place; else it waits."""
        ticket = self.queue.ask(key, session, "any", self.now_s, has_place=has_place, number=None)
        room = lambda key: self.room.get(key, math.inf)  # noqa: E731
        free = {"v": self.free}
        open_to = self.queue.open_to(ticket, free, self.held, lambda _: {"v"}, room, math.inf, self.now_s)
        if open_to:
            self.queue.serve(key, session, self.now_s)
            self.free -= 1
            self.held[key] = self.held.get(key, 0) + 1
        else:
            self.retry_s = self.queue.wait(ticket, 4, self.now_s)
        return bool(open_to)


def test_a_freed_place_is_kept_for_the_text_that_waits_longest() -> None:
    line = Line()
    assert [line.ask(name) for name in ("first", "second")] == [False, False]
    line.free = 1
    assert not line.ask("newcomer")
    assert not line.ask("second")
    assert line.ask("first")


def test_of_two_free_places_the_second_is_the_second_texts() -> None:
    line = Line()
    assert [line.ask(name) for name in ("first", "second", "third")] == [False] * 3
    line.free = 2
    assert not line.ask("third")
    assert line.ask("second"), "one is left for the first"
    assert not line.ask("third")
    assert line.ask("first")


def test_a_text_that_asks_again_keeps_its_turn() -> None:
    line = Line()
    for line.now_s in (0.0, 1.0, 2.0, 3.0):
        assert not line.ask("first")
        assert not line.ask("second")
    line.free = 1
    assert not line.ask("second")
    assert line.ask("first")


def test_a_place_is_kept_until_its_edge_is_late_and_then_goes_to_the_next() -> None:
    line = Line()
    assert not line.ask("gone")
    line.free, late = 1, line.retry_s + GRACE_S
    line.now_s = late - 0.01
    assert not line.ask("next")
    line.now_s = late + 0.01
    assert line.ask("next")


def test_an_edge_that_comes_late_has_its_number_still() -> None:
    line = Line()
    assert not line.ask("late")
    line.now_s = FORGET_S - 0.01
    assert not line.ask("next")
    assert not line.ask("late")
    line.free = 1
    assert not line.ask("next")
    assert line.ask("late")


def test_an_edge_that_never_comes_back_is_forgotten() -> None:
    line = Line()
    assert not line.ask("gone")
    line.now_s = FORGET_S + 0.01
    assert not line.ask("other")
    assert len(line.queue) == 1


def test_an_end_that_is_reported_frees_the_turn_at_once() -> None:
    line = Line()
    assert not line.ask("left")
    assert line.queue.leave("", "left") is not None
    line.free = 1
    assert line.ask("next")


def test_the_turn_is_that_of_the_key_with_fewest_places() -> None:
    line = Line(alice=3, bob=1)
    assert not line.ask("a1", "alice")
    assert not line.ask("b1", "bob")
    assert not line.ask("b2", "bob")
    line.free = 2
    assert not line.ask("a1", "alice"), "bob has one, and then two"
    assert line.ask("b2", "bob")
    assert line.ask("b1", "bob")
    line.free = 1
    assert line.ask("a1", "alice"), "both have three"


def test_texts_that_their_own_key_holds_back_keep_no_place_from_others() -> None:
    line = Line(alice=1)
    line.room["alice"] = 0
    assert not line.ask("a1", "alice")
    line.free = 1
    assert line.ask("b1", "bob")
    line.free = 1
    assert not line.ask("a1", "alice")
    assert line.ask("a2", "alice", has_place=True), "its key has counted it already"


def test_a_key_has_only_so_many_tickets_and_none_keeps_all_others_out() -> None:
    line = Line()
    for number in range(MAX_TICKETS_OF_KEY + 5):
        assert not line.ask(f"s{number}", "alice")
    assert len(line.queue) == MAX_TICKETS_OF_KEY
    assert not line.ask("b1", "bob")
    assert len(line.queue) == MAX_TICKETS_OF_KEY + 1
    line.free = 1
    assert not line.ask("s9999", "alice"), "it is behind all that have one"


def test_there_are_only_so_many_tickets_in_all() -> None:
    line = Line()
    for number in range(MAX_TICKETS + 5):
        assert not line.ask(f"s{number}")
    assert len(line.queue) == MAX_TICKETS


def test_the_nearer_the_turn_the_sooner_an_edge_asks_again() -> None:
    line = Line()
    for number in range(40):  # four places a second are given
        line.now_s, line.free = number / 4, 1
        assert line.ask(f"s{number}")
    waits = []
    for number in [*range(200), *range(200)]:
        assert not line.ask(f"w{number}")
        waits.append(line.retry_s)
    del waits[:200]  # the others were not there yet
    assert waits == sorted(waits)
    assert waits[0] == SOON_S
    assert waits[8] == pytest.approx(8 / 2 / 4, rel=0.1)
    assert waits[-1] == RETRY_WHEN_FULL_S


def test_where_few_wait_all_ask_often_since_many_places_may_be_free_at_once() -> None:
    line = Line()
    for number in range(20):
        assert not line.ask(f"w{number}")
    assert line.retry_s == 20 / QUESTIONS_PER_S


# --- the view of a fleet ---


def request(session: str, **changes: Any) -> LeaseRequest:
    return LeaseRequest("tiny", session, TOKENIZER_SHA256, **changes)


def view(*verifiers: VerifierInfo) -> FleetView:
    fleet = FleetView(1.0)
    fleet.observe(verifiers)
    return fleet


def test_a_lease_takes_its_place_until_the_verifier_has_admitted_it() -> None:
    fleet = view(ready("a", max_sessions=1, lists_admitted=True))
    fleet.grant(request("s1"), "", fleet.choose(request("s1"), "", 0.0), 0.0)
    with pytest.raises(ResourceExhausted):
        fleet.choose(request("s2"), "", 0.1)
    fleet.observe((ready("a", max_sessions=1, lists_admitted=True, admitted={"s1": 0}),))
    assert fleet.choose(request("s2"), "", 0.2).name == "a", "its text has ended already"


def test_a_lease_that_nobody_uses_keeps_its_place_for_two_polls() -> None:
    fleet = view(ready("a", max_sessions=1, lists_admitted=True))
    fleet.grant(request("s1"), "", fleet.choose(request("s1"), "", 0.0), 0.0)
    with pytest.raises(ResourceExhausted):
        fleet.choose(request("s2"), "", 1.9)
    assert fleet.choose(request("s2"), "", 2.1).name == "a"


def test_a_text_whose_verifier_refused_it_has_its_turn_back() -> None:
    full = ready("a", max_sessions=1, sessions=1, lists_admitted=True)
    fleet = view(full)
    for session in ("s1", "s2"):
        with pytest.raises(ResourceExhausted):
            fleet.choose(request(session), "", 0.0)
    fleet.observe((ready("a", max_sessions=1, lists_admitted=True),))
    fleet.grant(request("s1"), "", fleet.choose(request("s1"), "", 0.1), 0.1)
    with pytest.raises(ResourceExhausted):
        fleet.choose(request("s2"), "", 0.2)
    assert fleet.choose(request("s1"), "", 0.3).name == "a", "with the next lease"
    with pytest.raises(ResourceExhausted):
        fleet.choose(request("s2"), "", 0.4)


def test_questions_and_suspicions_take_no_turn() -> None:
    fleet = view(ready("a", max_sessions=1, sessions=1, lists_admitted=True))
    for asked in (request("i", inquiry=True), request("s", suspected=True)):
        with pytest.raises(ResourceExhausted):
            fleet.choose(asked, "", 0.0)
    assert not len(fleet.queue)


def test_a_place_that_few_texts_can_take_is_left_to_them() -> None:
    small, large = (
        ready(name, max_sessions=1, context_length=n, lists_admitted=True) for name, n in (("a", 64), ("b", 128))
    )
    fleet = view(*(ready(v.name, max_sessions=1, sessions=1, context_length=v.context_length) for v in (small, large)))
    for session, needed in (("short", 10), ("long", 100)):
        with pytest.raises(ResourceExhausted):
            fleet.choose(request(session, context_length=needed), "", 0.0)
    fleet.observe((small, large))
    assert fleet.choose(request("long", context_length=100), "", 0.1).name == "b"


# --- whole schedules ---

KEYS = [(("", 1.0),), (("a", 5.0), ("b", 1.0)), (("a", 1.0), ("b", 1.0), ("c", 6.0))]


def shape(seed: int) -> Shape:
    """A small fleet and its texts: keys, limits, texts that few can take, ends that nobody reports, and a restart."""
    rng = random.Random(seed)
    return Shape(
        places=rng.choice([(1,), (2,), (4, 4), (1, 3), (2, 2, 2)]),
        service_s=rng.choice([0.3, 1.0, 3.0]),
        load=rng.uniform(0.7, 2.0),
        until_s=6.0,
        burst=rng.choice([0, 20]),
        keys=rng.choice(KEYS),
        limits=rng.choice([(), (("a", 1),), (("a", 3), ("b", 1))]),
        long=rng.choice([0.0, 0.3]),
        leaves=rng.choice([0.0, 0.3]),
        unused=rng.choice([0.0, 0.1]),
        unreported=rng.choice([0.0, 0.5]),
        restarts=rng.choice([(), (3.0,)]),
    )


def violations(seeds: range) -> Iterator[str]:
    """Texts that were passed or left waiting, and shares that were exceeded, in the schedules of these seeds."""
    return (f"seed {seed}: {found}" for seed in seeds for found in WaitingWorld(shape(seed), seed).run().found)


def test_no_text_is_passed_or_left_and_no_key_has_more_than_its_share() -> None:
    assert next(violations(range(25)), None) is None


@pytest.mark.soak
def test_no_text_is_passed_in_hundreds_of_schedules() -> None:
    assert next(violations(range(400)), None) is None


def only_who_asks(self: PlaceTicket, now_s: float) -> bool:
    return self.asked_s == now_s


def first_come(self: PlaceQueue, ticket: PlaceTicket, free: Any, held: Any, *rest: Any) -> frozenset[str]:
    return rightly(self, ticket, free, {}, *rest)


def newest_first(line: Any, now_s: float) -> Iterator[PlaceTicket]:
    return (ticket for ticket in reversed(list(line.values())) if ticket.counts(now_s))


rightly = PlaceQueue.open_to
PLANTED = {
    "luck": [(FleetView, "_with_places_for", by_luck)],
    "the newest has its turn first": [(PlaceQueue, "_waiting", staticmethod(newest_first))],
    "no place is kept": [(PlaceTicket, "counts", only_who_asks)],
    "keys do not count": [(PlaceQueue, "open_to", first_come)],
    "a number is lost with each question": [(queue, "FORGET_S", 0.0)],
    "leases take no place before they are sessions": [(FleetView, "_expire", lambda self, _: self.granted.clear())],
    "texts that are gone keep their turn": [(queue, "GRACE_S", math.inf), (queue, "FORGET_S", math.inf)],
    "leases that nobody uses keep their places": [(FleetView, "_expire", lambda *_: None)],
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_rule_that_passes_or_leaves_texts_is_found(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for patch in PLANTED[planted]:
        monkeypatch.setattr(*patch)
    assert next(violations(range(40)), None) is not None


BURST = Shape(places=(16,), load=0.9, until_s=200.0, burst=100)


def test_after_a_burst_none_fails_and_none_waits_much_longer_than_in_order() -> None:
    world = WaitingWorld(BURST, 1).run()
    ideal = in_order(world)
    assert not any(text.failed for text in world.texts)
    assert world.waits[-1] < ideal[-1] + 5.0
    assert world.waits[int(0.95 * len(ideal))] < ideal[int(0.95 * len(ideal))] + 5.0


def test_after_the_same_burst_texts_fail_where_luck_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FleetView, "_with_places_for", by_luck)
    world = WaitingWorld(BURST, 1).run()
    assert any(text.failed for text in world.texts)
    assert world.waits[-1] > in_order(world)[-1] + 30.0

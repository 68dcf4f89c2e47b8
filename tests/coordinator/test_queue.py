"""The line of waiting texts: order, shares, bounds and times, as rules of their own and over whole schedules."""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from fake_cluster import TOKENIZER_SHA256, ready
from waiting_world import Finding, Shape, WaitingWorld, by_luck, in_order

from outrider.coordinator import queue
from outrider.coordinator.cluster import VerifierInfo, VerifierState
from outrider.coordinator.fleet_view import FleetView
from outrider.coordinator.queue import (
    GRACE_S,
    INQUIRIES_PER_S,
    LOOK_EVERY_S,
    LOOK_WITHIN_S,
    MAX_TICKETS_OF_KEY,
    QUESTIONS_PER_S,
    RETRY_WHEN_FULL_S,
    SOON_S,
    InquiryPace,
    KeyShare,
    SlotQueue,
    SlotTicket,
)
from outrider.proto.errors import ResourceExhausted, Unavailable
from outrider.proto.lease import text_name
from outrider.proto.types import LeaseRequest, ServiceClass, ServiceGoal


class Line:
    """A queue before one verifier, and its questions."""

    def __init__(self, **held: int) -> None:
        self.queue, self.now_s, self.free, self.held = SlotQueue(), 0.0, 0, held
        self.room: dict[str, float] = {}
        self.lately: dict[str, int] = {}
        self.asked_for_room: list[str] = []

    def share(self, key: str) -> KeyShare:
        return KeyShare(self.held.get(key, 0), self.lately.get(key, math.inf))

    def room_of(self, key: str) -> float:
        self.asked_for_room.append(key)
        return self.room.get(key, math.inf)

    def ask(
        self, session: str, key: str = "", *, has_slot: bool = False, has_run: bool = False, **service: Any
    ) -> bool:
        """Whether a text gets a slot; else it waits."""
        ticket = self.queue.ask(key, session, "any", self.now_s, has_slot=has_slot, has_run=has_run, **service)
        free = {"v": self.free}
        open_to = self.queue.open_to(ticket, free, self.share, lambda _: {"v"}, self.room_of, math.inf, self.now_s)
        if open_to:
            self.queue.serve(key, session, self.now_s)
            self.free -= 1
            self.held[key] = self.held.get(key, 0) + 1
        else:
            self.retry_s = self.queue.wait(ticket, 4, self.now_s)
        return bool(open_to)


def test_an_end_that_is_reported_frees_the_turn_at_once() -> None:
    line = Line()
    assert not line.ask("left")
    line.queue.leave("", "left")
    line.free = 1
    assert line.ask("next")


def serve(line: Line, *sessions: str, key: str = "") -> None:
    line.free = len(sessions)
    for session in sessions:
        assert line.ask(session, key)


def lose(line: Line, key: str, slots: int) -> None:
    line.held[key] -= slots


def test_a_text_that_has_ended_is_a_newcomer_when_its_session_comes_again() -> None:
    line = Line()
    serve(line, "conversation")
    line.queue.leave("", "conversation")
    assert not line.ask("newcomer")
    assert not line.ask("conversation"), "its next turn"
    line.free = 1
    assert not line.ask("conversation")
    assert line.ask("newcomer")


def test_a_key_that_hides_the_ends_of_its_texts_gains_no_slot_by_it() -> None:
    line = Line()
    for name in ("a1", "a2", "a3", "a4"):  # one after the other
        serve(line, name, key="alice")
        lose(line, "alice", 1)
    line.lately["alice"] = 1
    for name in ("a1", "a2", "a3", "a4"):
        assert not line.ask(name, "alice")
    assert not line.ask("b1", "bob")
    line.free = 1
    assert line.ask("a1", "alice"), "it may be a text that goes on"
    line.free = 1
    assert not line.ask("a2", "alice")
    assert line.ask("b1", "bob")


def test_there_is_room_in_the_line_for_a_running_text_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MAX_TICKETS", 2)
    line = Line()
    serve(line, "running")
    assert [line.ask(name) for name in ("w1", "w2", "w3", "running")] == [False] * 4
    assert len(line.queue) == 3
    line.free = 1
    assert not line.ask("w1")
    assert line.ask("running")


def test_the_numbers_of_texts_whose_ends_nobody_reports_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "MAX_NUMBERS", 2)
    line = Line()
    serve(line, "s1", "s2", "s3")
    assert [line.ask(name) for name in ("newcomer", "s1", "s3")] == [False] * 3
    line.free = 2
    assert not line.ask("s1"), "it is the oldest and was forgotten"
    assert line.ask("s3")


def test_the_room_of_a_key_is_asked_for_once_a_question_however_many_wait() -> None:
    line = Line()
    line.room["alice"] = 0
    for number in range(50):
        assert not line.ask(f"a{number}", "alice")
    line.free = 1
    line.asked_for_room.clear()
    assert line.ask("b1", "bob")
    assert sorted(line.asked_for_room) == ["alice", "bob"]


def test_a_question_looks_at_no_other_ticket_where_no_free_slot_fits_it() -> None:
    line = Line()
    for number in range(50):
        assert not line.ask(f"w{number}")
    looked: list[object] = []

    def fits(wants: object) -> set[str]:
        looked.append(wants)
        return {"v"}

    ticket = line.queue.ask("", "w49", "any", 0.0)
    free = {"v": 0, "another model's": 3}
    assert not line.queue.open_to(ticket, free, line.share, fits, line.room_of, math.inf, 0.0)
    assert looked == ["any"], "its own wants alone"


def test_texts_that_their_own_key_holds_back_keep_no_slot_from_others() -> None:
    line = Line(alice=1)
    line.room["alice"] = 0
    assert not line.ask("a1", "alice")
    line.free = 1
    assert line.ask("b1", "bob")
    line.free = 1
    assert not line.ask("a1", "alice")
    assert line.ask("a2", "alice", has_slot=True), "its key has counted it already"


def test_a_key_has_only_so_many_tickets_and_none_keeps_all_others_out() -> None:
    line = Line()
    for number in range(MAX_TICKETS_OF_KEY + 5):
        assert not line.ask(f"s{number}", "alice")
    assert len(line.queue) == MAX_TICKETS_OF_KEY
    assert not line.ask("b1", "bob")
    assert len(line.queue) == MAX_TICKETS_OF_KEY + 1
    line.free = 1
    assert not line.ask("s9999", "alice"), "it is behind all that have one"


def test_the_nearer_the_turn_the_sooner_an_edge_asks_again() -> None:
    line = Line()
    for number in range(40):  # four slots a second are given
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


def test_where_few_wait_all_ask_often_since_many_slots_may_be_free_at_once() -> None:
    line = Line()
    for number in range(20):
        assert not line.ask(f"w{number}")
    assert line.retry_s == 20 / QUESTIONS_PER_S


FIGURES, BATCH = ServiceGoal(gap_s=0.05), ServiceGoal(batch=True)


def served(line: Line, **asking: ServiceGoal | None) -> list[str]:
    """Return the order in which waiting texts get slots, one after the other."""
    order: list[str] = []
    while len(order) < len(asking):
        line.free = 1
        left = [session for session in asking if session not in order]
        order += [session for session in left if line.ask(session, service=asking[session])]
        line.now_s += 0.5
    return order


def test_the_line_is_served_in_order_of_worth_and_in_a_class_in_order_of_arrival() -> None:
    line = Line()
    asking = {"b1": BATCH, "i1": None, "b2": BATCH, "f1": FIGURES, "i2": ServiceGoal(), "f2": FIGURES}
    for session, service in asking.items():
        assert not line.ask(session, service=service)
        line.now_s += 0.1
    assert served(line, **asking) == ["f1", "f2", "i1", "i2", "b1", "b2"]


def first_batch_text(line: Line, seconds: float) -> float:
    """Return when a batch text gets a slot though texts with figures come all the time; infinite: it does not."""
    waiting: dict[str, ServiceGoal] = {"batch": BATCH}
    while line.now_s < seconds:
        waiting[f"f{line.now_s:g}"] = FIGURES  # more than there are slots
        for session in list(waiting):
            if line.ask(session, service=waiting[session]):
                del waiting[session]
        if "batch" not in waiting:
            return line.now_s
        line.now_s += 0.5
        line.free = int(line.now_s) == line.now_s
    return math.inf


def test_a_batch_text_is_passed_only_for_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    passed_s = queue.AHEAD_S[ServiceClass.FIGURES] - queue.AHEAD_S[ServiceClass.BATCH]
    assert passed_s <= first_batch_text(Line(), 200.0) <= 2 * passed_s + 2
    ages = {each: 1e9 * (each - 1) for each in ServiceClass}
    monkeypatch.setattr(queue, "AHEAD_S", ages)
    assert first_batch_text(Line(), 200.0) == math.inf, "negative control: strict priority starves it"


# --- the view of a fleet ---


def request(session: str, **changes: Any) -> LeaseRequest:
    return LeaseRequest("tiny", session, TOKENIZER_SHA256, **changes)


def view(*verifiers: VerifierInfo) -> FleetView:
    fleet = FleetView(1.0)
    fleet.observe(verifiers, 0.0)
    return fleet


def test_questions_and_suspicions_take_no_turn() -> None:
    fleet = view(ready("a", max_sessions=1, sessions=1))
    for asked in (request("i", inquiry=True), request("s", suspected=True)):
        with pytest.raises(ResourceExhausted):
            fleet.choose(asked, "", 0.0)
    assert not len(fleet.queue)


def granted(fleet: FleetView, asked: LeaseRequest, tenant: str, now_s: float) -> str:
    chosen = fleet.choose(asked, tenant, now_s)
    fleet.grant(asked, tenant, chosen, now_s)
    return chosen.name


def verifier(slots: int, sessions: int, **changes: Any) -> VerifierInfo:
    return ready("a", max_sessions=slots, sessions=sessions, precision="float32", **changes)


def waits(fleet: FleetView, asked: LeaseRequest, tenant: str, now_s: float) -> None:
    with pytest.raises(ResourceExhausted):
        fleet.choose(asked, tenant, now_s)


def test_a_text_whose_lease_comes_to_nothing_late_has_its_turn_still() -> None:
    fleet = view(verifier(1, 0))
    granted(fleet, request("late"), "", 0.0)
    waits(fleet, request("next"), "", 0.1)
    fleet.observe((verifier(1, 1),), 3.0)
    waits(fleet, request("late"), "", 3.0)
    waits(fleet, request("next"), "", 3.0)
    fleet.observe((verifier(1, 0),), 3.1)
    waits(fleet, request("next"), "", 3.1)
    assert granted(fleet, request("late"), "", 3.1) == "a"


def test_a_suspected_stream_is_left_for_the_next_free_slot_though_others_wait() -> None:
    hung = ready("hung", max_sessions=1)
    fleet = view(hung)
    asked = request("s", avoid=("hung",), suspected=True, epoch=1)
    assert granted(fleet, request("s"), "", 0.0) == "hung"
    full = (verifier(1, 1), replace(hung, sessions=1))
    fleet.observe(full, 1.0)
    waits(fleet, request("newcomer"), "", 1.0)
    waits(fleet, asked, "", 1.0)
    assert len(fleet.queue) == 1, "no slot is kept for it"
    fleet.observe((verifier(1, 0), full[1]), 2.0)
    assert fleet.choose(asked, "", 2.0).name == "a"


@pytest.mark.parametrize("tenant", ["", "alice"])
def test_after_a_restart_verifiers_say_which_texts_are_no_newcomers(tenant: str) -> None:
    admitted = {text_name(tenant, "old"): 0}
    fleet = view(verifier(1, 1, admitted=admitted))
    waits(fleet, request("newcomer"), tenant, 0.0)
    waits(fleet, request("liar", precision="float32", epoch=3), tenant, 0.0)
    waits(fleet, request("old", precision="float32", epoch=1), tenant, 0.0)
    fleet.observe((verifier(1, 0, admitted=admitted),), 0.5)
    waits(fleet, request("newcomer"), tenant, 0.5)
    waits(fleet, request("liar", precision="float32", epoch=3), tenant, 0.5)
    assert fleet.choose(request("old", precision="float32", epoch=1), tenant, 0.5).name == "a"


def test_a_slot_is_kept_for_an_edge_that_was_told_that_none_is_ready() -> None:
    drained = verifier(1, 0, state=VerifierState.DRAINING)
    fleet = view(drained)
    with pytest.raises(Unavailable):
        fleet.choose(request("first"), "", 0.0)
    fleet.observe((verifier(1, 0),), 1.0)
    waits(fleet, request("newcomer"), "", RETRY_WHEN_FULL_S + GRACE_S - 0.01)
    assert fleet.choose(request("first"), "", RETRY_WHEN_FULL_S + GRACE_S).name == "a"


def test_what_a_verifier_admitted_and_has_no_token_is_a_newcomer() -> None:
    fleet = view(verifier(1, 1, admitted={"turn": 0}))
    waits(fleet, request("newcomer"), "", 0.0)
    waits(fleet, request("turn", epoch=1), "", 0.0)
    fleet.observe((verifier(1, 0, admitted={"turn": 0}),), 0.5)
    waits(fleet, request("turn", epoch=1), "", 0.5)
    assert fleet.choose(request("newcomer"), "", 0.5).name == "a"


def texts(*sessions: str) -> dict[str, Any]:
    return {"texts_of_keys": {"alice": dict.fromkeys(sessions, 1.0)}}


def test_a_key_had_lately_what_it_had_at_once_within_a_minute() -> None:
    fleet = view(verifier(4, 3, **texts("a1", "a2", "a3")))
    assert fleet._share_of()("alice") == KeyShare(3, math.inf, Counter(("a1", "a2", "a3"))), "nobody watched before"
    fleet.observe((verifier(4, 3, **texts("a1", "a2", "a3")),), 61.0)
    fleet.observe((verifier(4, 1, **texts("a1")),), 62.0)
    assert fleet._share_of()("alice") == KeyShare(1, 3, Counter(("a1",)))
    assert fleet._share_of()("bob") == KeyShare(0, 0)
    assert fleet._share_of()("") == KeyShare(), "it may have any number"
    for now_s in (122.0, 183.0):
        fleet.observe((verifier(4, 1, **texts("a1")),), now_s)
    assert fleet._share_of()("alice").lately == 1


def test_texts_of_a_sick_verifier_have_no_slot_and_one_that_moves_has_one() -> None:
    moving = texts("a1")
    fleet = view(verifier(4, 1, **moving), ready("b", **moving, state=VerifierState.SICK), ready("c").down())
    fleet.grant(request("a1"), "alice", ready("b"), 0.0)
    fleet.grant(request("a2"), "alice", ready("b"), 0.0)
    assert fleet._share_of()("alice").now == 2


def test_a_promised_text_that_no_verifier_can_take_keeps_no_slot() -> None:
    fleet = view(verifier(1, 0, context_length=64))
    with pytest.raises(Unavailable, match="128 positions") as refused:
        fleet.choose(request("long", precision="float32", context_length=128, epoch=1), "", 0.0)
    assert (refused.value.field, refused.value.retry_after_s) == ("lease_request.context_length", 1.0)
    assert fleet.choose(request("short", context_length=10), "", 0.1).name == "a"


def test_a_slot_that_few_texts_can_take_is_left_to_them() -> None:
    small, large = (ready(name, max_sessions=1, context_length=n) for name, n in (("a", 64), ("b", 128)))
    fleet = view(*(ready(v.name, max_sessions=1, sessions=1, context_length=v.context_length) for v in (small, large)))
    for session, needed in (("short", 10), ("long", 100)):
        with pytest.raises(ResourceExhausted):
            fleet.choose(request(session, context_length=needed), "", 0.0)
    fleet.observe((small, large), 0.1)
    assert fleet.choose(request("long", context_length=100), "", 0.1).name == "b"


# --- whole schedules ---

KEYS = [(("", 1.0),), (("a", 5.0), ("b", 1.0)), (("a", 1.0), ("b", 1.0), ("c", 6.0))]


def shape(seed: int) -> Shape:
    """A small fleet and its texts: keys, limits, texts that few can take, ends that nobody reports, and faults."""
    rng = random.Random(seed)
    return Shape(
        slots=rng.choice([(1,), (2,), (4, 4), (1, 3), (2, 2, 2)]),
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
        lease_s=rng.choice([math.inf, 0.7]),
        preempted=rng.choice([0.0, 0.3]),
        drains=rng.choice([(), (2.5, 6.0)]),
    )


def findings(seeds: range) -> Iterator[tuple[int, Finding]]:
    """Return the violations in the schedules of these seeds."""
    return ((seed, found) for seed in seeds for found in WaitingWorld(shape(seed), seed).run().found)


def test_running_texts_go_on_and_no_text_is_passed_or_left_and_shares_hold() -> None:
    assert next(findings(range(25)), None) is None


@pytest.mark.soak
def test_the_same_holds_in_hundreds_of_schedules() -> None:
    assert next(findings(range(200)), None) is None


def only_who_asks(self: SlotTicket, now_s: float) -> bool:
    return self.asked_s == now_s


def first_come(self: SlotQueue, ticket: SlotTicket, free: Any, share_of: Any, *rest: Any) -> frozenset[str]:
    return rightly(self, ticket, free, lambda _: KeyShare(), *rest)


def newest_first(line: Any, left: Any, now_s: float) -> Iterator[SlotTicket]:
    return (ticket for ticket in reversed(list(line)) if left.open_to(ticket) and ticket.counts(now_s))


def none_lately(self: FleetView) -> Any:
    return lambda key: KeyShare(self._held()[key], 0)


rightly = SlotQueue.open_to
FORGETS = [(queue, "MAX_NUMBERS", 0), (FleetView, "_has_run", lambda *_: False)]
PLANTED = {
    "luck": ("order", [(FleetView, "_with_slots_for", by_luck)]),
    "the newest has its turn first": ("order", [(SlotQueue, "_waiting", staticmethod(newest_first))]),
    "no slot is kept": ("order", [(SlotTicket, "counts", only_who_asks)]),
    "keys do not count": ("shares", [(SlotQueue, "open_to", first_come)]),
    "a number is lost with each question": ("order", [(queue, "FORGET_S", 0.0)]),
    "leases take no slot before they are sessions": (
        "a lease is a slot",
        [(FleetView, "_expire", lambda self, _: self.granted.clear())],
    ),
    "texts that are gone keep their turn": (
        "no slot stays free",
        [(queue, "GRACE_S", math.inf), (queue, "FORGET_S", math.inf)],
    ),
    "leases that nobody uses keep their slots": ("no slot stays free", [(FleetView, "_expire", lambda *_: None)]),
    "a running text that loses its slot is a newcomer": ("running texts first", FORGETS),
    "a running text is a newcomer to other keys": ("running texts first", [(FleetView, "_share_of", none_lately)]),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_defect_is_found_by_the_property_that_it_violates(
    planted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    violated, patches = PLANTED[planted]
    for patch in patches:
        monkeypatch.setattr(*patch)
    assert any(found.violated == violated for _, found in findings(range(40)))


# Texts that take longer than a lease, many more of them than slots, and a verifier that drains.
LONG = Shape(slots=(8, 8), service_s=30.0, load=4.0, until_s=60.0, lease_s=25.0, preempted=0.3, drains=(30.0,))


def test_of_long_texts_none_that_has_begun_fails() -> None:
    world = WaitingWorld(LONG, 1).run()
    assert not world.found
    assert any(text.failed for text in world.texts), "of those that had no slot, for want of slots"


def test_long_texts_fail_where_one_that_loses_its_slot_is_a_newcomer(monkeypatch: pytest.MonkeyPatch) -> None:
    for patch in FORGETS:
        monkeypatch.setattr(*patch)
    assert any(found.violated == "running texts go on" for found in WaitingWorld(LONG, 1).run().found)


BURST = Shape(slots=(16,), load=0.9, until_s=200.0, burst=100)


def test_after_a_burst_none_fails_and_none_waits_much_longer_than_in_order() -> None:
    world = WaitingWorld(BURST, 1).run()
    ideal = in_order(world)
    assert not any(text.failed for text in world.texts)
    assert world.waits[-1] < ideal[-1] + 5.0
    assert world.waits[int(0.95 * len(ideal))] < ideal[int(0.95 * len(ideal))] + 5.0


def test_after_the_same_burst_texts_fail_where_luck_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FleetView, "_with_slots_for", by_luck)
    world = WaitingWorld(BURST, 1).run()
    assert any(text.failed for text in world.texts)
    assert world.waits[-1] > in_order(world)[-1] + 30.0


# --- edges that only look ---


def looks_of(edges: int, every_s: float, until_s: float) -> Counter[int]:
    """Looks in each second, of edges that came back within one and keep to the pace."""
    pace, looks = InquiryPace(), Counter[int]()
    due = [number / edges for number in range(edges)]
    heapq.heapify(due)
    while due[0] < until_s:
        now_s = heapq.heappop(due)
        looks[int(now_s)] += 1
        heapq.heappush(due, now_s + max(every_s, pace.again_in(now_s)))
    return looks


@pytest.mark.parametrize("edges", [50, 1000, 10_000])
def test_edges_that_look_ask_no_more_often_than_a_coordinator_can_answer(edges: int) -> None:
    looks = looks_of(edges, LOOK_EVERY_S, 300.0)
    assert max(looks[second] for second in range(2, 300)) <= INQUIRIES_PER_S + 1
    assert sum(looks.values()) >= min(INQUIRIES_PER_S, edges / 2.0) * 290, "and no less often than they may"


def test_a_look_is_never_put_off_for_long() -> None:
    pace = InquiryPace()
    assert max(pace.again_in(0.0) for _ in range(20_000)) == LOOK_WITHIN_S

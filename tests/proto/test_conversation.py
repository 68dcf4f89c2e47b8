"""Several turns on one session: both halves over a bad link, then rule by rule."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from bad_link import Faults
from checked_simulation import CheckedSimulation, open_frame, own_text, rules
from hand_driven import HandDrivenEdge, committed, drafts_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle_drafters import drafter_of, hashing_oracle

from outrider.edge.selectors import FixedShare, Leader
from outrider.proto import codec
from outrider.proto.errors import (
    InvalidArgument,
    PromptTooLong,
    ResourceExhausted,
    UnknownToken,
)
from outrider.proto.policy import Measurements, Window
from outrider.proto.session import (
    Done,
    Emit,
    Reopen,
    Selection,
    StopRequested,
    TeacherForced,
    TurnBegun,
)
from outrider.proto.session.verifier import Verified, VerifierSession
from outrider.proto.types import (
    CloudFrame,
    Commit,
    CommittedToken,
    Continue,
    Draft,
    DraftToken,
    EdgeFrame,
    FinishReason,
    Goaway,
    Open,
    Opened,
    Patience,
    Report,
    Sampling,
    token_ids,
)

# === both halves together =======================================================================================


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Actions of a user: keep the share `kept` of the last text, add `prompt`, leave the turn after `leave_s`."""

    prompt: tuple[int, ...]
    sampling: Sampling
    kept: float = 1.0
    leave_s: float = math.inf
    pause_s: float = 0.0
    evicted: bool = False


class Talk(CheckedSimulation):
    """A simulation that goes on after Done, on the stream that is open or on another."""

    def __init__(self, turns: list[Turn], oracle, drafter, *, verifier, **options) -> None:
        first = turns[0]
        frame = open_frame(prompt=first.prompt, sampling=first.sampling, keep_s=60.0, drafting=drafter is not None)
        super().__init__(frame, oracle, drafter, verifier=verifier, **options)
        self.continued: list[Continue] = []
        self.opens: list[Open] = []
        self._turns = turns
        self._opening_credit = 0

    def run_turns(self) -> None:
        self.begin()
        for number, turn in enumerate(self._turns):
            if number:
                self._begin(turn)
            if turn.leave_s < math.inf:
                self.clock.at(self.now + turn.leave_s, lambda number=number: self._leave(number))
            self._number = number
            self.run_until(lambda: self.done is not None)
            self._check(turn)
            until = self.now + turn.pause_s
            self.clock.at(until, lambda: None)
            self.run_until(lambda until=until: self.now >= until)
            slot = self.verifier.slot(self.stream)
            if turn.evicted and slot is not None and slot.session.finish is not None:
                self.verifier.release(self.stream)
                self.stream.send_down(Goaway("its pages are needed", epoch=self.edge.next_epoch - 1))

    def _begin(self, turn: Turn) -> None:
        prompt_length = self.edge.prompt_length
        start = prompt_length + round(turn.kept * (len(self.edge.transcript) - prompt_length))
        self.emitted.clear()
        self.done = None
        self.handle(TurnBegun(start, turn.prompt, turn.sampling))

    def _leave(self, number: int) -> None:
        if self._number == number:
            self.handle(StopRequested())

    def _check(self, turn: Turn) -> None:
        assert self.done is not None
        assert self.done.error is None
        prompt = tuple(self.edge.transcript[: self.edge.prompt_length])
        whole = own_text(self.oracle, open_frame(prompt=prompt, sampling=turn.sampling), self.rules)
        text = tuple(self.emitted)
        assert prompt[len(prompt) - len(turn.prompt) :] == turn.prompt
        assert text == (whole[: len(text)] if self.done.finish is FinishReason.CANCELLED else whole)

    def send(self, frame: EdgeFrame) -> None:
        if isinstance(frame, Open):
            self.opens.append(frame)
        if isinstance(frame, Continue):
            self.continued.append(frame)
            self._granted = self._opening_credit
        super().send(frame)

    def receive(self, stream, frame: CloudFrame) -> None:
        if isinstance(frame, Opened) and stream is self.stream:
            self._opening_credit = frame.credit
        granted = self._granted
        super().receive(stream, frame)
        if isinstance(frame, Commit) and frame.turn != self.edge._stream.turn:
            self._granted = granted  # of an earlier turn, and ignored


prompts = st.lists(st.integers(1, 7), min_size=1, max_size=6).map(tuple)
turns = st.builds(
    Turn,
    prompt=prompts,
    sampling=st.sampled_from([Sampling(max_tokens=n, stop_tokens=stop) for n in (1, 5, 25) for stop in ((), (3,))]),
    kept=st.sampled_from([1.0, 1.0, 0.5, 0.0]),
    leave_s=st.sampled_from([math.inf, math.inf, 0.0, 0.05, 0.2]),
    pause_s=st.sampled_from([0.0, 0.05, 1.0]),
    evicted=st.sampled_from([False, False, True]),
)
links = st.builds(
    Faults,
    delay_s=st.sampled_from([0.03, 0.2, 0.0]),
    jitter_s=st.sampled_from([0.0, 0.05]),
    duplicated=st.sampled_from([0.0, 0.3]),
    reordered=st.sampled_from([0.0, 0.3]),
    breaks_every_s=st.sampled_from([0.0, 0.0, 0.7]),
    goaway_every_s=st.sampled_from([0.0, 0.0, 1.0]),
)


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1 << 30),
    said=st.lists(turns, min_size=2, max_size=5),
    link=links,
    right=st.sampled_from([0.9, 0.5, 1.0, 0.0, None]),
    window=st.sampled_from([Window(), Window(64), Window(3)]),
    patience=st.sampled_from([None, Patience(0.0), Patience(0.01, 4), Patience(math.inf, 4)]),
    max_credit=st.sampled_from([64, 5, 1]),
    fickle_credit=st.booleans(),
    send_q=st.booleans(),
)
def test_every_turn_has_the_text_of_a_fresh_open_whatever_happens_before(
    seed, said, link, right, window, patience, max_credit, fickle_credit, send_q
):
    oracle = hashing_oracle(seed, eos_odds=0.02)
    drafter = None if right is None else drafter_of(oracle, seed, right, silent=0.1, confidence="telling")
    talk = Talk(
        said,
        oracle,
        drafter,
        verifier=rules(max_credit=max_credit, patience=patience),
        window=window,
        link=link,
        seed=seed,
        fickle_credit=fickle_credit,
        send_q=send_q,
    )
    talk.run_turns()


def test_what_the_drafter_read_in_earlier_turns_is_not_read_again():
    said = [Turn(prompt=(n, 5), sampling=Sampling(max_tokens=12), pause_s=0.1) for n in range(1, 5)]
    oracle = hashing_oracle(1, eos_odds=0)
    read: list[int] = []
    talk = Talk(said, oracle, drafter_of(oracle, 1, 1.0), verifier=rules())
    drafting = talk.drafters.draft

    def counting(job):
        read.append(len(job.extend_with))
        return drafting(job)

    talk.drafters.draft = counting
    talk.run_turns()
    assert sum(read) < len(talk.edge.transcript) + 20
    assert talk.edge.statistics.accepted > 6


# === on the wire ================================================================================================


def test_a_continue_of_a_stranger_is_checked_before_a_list_is_built():
    data = codec.encode_edge_frame(Continue(0, (1,) * 50))
    with pytest.raises(PromptTooLong) as caught:
        codec.decode_edge_frame(data, max_tokens=10)
    assert caught.value.field == "continuation.prompt"
    with pytest.raises(InvalidArgument, match=r"sampling\.stop_tokens"):
        codec.decode_edge_frame(codec.encode_edge_frame(Continue(0, (), Sampling(stop_tokens=(1,) * 50))), 10)


# === the verifier's half ========================================================================================


def finished(**changes) -> VerifierSession:
    """A kept session with the transcript 3 1 2, 4 5."""
    session = VerifierSession(open_frame(**{"sampling": Sampling(max_tokens=2), "keep_s": 9.0} | changes), rules(), 0.0)
    session.opened()
    for token in (4, 5):
        commit = session.on_verified(Verified((), tuple(map(CommittedToken, (token,), (0.0,)))), 1.0)
    assert commit.finish is FinishReason.LENGTH
    return session


@pytest.mark.parametrize(
    ("frame", "error", "field"),
    [
        (Continue(6, (1,)), InvalidArgument, "continuation.start"),
        (Continue(0, ()), InvalidArgument, "continuation.prompt"),
        (Continue(5, (8,)), UnknownToken, "continuation.prompt"),
        (Continue(5, (1,) * 507), PromptTooLong, "continuation.prompt"),
        (Continue(5, (1,), Sampling(stop_tokens=(9,))), UnknownToken, "sampling.stop_tokens"),
        (Continue(5, (1,), Sampling(logit_bias=((8, 1.0),))), UnknownToken, "sampling.bias_tokens"),
    ],
)
def test_a_continue_that_cannot_be_is_refused_with_the_field_named(frame, error, field):
    session = finished()
    with pytest.raises(error) as caught:
        session.continued(frame, 2.0)
    assert caught.value.field == field
    assert session.transcript == [3, 1, 2, 4, 5]
    assert session.continued(Continue(5, (1,)), 3.0).transcript == [3, 1, 2, 4, 5, 1]


def test_a_continue_needs_a_session_that_is_kept_and_at_rest():
    running = VerifierSession(open_frame(keep_s=9.0), rules(), 0.0)
    with pytest.raises(InvalidArgument, match=r"frame\.continuation"):
        running.continued(Continue(3, (1,)), 1.0)
    for session in (finished(keep_s=0.0), VerifierSession(open_frame(keep_s=9.0), rules(keep_s=0.0), 0.0)):
        assert session.opened().keep_s == 0
        with pytest.raises(InvalidArgument, match=r"open\.keep_s"):
            session.continued(Continue(3, (1,)), 1.0)
    assert VerifierSession(open_frame(keep_s=math.inf), rules(keep_s=7.0), 0.0).opened().keep_s == 7
    with pytest.raises(InvalidArgument, match="keep_s"):
        open_frame(keep_s=math.nan)


def test_a_chain_number_never_goes_back():
    session = finished().continued(Continue(5, (1,), chain=4), 2.0)
    session.on_cancel()
    with pytest.raises(InvalidArgument, match=r"continuation\.chain"):
        session.continued(Continue(5, (1,), chain=3), 3.0)


def test_the_sampling_of_the_last_turn_is_not_cut_to_the_room_that_it_had():
    full = VerifierSession(open_frame(sampling=Sampling(max_tokens=600), keep_s=9.0), rules(), 0.0)
    full.on_cancel()
    assert full.continued(Continue(1, (1,)), 1.0).sampling.max_tokens == 510


def test_drafts_of_earlier_turns_are_ignored_and_those_of_this_one_taken():
    session = finished()
    session.on_report(Report(True, 0.001, 0.05, 0.9))
    later = session.continued(Continue(5, (6,), Sampling(max_tokens=9), chain=3), 2.0)
    later.on_draft(Draft(2, 3, tuple(map(DraftToken, (4, 5)))), 2.1)
    later.on_draft(Draft(0, 700, tuple(map(DraftToken, (4,)))), 2.1)
    assert later.block() == ()
    later.on_draft(Draft(3, 6, tuple(map(DraftToken, (1, 2)))), 2.2)
    assert token_ids(later.block()) == (1, 2)
    commit = later.on_verified(
        Verified(tuple(map(DraftToken, (1, 2))), tuple(map(CommittedToken, (1, 2, 3), (0.0,) * 3))), 2.3
    )
    assert (token_ids(commit.tokens), commit.accepted, commit.timing.echo) == ((1, 2, 3), 2, 1)
    with pytest.raises(InvalidArgument, match=r"draft\.start"):
        later.on_draft(Draft(3, 5, tuple(map(DraftToken, (1,)))), 2.4)


def test_what_was_measured_and_the_credit_of_opening_go_on_into_the_next_turn():
    session = VerifierSession(open_frame(sampling=Sampling(max_tokens=2), keep_s=9.0), rules(), 0.0)
    session.credit = 20
    assert session.opened().credit == 20
    session.on_report(Report(True, 0.001, 0.05, 0.95))
    session.credit = 3
    session.on_cancel()
    later = session.continued(Continue(3, (1,)), 1.0)
    assert later.credit == 20
    assert later.report.drafting_s == 0.001
    assert later.received.acceptance.rate == pytest.approx(0.95)


# === the edge's half ============================================================================================


def edge_at_rest(keep_s: float = 9.0, **changes) -> HandDrivenEdge:
    """A session whose first turn is done: 3 1 2, 4 5."""
    edge = HandDrivenEdge(
        open_frame(**{"sampling": Sampling(max_tokens=2), "keep_s": 9.0} | changes), Window(4)
    ).opened(Opened(0, 64, 2, "v", 512, vocab_size=8, keep_s=keep_s), 0.1)
    instructions = edge.on_commit(Commit(3, committed(4, 5), 0, 64, finish=FinishReason.LENGTH), 0.2)
    assert instructions == [Emit(3, committed(4, 5), (False, False)), Done(FinishReason.LENGTH)]
    return edge


def test_a_turn_begins_only_when_the_last_is_done_and_a_bad_one_changes_nothing():
    edge = edge_at_rest()
    with pytest.raises(InvalidArgument, match=r"open\.prompt"):
        edge.on_turn(5, (-1,), Sampling(), 1.0)
    with pytest.raises(InvalidArgument, match=r"open\.prompt"):
        edge.on_turn(0, (), Sampling(), 1.0)
    assert edge.done
    edge.on_turn(5, (1,), Sampling(), 1.0)
    with pytest.raises(InvalidArgument, match="turn"):
        edge.on_turn(6, (1,), Sampling(), 1.0)


def test_pages_that_are_short_for_a_turn_are_waited_for_like_those_of_an_open():
    edge = edge_at_rest()
    edge.on_turn(5, (6,), Sampling(), 1.0)
    (instruction,) = edge.on_disconnected(ResourceExhausted("no pages", retry_after_s=1.0), 1.1)
    assert isinstance(instruction, Reopen)
    assert instruction.after_s == 1


@pytest.mark.parametrize("drafting", [False, True])
def test_the_last_turns_forced_proposals_are_not_taken_for_this_ones(drafting):
    leader = Leader(experts=FixedShare(arms=2))
    edge = HandDrivenEdge(open_frame(keep_s=9.0), Window(4), selection=Selection(leader, ("a", "b"))).opened(
        Opened(0, 64, 128, "v", 512, vocab_size=8, keep_s=9.0), 0.1
    )
    edge.on_drafted(edge.next_job(4), (1, 1, 1, 1), (0.5,) * 4, 0.01, 0.1)
    edge.on_commit(Commit(3, committed(4, 5, 6, 7), 0, 64), 0.2)
    job = edge.next_job(4) if drafting else next(read for _ in range(9) if (read := readings(edge)).tokens[-1] == 7)
    edge.on_commit(Commit(7, committed(2), 0, 64, finish=FinishReason.EOS), 0.3)
    edge.on_turn(3, (6,), Sampling(max_tokens=40), 0.4)
    assert edge.next_job(4) is edge.next_catch_up() is None, "it still runs"
    late = TeacherForced(drafts_of((4, 5, 6, 7), (0.9,) * 4))
    if drafting:
        late = TeacherForced(late.drafts[: job.teacher_forced])
        edge.on_drafted(job, (1,), (0.5,), 0.01, 0.5, teacher_forced=late)
    else:
        edge.on_caught_up(job, late, 0.01, 0.5)
    assert not edge.statistics.of_drafters
    assert edge.next_job(4).extend_with[-1] == 6


def readings(edge):
    """Return the next catch-up job of an idle drafter, after any before it has ended without a result."""
    job = edge.next_catch_up()
    if job.tokens[-1] != 7:
        edge.on_caught_up(job, TeacherForced(), 0.01, 0.2)
    return job


def test_a_turn_of_another_temperature_goes_by_what_drafts_were_worth_there():
    edge = edge_at_rest()
    hopeless = Measurements()
    for _ in range(200):
        hopeless.of("").calibration.add(0.9, False)
    edge.on_turn(5, (6,), Sampling(max_tokens=40), 1.0, hopeless)
    job = edge.next_job(4)
    assert job is not None
    edge.on_drafted(job, (1,), (0.9,), 0.01, 1.1)
    assert edge.survival < 0.1, "and not by what drafts of such confidence were worth before"
    same = edge_at_rest()
    same.on_turn(5, (6,), Sampling(max_tokens=40), 1.0)
    same.on_drafted(same.next_job(4), (1,), (0.9,), 0.01, 1.1)
    assert same.survival > 0.5

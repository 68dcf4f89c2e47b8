"""Both halves of the session machine: joined by a simulated bad link, then rule by rule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from bad_link import Faults
from checked_simulation import HASH, CheckedSimulation, open_frame, own_text, rules
from hand_driven import HandDrivenEdge, committed, frames
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle_drafters import drafter_of, hashing_oracle

from outrider.proto.errors import (
    DataLoss,
    Internal,
    InvalidArgument,
    LeaseExpired,
    PromptTooLong,
    ResourceExhausted,
    TokenizerMismatch,
    Unauthenticated,
    Unavailable,
    UnknownToken,
    UnsupportedProtocol,
)
from outrider.proto.policy import Measurements, Window
from outrider.proto.session import Done, Reopen, RetryRules, Send
from outrider.proto.session.acceptance import accept_drafts
from outrider.proto.session.verifier import Verified, VerifierRules, VerifierSession
from outrider.proto.types import (
    PROTOCOL_VERSION,
    Branch,
    Cancel,
    Commit,
    CommittedToken,
    Draft,
    DraftToken,
    FinishReason,
    Goal,
    Goaway,
    Open,
    Opened,
    Patience,
    Report,
    Sampling,
    Steering,
    SteeringPrecision,
    SteeringRequest,
    Timing,
    TokenFacts,
    token_ids,
)

PROMPT_LENGTH = 3

windows = st.sampled_from([Window(), Window(64), Window(4), Window(1), Window(0)])
patiences = st.sampled_from([None, Patience(0.0), Patience(0.01, 4), Patience(math.inf, 1), Patience(math.inf, 1000)])
links = st.builds(
    Faults,
    delay_s=st.sampled_from([0.03, 0.2, 0.001, 0.0]),
    jitter_s=st.sampled_from([0.0, 0.05]),
    duplicated=st.sampled_from([0.0, 0.3]),
    reordered=st.sampled_from([0.0, 0.0, 0.3]),
    breaks_every_s=st.sampled_from([0.0, 0.0, 0.7, 3.0]),
    goaway_every_s=st.sampled_from([0.0, 0.0, 2.0]),
)
drafters = st.fixed_dictionaries(
    {
        "right": st.sampled_from([0.9, 0.95, 0.5, 1.0, 0.0]),
        "silent": st.sampled_from([0.0, 0.0, 0.3, 1.0]),
        "dies_after": st.sampled_from([1 << 30, 1 << 30, 1 << 29, 3, 0]),
        "confidence": st.sampled_from(["none", "telling", "false"]),
    }
)


# === the two halves together ====================================================================================


@dataclass(frozen=True)
class Scenario:
    """Whatever may differ from one text to another.

    Attributes:
        drafter: keywords of `drafter_of`; None: cloud streaming.
        patience: of the edge.
        speed: of a step and of a draft, seconds.
        options: more keywords of `CheckedSimulation`.
    """

    seed: int
    drafter: dict[str, Any] | None
    verifier: VerifierRules
    max_tokens: int
    patience: Patience | None
    announced_window: int
    speed: tuple[float, float]
    options: dict[str, Any]

    def frame(self) -> Open:
        return open_frame(
            sampling=Sampling(max_tokens=self.max_tokens, stop_tokens=(7,) if self.seed % 5 == 0 else ()),
            patience=self.patience,
            drafting=self.drafter is not None,
            window=self.announced_window,
        )

    def simulation(self, frame: Open, oracle: Any) -> CheckedSimulation:
        step_s, drafting_s = self.speed
        return CheckedSimulation(
            frame,
            oracle,
            drafter_of(oracle, self.seed, **self.drafter) if self.drafter else None,
            verifier=self.verifier,
            seed=self.seed,
            step_s=step_s,
            drafting_s=drafting_s,
            **self.options,
        )


scenarios = st.builds(
    Scenario,
    seed=st.integers(0, 1 << 30),
    drafter=st.one_of(drafters, drafters, drafters, st.none()),
    verifier=st.builds(
        rules,
        max_drafts=st.sampled_from([16, 8, 2, 1]),
        max_credit=st.sampled_from([64, 20, 5, 1]),
        patience=patiences,
        context_length=st.sampled_from([512, 511, 500, 20, PROMPT_LENGTH + 1]),
        goal=st.sampled_from(Goal),
    ),
    max_tokens=st.sampled_from([40, 30, 80, 60, 1, 2]),
    patience=patiences,
    announced_window=st.sampled_from([0, 1, 4]),
    speed=st.sampled_from([(0.03, 0.002), (0.005, 0.02), (0.0, 0.0), (0.03, 0.1)]),
    options=st.fixed_dictionaries(
        {
            "window": windows,
            "link": links,
            "row_s": st.sampled_from([0.0, 0.002]),
            "send_q": st.booleans(),
            "max_per_job": st.sampled_from([1, 8]),
            "fickle_credit": st.booleans(),
            "queues_while_busy": st.booleans(),
        }
    ),
)


@settings(max_examples=400, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(scenario=scenarios)
def test_the_text_is_the_oracles_own_whatever_link_drafter_and_policies_do(scenario):
    frame, oracle = scenario.frame(), hashing_oracle(scenario.seed)
    simulation = scenario.simulation(frame, oracle)
    assert simulation.run() == own_text(oracle, frame, scenario.verifier)
    assert simulation.done.error is None
    assert simulation.edge.finish is simulation.done.finish is not None
    assert simulation.edge.statistics.committed == len(simulation.emitted)
    statistics = simulation.edge.statistics
    assert statistics.accepted <= statistics.drafted
    assert statistics.hits <= statistics.compared <= statistics.drafted
    assert statistics.messages == simulation.draft_frames


@settings(max_examples=60, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 30), cancel_at=st.floats(0, 1.5), link=links)
def test_a_cancelled_text_is_a_beginning_of_the_oracles_own(seed, cancel_at, link):
    oracle, frame = hashing_oracle(seed, eos_odds=0), open_frame()
    simulation = CheckedSimulation(
        frame, oracle, drafter_of(oracle, seed, 0.8), link=link, seed=seed, cancel_at=cancel_at
    )
    text = simulation.run()
    assert text == own_text(oracle, frame, rules())[: len(text)]
    wanted = FinishReason.CANCELLED if len(text) < frame.sampling.max_tokens else FinishReason.LENGTH
    assert simulation.done.finish in (wanted, FinishReason.CANCELLED)


def timed(drafter, **options):
    oracle, frame = hashing_oracle(5, eos_odds=0), open_frame(sampling=Sampling(max_tokens=200))
    simulation = CheckedSimulation(frame, oracle, drafter and drafter_of(oracle, 5, **drafter), **options)
    assert simulation.run() == own_text(oracle, frame, rules())
    return simulation


def test_a_perfect_drafter_commits_many_tokens_a_step_and_garbage_costs_no_time():
    alone = timed(None)
    perfect = timed({"right": 1.0}, verifier=rules(patience=Patience(0.0)))
    garbage = timed({"right": 0.0}, verifier=rules(patience=Patience(0.0)))
    assert perfect.now < alone.now / 3
    assert garbage.now < alone.now * 1.05
    assert perfect.edge.statistics.steps < 60 < 190 < alone.edge.statistics.steps


def test_a_text_survives_many_broken_streams_and_counts_them():
    simulation = timed({"right": 0.8}, link=Faults(breaks_every_s=0.3))
    assert simulation.edge.statistics.resumes >= 3
    assert simulation.num_streams == simulation.edge.statistics.resumes + 1


@pytest.mark.parametrize("delay_s", [0.01, 0.05, 0.1])
@pytest.mark.parametrize(
    ("queues_while_busy", "reordered", "within"), [(False, 0, 0.02), (True, 0, 0.02), (True, 0.3, 0.5)]
)
def test_the_measured_round_trip_is_the_links_own(delay_s, queues_while_busy, reordered, within):
    link = Faults(delay_s=delay_s, reordered=reordered)
    simulation = timed({"right": 0.9}, link=link, queues_while_busy=queues_while_busy)
    assert simulation.edge.statistics.round_trip_s == pytest.approx(2 * delay_s, rel=within)


@pytest.mark.parametrize("delay_s", [0.05, 0.1])
def test_on_a_long_link_a_message_goes_for_every_step_and_not_for_every_token(delay_s):
    statistics = timed(
        {"right": 0.95}, link=Faults(delay_s=delay_s), verifier=rules(patience=Patience(0.0))
    ).edge.statistics
    assert statistics.messages < 1.5 * statistics.steps
    assert statistics.messages < statistics.drafted / 2


def test_holding_drafts_back_costs_little_time(monkeypatch):
    held = [timed({"right": 0.9}, link=Faults(delay_s=delay_s)).now for delay_s in (0.005, 0.02, 0.05)]
    monkeypatch.setattr("outrider.proto.session.measuring.due_to_flush", lambda *_, **__: True)
    at_once = [timed({"right": 0.9}, link=Faults(delay_s=delay_s)).now for delay_s in (0.005, 0.02, 0.05)]
    assert sum(held) < 1.2 * sum(at_once)


def test_a_text_begins_with_what_the_last_one_has_measured():
    measurements = Measurements()
    first = timed({"right": 0.0, "confidence": "false"}, measurements=measurements)
    alone = timed({"right": 0.0, "confidence": "false"})
    second = timed({"right": 0.0, "confidence": "false"}, measurements=measurements)
    assert first.edge.statistics.drafted == alone.edge.statistics.drafted
    assert second.edge.statistics.drafted < first.edge.statistics.drafted, "it knows that drafts are worth nothing"


def test_the_goal_of_few_steps_takes_fewer_and_gives_the_same_text():
    for delay_s, never_more in ((0.005, 1.0), (0.05, 0.8)):  # on a short link waiting is what is soonest, too
        soonest = timed({"right": 0.9}, link=Faults(delay_s=delay_s), verifier=rules(goal=Goal.LATENCY))
        fewest = timed({"right": 0.9}, link=Faults(delay_s=delay_s), verifier=rules(goal=Goal.EFFICIENCY))
        assert fewest.edge.statistics.steps <= never_more * soonest.edge.statistics.steps
        assert fewest.emitted == soonest.emitted


def test_acceptance_is_counted_also_where_the_target_overtook_the_drafts():
    statistics = timed(
        {"right": 0.8}, link=Faults(delay_s=0.1), drafting_s=0.01, verifier=rules(patience=Patience(0.0))
    ).edge.statistics
    assert statistics.hits > statistics.accepted
    # A wrong draft is one of eight tokens at random, so it is right once in eight times.
    assert statistics.hits / statistics.compared == pytest.approx(0.8 + 0.2 / 8, abs=0.1)


# === the verifier's half ========================================================================================


def verifier_session(now=0.0, **changes):
    frame = changes.pop("frame", None) or open_frame(sampling=changes.pop("sampling", Sampling(max_tokens=40)))
    return VerifierSession(frame, rules(eos_tokens=frozenset({0}), **changes), now)


def with_top(token: int, top: tuple[tuple[int, float], ...] = ()) -> CommittedToken:
    return CommittedToken(token, None, TokenFacts(0.0, 1, top))


def drafts(chain: int, start: int, *tokens: int, complete: bool = False) -> Draft:
    return Draft(chain, start, tuple(map(DraftToken, tokens)), complete=complete)


def verify(session, *tokens, block=None, now=1.0):
    block = session.block() if block is None else block
    tokens = tokens + (6,) * (len(block) + 1 - len(tokens))
    return session.on_verified(Verified(block, tuple(map(CommittedToken, tokens, (-1.0,) * len(tokens)))), now)


@pytest.mark.parametrize("seconds", [math.inf, 1e9])
def test_whatever_an_edge_asks_for_a_step_begins_after_the_longest_patience(seconds):
    frame, patience = open_frame(patience=Patience(seconds, 64)), Patience(0.0)  # the edge's comes first
    session = verifier_session(frame=frame, patience=patience, max_patience_s=3.0, now=100.0)
    assert session.ready_at(0.01) == 103.0
    verify(session, 5, now=110.0)
    assert session.ready_at(0.01) == 113.0


@pytest.mark.parametrize(
    ("frame", "changes", "error", "field"),
    [
        (open_frame(protocol_version=PROTOCOL_VERSION - 1), {}, UnsupportedProtocol, "open.protocol_version"),
        (open_frame(tokenizer_sha256="cd" * 32), {}, TokenizerMismatch, "open.tokenizer_sha256"),
        (open_frame(prompt=(1,) * 20), {"context_length": 20}, PromptTooLong, "open.prompt"),
        (open_frame(prompt=(1,) * 10, committed=(2,) * 10), {"context_length": 20}, Unavailable, "open.context_length"),
        (open_frame(prompt=(1,) * 10, committed=(2,), context_length=11), {}, InvalidArgument, "open.committed"),
        (open_frame(prompt=(8,)), {}, UnknownToken, "open.prompt"),
        (open_frame(committed=(1, 8)), {}, UnknownToken, "open.committed"),
        (open_frame(sampling=Sampling(allowed_tokens=(1, 9))), {}, UnknownToken, "sampling.allowed_tokens"),
        (open_frame(sampling=Sampling(stop_tokens=(8,))), {}, UnknownToken, "sampling.stop_tokens"),
        (open_frame(sampling=Sampling(logit_bias=((8, 1.0),))), {}, UnknownToken, "sampling.bias_tokens"),
        (open_frame(committed=(1, 0)), {}, InvalidArgument, "open.committed"),
        (open_frame(committed=(1, 4), sampling=Sampling(stop_tokens=(4,))), {}, InvalidArgument, "open.committed"),
    ],
)
def test_an_open_that_cannot_be_served_is_refused_with_the_field_at_fault(frame, changes, error, field):
    with pytest.raises(error) as caught:
        VerifierSession(frame, rules(**changes), 0.0)
    assert type(caught.value) is error
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: open_frame(prompt=()), "open.prompt"),
        (lambda: open_frame(prompt=(-1,)), "open.prompt"),
        (lambda: open_frame(prompt=(1 << 31,)), "open.prompt"),
        (lambda: open_frame(session=""), "open.session"),
        (lambda: open_frame(isolation=bytes(17)), "open.isolation"),
        (lambda: open_frame(session="a b"), "open.session"),
        (lambda: open_frame(session="a\n"), "open.session"),
        (lambda: open_frame(session="x" * 65), "open.session"),
        (lambda: open_frame(model=""), "open.model"),
        (lambda: open_frame(tokenizer_sha256=HASH.upper()), "open.tokenizer_sha256"),
        (lambda: open_frame(committed=(1, 1), sampling=Sampling(max_tokens=2)), "open.committed"),
        (lambda: Sampling(temperature=-0.1), "sampling.temperature"),
        (lambda: Sampling(temperature=math.nan), "sampling.temperature"),
        (lambda: Sampling(seed=1 << 64), "sampling.seed"),
        (lambda: Sampling(top_k=-1), "sampling.top_k"),
        (lambda: Sampling(top_p=0.0), "sampling.top_p"),
        (lambda: Sampling(min_p=1.1), "sampling.min_p"),
        (lambda: Sampling(repetition_penalty=0.0), "sampling.repetition_penalty"),
        (lambda: Sampling(presence_penalty=math.inf), "sampling.presence_penalty"),
        (lambda: Sampling(max_tokens=0), "sampling.max_tokens"),
        (lambda: Sampling(logit_bias=((1, 0.0), (1, 1.0))), "sampling.bias_tokens"),
        (lambda: Sampling(logit_bias=((1, math.inf),)), "sampling.bias_values"),
        (lambda: Sampling(allowed_tokens=(1, 1)), "sampling.allowed_tokens"),
        (lambda: Patience(-1.0), "patience.seconds"),
        (lambda: Patience(math.nan), "patience.seconds"),
        (lambda: Patience(1.0, 0), "patience.drafts"),
        (lambda: Draft(0, 0, ()), "draft.tokens"),
        (lambda: Draft(-1, 0, tuple(map(DraftToken, (1,)))), "draft.chain"),
        (lambda: Draft(0, 0, (DraftToken(1, 0.5), DraftToken(2))), "draft.q"),
        (lambda: Draft(0, 0, (DraftToken(1, 1.5),)), "draft.q"),
        (lambda: Draft(0, 0, (DraftToken(1),), branches=(Branch(0, ()),)), "draft.branches.lengths"),
        (lambda: Draft(0, 0, (DraftToken(1),), branches=(Branch(0, (1,), 1.5),)), "draft.branches.chances"),
        (lambda: Report(True, math.inf), "report.drafting_s"),
        (lambda: Report(True, acceptance=1.1), "report.acceptance"),
        (lambda: Report(True, acceptance=math.nan), "report.acceptance"),
        (lambda: SteeringRequest("0123456789a"), "steering.projection"),
        (lambda: SteeringRequest("0123456789ab", every=-1), "steering.every"),
        (lambda: SteeringRequest("0123456789ab", precision=2), "steering.precision"),
        (lambda: Steering(1.0, b"abc", SteeringPrecision.FLOAT16), "steering.values"),
        (lambda: Steering(math.inf, b"ab", SteeringPrecision.INT8), "steering.scale"),
        (lambda: Commit(0, (), 0, 1), "commit.tokens"),
        (lambda: Commit(0, committed(1), 2, 1), "commit.accepted"),
        (lambda: Commit(0, (CommittedToken(1, 0.0), CommittedToken(2)), 0, 1), "commit.logp"),
        (lambda: Commit(0, (CommittedToken(1), CommittedToken(2, None, TokenFacts(0.0, 1))), 0, 1), "commit.logprobs"),
        (lambda: Commit(0, (with_top(1, ((1, 0.0),)), with_top(2)), 0, 1), "commit.top_logprobs"),
        (lambda: Window(-1), "window"),
    ],
)
def test_a_malformed_value_cannot_be_made_and_names_its_field(make, field):
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert caught.value.field == field


def test_drafts_are_judged_accepted_and_followed_by_the_targets_own_token():
    session = verifier_session()
    session.on_draft(drafts(0, 3, 1, 2), 0.25)
    session.on_draft(drafts(0, 5, 3, 4), 0.5)
    commit = verify(session, 1, 2, 5)
    assert commit == Commit(
        3,
        tuple(map(CommittedToken, (1, 2, 5), (-1.0,) * 3)),
        2,
        session.credit,
        timing=Timing(2, 0.5),
        chain=0,
        verified=4,
    )
    assert session.transcript == [3, 1, 2, 1, 2, 5]
    assert token_ids(session.block()) == ()


def test_a_chain_ends_where_its_edge_contradicts_it_and_the_session_goes_on():
    session = verifier_session()
    session.on_draft(drafts(0, 3, 1, 2, 5), 0.0)
    session.on_draft(drafts(0, 4, 3), 0.0)
    assert token_ids(session.block()) == (1, 3)
    commit = session.on_verified(Verified(session.block(), committed(1, 3, 4)), 0.1)
    assert (token_ids(commit.tokens), commit.accepted) == ((1, 3, 4), 2)


@pytest.mark.parametrize(
    ("draft", "error", "field"),
    [
        (drafts(0, 2, 1), InvalidArgument, "draft.start"),
        (drafts(0, 0, 1, complete=True), InvalidArgument, "draft.start"),
        (drafts(0, 3, 8), UnknownToken, "draft.tokens"),
        (drafts(0, 3, 1, 8, 2), UnknownToken, "draft.tokens"),
        (drafts(0, 3, 1, 2, 3, 4, 5), ResourceExhausted, "draft.tokens"),
        (drafts(0, 21, 1, 1, 1, 1), InvalidArgument, "draft.start"),
    ],
)
def test_drafts_that_no_honest_edge_sends_are_refused_with_the_field_at_fault(draft, error, field):
    session = verifier_session(max_credit=4, context_length=20)
    with pytest.raises(error) as caught:
        session.on_draft(draft, 0.0)
    assert (type(caught.value), caught.value.field) == (error, field)


CHAIN = drafts(0, 3, 1)


@pytest.mark.parametrize(
    ("came", "block", "waits"),
    [
        ((drafts(0, 5, 1),), (), False),  # behind a hole
        ((drafts(0, 5, 1, complete=True), drafts(0, 3, 1, 2)), (1, 2), False),  # what the hole has lost does not come
        ((CHAIN, drafts(0, 4, 2, complete=True), CHAIN), (1, 2), False),  # an old message does not undo it
        ((drafts(0, 3, 1, complete=True), drafts(1, 3, 2)), (2,), True),  # another chain
    ],
)
def test_a_patient_verifier_waits_for_the_rest_of_the_newest_chain(came, block, waits):
    session = verifier_session(patience=Patience(math.inf, 8))
    assert session.ready_at(0.01) == rules().max_patience_s
    for frame in came:
        session.on_draft(frame, 0.0)
    assert token_ids(session.block()) == block
    assert session.ready_at(0.01) == (rules().max_patience_s if waits else 0.0)


def test_a_verifier_that_steps_by_chains_verifies_no_branch():
    session = verifier_session()
    session.on_draft(
        Draft(0, 3, tuple(map(DraftToken, (1, 2), (0.5, 0.25))), branches=(Branch(3, (5,)), Branch(4, (6, 7)))), 0.0
    )
    assert token_ids(session.block()) == (1, 2)
    assert [draft.confidence for draft in session.block()] == [0.5, 0.25]
    assert session.branches == ()


def test_probabilities_stay_with_their_drafts_as_these_are_followed():
    session = verifier_session(max_drafts=2)
    session.on_draft(drafts(0, 3, 1, 2), 0.0)
    session.on_draft(Draft(0, 5, tuple(map(DraftToken, (3, 4), (0.5, 0.25)))), 0.0)
    assert all(math.isnan(draft.confidence) for draft in session.block())
    verify(session, 1, 2, 3)
    assert [draft.confidence for draft in session.block()] == [0.25]


def test_the_verifier_waits_for_the_drafts_that_its_patience_names():
    session = verifier_session(patience=Patience(0.5, 2), now=1.0)
    assert session.ready_at(0.01) == 1.5
    session.on_draft(drafts(0, 3, 1), 1.1)
    assert session.ready_at(0.01) == 1.5
    session.on_draft(drafts(0, 4, 1), 1.2)
    assert session.ready_at(0.01) == 1.0
    verify(session, 1, 1, 5, now=2.0)
    assert session.ready_at(0.01) == 2.5


def test_complete_ends_the_wait_until_the_next_commit_only():
    session = verifier_session(patience=Patience(math.inf, 8))
    session.on_draft(Draft(0, 3, (), complete=True), 0.0)
    assert not session.waits_for_drafts
    verify(session, 1)
    assert session.waits_for_drafts


def test_the_announced_window_and_the_credit_bound_the_drafts_waited_for():
    for changes in ({"window": 2}, {"max_drafts": 2}):
        session = verifier_session(frame=open_frame(patience=Patience(math.inf, 50), **changes))
        session.on_draft(drafts(0, 3, 1, 2), 0.0)
        assert session.ready_at(0.01) == 0.0


def test_a_report_that_drafting_has_stopped_ends_all_waiting():
    session = verifier_session(patience=Patience(math.inf, 8))
    session.on_report(Report(False))
    assert session.ready_at(0.01) == 0.0
    verify(session, 1)
    assert not session.waits_for_drafts


def test_the_planned_patience_uses_what_the_edge_reports_from_the_next_commit_on():
    session = verifier_session()
    assert session.ready_at(0.03) == 0.0
    session.on_report(Report(True, drafting_s=0.0005, round_trip_s=0.002, acceptance=0.9))
    session.on_draft(drafts(0, 3, 4), 0.5)
    verify(session, 5, now=1.0)
    assert 1.002 < session.ready_at(0.03) < 1.1
    assert session.ready_at(0.03) == session.ready_at(0.03)


def test_drafts_that_come_do_not_prolong_a_wait_that_has_begun():
    session = verifier_session()
    session.on_report(Report(True, drafting_s=0.0005, round_trip_s=0.002, acceptance=0.9))
    until = session.ready_at(0.03)
    assert until > 0
    session.on_draft(drafts(0, 3, 4), until / 2)
    assert session.ready_at(0.03) in (until, 0.0)


def test_where_steps_are_to_be_few_the_verifier_waits_for_a_whole_block():
    session = verifier_session(goal=Goal.EFFICIENCY, max_drafts=4)
    assert session.opened().goal is Goal.EFFICIENCY
    session.on_report(Report(True, drafting_s=0.001, round_trip_s=0.3, acceptance=0.5))
    assert session.ready_at(0.03) > 0.3
    session.on_draft(drafts(0, 3, 1, 2, 4), 0.1)
    assert session.ready_at(0.03) > 0.3
    session.on_draft(drafts(0, 6, 5), 0.2)
    assert session.ready_at(0.03) == 0.0


@pytest.mark.parametrize("late_by", [1, 2, 5])
def test_a_late_contradiction_dates_the_miss_back_to_the_commit_that_held_it(late_by):
    """Plans after a late sight of a miss equal those where it was seen at once."""

    def session():
        session = verifier_session()
        session.on_report(Report(True, drafting_s=0.0005, round_trip_s=0.01, acceptance=0.9))
        return session

    early, late, deaf = session(), session(), session()
    early.on_draft(drafts(0, 3, 5), 0.9)
    for n in range(late_by):
        for each in (early, late, deaf):
            verify(each, 4, now=1.0 + 0.03 * n, block=each.block())
    late.on_draft(drafts(0, 3, 5), 1.0 + 0.03 * late_by - 0.01)
    for each in (early, late, deaf):
        verify(each, 4, now=1.0 + 0.03 * late_by, block=())
    assert late.ready_at(0.03) == early.ready_at(0.03)
    views = [each._view(0.03, 0.0, 2.0) for each in (early, late, deaf)]
    assert views[0] == views[1] != views[2]
    assert (views[1].since_miss, views[1].since_miss_s) == (late_by, pytest.approx(1.0))


def test_log_probabilities_come_only_where_asked_for():
    session = verifier_session(frame=open_frame(logp=False))
    assert verify(session, 4).tokens == (CommittedToken(4),)
    assert verify(verifier_session(frame=open_frame(logp=True)), 4).tokens == (CommittedToken(4, -1.0),)


def test_a_commit_echoes_how_many_draft_messages_came_and_the_age_of_the_last():
    session = verifier_session()
    assert verify(session, 4, now=1.0).timing.echo == 0
    session.on_draft(drafts(0, 3, 7), 1.25)
    session.on_draft(drafts(0, 4, 7), 1.5)
    timing = verify(session, 4, now=2.0).timing
    assert (timing.echo, timing.hold_s) == (2, 0.5), "a stale message came as well"
    assert verify(session, 4, now=3.0).timing.hold_s == 1.5


def test_the_edges_view_of_acceptance_counts_until_the_verifier_has_its_own():
    fine, poor = verifier_session(), verifier_session()
    for session, rate in ((fine, 0.98), (poor, 0.05)):
        session.on_report(Report(True, drafting_s=0.0005, round_trip_s=0.005, acceptance=rate))
        session.on_draft(drafts(0, 3, 1, 2, 3, 4, 5, 6, 7, 1), 0.0)
    assert len(fine.block(0.02, 0.002)) > len(poor.block(0.02, 0.002)) >= 1


@pytest.mark.parametrize(
    ("sampling", "targets", "wanted"),
    [
        (Sampling(max_tokens=9), (1, 0, 2), ((1, 0), 2, FinishReason.EOS)),
        (Sampling(max_tokens=9, ignore_eos=True), (1, 0, 2), ((1, 0, 2), 2, None)),
        (Sampling(max_tokens=9, stop_tokens=(1,)), (1, 0, 2), ((1,), 1, FinishReason.STOP_TOKEN)),
        (Sampling(max_tokens=1, stop_tokens=(1,)), (1, 0, 2), ((1,), 1, FinishReason.STOP_TOKEN)),
        (Sampling(max_tokens=2, stop_tokens=(0,)), (1, 0, 2), ((1, 0), 2, FinishReason.EOS)),
        (Sampling(max_tokens=2, ignore_eos=True), (1, 0, 2), ((1, 0), 2, FinishReason.LENGTH)),
        (Sampling(max_tokens=2, stop_tokens=(0,), ignore_eos=True), (1, 0, 2), ((1, 0), 2, FinishReason.STOP_TOKEN)),
        (Sampling(max_tokens=9), (4, 0, 2), ((4,), 0, None)),
        (Sampling(max_tokens=1), (4, 0, 2), ((4,), 0, FinishReason.LENGTH)),
        (Sampling(max_tokens=9), (0, 0, 2), ((0,), 0, FinishReason.EOS)),
    ],
)
def test_eos_is_settled_before_stop_tokens_and_these_before_the_length(sampling, targets, wanted):
    by_target = committed(*targets)
    tokens, *rest = accept_drafts(
        tuple(map(DraftToken, (1, 0))), by_target, generated=0, sampling=sampling, eos_tokens=frozenset({0})
    )
    assert (token_ids(tokens), *rest) == wanted


# === the edge's half ============================================================================================


def edge_session(window=None, credit=16, max_tokens=40, now=0.0, **changes):
    return HandDrivenEdge(open_frame(**changes), window or Window(8)).opened(
        Opened(len(changes.get("committed", ())), credit, max_tokens, "v", 512, planned=False), now, sent_at=now
    )


def draft(edge, *tokens, most=8, now=0.0):
    """The drafter does the next job and says `tokens`; what is sent."""
    job = edge.next_job(most)
    assert job is not None
    return job, edge.on_drafted(job, tokens, (0.5,) * len(tokens), 0.001, now)


def sent(instructions, kind=Draft):
    return frames(instructions, kind)


def test_the_edge_drafts_ahead_of_what_is_verified_in_one_chain():
    edge = edge_session(Window(3))
    job, out = draft(edge, 1, 2)
    assert (job.truncate_to, job.extend_with, job.count) == (0, (3, 1, 2), 3)
    assert sent(out) == [drafts(0, 3, 1, 2)]
    job, out = draft(edge, 4)
    assert (job.truncate_to, job.extend_with, job.count) == (5, (), 1)
    assert sent(out) == [drafts(0, 5, 4, complete=True)]
    assert edge.next_job(8) is None


def measured_edge(*, round_trip_s=0.1, step_s=0.03, window=64, planned=False, max_drafts=None, **options):
    """An edge that knows the link and the step, and has just heard of a commit, at 0.1 s."""
    edge = HandDrivenEdge(open_frame(), Window(window), **options)
    edge.open_frame(b"", -round_trip_s)
    most = {} if max_drafts is None else {"max_drafts": max_drafts}
    edge.on_opened(Opened(0, 64, 40, "v", 512, planned=planned, **most), 0.0)
    edge.on_commit(Commit(3, committed(1), 0, 64, timing=Timing(verify_s=step_s)), 0.1)
    return edge


def hopeless():
    """Measurements of a drafter that is nearly always wrong."""
    measurements = Measurements()
    for _ in range(300):
        measurements.of("").calibration.add(math.nan, False)
    return measurements


def unsure_draft(edge, *tokens, now):
    return edge.on_drafted(edge.next_job(8), tokens, (), 0.001, now)


def test_an_unlikely_rest_of_a_chain_waits_for_a_commit_where_the_verifier_plans():
    edge = measured_edge(planned=True, measurements=hopeless())
    assert sent(unsure_draft(edge, 1, 2, now=0.1195)) == [drafts(0, 4, 1, 2)]
    assert unsure_draft(edge, 4, 5, now=0.1495) == [], "not worth a message"
    edge.on_commit(Commit(4, committed(1, 2), 2, 64, timing=Timing(verify_s=0.03)), 0.15)
    assert sent(unsure_draft(edge, 6, now=0.1695)) == [drafts(0, 6, 4, 5, 6)]


def test_the_rest_of_a_chain_goes_in_time_where_the_verifier_may_wait_forever():
    edge = measured_edge(planned=False, measurements=hopeless())
    assert sent(unsure_draft(edge, 1, 2, now=0.1195)) == [drafts(0, 4, 1, 2)]
    assert sent(unsure_draft(edge, 4, 5, now=0.1495)) == [drafts(0, 6, 4, 5)]


def test_nothing_is_said_of_an_empty_chain_to_a_verifier_that_runs_ahead():
    edge = measured_edge(planned=True)
    assert sent(unsure_draft(edge, now=0.101)) == []


def test_drafts_are_held_until_a_step_is_about_to_begin_and_go_in_one_message():
    edge = measured_edge()  # the deadlines are 0.12, 0.15, ...
    _, out = draft(edge, 1, now=0.105)
    assert out == []
    _, out = draft(edge, 2, 4, now=0.11)
    assert out == []
    _, out = draft(edge, 5, now=0.1195)
    assert sent(out) == [drafts(0, 4, 1, 2, 4, 5)]
    _, out = draft(edge, 6, now=0.121)
    assert out == [], "the next step is far"
    _, out = draft(edge, 7, now=0.1495)
    assert sent(out) == [drafts(0, 8, 6, 7)]
    assert edge.statistics.messages == 2


@pytest.mark.parametrize(
    ("window", "max_drafts", "token", "complete"),
    [(32, 3, (4,), False), (3, None, (4,), True), (64, None, (), True)],
    ids=["a whole block", "a full window", "a drafter that says no more"],
)
def test_held_drafts_go_at_once_where_nothing_more_can_go_with_them(window, max_drafts, token, complete):
    edge = measured_edge(window=window, max_drafts=max_drafts, planned=max_drafts is not None)
    assert draft(edge, 1, 2, now=0.101)[1] == []
    assert sent(draft(edge, *token, now=0.102)[1]) == [drafts(0, 4, 1, 2, *token, complete=complete)]


@pytest.mark.parametrize(("echo", "measured"), [(1, 0.2), (2, 0.1), (0, None), (3, None)])
def test_the_echo_and_the_hold_give_the_round_trip_of_that_message(echo, measured):
    edge = edge_session(Window(64), now=0.0)
    draft(edge, 1, now=0.2)
    draft(edge, 2, now=0.3)
    before = edge.statistics.round_trip_s
    edge.on_commit(Commit(3, committed(1, 2), 2, 16, timing=Timing(echo, hold_s=0.05)), 0.45)
    link = edge.measurements.round_trip
    assert link.weight == 1.0, "what an Open measured gives way to the first draft message"
    assert edge.statistics.round_trip_s >= before
    if measured is not None:
        assert link.y == pytest.approx(measured)


def test_the_ordinals_begin_anew_with_each_stream():
    edge = edge_session(Window(64), now=0.0)
    draft(edge, 1, now=0.2)
    edge.on_disconnected(Unavailable("gone"), 1.0)
    edge.open_frame(b"", 2.0)
    edge.on_opened(Opened(0, 16, 40, "v", 512), 2.0)  # the draft goes again, at once
    edge.on_commit(Commit(3, committed(1), 1, 16, timing=Timing(1, hold_s=0.05)), 2.3)
    assert edge.measurements.round_trip.y == pytest.approx(0.25)


def test_a_draft_that_meets_a_committed_token_counts_however_it_met_it():
    edge = edge_session()
    draft(edge, 1, 2, 4)
    edge.on_commit(
        Commit(3, committed(1, 5), 1, 16), 0.1
    )  # one hit and one miss; what follows was not put to the question
    assert (edge.statistics.hits, edge.statistics.compared) == (1, 2)
    job = edge.next_job(8)
    edge.on_commit(Commit(5, committed(6, 7), 0, 16), 0.2)
    edge.on_drafted(job, (6, 4, 4), (), 0.001, 0.3)  # overtaken
    assert (edge.statistics.hits, edge.statistics.compared) == (2, 4)


@pytest.mark.parametrize(
    "commit", [Commit(3, committed(7), 0, 16), Commit(4, committed(1, 5), 0, 16), Commit(2, committed(2, 1), 0, 16)]
)
def test_a_commit_that_contradicts_the_transcript_ends_the_text_with_an_error(commit):
    edge = edge_session()
    edge.on_commit(Commit(3, committed(1, 2), 0, 16), 0.1)
    (done,) = edge.on_commit(commit, 0.2)
    assert isinstance(done, Done)
    assert done.error.field == "commit.tokens"


@pytest.mark.parametrize(("count", "finish"), [(40, None), (41, None), (41, FinishReason.LENGTH)])
def test_a_commit_that_goes_on_beyond_max_tokens_ends_the_text_with_an_error(count, finish):
    edge = edge_session()
    edge.on_commit(Commit(3, committed(1, 2), 0, 16), 0.1)
    (done,) = edge.on_commit(Commit(5, committed(*[1] * (count - 2)), 0, 16, finish=finish), 0.2)
    assert isinstance(done, Done)
    assert done.error.field == "commit.tokens"
    assert edge.transcript == [3, 1, 2, 1, 2]


def test_a_verifier_that_took_over_another_text_is_an_error():
    edge = HandDrivenEdge(open_frame(committed=(1, 2)))
    edge.open_frame(b"", 0.0)
    (done,) = edge.on_opened(Opened(1, 16, 40, "v", 512), 0.1)
    assert done.error.field == "opened.committed"


def test_a_drafter_that_dies_while_a_stream_reopens_is_reported_to_the_verifier():
    edge = edge_session()
    job = edge.next_job(8)
    edge.on_disconnected(Unavailable("gone"), 0.1)
    assert edge.open_frame(b"new", 0.2).drafting
    assert edge.on_drafter_failed(Internal("dead")) == []
    out = edge.on_opened(Opened(0, 16, 40, "other", 512), 0.3)
    assert [report.drafting for report in sent(out, Report)] == [False], "or it waits for drafts for ever"
    assert job is not None
    assert edge.next_job(8) is None
    assert "dead" in edge.statistics.drafter_error


def test_a_new_verifier_learns_what_the_last_one_knew():
    edge = edge_session(now=0.0)
    draft(edge, 1)
    edge.on_commit(Commit(3, committed(1, 2), 1, 16), 0.1)
    edge.on_disconnected(Unavailable("gone"), 0.2)
    edge.open_frame(b"new", 0.3)
    (report,) = sent(edge.on_opened(Opened(2, 16, 40, "other", 512), 0.31), Report)
    assert (report.drafting, report.drafting_s) == (True, 0.001)


def test_a_report_is_sent_when_what_it_says_has_changed_by_a_quarter():
    edge = edge_session()
    draft(edge, 1)
    assert [r.drafting_s for r in sent(edge.on_commit(Commit(3, committed(5), 0, 16), 0.1), Report)] == [0.001]
    draft(edge, 1)
    assert sent(edge.on_commit(Commit(4, committed(5), 0, 16), 0.2), Report) == []


def test_complete_is_said_when_the_drafter_has_nothing_to_say():
    edge = edge_session()
    _, out = draft(edge)
    assert sent(out) == [Draft(0, 3, (), complete=True)]
    assert edge.next_job(8) is None
    edge.on_commit(Commit(3, committed(5), 0, 16), 0.1)
    assert edge.next_job(8) is not None, "it is asked again after the next commit"


def test_complete_is_said_when_the_window_is_full_or_shut():
    edge = HandDrivenEdge(open_frame(), Window(0))
    edge.open_frame(b"", 0.0)
    opened = Opened(0, 16, 40, "v", 512, planned=False)
    assert sent(edge.on_opened(opened, 0.0)) == [Draft(0, 3, (), complete=True)]
    edge = edge_session(Window(2))
    _, out = draft(edge, 1, 2)
    assert sent(out)[0].complete


def test_no_draft_is_made_where_the_text_has_no_room_for_it():
    edge = edge_session(max_tokens=3)
    assert edge.next_job(8).count == 2, "the last token is the target's own"


def test_probabilities_are_sent_only_where_asked_for():
    (unasked,) = sent(draft(edge_session(), 1)[1])[0].tokens
    assert math.isnan(unasked.confidence)
    edge = HandDrivenEdge(open_frame(), Window(4), send_q=True).opened(Opened(0, 16, 40, "v", 512))
    assert sent(draft(edge, 1, 2)[1])[0].tokens == (DraftToken(1, 0.5), DraftToken(2, 0.5))


def test_backoff_doubles_to_its_limit_and_is_forgotten_after_a_commit():
    edge = HandDrivenEdge(open_frame(), retry=RetryRules(0.1, 0.3, 100.0))
    waits = [edge.on_disconnected(Unavailable("no"), float(n))[0].after_s for n in range(4)]
    assert waits == [0.1, 0.2, 0.3, 0.3]
    assert edge.on_disconnected(Unavailable("no", retry_after_s=7.0), 5.0)[0].after_s == 7.0
    edge.open_frame(b"", 6.0)
    edge.on_opened(Opened(0, 16, 40, "v", 512), 6.0)
    edge.on_commit(Commit(3, committed(1), 0, 16), 6.1)
    assert edge.on_disconnected(Unavailable("no"), 7.0)[0].after_s == 0.1


def test_an_edge_that_never_gives_up_can_retry_for_days():
    edge = HandDrivenEdge(open_frame(), retry=RetryRules(0.05, 2.0, math.inf))
    for n in range(3000):
        (reopen,) = edge.on_disconnected(Unavailable("no"), 2.0 * n)
    assert reopen.after_s == 2.0


def test_an_edge_that_is_asked_to_wait_for_longer_than_it_retries_says_so_at_once():
    edge = HandDrivenEdge(open_frame(), retry=RetryRules(abandon_after_s=60.0))
    edge.open_frame(b"", 0.0)
    patient = edge.on_disconnected(ResourceExhausted("full", retry_after_s=59.0), 1.0)
    assert [instruction.after_s for instruction in patient] == [59.0]
    [done] = edge.on_disconnected(ResourceExhausted("the key has spent its tokens", retry_after_s=6000.0), 2.0)
    assert done.error is not None
    assert done.error.retry_after_s == 6000.0


def test_the_edge_gives_up_after_the_time_that_it_was_given():
    edge = HandDrivenEdge(open_frame(), retry=RetryRules(abandon_after_s=60.0))
    edge.on_disconnected(Unavailable("no"), 10.0)
    assert isinstance(edge.on_disconnected(Unavailable("no"), 70.0)[0], Reopen)
    (done,) = edge.on_disconnected(Unavailable("no"), 70.1)
    assert isinstance(done.error, Unavailable)
    assert edge.on_disconnected(Unavailable("no"), 71.0) == []


def test_a_text_that_ends_each_verifier_soon_after_it_has_it_ends_few():
    edge = HandDrivenEdge(open_frame(), retry=RetryRules(abandon_after_s=60.0, max_losses=12))
    ended, now, said = 0, 0.0, []
    while not said or isinstance(said[0], Reopen):
        edge.open_frame(b"", now)
        edge.on_opened(Opened(0, 64, 40, "v", 512), now)
        now += 7.0
        said = edge.on_disconnected(Unavailable("it is gone"), now)
        ended += 1
    assert ended == 12
    assert isinstance(said[0].error, Unavailable)


def test_a_text_that_is_sent_away_often_within_a_minute_goes_on():
    edge = HandDrivenEdge(open_frame(), retry=RetryRules(abandon_after_s=60.0, max_losses=12))
    for number in range(58):
        edge.open_frame(b"", float(number))
        edge.on_opened(Opened(0, 64, 40, "v", 512), number + 0.1)
        assert isinstance(edge.on_goaway(Goaway("no KV pages"), number + 0.9)[0], Reopen)


def test_the_time_that_a_text_lacks_a_verifier_adds_up_until_a_commit_comes():
    edge = HandDrivenEdge(open_frame(), retry=RetryRules(abandon_after_s=60.0))
    for number, first in enumerate((0.0, 100.0)):
        edge.on_disconnected(Unavailable("no"), first)
        edge.open_frame(b"", first + 30.0)
        edge.on_opened(Opened(0, 64, 40, "v", 512), first + 30.0)
        if not number:
            continue
        [reopen] = edge.on_disconnected(Unavailable("no"), first + 50.0)
        assert isinstance(reopen, Reopen)
        [done] = edge.on_disconnected(Unavailable("no"), first + 50.1)
        assert isinstance(done.error, Unavailable)


@pytest.mark.parametrize(
    ("error", "heals"),
    [
        (Unavailable("x"), True),
        (LeaseExpired("x"), True),
        (ResourceExhausted("x", retry_after_s=1.0), True),
        (ResourceExhausted("x"), False),
        (InvalidArgument("x"), False),
        (Unauthenticated("x"), False),
        (TokenizerMismatch("x"), False),
        (DataLoss("x"), False),
    ],
)
def test_only_errors_that_another_stream_can_heal_are_retried(error, heals):
    (instruction,) = HandDrivenEdge(open_frame()).on_disconnected(error, 0.0)
    assert isinstance(instruction, Reopen) is heals
    assert heals or instruction.error is error


def test_goaway_resumes_elsewhere():
    edge = edge_session()
    (reopen,) = edge.on_goaway(Goaway("drains", 0.75), 0.1)
    assert reopen.after_s == 0.75
    assert edge.next_job(8) is None, "nothing is drafted while no stream is open"


def test_cancelling_tells_the_verifier_and_ends_at_once():
    edge = edge_session()
    assert edge.on_cancel(FinishReason.STOP_STRING) == [Send(Cancel("stop_string")), Done(FinishReason.STOP_STRING)]
    assert edge.on_cancel() == []
    assert edge.on_commit(Commit(3, committed(1), 0, 16), 0.1) == []


def test_the_verifier_learns_what_acceptance_the_edge_has_seen():
    edge = edge_session()
    draft(edge, 1)
    (report,) = sent(edge.on_commit(Commit(3, committed(5), 0, 16), 0.1), Report)
    assert report.acceptance == edge.measurements.of("").calibration.acceptance.rate


@pytest.mark.parametrize("token", [8, -1])
def test_a_drafter_that_proposes_what_the_target_does_not_have_is_given_up(token):
    edge = HandDrivenEdge(open_frame(), Window(8)).opened(Opened(0, 16, 40, "v", 512, vocab_size=8))
    _, out = draft(edge, 1, token)
    assert [report.drafting for report in sent(out, Report)] == [False]
    assert sent(out) == []
    assert edge.next_job(8) is None


def test_held_drafts_go_though_another_text_has_changed_the_window_meanwhile():
    edge = HandDrivenEdge(open_frame(), Window()).opened(Opened(0, 64, 40, "v", 512, planned=False), 0.0, sent_at=-0.1)
    edge.on_commit(Commit(3, committed(1), 0, 64, timing=Timing(verify_s=0.03)), 0.1)
    assert draft(edge, 1, 2, now=0.101)[1] == []
    measurements = edge.measurements.copy()
    for _ in range(300):  # before this text asks for its next job, another learns that drafts are worth nothing
        measurements.of("").calibration.add(0.5, False)
        measurements.of("").drafting_s.add(0.5)
    assert edge.next_job(8, measurements) is None
    assert sent(edge.on_idle(0.102)) == [drafts(0, 4, 1, 2, complete=True)], "or a patient verifier waits for ever"
    assert sent(edge.on_idle(0.103)) == [], "once is enough"


@pytest.mark.parametrize("max_credit", [1, 5, 6, 64])
def test_the_credit_of_a_probe_is_never_more_than_a_session_may_use(max_credit):
    session = verifier_session(max_credit=max_credit, sampling=Sampling(max_tokens=40))
    allowed = []
    for _ in range(30):
        session.block(step_s=0.001, row_s=0.1)
        session.on_verified(Verified((), (CommittedToken(5, 0.0),)), 0.0)
        allowed.append(session.credit)
    assert set(allowed) == {0, min(6, max_credit)}
    probe = tuple(map(DraftToken, (1,) * max(allowed)))
    session.on_draft(Draft(0, len(session.transcript), probe), 0.0)  # no ResourceExhausted


def test_a_verifier_on_which_rows_are_too_dear_asks_for_a_few_drafts_now_and_then():
    session = verifier_session(sampling=Sampling(max_tokens=200))
    costs = {"step_s": 0.001, "row_s": 0.1}
    allowed = []
    for i in range(64):
        session.on_draft(Draft(i, len(session.transcript), tuple(map(DraftToken, (1, 2, 3)))), 0.0)
        session.credit = 64
        block = session.block(**costs)
        assert len(block) <= 1
        tokens = (5,) * (len(block) + 1)
        session.on_verified(Verified(block, tuple(map(CommittedToken, tokens, (0.0,) * len(tokens)))), 0.0)
        allowed.append(session.credit)
    assert 2 <= sum(credit > 0 for credit in allowed) <= 8
    session.credit = 64
    session.block(step_s=0.03, row_s=0.0)
    session.on_verified(Verified((), tuple(map(CommittedToken, (5,), (0.0,)))), 0.0)
    assert session.credit == 64, "and for as many as before once they pay"

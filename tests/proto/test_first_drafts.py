"""Drafts that follow an Open before it is answered: what they bring, and that they delay and change nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from bad_link import Faults
from checked_simulation import CheckedSimulation, open_frame, own_text, rules
from hand_driven import HandDrivenEdge, committed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle_drafters import drafter_of, hashing_oracle

from outrider.proto.errors import InvalidArgument, ResourceExhausted, Unavailable
from outrider.proto.policy import Window
from outrider.proto.policy.selector import Selector
from outrider.proto.session import (
    Disconnected,
    Done,
    DraftJob,
    EdgeSession,
    Reopen,
    Send,
    Started,
    StopRequested,
    StreamReady,
    TurnBegun,
)
from outrider.proto.session.verifier import VerifierSession
from outrider.proto.types import Commit, Open, Opened, Sampling

OPENED = Opened(0, 8, 40, "v", 2048, vocab_size=8)
PROMPT = tuple(i % 7 + 1 for i in range(600))  # two steps read it, of 512 rows and of the rest


def simulation(*, drafting_s: float = 0.002, opened: Opened | None = OPENED, drafts: bool = True) -> CheckedSimulation:
    """A text over a long link, whose prompt is read in 0.6 s."""
    oracle = hashing_oracle(3, eos_odds=0.0)
    return CheckedSimulation(
        open_frame(prompt=PROMPT),
        oracle,
        drafter_of(oracle, 0, right=1.0) if drafts else None,
        window=Window(8),
        link=Faults(delay_s=0.1),
        verifier=rules(context_length=2048),
        row_s=0.001,
        drafting_s=drafting_s,
        opened=opened,
    )


def first_commit(text: CheckedSimulation) -> tuple[float, int]:
    """Arrival of the first commit of a text, and its tokens."""
    assert text.run() == own_text(text.oracle, open_frame(prompt=PROMPT), text.rules)
    return text.arrivals[0], text.arrivals.count(text.arrivals[0])


def frames(instructions: list) -> list:
    return [instruction.frame for instruction in instructions if isinstance(instruction, Send)]


def hand_driven(**changes) -> HandDrivenEdge:
    return HandDrivenEdge(open_frame(**changes), Window(8))


def drafted_early(machine: HandDrivenEdge, *tokens: int, now: float = 0.0, opened: Opened = OPENED) -> list:
    """Open a stream whose verifier has answered before, draft behind the Open, and return the frames that went."""
    sent = machine.handle(StreamReady(b"", opened), now)
    job = machine.next_job(len(tokens))
    return frames([*sent, *machine.on_drafted(job, tokens, (), 0.001, now), *machine.on_idle(now)])


@pytest.mark.parametrize("opened", [None, OPENED])
@pytest.mark.parametrize("drafting_s", [0.002, 10.0])
def test_the_first_token_comes_as_early_as_without_a_drafter(drafting_s: float, opened: Opened | None) -> None:
    text = simulation(drafting_s=drafting_s, opened=opened)
    cloud = simulation(opened=opened, drafts=False)
    sent = []
    send = text.send
    text.send = lambda frame: (sent.append((text.now, frame)), send(frame))[1]
    at, tokens = first_commit(text)
    assert at - 0.001 * (tokens - 1) == pytest.approx(first_commit(cloud)[0]), "but for the rows of the drafts"
    assert sent[0][0] == 0.0
    assert isinstance(sent[0][1], Open)


def test_drafts_behind_the_open_are_verified_with_the_first_step() -> None:
    assert first_commit(simulation())[1] == 9, "all eight, and the target's own"
    late = simulation(drafting_s=1.0)
    assert first_commit(late)[1] < 9, "those that were not there"
    assert first_commit(simulation(drafts=False))[1] == 1


def test_nothing_is_drafted_before_the_open_or_without_known_terms() -> None:
    machine = EdgeSession(open_frame(), Window(8))
    assert machine.handle(Started(), 0.0) == []
    assert [type(frame) for frame in frames(machine.handle(StreamReady(b""), 0.0))] == [Open]
    known = EdgeSession(open_frame(), Window(8))
    sent, job = known.handle(StreamReady(b"", OPENED), 0.0)
    assert isinstance(sent, Send)
    assert isinstance(sent.frame, Open)
    assert isinstance(job, DraftJob)


def test_after_a_refused_open_the_same_drafts_follow_the_next_one() -> None:
    machine = hand_driven()
    drafted_early(machine, 1, 2)
    (reopen,) = machine.handle(Disconnected(ResourceExhausted("full", retry_after_s=1.0)), 0.2)
    assert isinstance(reopen, Reopen)
    assert machine.allowance() == 0, "no stream takes any"
    opening, draft = frames([*machine.handle(StreamReady(b"", OPENED), 1.2), *machine.on_idle(1.2)])
    assert isinstance(opening, Open)
    assert (draft.chain, draft.start, len(draft.tokens)) == (1, 3, 2)
    verifier = VerifierSession(opening, rules(), 1.3)
    verifier.on_draft(draft, 1.3)
    assert [token.id for token in verifier.block()] == [1, 2]


def test_a_resumed_stream_takes_drafts_behind_its_open() -> None:
    machine = hand_driven()
    drafted_early(machine, 1, 2, 3)
    machine.handle(OPENED, 0.2)
    machine.handle(Commit(3, committed(1), 0, 8), 0.3)
    machine.handle(Disconnected(Unavailable("gone")), 0.4)
    opening, draft = frames([*machine.handle(StreamReady(b"", OPENED), 0.5), *machine.on_idle(0.5)])
    assert opening.committed == (1,)
    assert (draft.start, [token.id for token in draft.tokens]) == (4, [2, 3])
    verifier = VerifierSession(opening, rules(), 0.6)
    verifier.on_draft(draft, 0.6)
    assert [token.id for token in verifier.block()] == [2, 3]


@pytest.mark.parametrize("kind", [InvalidArgument, ResourceExhausted])
def test_a_verifier_that_refuses_early_drafts_is_opened_again_without_them(kind) -> None:
    error = kind("no such drafts", field="draft.tokens")
    machine = hand_driven()
    drafted_early(machine, 1, 2)
    (reopen,) = machine.handle(Disconnected(error), 0.2)
    assert reopen == Reopen(0.0, error)
    assert [type(frame) for frame in drafted_early_or_not(machine)] == [Open]
    machine.on_opened(OPENED, 0.4)
    assert machine.next_job(2) is not None, "once it has answered, it gets drafts"
    (done,) = machine.handle(Disconnected(error), 0.5)
    assert done == Done(error=error), "not for ever"


def drafted_early_or_not(machine: HandDrivenEdge) -> list:
    sent = machine.handle(StreamReady(b"", OPENED), 0.3)
    assert machine.next_job(2) is None
    return frames([*sent, *machine.on_idle(0.3)])


def test_a_text_left_before_the_answer_takes_no_more_drafts() -> None:
    machine = hand_driven(keep_s=10.0)
    drafted_early(machine, 1, 2)
    machine.handle(StopRequested(), 0.1)
    (reopen,) = machine.handle(TurnBegun(0, (4, 5), Sampling(max_tokens=9)), 0.2)
    assert isinstance(reopen, Reopen)
    assert machine.next_job(2) is None
    (late,) = machine.handle(OPENED, 0.3)
    assert isinstance(late, Reopen)
    assert not machine.connected


class Attentive(Selector):
    """A selector that wants the prompt's scores before its first choice, and notes whether it had them."""

    catches_up = True

    def __init__(self) -> None:
        self.scores: list[float] | None = None

    def read_prompt(self, scores) -> None:
        self.scores = list(scores)

    def choose(self, view) -> int:
        assert self.scores is not None, "it has to choose without having seen the prompt"
        return 1

    def learn(self, outcome) -> None:
        pass


def test_several_drafters_read_the_prompt_before_one_drafts() -> None:
    oracle = hashing_oracle(3, eos_odds=0.0)
    drafter = drafter_of(oracle, 0, right=1.0)
    text = CheckedSimulation(
        open_frame(prompt=PROMPT),
        oracle,
        drafter,
        window=Window(8),
        link=Faults(delay_s=0.1),
        verifier=rules(context_length=2048),
        row_s=0.001,
        others=[drafter],
        selector=Attentive(),
        opened=OPENED,
    )
    assert first_commit(text)[1] == 9


@given(
    seed=st.integers(0, 1 << 20),
    credit=st.integers(1, 64),
    right=st.sampled_from([0.0, 0.7, 1.0]),
    link=st.builds(
        Faults,
        delay_s=st.sampled_from([0.0, 0.02, 0.2]),
        jitter_s=st.sampled_from([0.0, 0.05]),
        duplicated=st.sampled_from([0.0, 0.3]),
        reordered=st.sampled_from([0.0, 0.3]),
        breaks_every_s=st.sampled_from([0.0, 0.7]),
        goaway_every_s=st.sampled_from([0.0, 2.0]),
    ),
    drafting_s=st.sampled_from([0.0, 0.002, 0.1]),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_text_is_the_targets_own_whatever_follows_the_open(seed, credit, right, link, drafting_s) -> None:
    oracle, frame = hashing_oracle(seed), open_frame(prompt=PROMPT[: 1 + seed % 20])
    text = CheckedSimulation(
        frame,
        oracle,
        drafter_of(oracle, seed, right=right),
        link=link,
        seed=seed,
        row_s=0.001,
        drafting_s=drafting_s,
        fickle_credit=seed % 2 == 0,
        opened=replace(OPENED, credit=credit),
    )
    assert text.run() == own_text(oracle, frame, text.rules)

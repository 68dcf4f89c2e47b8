"""A text in the simulator whose every event is followed by checks of what must always hold."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import replace

from bad_link import Faults, FaultySimulation
from hand_driven import committed
from oracle_drafters import Oracle, OracleTarget, Proposer, ScriptedDrafters

from outrider.proto.policy import Measurements, Window
from outrider.proto.policy.selector import Selector
from outrider.proto.session import Done, DrafterFailed, EdgeSession, EdgeStatistics, Reopen, Selection, StopRequested
from outrider.proto.session import verifier as session_verifier
from outrider.proto.session.verifier import VerifierRules
from outrider.proto.types import Commit, CommittedToken, Draft, Open, Opened, Sampling, token_ids
from research.simulator import virtual_engine as simulated_engine
from research.simulator.clock import Costs, VirtualClock
from research.simulator.simulated_verifier import SimulatedVerifier

HASH = "ab" * 32
MAX_EVENTS = 60_000
FREE = Costs(step_s=0.0, row_s=0.0, prefill_row_s=0.0, job_s=0.0, edge_event_s=0.0, cloud_event_s=0.0, commit_s=0.0)


def rules(**changes) -> VerifierRules:
    defaults = {
        "name": "v",
        "model": "m",
        "tokenizer_sha256": HASH,
        "vocab_size": 8,
        "context_length": 512,
        "eos_tokens": frozenset({0}),
    }
    return VerifierRules(**(defaults | changes))


def open_frame(**changes) -> Open:
    defaults = {
        "model": "m",
        "tokenizer_sha256": HASH,
        "prompt": (3, 1, 2),
        "sampling": Sampling(max_tokens=40),
        "session": "s",
    }
    return Open(**(defaults | changes))


def take_branches_for_text(monkeypatch) -> None:
    """Plant a defect: a step follows a branch whether its first token is the target's or not."""
    rightly, really = simulated_engine.branch_taken, session_verifier.accept_drafts

    def take(block, branches, tokens):
        return rightly(block, branches, tokens) or next(iter(branches), None)

    def accept(block, tokens, **rest):
        said, _, finish = really(block, (*committed(*token_ids(block)), tokens[-1]), **rest)
        return said, len(block), finish

    monkeypatch.setattr(simulated_engine, "branch_taken", take)
    monkeypatch.setattr(session_verifier, "accept_drafts", accept)


def own_text(oracle: Oracle, frame: Open, verifier: VerifierRules) -> tuple[int, ...]:
    """Return the text of plain decoding."""
    sampling, text = frame.sampling, ()
    most = min(sampling.max_tokens, verifier.context_length - len(frame.prompt))
    while len(text) < most:
        text += (oracle(frame.prompt + text),)
        ended = text[-1] in verifier.eos_tokens and not sampling.ignore_eos
        if ended or text[-1] in sampling.stop_tokens:
            break
    return text


class CheckedVerifier(SimulatedVerifier):
    """A verifier that may take frames during a step, and grant any credit.

    Attributes:
        runs: by the start of each commit, the edge's drafts that the verifier had after it.
    """

    def __init__(self, *args, rng: random.Random, fickle_credit: bool, queues_while_busy: bool) -> None:
        super().__init__(*args)
        self.runs: dict[int, tuple[int, ...]] = {}
        self._rng = rng
        self._fickle_credit = fickle_credit
        self._queues_while_busy = queues_while_busy

    def receive(self, stream, frame) -> None:
        super().receive(stream, frame)
        if self._busy and not self._queues_while_busy:
            self._take(self.inbox.take())

    def _commit(self, slot, verified) -> Commit:
        before = tuple(slot.session.transcript)
        if self._fickle_credit:
            credit = self._rng.randint(1, self.rules.max_credit)
            self.sessions.rules = replace(self.rules, max_credit=credit, max_drafts=1)
        commit = super()._commit(slot, verified)
        self.sessions.rules = self.rules
        assert tuple(slot.session.transcript) == before + token_ids(commit.tokens), "a commit appends and nothing else"
        self.runs[commit.start] = token_ids(slot.session.received.tokens)
        return commit


class CheckedDrafters(ScriptedDrafters):
    """Asserts that every job continues the text as it is."""

    def __init__(self, *args, edge: EdgeSession) -> None:
        super().__init__(*args)
        self._edge = edge
        self.failed: list[int] = []

    def draft(self, job):
        prefix = self.prefixes[job.drafter][: job.truncate_to] + job.extend_with
        assert len(prefix) == job.start
        wanted = tuple(self._edge.transcript) + self._edge._tree.tokens
        if job.branch >= 0:
            assert prefix[: job.branch] == wanted[: job.branch]
            assert len(self._edge.transcript) <= job.branch < len(wanted), "a branch is at a draft"
            assert prefix[job.branch] != wanted[job.branch], "a branch leaves the chain"
            return super().draft(job)
        assert prefix == wanted, "the drafter would continue another text"
        if job.teacher_forced and job.count:
            forced_until = job.truncate_to + job.skip + job.teacher_forced
            assert forced_until <= len(self._edge.transcript), "only committed tokens are forced"
        return super().draft(job)

    def catch_up(self, job):
        prefix = self.prefixes[job.drafter][: job.truncate_to] + job.tokens
        begun = len(self._edge.transcript) > self._edge.prompt_length
        assert job.drafter != self._edge.drafter or not begun, "the active drafter drafts, and need not read"
        assert job.drafter not in self.failed, "it is broken"
        assert prefix == tuple(self._edge.transcript[: len(prefix)]), "the drafter would read another text"
        return super().catch_up(job)


def counts_of(simulations: Iterable[CheckedSimulation]) -> list[EdgeStatistics]:
    """Decode texts, each of which must be the target's, and return what their edges have counted."""
    found = []
    for number, simulation in enumerate(simulations):
        wanted = own_text(simulation.oracle, simulation.frame, simulation.rules)
        assert simulation.run() == wanted, f"text {number}"
        found.append(simulation.edge.statistics)
    return found


class CheckedSimulation(FaultySimulation):
    """One text from Open to Done; fails where it can never go on."""

    verifier_kind = CheckedVerifier

    def __init__(
        self,
        frame: Open,
        oracle: Oracle,
        drafter: Proposer | None,
        *,
        verifier: VerifierRules | None = None,
        window: Window | None = None,
        link: Faults | None = None,
        seed: int = 0,
        step_s: float = 0.03,
        row_s: float = 0.0,
        drafting_s: float = 0.002,
        max_per_job: int = 8,
        cancel_at: float = math.inf,
        fickle_credit: bool = False,
        queues_while_busy: bool = True,
        measurements: Measurements | None = None,
        send_q: bool = False,
        others: Sequence[Proposer] = (),
        selector: Selector | None = None,
        edge: EdgeSession | None = None,
        opened: Opened | None = None,
    ) -> None:
        self.rules = verifier or rules()
        self.oracle, self.frame = oracle, frame
        clock, rng = VirtualClock(), random.Random(seed)
        selection = Selection(selector, tuple("abcdef"[: 1 + len(others)])) if selector is not None else None
        edge = edge or EdgeSession(
            frame if drafter is not None else replace(frame, drafting=False),
            window,
            measurements=measurements,
            send_q=send_q,
            selection=selection,
            job_tokens=lambda _: max_per_job,
        )
        drafters = [] if drafter is None else [drafter, *others]
        self.drafters = CheckedDrafters(drafters, drafting_s, rng, edge=edge)
        costs = replace(FREE, step_s=step_s, row_s=row_s, prefill_row_s=row_s)
        checked = self.verifier_kind(
            clock,
            self.rules,
            OracleTarget(oracle),
            costs,
            rng=rng,
            fickle_credit=fickle_credit,
            queues_while_busy=queues_while_busy,
        )
        super().__init__(clock, edge, checked, self.drafters, link or Faults(), rng)
        self._opened = opened
        self.draft_frames = 0
        self._granted = 0
        self._said: dict[tuple[int, int, int], int] = {}  # drafts that a verifier was sent: by stream, chain, position
        if cancel_at < math.inf:
            clock.at(cancel_at, lambda: self.handle(StopRequested()))

    @property
    def now(self) -> float:
        return self.clock.now

    @property
    def failed(self) -> list[int]:
        """The drafters that have broken."""
        return self.drafters.failed

    def run(self, limit_s: float = 10_000.0) -> tuple[int, ...]:
        """The emitted text."""
        self.begin()
        self.run_until(lambda: self.done is not None, limit_s)
        late = Commit(self.edge.prompt_length, (CommittedToken(7),), 0, 1)
        assert not self.edge.handle(late, self.now), "speaks after Done"
        return tuple(self.emitted)

    def run_until(self, over, limit_s: float = 10_000.0) -> None:
        for _ in range(MAX_EVENTS):
            if over():
                return
            self.clock.advance()
            assert self.now < limit_s, "no end in sight"
            assert self.emitted == self.edge.transcript[self.edge.prompt_length :], "emitted is not the transcript"
        raise AssertionError("too many events")

    def handle(self, event) -> None:
        if isinstance(event, DrafterFailed):
            self.failed.append(event.drafter)
        super().handle(event)

    def open_stream(self):
        self._granted = 0 if self._opened is None else self._opened.credit
        return super().open_stream()

    def follow(self, instruction) -> None:
        assert self.done is None or not isinstance(instruction, Done | Reopen), f"says {instruction} after Done"
        super().follow(instruction)

    def send(self, frame) -> None:
        self.draft_frames += isinstance(frame, Draft)
        if isinstance(frame, Draft) and frame.tokens:
            unverified = frame.start + len(frame.tokens) - len(self.edge.transcript)
            assert unverified <= self._granted, f"{unverified} unverified tokens on {self._granted} of credit"
            self._check_chain(frame)
        super().send(frame)

    def _check_chain(self, frame: Draft) -> None:
        for position, token in enumerate(token_ids(frame.tokens), frame.start):
            key = self.num_streams, frame.chain, position
            assert self._said.setdefault(key, token) == token, "it contradicts its own chain"
            follows = position == len(self.edge.transcript) or (*key[:2], position - 1) in self._said
            assert follows, "it leaves drafts out, which the verifier does not have"

    def receive(self, stream, frame) -> None:
        if stream is self.stream:
            if isinstance(frame, Opened):
                self._granted = frame.credit
            if isinstance(frame, Commit) and frame.start + len(frame.tokens) > len(self.edge.transcript):
                self._granted = frame.credit
            if isinstance(frame, Commit) and frame.chain > self.edge._tree.number:  # it has followed a branch
                run = enumerate(self.verifier.runs[frame.start], frame.start + len(frame.tokens))
                self._said |= {(self.num_streams, frame.chain, position): token for position, token in run}
        super().receive(stream, frame)

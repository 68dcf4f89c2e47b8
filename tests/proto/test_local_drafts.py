"""Drafts beside the target: the drafter's prefix is always the text and the chain, and the text always the target's.

One session is driven through random drafts of its edge, jobs that are dropped, late or stale, commits and turns. The
drafter is a plain list, which every job must make equal to what a brute-force reading of both ends says.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter

import pytest
from oracle_drafters import hashing_oracle

from outrider.proto.session import Drafted
from outrider.proto.session import verifier as verifier_module
from outrider.proto.session.acceptance import accept_drafts
from outrider.proto.session.both_ends import BothEnds, DraftingHere, LocalJob
from outrider.proto.session.verifier import Verified, VerifierRules, VerifierSession
from outrider.proto.types import CommittedToken, Continue, Draft, DraftToken, Open, Report, Sampling, token_ids

VOCAB, SEEDS = 6, 60
RULES = VerifierRules("v", "m", "ab" * 32, VOCAB, 400, frozenset({0}), max_drafts=6, max_credit=12, keep_s=60.0)


class DrivenText:
    """A session, its edge's chain, its drafter's prefix, and what must hold of them."""

    def __init__(self, seed: int, counts: Counter[str]) -> None:
        self.rng = random.Random(seed)
        self.counts = counts
        self.oracle = hashing_oracle(seed, VOCAB, eos_odds=0.0)
        self.right = self.rng.choice((0.3, 0.7, 0.95))
        self.edge_right = self.rng.choice((0.0, 0.5, 0.95))
        self.here = DraftingHere("own@1", self.rng.choice((None, 0.0, 1.0)))
        prompt = tuple(self.rng.randrange(1, VOCAB) for _ in range(self.rng.randrange(1, 9)))
        sampling = Sampling(max_tokens=60, ignore_eos=True)
        fixed = self.rng.choice((None, None, 3))
        frame = Open("m", "ab" * 32, prompt, sampling, "s", keep_s=60.0, drafts_here=fixed)
        self.session = VerifierSession(frame, RULES, 0.0, self.here)
        self.now = 0.0
        self.prefix: list[int] = []
        self.job: LocalJob | None = None
        self.result: Drafted | None = None  # of a job that has begun
        self.chain, self.edge = 0, list[int]()  # the edge's drafts after the transcript

    def proposal(self, text: list[int], right: float) -> int:
        token = self.oracle(tuple(text))
        return token if self.rng.random() < right else self.rng.randrange(1, VOCAB)

    # --- events ---

    def ask(self, block: tuple[DraftToken, ...] | None) -> None:
        had = self.job
        job = self.session.local_job(0.01, 0.0002, self.now, block)
        if job is None:
            return
        assert had is None, "it has one job at most"
        self.job = job
        ends = self.session.ends
        assert ends is not None
        prefix = self.prefix[: job.job.truncate_to] + list(job.job.extend_with)
        assert job.job.truncate_to <= len(self.prefix)
        assert prefix == self.session.transcript + list(token_ids(ends.chain())), "it would continue another text"
        self.counts["jobs"] += 1
        self.counts["continues the edge's"] += bool(self.edge and prefix[-len(self.edge) :] == self.edge)

    def begin_job(self) -> None:
        if self.job is None or self.result is not None:
            return
        job = self.job.job
        self.prefix = self.prefix[: job.truncate_to] + list(job.extend_with)
        drafts: list[DraftToken] = []
        ends = self.session.ends
        assert ends is not None
        while not self.job.is_enough(drafts) and ends.goes_on(self.job) and self.rng.random() < 0.95:
            draft = DraftToken(self.proposal(self.prefix, self.right), self.rng.choice((math.nan, 0.5, 0.99)))
            drafts.append(draft)
            self.prefix.append(draft.id)
        self.result = Drafted(job, tuple(drafts), 0.001 * len(drafts))

    def answer_job(self) -> None:
        ends = self.session.ends
        assert ends is not None
        if self.result is not None:
            self.counts["stale"] += self.job is not None and not ends.goes_on(self.job)
            ends.take(self.result, self.rng.choice((0.0, 0.002)))
            self.job = self.result = None

    def drop_job(self) -> None:
        if self.job is not None and self.result is None and self.session.ends is not None:
            self.session.ends.drop(0.001)
            self.job = None
            self.counts["dropped"] += 1

    def send_drafts(self) -> None:
        """Let the edge go on with its chain, or begin another."""
        text = self.session.transcript
        if self.rng.random() < 0.3:
            self.chain, self.edge = self.chain + 1, []
        start = len(text) + len(self.edge)
        path = list[int]()
        for _ in range(min(self.rng.randrange(1, 5), 12 - len(self.edge))):
            path.append(self.proposal([*text, *self.edge, *path], self.edge_right))
        if path:
            self.session.on_draft(Draft(self.chain, start, tuple(map(DraftToken, path))), self.now)
            self.edge += path

    def step(self) -> None:
        """Verify a block and commit; what the verifier counts as its own is what the edge has not sent."""
        session = self.session
        block = session.block(0.01, 0.0002)
        self.ask(block)
        if self.rng.random() < 0.5:
            self.begin_job()
        before = list(session.transcript)
        ids = token_ids(block)
        tokens = tuple(CommittedToken(self.oracle((*before, *ids[:k])), -1.0) for k in range(len(ids) + 1))
        common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, self.edge, strict=False)))
        self.now += 0.01
        commit = session.on_verified(Verified(block, tokens), self.now)
        said = list(token_ids(commit.tokens))
        assert session.transcript == before + said
        for position in range(len(before), len(session.transcript)):
            text = session.transcript
            assert text[position] == self.oracle(tuple(text[:position])), "the text is not the target's"
        assert commit.verified_here == len(block) - common
        self.counts["verified here"] += commit.verified_here
        self.counts["accepted here"] += commit.accepted_here
        self.counts["tokens"] += len(said)
        lives = self.edge[: len(said)] == said[: len(self.edge)]
        if not lives:
            self.chain += 1
        self.edge = self.edge[len(said) :] if lives else []

    def next_turn(self) -> None:
        start = self.rng.randrange(1, min(200, len(self.session.transcript)) + 1)
        more = tuple(self.rng.randrange(1, VOCAB) for _ in range(self.rng.randrange(1, 6)))
        self.chain, self.edge = self.chain + 1, []
        self.session = self.session.continued(Continue(start, more, chain=self.chain), self.now)
        self.counts["turns"] += 1

    def drive(self) -> None:
        for _ in range(400):
            self.now += self.rng.choice((0.0, 0.001, 0.02))
            event = self.rng.choice(("ask", "ask", "begin", "answer", "drop", "drafts", "step", "report"))
            if self.session.finish is not None:
                self.next_turn()
            match event:
                case "ask":
                    self.ask(None)
                case "begin":
                    self.begin_job()
                case "answer":
                    self.answer_job()
                case "drop":
                    self.drop_job()
                case "drafts":
                    self.send_drafts()
                case "step":
                    self.step()
                case "report":
                    report = Report(
                        self.rng.random() < 0.8, drafting_s=0.002, round_trip_s=self.rng.choice((0.01, 0.2))
                    )
                    self.session.on_report(report)


def drive_all(counts: Counter[str]) -> None:
    for seed in range(SEEDS):
        text = DrivenText(seed, counts)
        try:
            text.drive()
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


def test_the_drafter_always_continues_the_text_and_the_text_is_the_targets() -> None:
    counts: Counter[str] = Counter()
    drive_all(counts)
    for what, least in {
        "jobs": 12,
        "continues the edge's": 3,
        "stale": 4,
        "dropped": 4,
        "verified here": 6,
        "accepted here": 3,
        "tokens": 50,
        "turns": 0.5,
    }.items():
        assert counts[what] >= least * SEEDS, (what, counts)


# === what it would find ===========================================================================================


def no_rollback(monkeypatch: pytest.MonkeyPatch) -> None:
    """A miss leaves the prefix as it is."""
    monkeypatch.setattr(BothEnds, "_miss", lambda self, _: self._abandon(0))


def dropped_as_if_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BothEnds, "drop", lambda self, _: setattr(self, "running", None))


def old_prefix_in_a_new_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    right = BothEnds.begin_turn
    monkeypatch.setattr(BothEnds, "begin_turn", lambda self, sent, text, _: right(self, sent, text, len(text)))


def miscounted(monkeypatch: pytest.MonkeyPatch) -> None:
    """All drafts count as the edge's where any are."""
    right = BothEnds.chain

    def chain(self: BothEnds) -> list[DraftToken]:
        drafts = right(self)
        return drafts if all(draft.other for draft in drafts) else [draft._replace(other=False) for draft in drafts]

    monkeypatch.setattr(BothEnds, "chain", chain)


def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every draft becomes text."""

    def accept(block, tokens, **rest):
        said, _, finish = accept_drafts(
            block, (*[CommittedToken(token, -1.0) for token in token_ids(block)], tokens[-1]), **rest
        )
        return said, len(block), finish

    monkeypatch.setattr(verifier_module, "accept_drafts", accept)


@pytest.mark.parametrize("defect", [no_rollback, dropped_as_if_read, old_prefix_in_a_new_turn, miscounted, unchecked])
def test_a_defect_is_found_soon(defect, monkeypatch) -> None:
    defect(monkeypatch)
    with pytest.raises(AssertionError):
        drive_all(Counter())


def test_a_stale_chain_that_is_verified_changes_no_text(monkeypatch) -> None:
    """Drafts are only proposals: where they come from decides nothing."""
    right = BothEnds.take

    def take(self: BothEnds, done: Drafted, waited_s: float) -> None:
        right(self, done, waited_s)
        if not self.tokens:
            self.tokens = [draft._replace(other=True) for draft in done.drafts]

    monkeypatch.setattr(BothEnds, "take", take)
    monkeypatch.setattr(
        DrivenText,
        "ask",
        lambda self, block: setattr(self, "job", self.session.local_job(0.01, 0.0002, self.now, block) or self.job),
    )
    counts: Counter[str] = Counter()
    drive_all(counts)
    assert counts["verified here"] > counts["accepted here"] > 0

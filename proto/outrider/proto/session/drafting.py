"""The drafters of one text: which is active, how far ahead it drafts, and the fate of its drafts."""

from __future__ import annotations

import math
from collections.abc import Callable

from outrider.proto.drafter_format import published_name
from outrider.proto.errors import OutriderError, UnknownToken
from outrider.proto.policy import Window
from outrider.proto.session.allowance import Allowance
from outrider.proto.session.branching import Branching
from outrider.proto.session.chain import Chain, DrafterName
from outrider.proto.session.events import CaughtUp, Drafted
from outrider.proto.session.hits import HitCounter
from outrider.proto.session.jobs import CatchUpJob, DraftJob
from outrider.proto.session.measuring import Meter
from outrider.proto.session.merging import Merging
from outrider.proto.session.selection import Selection
from outrider.proto.session.steering import Steer, VectorKeeper
from outrider.proto.session.stream import EdgeStream
from outrider.proto.session.text import EdgeText
from outrider.proto.session.verifier_arm import VerifierArm
from outrider.proto.types import Commit, DraftToken, token_ids

CATCH_UP = 8  # a job that first has to read more tokens than this says nothing about drafting speed
JOB_S = 0.004  # drafting time between looks at the verifier's frames
MAX_JOB_TOKENS = 8


def job_tokens(drafting_s: float) -> int:
    """Return the most tokens of a drafting job where each takes `drafting_s` seconds; 0: unknown yet."""
    if drafting_s < JOB_S / (MAX_JOB_TOKENS + 1):
        return MAX_JOB_TOKENS
    return max(1, min(MAX_JOB_TOKENS, int(JOB_S / drafting_s)))


class Drafting:
    """Issues jobs to drafters, one at a time, and compares their proposals with the text.

    Attributes:
        enabled: whether there is a drafter that works.
        running: job that no event has answered yet.
        last_job_s: duration of the newest job, in seconds.
        branching: branches of the chain.
        merging: branches that idle drafters make.
    """

    def __init__(
        self,
        text: EdgeText,
        chain: Chain,
        stream: EdgeStream,
        meter: Meter,
        selection: Selection,
        window: Window,
        *,
        vectors: VectorKeeper | None,
        battery: float,
        job_tokens: Callable[[float], int],
    ) -> None:
        self.enabled = text.frame.drafting
        self.running: DraftJob | CatchUpJob | None = None
        self.last_job_s = 0.0
        self._text = text
        self._chain = chain
        self._stream = stream
        self._meter = meter
        self._selection = selection
        self._allowance = Allowance(text, chain, stream, meter, window=window, job_tokens=job_tokens)
        self._verifier = VerifierArm()
        self._hits = HitCounter(text, meter, selection)
        self.branching = Branching(text, chain, stream, meter, battery)
        self.merging = Merging(text, chain, meter, self.branching, selection)
        self._vectors = vectors
        self._job_tokens = job_tokens
        self._choice_due = True
        self._yields = False  # the verifier's own drafter is the better one
        self._stalled = False  # the drafter had nothing to say; ask again after the next commit
        self._issued_in = self._replaced_in = 0  # turns in which the newest job was issued, and drafters replaced
        selection.begin_text(text.prompt_length, 0)

    @property
    def active(self) -> int:
        """Index of the active drafter."""
        return self._selection.current

    @property
    def drafter(self) -> DrafterName:
        """Name in the manifest and version of the active drafter."""
        name, version = self.drafters[self.active]
        return published_name(name), version

    @property
    def drafters(self) -> tuple[DrafterName, ...]:
        """Name and version of each drafter, by its index."""
        return tuple(zip(self._selection.names, self._selection.versions, strict=True))

    @property
    def job_runs(self) -> bool:
        """Whether the active drafter has a drafting job."""
        return isinstance(self.running, DraftJob) and self.running.drafter == self.active

    def review(self) -> None:
        """Compute the allowance once more, now that an event may have changed what it depends on."""
        self._allowance.review()

    def allowance(self) -> int:
        """Return how many more tokens may be drafted in the next job."""
        if self._stalled or self._yields or not self.enabled:
            return 0
        return self._allowance.tokens(self._selection.current)

    @property
    def rests(self) -> bool:
        """Whether the verifier drafts alone, since it grants no credit or hits more."""
        stream = self._stream
        return self._yields or (not stream.credit and bool(stream.terms.drafter_here))

    @property
    def should_lead(self) -> bool:
        """Whether the active drafter hits more than the verifier's own, and rests all the same."""
        return self.rests and self._verifier.is_worse_than(self._meter.drafter(self.active).calibration.acceptance)

    # --- jobs ---

    def draft(self) -> DraftJob | None:
        """Issue a drafting job; None: enough is drafted, or nothing can be."""
        stream = self._stream
        if not stream.connected and self._selection.reads_prompt(len(self._text.tokens)):
            return None  # what the prompt tells of the drafters decides which of them is first
        if self._choice_due and self.enabled and stream.takes_drafts and not self._chain:
            self._choice_due = False
            _choose(self._selection, self._meter, self._text)
        count = self.allowance()
        return self._draft(count) if count else None

    def _draft(self, count: int) -> DraftJob:
        """Issue a job of at most `count` tokens after the drafts in flight."""
        selection, drafts = self._selection, self._chain.tokens
        committed, agreed = len(self._text.tokens), selection.agreed
        after = (*self._text.tokens[agreed:], *drafts[max(0, agreed - committed) :])
        forced = max(0, committed - selection.forced_from(committed, self.active))
        prefix_length = committed + len(drafts)
        vectors = self._vectors if self.active == selection.steered else None
        job = DraftJob(
            truncate_to=agreed,
            extend_with=after,
            count=count,
            epoch=self._chain.epoch,
            steer=None if vectors is None else _steer(vectors, self._text, self._meter, prefix_length - 1),
            drafter=self.active,
            skip=committed - forced - agreed if forced else 0,
            teacher_forced=forced,
        )
        selection.agreed = prefix_length
        self.running, self._issued_in = job, self._text.turns
        return job

    def branch(self, now: float) -> DraftJob | None:
        """Issue a job for a branch of the chain; None: there is none worth drafting."""
        selection, committed = self._selection, len(self._text.tokens)
        if self._text.done or not self.enabled or selection.agreed < committed:
            return None
        job = self.branching.job(self.active, selection.agreed, self._job_tokens, now)
        if job is not None:
            selection.agreed = job.branch
            self.running, self._issued_in = job, self._text.turns
        return job

    def merge(self, within_s: float) -> DraftJob | None:
        """Issue a job of at most `within_s` seconds to an idle drafter, for branches; None: there is none that pays."""
        job = self.merging.job(within_s)
        if job is not None:
            self.running, self._issued_in = job, self._text.turns
        return job

    def catch_up(self) -> CatchUpJob | None:
        """Issue a job to an idle drafter; None: there is nothing worth reading, or the first Open has not left yet."""
        if self._text.done or not self._stream.has_opened:
            return None
        job = self._selection.next_catch_up(self._text.tokens)
        if job is None and self.rests and self.enabled:
            job = self._selection.catch_up_active(self._text.tokens)
        self.running = job
        self._issued_in = self._text.turns
        return job

    # --- their results ---

    def take(self, done: Drafted) -> None:
        """Put the proposals that continue the text on the chain.

        Raises:
            UnknownToken: the target does not have one of them.
        """
        job, drafts, text, selection = done.job, done.drafts, self._text, self._selection
        self.running = None
        text.statistics.drafting_s += done.seconds
        if text.done:
            return
        if any(not 0 <= draft.id < self._stream.terms.vocab_size for draft in drafts):
            raise UnknownToken("the drafter proposes tokens that the target does not have")
        this_turn = self._issued_in == text.turns
        if job.drafter != self.active:
            if this_turn:
                self.merging.add(done, self._hits)
            return
        if this_turn:
            self._hits.compare_forced(job.drafter, job.truncate_to + job.skip, done.teacher_forced)
        if job.branch >= 0:
            self.branching.add(done)
            return
        if job.epoch != self._chain.epoch:
            selection.agreed = min(selection.agreed, job.start)
            return
        text.statistics.drafted += len(drafts)
        if not drafts:
            self._stalled = self._choice_due = True
        elif len(job.extend_with) <= CATCH_UP:
            self._meter.time_drafting(self.active, done.seconds / len(drafts))
            self.last_job_s = done.seconds
        overtaken = max(0, min(len(drafts), len(text.tokens) - job.start))
        if not self._meet(drafts[:overtaken], job.start):
            return
        room = max(0, self._stream.credit - len(self._chain))  # the credit may have shrunk meanwhile
        self._chain.drafts += drafts[overtaken : overtaken + room]
        if drafts[overtaken:]:
            selection.agreed = max(selection.agreed, len(text.tokens) + len(self._chain))

    def _meet(self, drafts: tuple[DraftToken, ...], start: int) -> bool:
        """Compare drafts with the tokens that were committed meanwhile, from `start` on; return whether all agree."""
        if not drafts:
            return True
        committed = self._text.tokens[start : start + len(drafts)]
        hits = self._hits.compare(self.active, start, drafts, committed)
        agree = hits == len(drafts)
        self._selection.agreed = start + hits
        self._choice_due = self._choice_due or not agree
        return agree

    def take_reading(self, done: CaughtUp) -> bool:
        """Learn from an idle drafter's catching up; return whether it belongs to this turn."""
        self.running = None
        text, job = self._text, done.job
        text.statistics.reading_s += done.seconds
        if text.done or self._issued_in != text.turns:
            return False
        self._meter.time_reading(job.drafter, done.seconds / len(job.tokens))
        text.statistics.read += len(job.tokens)
        self._selection.note_prompt(job.drafter, done.teacher_forced.log_q)
        self._hits.compare_forced(job.drafter, job.start, done.teacher_forced)
        return True

    def fail(self, error: OutriderError, drafter: int) -> None:
        """Go on without a drafter that is broken."""
        self.running = None
        if self._issued_in < self._replaced_in:
            return  # it was one of the drafters before
        self._text.statistics.drafter_error = str(error)
        self.enabled = self._selection.fail(drafter) and self.enabled
        if drafter == self.active:
            self.abandon()

    # --- the text goes on ---

    def begin_turn(self, kept: int, selection: Selection | None) -> None:
        """Begin with another prompt, whose first `kept` tokens the drafters may know.

        The drafters of `selection` take the place of those so far; ones that stay keep what they have read.
        """
        if selection is not None:
            self.enabled = selection.take_over(self._selection)
            self._selection = self.merging.selection = selection
            self._replaced_in = self._text.turns
            self._meter.take_drafters(selection.names)
            self._hits = HitCounter(self._text, self._meter, selection)
            if self.enabled:
                self._text.statistics.drafter_error = ""
        self._stalled = self._yields = False
        self._verifier = VerifierArm()
        self.abandon()
        self._selection.begin_text(self._text.prompt_length, kept)

    def abandon(self) -> None:
        """Forget all drafts in flight."""
        self._selection.agreed = min(self._selection.agreed, len(self._text.tokens))
        self._choice_due = True
        self.branching.forget()
        self._chain.abandon()

    def commit(self, commit: Commit, known: int, seconds: float) -> None:
        """Append the commit's tokens after the first `known`, which came after `seconds`, to text and chain."""
        text, chain, position = self._text, self._chain, len(self._text.tokens)
        tokens = token_ids(commit.tokens[known:])
        text.tokens += tokens
        met = 0
        while True:
            # Where the chain is shorter, a running job may be proposing the rest, and is compared when it is done.
            drafts = chain.drafts[: len(tokens) - met]
            hits = self._hits.compare(self.active, position + met, drafts, tokens[met:], chain.borrowed)
            if hits == len(drafts):
                break
            met += hits + 1
            self._miss(position + met - 1, drafts[hits], tokens[met - 1], commit.chain)
        chain.advance(hits)
        self.branching.advance()
        self._verifier.take(commit)
        self._yields = self._verifier.is_better_than(self._meter.drafter(self.active).calibration.acceptance)
        self._choice_due = self._choice_due or self.rests  # a chain would be another drafter's, perhaps
        text.statistics.of(self._selection.names[self.active]).committed += len(tokens)
        self._selection.learn(
            committed=len(tokens),
            # A step verifies drafts after a miss too, but nothing is known of them; the verifier's own come last.
            verified=max(0, min(commit.verified - commit.verified_here, len(commit.tokens)) - known),
            accepted=max(0, commit.accepted - commit.accepted_here - known),
            agreement=math.nan if commit.reward is None else commit.reward,
            seconds=seconds,
        )

    def _miss(self, position: int, draft: DraftToken, token: int, chain: int) -> None:
        """Go on with the branch of `token`, if there is one; `chain` is the newest that the verifier knows."""
        branch, taken = self.branching.take(position, draft, token), chain > self._chain.number
        self.abandon()
        self._selection.agreed = min(self._selection.agreed, position)
        if branch:
            self._chain.follow_branch(branch, chain if taken else 0, len(branch) if self.branching.borrowed else 0)
            self._text.statistics.branches_taken += taken

    def resume(self) -> None:
        """Ask a drafter that had nothing to say again."""
        self._stalled = False


def _steer(vectors: VectorKeeper, text: EdgeText, meter: Meter, position: int) -> Steer | None:
    """Return the vector for a job whose first token follows `position`; None: unchanged."""
    meter.measurements.lead.add(position + 2 - len(text.tokens))
    age = vectors.age(position)
    if age is not None:
        text.statistics.steered_jobs += 1
        text.statistics.vector_age += age
    return vectors.steer(text.prompt_length)


def _choose(selection: Selection, meter: Meter, text: EdgeText) -> None:
    """Choose the active drafter, now that a chain begins."""
    before, patience = selection.current, text.frame.patience
    patience_s = patience.seconds if patience is not None else 0.0
    selection.choose(meter.arms(before), meter.round_costs(), len(text.tokens), patience_s)
    text.statistics.switches += selection.current != before

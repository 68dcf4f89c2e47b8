"""The drafters of one text: which is active, how far ahead it drafts, what idle ones add, and the fate of all drafts.

Idle drafters catch up with the text, and where steps verify branches they read the chain, which shows their own
proposals in place of the drafts. One that differs is a branch, worth a row by the share of misses at which this drafter
had the token. What it proposes after that is drafted where it is likely enough. A drafter whose branches bring less
than the time that reading takes rests.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.proto.drafter_format import published_name
from outrider.proto.errors import OutriderError, UnknownToken
from outrider.proto.policy import Window
from outrider.proto.policy.measures import Acceptance, Smoothed
from outrider.proto.session.events import CaughtUp, Drafted
from outrider.proto.session.jobs import CATCH_UP, CatchUpJob, DraftJob, TeacherForced
from outrider.proto.session.measuring import Meter
from outrider.proto.session.selection import DrafterName, Selection
from outrider.proto.session.session_steering import Steer, VectorKeeper
from outrider.proto.session.session_text import EdgeText
from outrider.proto.session.stream import EdgeStream
from outrider.proto.session.tree import DraftTree
from outrider.proto.types import Commit, DraftToken, token_ids

JOB_S = 0.004  # drafting time between looks at the verifier's frames
MAX_JOB_TOKENS = 8
RUN = 8  # most tokens that an idle drafter proposes after its own in place of a draft
FIRST_S = 0.0005  # assumed time of an idle drafter's job before the first
MAX_UNREAD = 64  # tokens of the transcript that an idle drafter reads before the chain
REST = 12  # chains that are not read after one did not pay
CHEAP_S = 0.0005  # longest time of a job for branches; whoever takes longer only drafts
_MIN_TRIALS = 8  # of the verifier's own drafts, before they say anything
_QUIET_COMMITS = 8  # without one, after which the verifier is taken to draft no more


def job_tokens(drafting_s: float) -> int:
    """Return the most tokens of a drafting job where each takes `drafting_s` seconds; 0: unknown yet."""
    if drafting_s < JOB_S / (MAX_JOB_TOKENS + 1):
        return MAX_JOB_TOKENS
    return max(1, min(MAX_JOB_TOKENS, int(JOB_S / drafting_s)))


@dataclass(slots=True)
class Worth:
    """Worth of an idle drafter's reading of chains.

    Attributes:
        seconds: time of one, in seconds.
        gain: expected tokens that its branches add to a step.
        rests_until: epoch of the next chain that it reads.
    """

    seconds: Smoothed = field(default_factory=Smoothed)
    gain: Smoothed = field(default_factory=Smoothed)
    rests_until: int = 0


class VerifierArm:
    """Hits of the verifier's own drafter in one text, as commits show them: an arm that costs the edge nothing.

    Chains of both that part compete for the rows of a step, and the verifier's come a round trip sooner. So a drafter
    of the edge that hits less rests; one that hits as much drafts, and price and round trip decide who does
    (`policy.patience`); one that hits more leads. The edge goes by its own counts of both over the same tokens: a
    resting drafter reads the text and is teacher-forced, for no bytes and a fraction of the drafting.
    """

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self._trials = 0
        self._quiet_commits = _QUIET_COMMITS

    def take(self, commit: Commit) -> None:
        """Count the verifier's own drafts of a commit, which come after the edge's, up to the first miss."""
        self._quiet_commits = 0 if commit.verified_here else self._quiet_commits + 1
        if not commit.verified_here or commit.accepted < commit.verified - commit.verified_here:
            return
        for _ in range(commit.accepted_here):
            self.acceptance.add(True)
        if commit.accepted_here < commit.verified_here and commit.finish is None:
            self.acceptance.add(False)
        self._trials += commit.accepted_here + 1

    def is_better_than(self, mine: Acceptance) -> bool:
        """Return whether the verifier drafts, and hits surely more than a drafter of the edge."""
        known = self._trials >= _MIN_TRIALS and self._quiet_commits < _QUIET_COMMITS
        return known and self.acceptance.surely_exceeds(mine)


class Drafting:
    """Issues jobs to drafters, one at a time, and compares their proposals with the text.

    Attributes:
        enabled: whether there is a drafter that works.
        running: job that no event has answered yet.
        last_job_s: duration of the newest job, in seconds.
    """

    def __init__(
        self,
        text: EdgeText,
        tree: DraftTree,
        stream: EdgeStream,
        meter: Meter,
        selection: Selection,
        window: Window,
        *,
        vectors: VectorKeeper | None,
        job_tokens: Callable[[float], int],
    ) -> None:
        self.enabled = text.frame.drafting
        self.running: DraftJob | CatchUpJob | None = None
        self.last_job_s = 0.0
        self._text = text
        self._tree = tree
        self._stream = stream
        self._meter = meter
        self._selection = selection
        self._window = window
        self._vectors = vectors
        self._job_tokens = job_tokens
        self._allowed, self._allowed_to = 0, -1  # tokens since the last review, and their drafter; -1: none
        self._verifier = VerifierArm()
        self._choice_due = True
        self._yields = False  # the verifier's own drafter is the better one
        self._stalled = False  # the drafter had nothing to say; ask again after the next commit
        self._issued_in = self._replaced_in = 0  # turns in which the newest job was issued, and drafters replaced
        self._worth: dict[str, Worth] = {}  # of idle drafters, by name
        self._committed = 0  # length of the transcript when the newest job for branches was issued
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

    # --- how far ahead ---

    def review(self) -> None:
        """Compute the allowance once more, now that an event may have changed what it depends on."""
        self._allowed_to = -1

    def allowance(self) -> int:
        """Return how many more tokens may be drafted in the next job."""
        if self._stalled or self._yields or not self.enabled:
            return 0
        if self._allowed_to != self.active:
            self._allowed, self._allowed_to = self._tokens(self.active), self.active
        return self._allowed

    def _tokens(self, drafter: int) -> int:
        """Return how many more tokens a drafter may draft: by credit, length of text and job, and the window."""
        text, stream, meter = self._text, self._stream, self._meter
        in_flight = len(self._tree)
        room = min(stream.credit, stream.max_tokens - text.generated - 1) - in_flight
        if room <= 0 or not stream.takes_drafts or text.done:
            return 0
        mine = meter.drafter(drafter)
        drafting_s = mine.drafting_s.value
        return self._window.more(
            meter.measurements,
            stream.terms.goal,
            min(room, self._job_tokens(drafting_s)),
            in_flight=in_flight,
            survival=self._tree.survival(drafter),
            acceptance=mine.calibration.acceptance.rate,
            drafting_s=drafting_s,
            covered=stream.covered,
        )

    @property
    def rests(self) -> bool:
        """Whether the verifier drafts alone, since it grants no credit or hits more."""
        stream = self._stream
        return self._yields or (not stream.credit and bool(stream.terms.drafter_here))

    @property
    def should_lead(self) -> bool:
        """Whether the active drafter hits more than the verifier's own, and rests all the same."""
        mine = self._meter.drafter(self.active).calibration.acceptance
        return self.rests and mine.surely_exceeds(self._verifier.acceptance)

    # --- jobs ---

    def draft(self) -> DraftJob | None:
        """Issue a drafting job; None: enough is drafted, or nothing can be."""
        stream = self._stream
        if not stream.connected and self._selection.reads_prompt(len(self._text.tokens)):
            return None  # what the prompt tells of the drafters decides which of them is first
        if self._choice_due and self.enabled and stream.takes_drafts and not self._tree:
            self._choice_due = False
            _choose(self._selection, self._meter, self._text)
        count = self.allowance()
        return self._draft(count) if count else None

    def _draft(self, count: int) -> DraftJob:
        """Issue a job of at most `count` tokens after the drafts in flight."""
        selection, drafts = self._selection, self._tree.tokens
        committed, agreed = len(self._text.tokens), selection.agreed
        after = (*self._text.tokens[agreed:], *drafts[max(0, agreed - committed) :])
        forced = max(0, committed - selection.forced_from(committed, self.active))
        prefix_length = committed + len(drafts)
        vectors = self._vectors if self.active == selection.steered else None
        job = DraftJob(
            truncate_to=agreed,
            extend_with=after,
            count=count,
            epoch=self._tree.epoch,
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
        job = self._tree.job(self.active, selection.agreed, self._job_tokens, now)
        if job is not None:
            selection.agreed = job.branch
            self.running, self._issued_in = job, self._text.turns
        return job

    def merge(self, within_s: float) -> DraftJob | None:
        """Issue a job of at most `within_s` seconds to an idle drafter, for branches; None: there is none that pays."""
        within_s = min(within_s, CHEAP_S)
        if within_s <= 0 or self._selection.drafters < 2 or self._text.done:
            return None
        if not (self._tree and self._tree.takes_others):
            return None
        self._committed = len(self._text.tokens)
        job = self._reading(within_s) or self._run(within_s)
        if job is not None:
            self._selection.note_read(job.drafter, self._committed)
            self.running, self._issued_in = job, self._text.turns
        return job

    def _reading(self, within_s: float) -> DraftJob | None:
        """Return a job in which a drafter reads what it lacks of the text, and the chain."""
        other = next((other for other in self._selection.idle if self._should_read(other, within_s)), None)
        if other is None:
            return None
        agreed, committed, chain = self._selection.read(other), self._committed, self._tree.tokens
        forced_from = max(1, self._selection.forced_from(committed, other))
        return DraftJob(
            truncate_to=agreed,
            extend_with=(*self._text.tokens[agreed:], *chain),
            count=0,
            epoch=self._tree.epoch,
            drafter=other,
            skip=forced_from - agreed,
            teacher_forced=committed + len(chain) - forced_from,
        )

    def _should_read(self, other: int, within_s: float) -> bool:
        if self._tree.read_to.get(other, 0) >= self._committed + len(self._tree):
            return False
        worth = self._worth.setdefault(self._selection.names[other], Worth())
        if self._tree.epoch < worth.rests_until or self._committed - self._selection.read(other) > MAX_UNREAD:
            return False
        return (worth.seconds.value or FIRST_S) <= within_s

    def _run(self, within_s: float) -> DraftJob | None:
        """Return a job in which a drafter goes on after its own token in place of a draft."""
        found = self._tree.likeliest_other()
        if found is None:
            return None
        chance, position, token, other = found
        measured = self._meter.drafter(other)
        token_s = measured.drafting_s.value or FIRST_S / RUN
        count = min(RUN, int(within_s / token_s))
        follows, active = measured.calibration.acceptance.rate, self._meter.drafter(self._selection.current)
        if follows <= active.calibration.acceptance.rate:
            return None  # the active drafter's own drafts are better than more of these
        gain = chance * follows * (1 - follows**count) / (1 - follows)
        if not count or not self._pays(gain, count * token_s):
            return None
        self._tree.branches[position, token].asked = True
        committed, agreed = self._committed, self._selection.read(other)
        forced = committed - max(1, self._selection.forced_from(committed, other))
        return DraftJob(
            truncate_to=agreed,
            extend_with=(*self._text.tokens[agreed:], *self._tree.tokens[: position - committed], token),
            count=count,
            epoch=self._tree.epoch,
            drafter=other,
            skip=committed - forced - agreed if forced else 0,
            teacher_forced=forced,
            branch=position,
        )

    def _pays(self, gain: float, seconds: float) -> bool:
        """Return whether so many tokens more in a step are worth the work of an idle drafter."""
        return gain * self._meter.measurements.pace.token_s > seconds

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
                self._take_idle(done)
            return
        if this_turn:
            self._compare_forced(job.drafter, job.truncate_to + job.skip, done.teacher_forced)
        if job.branch >= 0:
            self._tree.add(done)
            return
        if job.epoch != self._tree.epoch:
            selection.agreed = min(selection.agreed, job.start)
            return
        text.statistics.drafted += len(drafts)
        if not drafts:
            self._stalled = self._choice_due = True
        elif len(job.extend_with) <= CATCH_UP:
            self._meter.drafter(self.active).drafting_s.add(done.seconds / len(drafts))
            self.last_job_s = done.seconds
        overtaken = max(0, min(len(drafts), len(text.tokens) - job.start))
        if not self._meet(drafts[:overtaken], job.start):
            return
        room = max(0, self._stream.credit - len(self._tree))  # the credit may have shrunk meanwhile
        self._tree.drafts += drafts[overtaken : overtaken + room]
        if drafts[overtaken:]:
            selection.agreed = max(selection.agreed, len(text.tokens) + len(self._tree))

    def _meet(self, drafts: tuple[DraftToken, ...], start: int) -> bool:
        """Compare drafts with the tokens that were committed meanwhile, from `start` on; return whether all agree."""
        if not drafts:
            return True
        committed = self._text.tokens[start : start + len(drafts)]
        hits = self._compare(start, drafts, committed)
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
        self._meter.drafter(job.drafter).reading_s.add(done.seconds / len(job.tokens))
        text.statistics.read += len(job.tokens)
        self._selection.note_prompt(job.drafter, done.teacher_forced.log_q)
        self._compare_forced(job.drafter, job.start, done.teacher_forced)
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

    def _take_idle(self, done: Drafted) -> None:
        """Take in what an idle drafter has read of the chain, or the run of its branch."""
        job, other, drafts = done.job, done.job.drafter, done.teacher_forced.drafts
        known = min(len(drafts), self._committed - job.truncate_to - job.skip)
        if known > 0:
            self._compare_forced(other, self._committed - known, TeacherForced(drafts[:known]))
        if job.count:
            self._meter.drafter(other).drafting_s.add(done.seconds / max(1, len(done.drafts)))
            self._tree.add(done)
            return
        self._text.statistics.read += len(job.extend_with)
        worth = self._worth.setdefault(self._selection.names[other], Worth())
        worth.seconds.add(done.seconds)
        if job.epoch != self._tree.epoch:
            return
        self._tree.read_to[other] = job.start
        worth.gain.add(self._tree.propose(other, self.active, self._committed, drafts[max(0, known) :]))
        if not self._pays(worth.gain.value, worth.seconds.value):
            worth.rests_until = self._tree.epoch + REST

    # --- hits ---

    def _compare(self, start: int, drafts: Sequence[DraftToken], tokens: Sequence[int]) -> int:
        """Count the chain's drafts from `start` on, up to the first that misses; return the hits before it.

        Another drafter's, which come first, say nothing of the active one.
        """
        hits = next((i for i, draft in enumerate(drafts) if draft.id != tokens[i]), len(drafts))
        compared = drafts[: hits + 1]
        if not compared:
            return 0
        others = sum(draft.other for draft in compared)
        if others:
            self._meter.forget_chances()
        if others < len(compared):
            own = [i < hits for i in range(others, len(compared))]
            self._learn(self.active, start + others, own, compared[others:])
        self._text.statistics.compared += len(compared)
        self._text.statistics.hits += hits
        return hits

    def _compare_forced(self, drafter: int, start: int, forced: TeacherForced) -> None:
        """Compare teacher-forced proposals from position `start` on with the committed tokens there."""
        known = max(0, self._selection.first_undecided(drafter) - start)
        drafts, start = forced.drafts[known:], start + known
        if not drafts:
            return
        committed = self._text.tokens[start : start + len(drafts)]
        hits = [draft.id == token for draft, token in zip(drafts, committed, strict=True)]
        self._learn(drafter, start, hits, drafts)

    def _learn(self, drafter: int, start: int, hits: list[bool], drafts: Sequence[DraftToken]) -> None:
        """Count the hits of a drafter's proposals for positions from `start` on."""
        self._meter.compare(drafter, [draft.lead for draft in drafts], hits)
        self._selection.note(drafter, start, hits)
        counts = self._text.statistics.of(self._selection.names[drafter])
        counts.compared += len(hits)
        counts.hits += sum(hits)

    # --- the text goes on ---

    def begin_turn(self, kept: int, selection: Selection | None) -> None:
        """Begin with another prompt, whose first `kept` tokens the drafters may know.

        The drafters of `selection` take the place of those so far; ones that stay keep what they have read.
        """
        if selection is not None:
            self.enabled = selection.take_over(self._selection)
            self._selection = selection
            self._replaced_in = self._text.turns
            self._meter.take_drafters(selection.names)
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
        self._tree.abandon()

    def commit(self, commit: Commit, known: int, seconds: float) -> None:
        """Append the commit's tokens after the first `known`, which came after `seconds`, to text and chain."""
        text, tree, position = self._text, self._tree, len(self._text.tokens)
        tokens = token_ids(commit.tokens[known:])
        text.tokens += tokens
        met = 0
        while True:
            # Where the chain is shorter, a running job may be proposing the rest, and is compared when it is done.
            drafts = tree.drafts[: len(tokens) - met]
            hits = self._compare(position + met, drafts, tokens[met:])
            if hits == len(drafts):
                break
            met += hits + 1
            self._choice_due = True
            self._selection.agreed = min(self._selection.agreed, position + met - 1)
            tree.miss(position + met - 1, drafts[hits], tokens[met - 1], commit.chain)
        tree.advance(hits)
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
    selection.choose(meter.round_costs(before), len(text.tokens), patience_s)
    text.statistics.switches += selection.current != before

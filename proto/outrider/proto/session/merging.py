"""Merged trees: the runs that idle drafters of the edge propose where they disagree with the active drafter's chain.

An idle drafter reads the chain, which shows its own proposals in place of the drafts. One that differs is a branch,
worth a row by the share of misses at which this drafter had the token. What it proposes after that is drafted where it
is likely enough. A drafter whose branches bring less than the time that reading takes rests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.proto.policy.measures import Smoothed
from outrider.proto.session.branching import Branching
from outrider.proto.session.chain import Chain
from outrider.proto.session.events import Drafted
from outrider.proto.session.hits import HitCounter
from outrider.proto.session.jobs import DraftJob, TeacherForced
from outrider.proto.session.measuring import Meter
from outrider.proto.session.selection import Selection
from outrider.proto.session.text import EdgeText

RUN = 8  # most tokens that a drafter proposes after its own in place of a draft
FIRST_S = 0.0005  # assumed time of a job before the first
MAX_UNREAD = 64  # tokens of the transcript that a drafter reads before the chain
REST = 12  # chains that are not read after one did not pay
CHEAP_S = 0.0005  # longest time of a job; whoever takes longer only drafts


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


@dataclass(slots=True, eq=False)
class Merging:
    """Branches that idle drafters make beside the chain of the active one.

    Attributes:
        selection: the drafters.
    """

    _text: EdgeText
    _chain: Chain
    _meter: Meter
    _branching: Branching
    selection: Selection
    _worth: dict[str, Worth] = field(default_factory=dict)  # by name
    _read_to: dict[int, tuple[int, int]] = field(default_factory=dict)  # epoch, and end of the chain that was read
    _committed: int = 0  # length of the transcript when the newest job was issued

    @property
    def is_open(self) -> bool:
        """Whether idle drafters may make branches."""
        if self.selection.drafters < 2 or self._text.done:
            return False
        return bool(self._chain.drafts) and self._branching.takes_others

    def job(self, within_s: float) -> DraftJob | None:
        """Return a job of at most `within_s` seconds for an idle drafter; None: there is none that pays."""
        within_s = min(within_s, CHEAP_S)
        if within_s <= 0 or not self.is_open:
            return None
        self._committed = len(self._text.tokens)
        job = self._reading(within_s) or self._run(within_s)
        if job is not None:
            self.selection.note_read(job.drafter, self._committed)
        return job

    def _reading(self, within_s: float) -> DraftJob | None:
        """Return a job in which a drafter reads what it lacks of the text, and the chain."""
        other = next((other for other in self.selection.idle if self._should_read(other, within_s)), None)
        if other is None:
            return None
        agreed, committed, chain = self.selection.read(other), self._committed, self._chain.tokens
        forced_from = max(1, self.selection.forced_from(committed, other))
        return DraftJob(
            truncate_to=agreed,
            extend_with=(*self._text.tokens[agreed:], *chain),
            count=0,
            epoch=self._chain.epoch,
            drafter=other,
            skip=forced_from - agreed,
            teacher_forced=committed + len(chain) - forced_from,
        )

    def _should_read(self, other: int, within_s: float) -> bool:
        epoch, end = self._read_to.get(other, (-1, 0))
        if epoch == self._chain.epoch and end >= self._committed + len(self._chain):
            return False
        worth = self._worth.setdefault(self.selection.names[other], Worth())
        if self._chain.epoch < worth.rests_until or self._committed - self.selection.read(other) > MAX_UNREAD:
            return False
        return (worth.seconds.value or FIRST_S) <= within_s

    def _run(self, within_s: float) -> DraftJob | None:
        """Return a job in which a drafter goes on after its own token in place of a draft."""
        found = self._branching.likeliest_other()
        if found is None:
            return None
        chance, position, token, other = found
        measured = self._meter.drafter(other)
        token_s = measured.drafting_s.value or FIRST_S / RUN
        count = min(RUN, int(within_s / token_s))
        follows, active = measured.calibration.acceptance.rate, self._meter.drafter(self.selection.current)
        if follows <= active.calibration.acceptance.rate:
            return None  # the active drafter's own drafts are better than more of these
        gain = chance * follows * (1 - follows**count) / (1 - follows)
        if not count or not self._pays(gain, count * token_s):
            return None
        self._branching.begin_run(position, token)
        committed, agreed = self._committed, self.selection.read(other)
        forced = committed - max(1, self.selection.forced_from(committed, other))
        return DraftJob(
            truncate_to=agreed,
            extend_with=(*self._text.tokens[agreed:], *self._chain.tokens[: position - committed], token),
            count=count,
            epoch=self._chain.epoch,
            drafter=other,
            skip=committed - forced - agreed if forced else 0,
            teacher_forced=forced,
            branch=position,
        )

    def _pays(self, gain: float, seconds: float) -> bool:
        """Return whether so many tokens more in a step are worth the work of an idle drafter."""
        return gain * self._meter.measurements.pace.token_s > seconds

    def add(self, done: Drafted, hits: HitCounter) -> None:
        """Take the result of a job of this turn in."""
        job, other, drafts = done.job, done.job.drafter, done.teacher_forced.drafts
        known = min(len(drafts), self._committed - job.truncate_to - job.skip)
        if known > 0:
            hits.compare_forced(other, self._committed - known, TeacherForced(drafts[:known]))
        if job.count:
            self._meter.time_drafting(other, done.seconds / max(1, len(done.drafts)))
            self._branching.add(done)
            return
        self._text.statistics.read += len(job.extend_with)
        worth = self._worth.setdefault(self.selection.names[other], Worth())
        worth.seconds.add(done.seconds)
        if job.epoch != self._chain.epoch:
            return
        self._read_to[other] = job.epoch, job.start
        active = self.selection.current
        worth.gain.add(self._branching.propose(other, active, self._committed, drafts[max(0, known) :]))
        if not self._pays(worth.gain.value, worth.seconds.value):
            worth.rests_until = self._chain.epoch + REST

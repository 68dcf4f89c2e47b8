"""Which of several drafters is active, what its selector sees and learns, and how idle drafters catch up."""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.selector import RoundCosts, RoundOutcome, SelectionView, Selector, StaticSelector
from outrider.proto.session.jobs import CatchUpJob

DrafterName = tuple[str, str]  # name and version
NO_DRAFTER: DrafterName = ("", "")

READ_TOKENS = 16  # tokens of a catch-up job; a commit that comes meanwhile has to wait for it
READ_PROMPT_TOKENS = 64  # tokens of a job before the first choice, which reads what of a prompt shows nothing
PROMPT_TOKENS = 64  # last tokens of a prompt, which show its subject before there is any text
MIN_LOG_Q = -9.0  # nats; the least that one of them counts: a head may lack a rare token, which then has e^-20
REST_TOKENS = 4  # new tokens from which on a resting drafter reads
ROUND_DRAFTS = 8  # drafts of a round in views of selectors


class Selection:
    """The drafters of one session: which is active, how far each has read, and its known hits.

    A drafter is an index into their names. Another one becomes active only at the beginning of a chain.

    Attributes:
        versions: version of each; empty: unknown.
        steered: drafter that steering vectors are meant for; None: none of them.

    Raises:
        InvalidArgument: there is no drafter, two share a name, one has no version though others do, or none of them is
            the steered one.
    """

    def __init__(
        self,
        selector: Selector,
        names: tuple[str, ...],
        *,
        versions: tuple[str, ...] = (),
        steered: int | None = 0,
    ) -> None:
        drafters = len(names)
        if not drafters or len(set(names)) < drafters:
            raise InvalidArgument("must be one or more drafters of different names", field="selection.names")
        if versions and len(versions) != drafters:
            raise InvalidArgument(f"must be {drafters}, one for each drafter, or none", field="selection.versions")
        if steered is not None and not 0 <= steered < drafters:
            raise InvalidArgument(f"must be below {drafters}, the number of drafters", field="selection.steered")
        self.names = names
        self.drafters = drafters
        self.versions = versions or ("",) * drafters
        self.current = 0
        self.steered = steered
        self._selector = selector
        self._prefix = [0] * drafters  # tokens of each prefix that are known to agree with the text
        self._first = 0  # position of the first token of text
        self._scored = [(0.0, 0)] * drafters  # sum and count of log q at the prompt's last tokens
        self._new_scores = False  # whether the selector has not learned these
        self._num_decided = [0] * drafters  # tokens of text at which each drafter's hit is decided, known or not
        self._new_hits = self._no_hits()  # hits that the selector has not learned
        self._failed: set[int] = set()
        self._view: SelectionView | None = None
        self._due: list[int] | None = None  # idle drafters that should catch up now, best last; None: not known

    @classmethod
    def of_one(cls, name: str = "") -> Selection:
        """Return the selection of a single drafter: nothing is selected, and none catches up."""
        return cls(StaticSelector(), (name,))

    @property
    def agreed(self) -> int:
        """Tokens of the active drafter's prefix that are known to agree with transcript and drafts."""
        return self._prefix[self.current]

    @agreed.setter
    def agreed(self, length: int) -> None:
        self._prefix[self.current] = length

    @property
    def idle(self) -> list[int]:
        """Drafters that work and are not the active one."""
        return [i for i in range(self.drafters) if i != self.current and i not in self._failed]

    def read(self, drafter: int) -> int:
        return self._prefix[drafter]

    def note_read(self, drafter: int, length: int) -> None:
        """Note that an idle drafter's prefix agrees with the transcript up to `length` tokens."""
        self._prefix[drafter] = length
        self._due = None

    def take_over(self, previous: Selection) -> bool:
        """Begin in the place of `previous`, and return whether any drafter works.

        Drafters of both, version for version, keep their prefixes, and are left out if they are broken.
        """
        known = {which: drafter for drafter, which in enumerate(zip(previous.names, previous.versions, strict=True))}
        for drafter, which in enumerate(zip(self.names, self.versions, strict=True)):
            if which in known:
                self._prefix[drafter] = previous._prefix[known[which]]
                self._failed |= {drafter} if known[which] in previous._failed else set()
        return len(self._failed) < self.drafters

    def begin_text(self, first: int, kept: int) -> None:
        """Begin a text at position `first`; at most `kept` tokens of every prefix are still right."""
        if self._view is not None:  # so that all drafters' news go on at the same token
            for drafter in range(self.drafters):
                self._pad(drafter, max(self._num_decided))
            self.learn(committed=0, verified=0, accepted=0, agreement=math.nan, seconds=0.0)
        self._first = first
        self._scored = [(0.0, 0)] * self.drafters
        self._prefix = [min(length, kept) for length in self._prefix]
        self._num_decided = [0] * self.drafters
        self._new_hits = self._no_hits()
        self._view = self._due = None

    def _no_hits(self) -> list[list[bool | None]]:
        return [[] for _ in self.names]

    # --- hits ---

    def note(self, drafter: int, start: int, hits: Sequence[bool]) -> None:
        """Count which of a drafter's proposals from position `start` on are the committed tokens there.

        Nothing is counted where something is known of the drafter at `start` already.
        """
        if self.drafters == 1:
            return
        known = start - self._first - self._num_decided[drafter]
        if known < 0:
            return
        if known:
            self._pad(drafter, start - self._first)
        self._new_hits[drafter] += hits
        self._num_decided[drafter] += len(hits)

    def _pad(self, drafter: int, tokens: int) -> None:
        """Count as unknown the hits of the drafter among the first `tokens` of the text that it has not shown."""
        self._new_hits[drafter] += [None] * (tokens - self._num_decided[drafter])
        self._num_decided[drafter] = tokens

    def note_prompt(self, drafter: int, log_q: Sequence[float]) -> None:
        if not log_q:
            return
        total, n = self._scored[drafter]
        self._scored[drafter] = (total + sum(max(value, MIN_LOG_Q) for value in log_q), n + len(log_q))
        self._new_scores = True

    def first_undecided(self, drafter: int) -> int:
        """Return the first position of the text at which nothing is known of the drafter."""
        return self._first + self._num_decided[drafter]

    def forced_from(self, committed: int, drafter: int) -> int:
        """Return the position from which on a drafter is teacher-forced up to the `committed` tokens."""
        if not self._selector.catches_up:
            return committed
        return max(self._prefix[drafter], self.first_undecided(drafter), committed - READ_TOKENS)

    # --- the active drafter ---

    def choose(self, costs: RoundCosts, committed: int, patience_s: float = 0.0) -> int:
        """Choose and return the active drafter of a text of `committed` tokens, whose verifier waits `patience_s`."""
        if self.drafters == 1:
            return self.current
        # A target waits for drafts that come within a step, or as long as it was asked to; later ones find it ahead.
        waits = costs.round_trip_s < max(costs.step_s, patience_s)
        self._view = (SelectionView.of_rounds if waits else SelectionView.of_stream)(
            costs,
            self._unread(committed),
            drafts=ROUND_DRAFTS,
            current=self.current if self._view is not None else None,
        )
        if self._new_scores:
            self._new_scores = False
            self._selector.read_prompt([total / n if n else math.nan for total, n in self._scored])
        chosen = self._selector.choose(self._view)
        if chosen in self._failed:
            chosen = next(drafter for drafter in range(self.drafters) if drafter not in self._failed)
        self.current, self._due = chosen, None
        return chosen

    def learn(self, *, committed: int, verified: int, accepted: int, agreement: float, seconds: float) -> None:
        """Let the selector learn from a commit, which came after `seconds`, and from what is known since the last."""
        if self._view is None:
            return
        for drafter in self._failed:
            self._pad(drafter, max(self._num_decided))
        self._due = None
        if self._selector.catches_up and not any(self._new_hits):
            return  # nothing to learn from
        hits, self._new_hits = self._new_hits, self._no_hits()
        self._selector.learn(
            RoundOutcome(self._view, self.current, committed, verified, accepted, agreement, seconds, hits)
        )

    def fail(self, drafter: int) -> bool:
        """Leave a broken drafter out from now on; return whether another is left."""
        self._failed.add(drafter)
        self._due = None
        return len(self._failed) < self.drafters

    def _unread(self, committed: int) -> list[int]:
        return [committed - length if length < committed else 0 for length in self._prefix]

    # --- catching up ---

    def reads_prompt(self, length: int) -> bool:
        """Return whether the first choice waits until all drafters have read the transcript of `length` tokens."""
        if self.drafters == 1 or not self._selector.catches_up or self._view is not None:
            return False
        return any(self._prefix[i] < length for i in range(self.drafters) if i not in self._failed)

    def next_catch_up(self, transcript: Sequence[int]) -> CatchUpJob | None:
        """Return a job for an idle drafter to catch up while none drafts; None: there is nothing worth reading."""
        if self.drafters == 1 or not self._selector.catches_up:
            return None
        if self._view is None:  # before the first choice all read the prompt
            behind = (i for i, length in enumerate(self._prefix) if length < len(transcript) and i not in self._failed)
            drafter = next(behind, None)
            return None if drafter is None else self._catch_up_of(drafter, transcript)
        due = self._due
        if due is None:
            due = self._due = self._behind(len(transcript))
        if not due:
            return None
        job = self._catch_up_of(due.pop(), transcript)
        if len(transcript) > job.truncate_to + len(job.tokens):
            self._due = None  # it has not read all, and may be the first once more
        return job

    def _behind(self, committed: int) -> list[int]:
        """Return the idle drafters that should catch up with `committed` tokens, best last."""
        if self._view is None or committed - min(self._prefix) < self._selector.stride:
            return []
        unread = self._unread(committed)
        due = self._selector.score(self._view, self.current, unread)
        return [drafter for drafter in reversed(due) if unread[drafter] and drafter not in self._failed]

    def catch_up_active(self, transcript: Sequence[int]) -> CatchUpJob | None:
        """Return a job for the active drafter while it rests, so that its hits stay known; None: too little is new."""
        if self.agreed > len(transcript) - REST_TOKENS or self.current in self._failed:
            return None
        return self._catch_up_of(self.current, transcript)

    def _catch_up_of(self, drafter: int, transcript: Sequence[int]) -> CatchUpJob:
        start, first = self._prefix[drafter], self._first
        end = min(len(transcript), start + READ_TOKENS)
        # Scoring and teacher forcing compute, and need a token before; skipping alone would leave all work for later.
        if start < first:
            scored = first - PROMPT_TOKENS
            if self._view is None:
                end = max(end, min(start + READ_PROMPT_TOKENS, scored))
            skip = max(1, min(scored, end - 1), start) - start
            score = max(0, min(end, first) - start - skip)
        else:
            skip, score = max(0, min(end - 1, first + self._num_decided[drafter]) - start), 0
        self._prefix[drafter] = end
        return CatchUpJob(drafter, start, tuple(transcript[start:end]), skip, score)

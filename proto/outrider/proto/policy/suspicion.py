"""Silent streams: when to ask a verifier for a sign of life, when its silence is suspect, and what that may cost.

Suspicion is phi-accrual (Hayashibara, Defago, Yared, Katayama 2004): with an answer due for t seconds, phi is minus the
decimal logarithm of the chance that an honest answer takes longer than t. It grows with t alone, and a bound on phi is
a bound on false alarms under the distribution, which follows what is measured.

Silence counts only while an answer is due: from the sending of the Open until the first frame, and from that of a Ping,
which goes where no frame has come for a while. So a verifier that has nothing to say (a long prompt, patience, an edge
without credit) is never suspect while it answers, and a kept session that nobody uses is not watched. Time in which
the watcher itself stood still does not count either.

A shell calls `look` at `next_look`, or some time later, and `hear` for every frame.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass

from outrider.proto.types import CloudFrame, Ping, Pong

KEPT = 32  # newest answers that the distribution rests on
_LEAST_SCALE_S = 0.01
_LEAST_SHARE = 1 / 8  # of the mean, for the scale
_ASSUMED = 2  # answers beside those that are kept
_HARMONIC = tuple(itertools.accumulate(1 / n for n in range(1, KEPT + _ASSUMED + 1)))
LOOK_S = 0.1  # while an answer is due
_FIRST_WAIT_S, _MAX_WAIT_S = 1.0, 8.0  # until a suspicion that came to nothing is raised again


@dataclass(frozen=True, slots=True)
class SilenceRules:
    """Rules by which a stream is watched.

    Attributes:
        quiet_s: time without a frame after which an answer is asked for, in seconds.
        phi: suspicion at which a stream is silent; 8: one honest answer in 10^8 takes longer.
        min_s, opening_s, max_s: shortest bound, also of a stream that is being opened, and longest one, in seconds.
        late_s: lateness of a look at the stream, in seconds, above which the watcher itself stood still.
    """

    quiet_s: float = 0.5
    phi: float = 8.0
    min_s: float = 1.5
    opening_s: float = 4.0
    max_s: float = 20.0
    late_s: float = 0.25


class AnswerTimes:
    """Distribution of the seconds that answers take: a mean, and an exponential excess over it.

    Its scale is so large that the worst of the kept answers is no rarer than the worst of as many exponential ones
    (their mean maximum is the scale times the harmonic number): one that came late raises the bound at once.
    """

    def __init__(self) -> None:
        self._answers: deque[float] = deque(maxlen=KEPT)

    def add(self, seconds: float) -> None:
        self._answers.append(seconds)

    def bound_s(self, phi: float, usual_s: float) -> float:
        """Return the seconds of silence at which suspicion is `phi`; messages usually take `usual_s`, 0: unknown."""
        mean, scale = self._fit(usual_s)
        return mean + scale * math.log(10) * phi

    def _fit(self, usual_s: float) -> tuple[float, float]:
        """Return mean and scale of the kept answers and two assumed ones, as long as usual and twice as long."""
        answers = (*self._answers, usual_s, 2 * usual_s)
        mean = sum(answers) / len(answers)
        excess_s = (max(answers) - mean) / _HARMONIC[len(answers) - 1]
        return mean, max(excess_s, _LEAST_SHARE * mean, _LEAST_SCALE_S)


@dataclass(frozen=True, slots=True)
class Silent:
    """The stream is suspect after `silence_s` seconds without an answer, `bound_s` of them expected.

    `again`: the same silence was suspect before.
    """

    silence_s: float
    bound_s: float
    again: bool = False


class SilenceWatch:
    """Watch over one stream from the sending of its Open at `now`; times are seconds on one clock."""

    def __init__(self, times: AnswerTimes, rules: SilenceRules, now: float) -> None:
        self._times = times
        self._rules = rules
        self._opening = True
        self._heard_at = now
        self._due_since: float | None = now
        self._number = 0
        self._asked_at: float | None = None  # sending of the newest Ping, until it is answered
        self._wait_s = 0.0
        self._suspect_from = now
        self.next_look = now + LOOK_S

    @property
    def silent(self) -> bool:
        return self._due_since is not None

    def hear(self, frame: CloudFrame, now: float) -> None:
        """Note a frame of the stream: there is no silence."""
        if isinstance(frame, Pong) and frame.number == self._number and self._asked_at is not None:
            self._times.add(now - self._asked_at)
            self._asked_at = None
        self._opening = False
        self._heard_at = now
        self._due_since = None
        self._wait_s = 0.0

    def resume(self, now: float) -> None:
        """Begin once more with a stream that has been idle, and was not watched."""
        self._heard_at, self._due_since, self._asked_at = now, None, None
        self.next_look = now + self._rules.quiet_s

    def postpone(self, now: float) -> None:
        """Leave the silence alone for a while, longer each time: there is nowhere to go."""
        self._wait_s = min(max(_FIRST_WAIT_S, 2 * self._wait_s), _MAX_WAIT_S)
        self._suspect_from = now + self._wait_s
        self.next_look = now + LOOK_S

    def look(self, now: float, usual_s: float) -> Ping | Silent | None:
        """Return the Ping to send now, or that the stream is silent; `usual_s`: usual round trip, 0: unknown."""
        late_s = now - self.next_look
        if late_s > self._rules.late_s and self._due_since is not None:
            self._due_since += late_s  # this side stood still, perhaps with the answer unread
            self._asked_at = None
        if self._due_since is None:
            return self._ask(now)
        self.next_look = now + LOOK_S
        silence_s, bound_s = now - self._due_since, self.bound_s(usual_s)
        if silence_s < bound_s or now < self._suspect_from:
            return None
        return Silent(silence_s, bound_s, again=self._wait_s > 0)

    def bound_s(self, usual_s: float) -> float:
        """Return the seconds after which an answer that is due is suspect."""
        rules = self._rules
        least_s = rules.opening_s if self._opening else rules.min_s
        trips = 4 if self._opening else 1  # TCP, TLS and HTTP/2 shake hands first
        return min(rules.max_s, max(least_s, trips * self._times.bound_s(rules.phi, usual_s)))

    def _ask(self, now: float) -> Ping | None:
        """Return a Ping where the stream is quiet."""
        if now < self._heard_at + self._rules.quiet_s:
            self.next_look = self._heard_at + self._rules.quiet_s
            return None
        self._number += 1
        self._asked_at = self._due_since = now
        self._suspect_from = now
        self.next_look = now + LOOK_S
        return Ping(self._number)


class ReopenBudget:
    """Limit of how often one edge leaves verifiers for their silence.

    All streams to a verifier that stood when the first of them was left, and are left within `together_s`, are one
    event, as where it has stopped. There are `events` of them at first, and another one each `refill_s`: where every
    verifier is slow, each text of an edge is begun again so often at most, and stays where it is otherwise.
    """

    def __init__(
        self,
        rules: SilenceRules = SilenceRules(),
        *,
        events: float = 3.0,
        refill_s: float = 60.0,
        together_s: float = 10.0,
    ) -> None:
        self.rules = rules
        self._most = self._left = events
        self._refill_s = refill_s
        self._together_s = together_s
        self._at = -math.inf
        self._left_at: dict[str, float] = {}  # of verifiers left lately

    def allows(self, verifier: str, opened_at: float, now: float) -> bool:
        """Return whether a stream of `verifier` that was opened at `opened_at` may be left at `now`, in seconds."""
        self._refill(now)
        return self._left >= 1.0 or self._belongs(verifier, opened_at)

    def take(self, verifier: str, opened_at: float, now: float) -> None:
        """Note that such a stream is left, as `allows` said that it may be."""
        self._refill(now)
        if not self._belongs(verifier, opened_at):
            self._left -= 1.0
            self._left_at[verifier] = now

    def _belongs(self, verifier: str, opened_at: float) -> bool:
        return opened_at <= self._left_at.get(verifier, -math.inf)

    def _refill(self, now: float) -> None:
        if now > self._at:
            self._left = min(self._most, self._left + (now - self._at) / self._refill_s)
            self._at = now
        self._left_at = {name: at for name, at in self._left_at.items() if now - at < self._together_s}

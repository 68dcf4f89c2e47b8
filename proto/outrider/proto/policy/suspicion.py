"""When silence becomes suspect: the law of the times that answers take, and a budget of what suspicion may cost.

Suspicion is phi-accrual (Hayashibara, Defago, Yared, Katayama 2004): with an answer due for t seconds, phi is minus the
decimal logarithm of the chance that an honest answer takes longer than t. It grows with t alone, and a bound on phi is
a bound on false alarms under the law, which follows what is measured.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from dataclasses import dataclass

KEPT = 32  # newest answers that the law rests on
_LEAST_SCALE_S = 0.01
_LEAST_SHARE = 1 / 8  # of the mean, for the scale
_ASSUMED = 2  # answers beside those that are kept
_HARMONIC = tuple(itertools.accumulate(1 / n for n in range(1, KEPT + _ASSUMED + 1)))


@dataclass(frozen=True, slots=True)
class SilenceRules:
    """Rules by which a stream is watched.

    Attributes:
        quiet_s: time without a frame after which an answer is asked for, in seconds.
        phi: suspicion at which a stream is silent; 8: one honest answer in 10^8 takes longer.
        min_s: shortest bound, in seconds, and of a stream that is being opened `opening_s`.
        max_s: longest bound, in seconds.
        late_s: lateness of a look at the stream, in seconds, above which the watcher itself stood still.
    """

    quiet_s: float = 0.5
    phi: float = 8.0
    min_s: float = 1.5
    opening_s: float = 4.0
    max_s: float = 20.0
    late_s: float = 0.25


class AnswerLaw:
    """Law of the seconds that answers take: a mean, and an exponential excess over it.

    Its scale is so large that the worst of the kept answers is no rarer than the worst of as many exponential ones
    (their mean maximum is the scale times the harmonic number): one that came late raises the bound at once.
    """

    def __init__(self) -> None:
        self._answers: deque[float] = deque(maxlen=KEPT)

    def add(self, seconds: float) -> None:
        """Count an answer."""
        self._answers.append(seconds)

    def phi(self, silence_s: float, usual_s: float) -> float:
        """Return the suspicion after `silence_s` seconds, where small messages usually take `usual_s` (0: unknown)."""
        mean, scale = self._fit(usual_s)
        return max(0.0, silence_s - mean) / (scale * math.log(10))

    def bound_s(self, phi: float, usual_s: float) -> float:
        """Return the seconds of silence at which the suspicion is `phi`."""
        mean, scale = self._fit(usual_s)
        return mean + scale * math.log(10) * phi

    def _fit(self, usual_s: float) -> tuple[float, float]:
        """Return mean and scale of the kept answers and two assumed ones, as long as usual and twice as long."""
        answers = (*self._answers, usual_s, 2 * usual_s)
        mean = sum(answers) / len(answers)
        excess_s = (max(answers) - mean) / _HARMONIC[len(answers) - 1]
        return mean, max(excess_s, _LEAST_SHARE * mean, _LEAST_SCALE_S)


class ReopenBudget:
    """Limit of how often one edge leaves verifiers for their silence.

    All streams to a verifier that stood when the first of them was left, and are left within `together_s`, are one
    event, as where it has stopped. There are `events` of them at first, and another one each `refill_s`: where every
    verifier is slow, each text of an edge is begun again so often at most, and stays where it is otherwise.

    Attributes:
        rules: rules by which the streams are watched.
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
        """Return whether the stream belongs to an event that has begun."""
        return opened_at <= self._left_at.get(verifier, -math.inf)

    def _refill(self, now: float) -> None:
        if now > self._at:
            self._left = min(self._most, self._left + (now - self._at) / self._refill_s)
            self._at = now
        self._left_at = {name: at for name, at in self._left_at.items() if now - at < self._together_s}

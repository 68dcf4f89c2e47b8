"""Window (edge) and patience (verifier): pure functions of what each side has measured. Neither can change a token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from outrider.proto.errors import InvalidArgument
from outrider.proto.types import Patience

ACCEPTANCE_PRIOR = 0.7
_SMOOTHING = 0.2


@dataclass(slots=True)
class Smoothed:
    """An exponentially weighted mean; the first value is taken whole."""

    value: float = 0.0
    seen: bool = False

    def add(self, value: float) -> None:
        """Take one more value in."""
        self.value += (value - self.value) * (_SMOOTHING if self.seen else 1.0)
        self.seen = True


@dataclass(slots=True)
class Acceptance:
    """The chance that a draft agrees with the target, given that all before it in its chain did.

    Counted until the first disagreement of a step: drafts behind it were never put to the question. Both counts
    decay, so that a change of subject is noticed within some 50 tokens.
    """

    hits: float = 2.0 * ACCEPTANCE_PRIOR
    trials: float = 2.0

    def add(self, accepted: int, judged: int) -> None:
        """One step judged `judged` drafts and accepted the first `accepted`."""
        questioned = min(accepted + 1, judged)
        decay = 0.98**questioned
        self.hits = self.hits * decay + accepted
        self.trials = self.trials * decay + questioned

    @property
    def rate(self) -> float:
        """Between 0.02 and 0.98, so that one lucky or unlucky run decides nothing for good."""
        return min(0.98, max(0.02, self.hits / self.trials))


@dataclass(frozen=True, slots=True)
class EdgeView:
    """What the edge knows when it asks how far ahead to draft. Seconds; 0: not measured yet."""

    acceptance: float
    drafting_s: float
    step_s: float
    round_trip_s: float


class WindowPolicy(Protocol):
    """How many unverified tokens to have in flight at most."""

    def limit(self, view: EdgeView) -> int:
        """The window in tokens."""
        ...


@dataclass(frozen=True, slots=True)
class FixedWindow:
    """Always the same number of tokens; 0 turns drafting off."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise InvalidArgument("must be 0 or more", field="window")

    def limit(self, view: EdgeView) -> int:  # noqa: ARG002 - the protocol's
        """The window in tokens."""
        return self.tokens


@dataclass(frozen=True, slots=True)
class SurvivalWindow:
    """Draft while the chance that the next token survives, times the target step it saves, exceeds its price.

    The n-th draft of a chain survives with a^n (a: acceptance); it saves a step of T seconds and costs the drafting
    time tau, so a^n T > tau bounds n. While a message travels for R seconds the verifier commits about R / T tokens
    of its own; drafts must lie beyond those to be of use, so that many are added.
    """

    most: int = 64

    def limit(self, view: EdgeView) -> int:
        """The window in tokens, at least 1."""
        if not view.step_s:
            return min(8, self.most)
        price = min(0.9, max(0.02, view.drafting_s / view.step_s))
        worthwhile = math.log(price) / math.log(view.acceptance)
        overtaken = view.round_trip_s / view.step_s
        return max(1, min(self.most, math.ceil(worthwhile + overtaken)))


@dataclass(slots=True)
class StepCost:
    """Seconds of a target step as base + slope * rows, by least squares over steps that fade with age.

    On a GPU the slope is near 0 up to hundreds of rows; on a CPU in float32 a few rows can cost as much as the base.
    """

    weight: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0
    rows_squared: float = 0.0
    rows_by_seconds: float = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """One step of `rows` rows took `seconds`."""
        fade = 1 - 1 / 64
        self.weight = self.weight * fade + 1
        self.rows = self.rows * fade + rows
        self.seconds = self.seconds * fade + seconds
        self.rows_squared = self.rows_squared * fade + rows * rows
        self.rows_by_seconds = self.rows_by_seconds * fade + rows * seconds

    @property
    def slope(self) -> float:
        """Seconds a row; 0 while all steps had the same number of rows."""
        spread = self.weight * self.rows_squared - self.rows**2
        if spread <= 1e-6 * self.weight**2:
            return 0.0
        return max(0.0, (self.weight * self.rows_by_seconds - self.rows * self.seconds) / spread)

    @property
    def base(self) -> float:
        """Seconds of a step beside its rows; 0 before the first step."""
        if not self.weight:
            return 0.0
        return max(0.1 * self.seconds, self.seconds - self.slope * self.rows) / self.weight


@dataclass(frozen=True, slots=True)
class VerifierView:
    """What the verifier knows of a session when it plans a step. Seconds; 0: not measured yet.

    `step_s` and `row_s` are the session's share of a step's base, and the cost of one row.
    """

    acceptance: float
    step_s: float
    row_s: float
    drafting_s: float
    round_trip_s: float
    most_drafts: int

    def rate(self, drafts: int, wait_s: float) -> float:
        """Tokens a second of steps with so many drafts, each after `wait_s`.

        A step commits (1 - a^(n+1)) / (1 - a) tokens on average (Leviathan et al. 2023, equation 1).
        """
        expected = (1 - self.acceptance ** (drafts + 1)) / (1 - self.acceptance)
        return expected / (wait_s + self.step_s + self.row_s * (drafts + 1))


def best_block(view: VerifierView) -> int:
    """How many of the drafts at hand to judge in one step, so that tokens come fastest.

    One is always judged: acceptance that is never put to the question could never be seen to have risen.
    """
    if not view.step_s:
        return view.most_drafts
    return max(range(1, view.most_drafts + 1), key=lambda drafts: view.rate(drafts, 0.0))


def balanced_patience(view: VerifierView) -> Patience:
    """Wait for as many drafts as make tokens come fastest, or not at all (run-ahead).

    The first draft comes a round trip after the last commit, each further one a drafting time later. The wait is
    bounded by twice the time in which the drafts should have come, so that a slow or silent edge costs little.
    """
    if not (view.step_s and view.drafting_s):
        return Patience(0.0)

    def wait_s(drafts: int) -> float:
        return view.round_trip_s + drafts * view.drafting_s if drafts else 0.0

    best = max(range(view.most_drafts + 1), key=lambda drafts: view.rate(drafts, wait_s(drafts)))
    return Patience(2 * wait_s(best), max(1, best))

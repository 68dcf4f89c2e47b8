"""Counts and means that fade with age, and the calibration of a drafter's signals by them."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

ACCEPTANCE_PRIOR = 0.7
BETTER = 0.1  # by which one drafter's acceptance must exceed another's: the same one at both ends must not seem better
_STANDARD_ERRORS = 2.0
_PRIOR_TRIALS, _BELIEVED_TRIALS = 2.0, 8.0
_SMOOTHING = 0.2
_FADE = 0.98  # at every trial, so that a change of subject is noticed within some 50 tokens


@dataclass(slots=True)
class Smoothed:
    """An exponentially weighted mean; the first value is taken whole."""

    value: float = 0.0
    seen: bool = False

    def add(self, value: float) -> None:
        """Count a value."""
        self.value += (value - self.value) * (_SMOOTHING if self.seen else 1.0)
        self.seen = True


@dataclass(slots=True)
class Acceptance:
    """The chance that a draft agrees with the target, given that all before it in its chain did.

    Every draft that is compared with a committed token counts, whether a step verified it or the target overtook it;
    drafts after the first miss are not compared.
    """

    hits: float = _PRIOR_TRIALS * ACCEPTANCE_PRIOR
    trials: float = _PRIOR_TRIALS

    def add(self, hit: bool) -> None:
        """Count one draft that was compared with the target's token."""
        self.hits = self.hits * _FADE + hit
        self.trials = self.trials * _FADE + 1

    def believe(self, rate: float) -> None:
        """Begin from another edge's rate, worth a few trials; ignore it after the first trial here."""
        if self.trials <= _PRIOR_TRIALS:
            self.restate(rate)

    def restate(self, rate: float) -> None:
        """Begin once more from a rate that another has measured since, worth a few trials."""
        self.hits, self.trials = rate * _BELIEVED_TRIALS, _BELIEVED_TRIALS

    @property
    def rate(self) -> float:
        """Share of hits, between 0.02 and 0.98 so that one lucky or unlucky run decides nothing for good."""
        rate = self.hits / self.trials
        return 0.98 if rate > 0.98 else 0.02 if rate < 0.02 else rate

    def surely_exceeds(self, other: Acceptance) -> bool:
        """Return whether this rate is higher by `BETTER`, and by two standard errors: sqrt(a (1 - a) / n) each."""
        variance = sum(each.rate * (1 - each.rate) / each.trials for each in (self, other))
        return self.rate - other.rate > max(BETTER, _STANDARD_ERRORS * math.sqrt(variance))


_BIN_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
_BINS = len(_BIN_EDGES) + 1
_PRIOR_WEIGHT = 3.0
_COMMON_WEIGHT = 5.0  # other texts' trials against a text's own; replayed: 1 % faster at T = 0, the same at T = 1
_OCTAVES = 10  # rows in a step: 1, 2 to 3, 4 to 7, … 512 and more
_DOUBT, _LEAST_WEIGHT = 0.1, 1e-3  # weights of steps: one counts half after 114 others, where it is above the curve


def _prior_bins() -> list[list[float]]:
    """Return hits and trials of each bin before the first draft.

    A target often agrees where the drafter hesitates, hence 0.35 + 0.64 sqrt(lead), which fits hit traces of the
    embedded family at temperature 0 to within 0.15. At temperature 1 it is up to 0.4 too high for small leads; three
    trials' weight is soon outvoted.
    """
    middles = [(low + high) / 2 for low, high in zip((0.0, *_BIN_EDGES), (*_BIN_EDGES, 1.0), strict=True)]
    return [[_PRIOR_WEIGHT * (0.35 + 0.64 * middle**0.5), _PRIOR_WEIGHT] for middle in middles]


@dataclass(slots=True)
class Calibration:
    """The share of hits among drafts of similar `DraftToken.lead`.

    Under shared noise it is the lead that tells hits from misses, not the probability of the token. On 2,296 drafts of
    the embedded family at temperature 1 the log loss of such shares is 0.576 nats by the lead, 0.646 by the probability
    and 0.687 by neither; at temperature 0 both signals are one, 0.451 against 0.539.
    """

    acceptance: Acceptance = field(default_factory=Acceptance)
    bins: list[list[float]] = field(default_factory=_prior_bins)

    def add(self, lead: float, hit: bool) -> None:
        """Count a draft of this lead (NaN: unknown) that was compared with the target's token."""
        self.acceptance.add(hit)
        if lead == lead:  # not NaN
            _count(self.bins[_bin(lead)], hit)

    def chance(self, lead: float) -> float:
        """Return the chance that a draft of this lead agrees, given that all before it in its chain do.

        NaN: the average chance.
        """
        return self.acceptance.rate if math.isnan(lead) else self.chance_of(_bin(lead))

    def chance_of(self, bin_: int) -> float:
        """Return the chance of drafts whose lead is in one bin."""
        hits, trials = self.bins[bin_]
        return min(0.995, max(0.02, hits / trials))


@dataclass(slots=True)
class TextCalibration:
    """The calibration of one text, which begins at that of all texts and soon weighs its own drafts more.

    A drafter's doubt means different things by subject: in sums it is right where it hesitates, in prose it is not.

    Attributes:
        common: calibration over all texts, which learns from this one's drafts too.
        bins: hits and trials of this text's drafts, by lead.
    """

    common: Calibration
    bins: list[list[float]] = field(default_factory=lambda: [[0.0, 0.0] for _ in range(_BINS)])
    _known: list[tuple[float, float, float] | None] = field(default_factory=lambda: [None] * _BINS)
    """The common hits and trials of each bin and the chance by them; None: this text has added to the bin since."""

    def add(self, lead: float, hit: bool) -> None:
        """Count a draft here and in the common calibration."""
        self.common.acceptance.add(hit)
        if lead == lead:  # not NaN
            changed = _bin(lead)
            _count(self.common.bins[changed], hit)
            _count(self.bins[changed], hit)
            self._known[changed] = None

    def chance(self, lead: float) -> float:
        """Return the chance that a draft agrees; the common one weighs `_COMMON_WEIGHT` trials."""
        return self.chances((lead,))[0]

    def chances(self, leads: Iterable[float]) -> list[float]:
        """Return the chance of each draft of these leads [n]."""
        chances, of_bin, common = [], self._known, self.common.bins
        for sure in leads:
            if sure != sure:  # NaN
                chances.append(self.common.acceptance.rate)
                continue
            bin_ = bisect.bisect_right(_BIN_EDGES, sure)
            known, (hits, trials) = of_bin[bin_], common[bin_]
            if known is None or known[0] != hits or known[1] != trials:
                known = of_bin[bin_] = (hits, trials, self._chance_of(bin_))
            chances.append(known[2])
        return chances

    def _chance_of(self, bin_: int) -> float:
        hits, trials = self.bins[bin_]
        chance = (hits + _COMMON_WEIGHT * self.common.chance_of(bin_)) / (trials + _COMMON_WEIGHT)
        return min(0.995, max(0.02, chance))


def _count(counts: list[float], hit: bool) -> None:
    counts[0] = counts[0] * _FADE + hit
    counts[1] = counts[1] * _FADE + 1


def _bin(confidence: float) -> int:
    return bisect.bisect_right(_BIN_EDGES, confidence)


@dataclass(slots=True)
class Line:
    """A line base + slope * x, fitted by least squares to points that fade with age.

    It holds seconds of a round trip against bytes sent, or seconds of a session's steps against rows.
    """

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    fade: float = 1 - 1 / 64
    _fit: tuple[float, float] | None = field(default=None, repr=False, compare=False)

    def add(self, x: float, y: float) -> None:
        """Count a point."""
        self._fit = None
        self.weight = self.weight * self.fade + 1
        self.x = self.x * self.fade + x
        self.y = self.y * self.fade + y
        self.xx = self.xx * self.fade + x * x
        self.xy = self.xy * self.fade + x * y

    def fit(self) -> tuple[float, float]:
        """Return base and slope."""
        if self._fit is None:
            weight, x, y, slope = self.weight, self.x, self.y, 0.0
            spread = weight * self.xx - x**2
            if spread > 1e-6 * weight**2:
                slope = max(0.0, (weight * self.xy - x * y) / spread)
            self._fit = (max(0.1 * y, y - slope * x) / weight if weight else 0.0), slope
        return self._fit

    @property
    def slope(self) -> float:
        """Increase of y for each x, 0 or more; 0 while all points had the same x."""
        return self.fit()[1]

    @property
    def mean(self) -> float:
        """Mean of y, weighted to recent points; 0 before the first."""
        return self.y / self.weight if self.weight else 0.0

    @property
    def base(self) -> float:
        """Value at x = 0, never below a tenth of the mean; 0 before the first point."""
        return self.fit()[0]


@dataclass(slots=True)
class StepCost:
    """Seconds of a target step against its rows: a smoothed mean for each octave of rows, straight lines between.

    On a GPU the curve is flat up to hundreds of rows and then rises; on a CPU in float32 a few rows can cost as much
    as the first. One straight line through both would mislead where many sessions share a step.

    The curve never falls: where a larger step was faster, both get their weighted mean (the pool of adjacent violators,
    Barlow et al. 1972), and weights fade, so that one slow step of a seldom number of rows does not make rows dear.
    What lies above the curve so far counts the less, the longer it was not met, and is met again some day.
    """

    # Rows, seconds and weight by octave.

    rows: list[Smoothed] = field(default_factory=lambda: [Smoothed() for _ in range(_OCTAVES)])
    seconds_of: list[Smoothed] = field(default_factory=lambda: [Smoothed() for _ in range(_OCTAVES)])
    weights: list[float] = field(default_factory=lambda: [0.0] * _OCTAVES)

    def add(self, rows: int, seconds: float) -> None:
        """Count a step of `rows` rows that took `seconds`."""
        octave = min(_OCTAVES - 1, rows.bit_length() - 1)
        measured = self.seconds_of[octave]
        before = measured.value
        self.rows[octave].add(rows)
        measured.add(seconds)
        self.weights = [weight * _FADE for weight in self.weights]
        self.weights[octave] += 1
        # A machine gets faster or slower for all octaves: one that is not met any more must not keep the price of a bad
        # moment, which would keep it from ever being met again.
        if before > 0:
            for other in self.seconds_of:
                if other is not measured:
                    other.value *= measured.value / before

    def seconds(self, rows: float) -> float:
        """Return the duration of a step of `rows` rows, in seconds; 0 before the first step.

        It never falls with rows, and the last slope goes on beyond the largest step.
        """
        return _along(self._curve(), rows)

    def _curve(self) -> list[tuple[float, float]]:
        """Return rows and seconds of the octaves that were met, of which neither falls."""
        pools: list[tuple[float, float, list[float]]] = []  # seconds, weight, and rows of its octaves
        for x, y, weight in zip(self.rows, self.seconds_of, self.weights, strict=True):
            if not x.seen:
                continue
            seconds, weight, octaves = y.value, max(weight, _LEAST_WEIGHT), [x.value]
            if pools and seconds > (below := pools[-1][0]):
                seconds = below + (seconds - below) * weight / (weight + _DOUBT)
            while pools and pools[-1][0] > seconds:
                below, its_weight, its_octaves = pools.pop()
                seconds = (below * its_weight + seconds * weight) / (its_weight + weight)
                weight, octaves = weight + its_weight, its_octaves + octaves
            pools.append((seconds, weight, octaves))
        return [(x, seconds) for seconds, _, octaves in pools for x in octaves]

    def line(self, sessions: int) -> tuple[float, float]:
        """Return base and seconds a row of every session, of the line through steps of one and of five such rows.

        All sessions wait for the rows of each, so that one that weighs its own rows weighs those of `sessions`.
        """
        curve = self._curve()
        few, many = _along(curve, sessions), _along(curve, 5 * sessions)
        row_s = (many - few) / 4
        return max(0.1 * few, few - row_s), row_s


def _along(points: Sequence[tuple[float, float]], rows: float) -> float:
    """Return the seconds of `rows` rows on straight lines between points (rows, seconds); 0 where there are none."""
    if not points:
        return 0.0
    best = points[0][1]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        if rows <= x0:
            break
        best = y1
        if rows <= x1 or (x1, y1) == points[-1]:
            best = y0 + (y1 - y0) * (rows - x0) / max(1e-9, x1 - x0)
            break
    return best

"""Measurements of an edge (its link, its verifier and its drafters), and the counts and means that they are made of.

All fade with age, and a drafter's signals are calibrated by them.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from outrider.proto.policy.likely_branches import OtherShares
from outrider.proto.types import Commit

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
        self.value += (value - self.value) * (_SMOOTHING if self.seen else 1.0)
        self.seen = True


@dataclass(slots=True)
class Acceptance:
    """The chance that a draft agrees with the target, given that all before it in its chain did.

    Every draft up to the first miss counts, whether a step verified it or the target overtook it.
    """

    hits: float = _PRIOR_TRIALS * ACCEPTANCE_PRIOR
    trials: float = _PRIOR_TRIALS

    def add(self, hit: bool) -> None:
        self.hits = self.hits * _FADE + hit
        self.trials = self.trials * _FADE + 1

    def expect(self, rate: float) -> None:
        """Begin from the rate of other texts, worth no more than the prior; ignore it after the first trial here."""
        if self.trials <= _PRIOR_TRIALS:
            self.hits = rate * self.trials

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


def _prior_bins() -> list[list[float]]:
    """Return hits and trials of each bin before the first draft.

    A target often agrees where the drafter hesitates, hence 0.35 + 0.64 sqrt(score), which fits hit traces of the
    embedded family at temperature 0 to within 0.15. At temperature 1 it is up to 0.4 too high for small scores; three
    trials' weight is soon outvoted.
    """
    middles = [(low + high) / 2 for low, high in zip((0.0, *_BIN_EDGES), (*_BIN_EDGES, 1.0), strict=True)]
    return [[_PRIOR_WEIGHT * (0.35 + 0.64 * middle**0.5), _PRIOR_WEIGHT] for middle in middles]


@dataclass(slots=True)
class Calibration:
    """The share of hits among drafts of similar `DraftToken.score`.

    Under shared noise the score tells hits from misses, not the probability of the token. On 2,296 drafts of the
    embedded family at temperature 1 the log loss of such shares is 0.576 nats by the score, 0.646 by the probability
    and 0.687 by neither; at temperature 0 both signals are one, 0.451 against 0.539.
    """

    acceptance: Acceptance = field(default_factory=Acceptance)
    bins: list[list[float]] = field(default_factory=_prior_bins)

    def add(self, score: float, hit: bool) -> None:
        """Count a draft that was compared with the target's token, by its score (NaN: unknown)."""
        self.acceptance.add(hit)
        if score == score:  # not NaN
            _count(self.bins[_bin(score)], hit)

    def chance(self, score: float) -> float:
        """Return the chance that a draft of this score (NaN: unknown) agrees, given that all before it do."""
        return self.acceptance.rate if math.isnan(score) else self.chance_of(_bin(score))

    def chance_of(self, bin_: int) -> float:
        hits, trials = self.bins[bin_]
        return min(0.995, max(0.02, hits / trials))


@dataclass(slots=True)
class TextCalibration:
    """The calibration of one text, which begins at the `common` one of all texts and soon weighs its own drafts more.

    A drafter's doubt means different things by subject: in sums it is right where it hesitates, in prose it is not.
    """

    common: Calibration
    bins: list[list[float]] = field(default_factory=lambda: [[0.0, 0.0] for _ in range(_BINS)])
    _known: list[tuple[float, float, float] | None] = field(default_factory=lambda: [None] * _BINS)
    """The common hits and trials of each bin and the chance by them; None: this text has added to the bin since."""

    def add(self, score: float, hit: bool) -> None:
        self.common.acceptance.add(hit)
        if score == score:  # not NaN
            changed = _bin(score)
            _count(self.common.bins[changed], hit)
            _count(self.bins[changed], hit)
            self._known[changed] = None

    def chance(self, score: float) -> float:
        """Return the chance that a draft agrees; the common one weighs `_COMMON_WEIGHT` trials."""
        return self.chances((score,))[0]

    def chances(self, scores: Iterable[float]) -> list[float]:
        """Return the chance of each draft of these scores [n]."""
        chances, of_bin, common = [], self._known, self.common.bins
        for score in scores:
            if score != score:  # NaN
                chances.append(self.common.acceptance.rate)
                continue
            bin_ = bisect.bisect_right(_BIN_EDGES, score)
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
        self._fit = None
        self.weight = self.weight * self.fade + 1
        self.x = self.x * self.fade + x
        self.y = self.y * self.fade + y
        self.xx = self.xx * self.fade + x * x
        self.xy = self.xy * self.fade + x * y

    def fit(self) -> tuple[float, float]:
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


# --- measurements of an edge ---

DRAFT_BYTES = 30  # a Draft message beside its tokens, framing included, for the link's rate
VECTOR_BYTES = 12  # a steering vector in a commit, beside its numbers
_TOKEN_BYTES, _NUMBER_BYTES, _RANK_BYTES = 2, 4, 1  # in a commit
_PACE_FADE = 0.95  # at every commit
_USUAL_S = 0.005  # a round trip may always differ from the usual by this
_MANY_COMMITS, _FEW_COMMITS = 1 - 1 / 32, 1 - 1 / 8  # fade of the downlink's price at every commit
_CONTRADICTION = 1.5  # standard errors between the two estimates
_QUEUE_FADE = 1 - 1 / 64
_FEW_POINTS = 4
_UNUSUAL = 6.0  # times the usual scatter of round trips
_MIN_SCATTER_S = 0.0005


@dataclass(slots=True)
class Pace:
    """Means over the newest commits, from faded sums of the times between them, their tokens and their number."""

    seconds: float = 0.0
    tokens: float = 0.0
    commits: float = 0.0

    def add(self, seconds: float, tokens: int) -> None:
        """Count a commit of `tokens` tokens that came `seconds` after the one before it."""
        self.seconds = self.seconds * _PACE_FADE + seconds
        self.tokens = self.tokens * _PACE_FADE + tokens
        self.commits = self.commits * _PACE_FADE + 1

    @property
    def token_s(self) -> float:
        return self.seconds / self.tokens if self.tokens else 0.0

    @property
    def commit_s(self) -> float:
        return self.seconds / self.commits if self.commits else 0.0

    @property
    def commit_tokens(self) -> float:
        return self.tokens / self.commits if self.commits else 0.0


@dataclass(slots=True)
class ByteTime:
    """The time of a byte, in seconds, from round trips that end with messages of different sizes.

    The fit is least squares through the origin over points that fade with age; each point is the difference of a
    message's bytes and round trip from those of the message before it. A drift or jump of the round trip thus counts
    for nothing, and a moment's jam for little, because differences far beyond the usual are clipped.

    Attributes:
        weight: faded number of points.
        xx, xy: faded sums of squared differences in bytes, and of these times the differences in seconds.
        errors: faded sum of squared errors, in square seconds.
        queued_s: recent growth of round trips, summed over messages, in seconds.
    """

    fade: float
    weight: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    errors: float = 0.0
    queued_s: float = 0.0

    def add(self, size: float, seconds: float) -> None:
        """Count a message of `size` more bytes than the one before it, whose round trip took `seconds` longer."""
        expected = self.xy / self.xx * size if self.xx else 0.0
        error = seconds - expected
        if self.weight >= _FEW_POINTS:
            usual = _UNUSUAL * self._scatter_s
            error = min(usual, max(-usual, error))
        self.weight = self.weight * self.fade + 1
        self.xx = self.xx * self.fade + size * size
        self.xy = self.xy * self.fade + size * (expected + error)
        self.errors = self.errors * self.fade + error * error
        self.queued_s = max(0.0, self.queued_s * _QUEUE_FADE + error)

    @property
    def _scatter_s(self) -> float:
        return math.sqrt(self.errors / self.weight + _MIN_SCATTER_S**2)

    @property
    def byte_s(self) -> float:
        """Time of a byte, in seconds, 0 or more; 0 while all messages had the same size."""
        return max(0.0, self.xy / self.xx) if self.xx else 0.0

    @property
    def doubt_s(self) -> float:
        """Standard error of `byte_s`, in seconds; infinite while there are too few points.

        Neighbouring differences share a round trip, which makes the variance half as large again.
        """
        if self.weight < _FEW_POINTS or not self.xx:
            return math.inf
        return self._scatter_s * math.sqrt(1.5 / self.xx)


@dataclass(slots=True)
class Downlink:
    """The time of a commit's bytes on their way down: `best` of many commits, unless the `few` newest contradict."""

    best: ByteTime = field(default_factory=lambda: ByteTime(_MANY_COMMITS))
    few: ByteTime = field(default_factory=lambda: ByteTime(_FEW_COMMITS))

    def add(self, size: float, seconds: float) -> None:
        """Count a commit of `size` more bytes than the one before it, whose way down took `seconds` longer."""
        best, few = self.best, self.few
        for measured in (best, few):
            measured.add(size, seconds)
        if abs(few.byte_s - best.byte_s) > _CONTRADICTION * math.hypot(few.doubt_s, best.doubt_s):
            self.best = replace(few, fade=_MANY_COMMITS)


def _new_round_trip() -> Line:
    return Line(fade=1 - 1 / 16)


@dataclass(slots=True)
class DrafterMeasurements:
    """Measurements of one drafter.

    Attributes:
        calibration: share of hits by the score of its drafts.
        drafting_s, reading_s: time to draft one token, and to read one in a pass with several, in seconds.
        beside: share of the misses of other drafters' chains at which it had the token.
    """

    calibration: Calibration = field(default_factory=Calibration)
    drafting_s: Smoothed = field(default_factory=Smoothed)
    reading_s: Smoothed = field(default_factory=Smoothed)
    beside: OtherShares = field(default_factory=OtherShares)

    def copy(self) -> DrafterMeasurements:
        bins = [list(counts) for counts in self.calibration.bins]
        calibration = Calibration(replace(self.calibration.acceptance), bins)
        beside = OtherShares(list(self.beside.hits), list(self.beside.misses))
        return DrafterMeasurements(calibration, replace(self.drafting_s), replace(self.reading_s), beside)


@dataclass(slots=True)
class Measurements:
    """Measurements of an edge; a new text begins where the last ended.

    Attributes:
        round_trip: round-trip time in seconds against bytes of Draft messages, or of an Open before the first.
        timed: whether a Draft message has been timed; an Open's time may include a connection's handshake.
        outliers: consecutive newest times that are below half or above twice the expected one.
        step: duration of the verifier's steps in seconds against their rows.
        downlink: time of a commit's bytes; measured for steered drafters alone, as is `lookahead`.
        lookahead: positions from the newest that the verifier has processed to the one that a drafting job follows.
    """

    drafters: dict[str, DrafterMeasurements] = field(default_factory=dict)
    round_trip: Line = field(default_factory=_new_round_trip)
    timed: bool = False
    outliers: int = 0
    step: Line = field(default_factory=Line)
    pace: Pace = field(default_factory=Pace)
    downlink: Downlink = field(default_factory=Downlink)
    lookahead: Smoothed = field(default_factory=Smoothed)

    @property
    def round_trip_s(self) -> float:
        """Smoothed round-trip time of a small message, in seconds, without the verifier's work."""
        trip_s, byte_s = self.round_trip.fit()
        return trip_s + byte_s * DRAFT_BYTES

    def of(self, drafter: str) -> DrafterMeasurements:
        if drafter not in self.drafters:
            self.drafters[drafter] = DrafterMeasurements()
        return self.drafters[drafter]

    def copy(self) -> Measurements:
        return replace(
            self,
            drafters={name: drafter.copy() for name, drafter in self.drafters.items()},
            round_trip=replace(self.round_trip),
            step=replace(self.step),
            pace=replace(self.pace),
            downlink=Downlink(replace(self.downlink.best), replace(self.downlink.few)),
            lookahead=replace(self.lookahead),
        )

    def time_open(self, seconds: float) -> None:
        """Count an Open that was answered after `seconds`, which matters until a Draft message is timed."""
        if not self.timed:
            self.round_trip = _new_round_trip()
            self.round_trip.add(0, seconds)

    def time_draft(self, size: int, seconds: float) -> None:
        """Count a Draft message of `size` bytes that was answered after `seconds`, without the verifier's time."""
        line = self.round_trip
        expected = line.base + line.slope * size
        outlying = self.timed and not 0.5 * expected - _USUAL_S < seconds < 2 * expected + _USUAL_S
        self.outliers = self.outliers + 1 if outlying else 0
        if self.outliers == 1:
            return  # a moment's jam, perhaps
        if not self.timed or outlying:
            # It is another link, whose times beside the old one's, at other sizes, would look like a price on bytes.
            self.round_trip, self.timed, self.outliers = _new_round_trip(), True, 0
        self.round_trip.add(size, max(0.0, seconds))


def commit_bytes(commit: Commit) -> int:
    """Return the approximate bytes of a commit on the wire beyond those of an empty one."""
    size = 0
    for token in commit.tokens:
        size += _TOKEN_BYTES + (_NUMBER_BYTES if token.logp is not None else 0)
        if token.facts is not None:
            size += _NUMBER_BYTES + _RANK_BYTES + (_TOKEN_BYTES + _NUMBER_BYTES) * len(token.top)
    return size + (len(commit.steering.values) + VECTOR_BYTES if commit.steering is not None else 0)

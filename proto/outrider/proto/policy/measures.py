"""What the policies count and smooth on the way."""

from __future__ import annotations

import bisect
import itertools
import math
from dataclasses import dataclass, field, replace

ACCEPTANCE_PRIOR = 0.7
_PRIOR_TRIALS, _TOLD_TRIALS = 2.0, 8.0
_SMOOTHING = 0.2
_FADE = 0.98  # of a count at every trial: a change of subject is noticed within some 50 tokens


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

    Every draft that meets a committed token counts, whether a step judged it or the target overtook it; drafts behind
    the first that missed were never put to the question.
    """

    hits: float = _PRIOR_TRIALS * ACCEPTANCE_PRIOR
    trials: float = _PRIOR_TRIALS

    def add(self, hit: bool) -> None:
        """One draft met the target's token."""
        self.hits = self.hits * _FADE + hit
        self.trials = self.trials * _FADE + 1

    def believe(self, rate: float) -> None:
        """Begin from what another has seen; it counts as a few trials, and for nothing once there are own ones."""
        if self.trials <= _PRIOR_TRIALS:
            self.hits, self.trials = rate * _TOLD_TRIALS, _TOLD_TRIALS

    @property
    def rate(self) -> float:
        """Between 0.02 and 0.98, so that one lucky or unlucky run decides nothing for good."""
        return min(0.98, max(0.02, self.hits / self.trials))


_BIN_EDGES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
_PRIOR_WEIGHT = 3.0
_COMMON_WEIGHT = (
    5.0  # of the other texts' trials against a text's own; replayed: 1 % faster at T = 0, the same at T = 1
)
_PACE_FADE = 0.95  # at every commit
_USUAL_S = 0.005  # by which a round trip may always differ from the usual
_MANY_COMMITS, _FEW_COMMITS = 1 - 1 / 32, 1 - 1 / 8  # fade of the downlink's price at every commit
_CONTRADICTION = 1.5  # standard errors between the two
_QUEUE_FADE = 1 - 1 / 64
_FEW_POINTS = 4
_UNUSUAL = 6.0  # times the usual scatter of round trips
_LEAST_SCATTER_S = 0.0005
_OCTAVES = 10  # of rows in a step: 1, 2 to 3, 4 to 7, … 512 and more


def _prior_bins() -> list[list[float]]:
    """Hits and trials of each bin before any was seen.

    A target often agrees where the drafter hesitates, so 0.35 + 0.64 sqrt(q): what hit traces of the embedded family
    show at temperatures 0 and 1 to within 0.1, and three trials' weight, soon outvoted.
    """
    middles = [(low + high) / 2 for low, high in zip((0.0, *_BIN_EDGES), (*_BIN_EDGES, 1.0), strict=True)]
    return [[_PRIOR_WEIGHT * (0.35 + 0.64 * middle**0.5), _PRIOR_WEIGHT] for middle in middles]


@dataclass(slots=True)
class Calibration:
    """What a drafter's confidence in a token has been worth: the share of hits among drafts of like confidence."""

    acceptance: Acceptance = field(default_factory=Acceptance)
    bins: list[list[float]] = field(default_factory=_prior_bins)

    def add(self, confidence: float, hit: bool) -> None:
        """A draft of this confidence (NaN: not known) met the target's token."""
        self.acceptance.add(hit)
        _count(self.bins, confidence, hit)

    def chance(self, confidence: float) -> float:
        """That a draft of this confidence agrees, given that all before it in its chain do; NaN: on average."""
        if math.isnan(confidence):
            return self.acceptance.rate
        hits, trials = self.bins[_bin(confidence)]
        return min(0.995, max(0.02, hits / trials))


@dataclass(slots=True)
class TextCalibration:
    """The same for one text: it begins at what all texts have shown, and its own drafts soon count for more.

    What a drafter's doubt means depends on the subject: in sums it is right where it hesitates, in prose it is not.
    """

    common: Calibration
    bins: list[list[float]] = field(default_factory=lambda: [[0.0, 0.0] for _ in range(len(_BIN_EDGES) + 1)])

    def add(self, confidence: float, hit: bool) -> None:
        """As of `Calibration`; the other texts learn of it too."""
        self.common.add(confidence, hit)
        _count(self.bins, confidence, hit)

    def chance(self, confidence: float) -> float:
        """As of `Calibration`, the common chance weighing as `_COMMON_WEIGHT` trials."""
        chance = self.common.chance(confidence)
        if math.isnan(confidence):
            return chance
        hits, trials = self.bins[_bin(confidence)]
        return min(0.995, max(0.02, (hits + _COMMON_WEIGHT * chance) / (trials + _COMMON_WEIGHT)))


def _count(bins: list[list[float]], confidence: float, hit: bool) -> None:
    if not math.isnan(confidence):
        counts = bins[_bin(confidence)]
        counts[0] = counts[0] * _FADE + hit
        counts[1] = counts[1] * _FADE + 1


def _bin(confidence: float) -> int:
    return bisect.bisect_right(_BIN_EDGES, confidence)


@dataclass(slots=True)
class Line:
    """base + slope * x, by least squares over points that fade with age.

    Of a link: seconds of a round trip against bytes sent. Of one session's steps: seconds against rows.
    """

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    fade: float = 1 - 1 / 64

    def add(self, x: float, y: float) -> None:
        """One more point."""
        self.weight = self.weight * self.fade + 1
        self.x = self.x * self.fade + x
        self.y = self.y * self.fade + y
        self.xx = self.xx * self.fade + x * x
        self.xy = self.xy * self.fade + x * y

    @property
    def slope(self) -> float:
        """At least 0; 0 while all points had the same x."""
        spread = self.weight * self.xx - self.x**2
        if spread <= 1e-6 * self.weight**2:
            return 0.0
        return max(0.0, (self.weight * self.xy - self.x * self.y) / spread)

    @property
    def mean(self) -> float:
        """Of y, recent points counting most; 0 before the first."""
        return self.y / self.weight if self.weight else 0.0

    @property
    def base(self) -> float:
        """Beside the slope; 0 before the first point, else never below a tenth of the mean."""
        if not self.weight:
            return 0.0
        return max(0.1 * self.y, self.y - self.slope * self.x) / self.weight


@dataclass(slots=True)
class StepCost:
    """Seconds of a target step against its rows: a smoothed mean for each octave of rows, straight lines between.

    On a GPU the curve is flat up to hundreds of rows and then rises; on a CPU in float32 a few rows can cost as much
    as the first. One straight line through both would mislead where many sessions share a step.
    """

    rows: list[Smoothed] = field(default_factory=lambda: [Smoothed() for _ in range(_OCTAVES)])
    seconds_of: list[Smoothed] = field(default_factory=lambda: [Smoothed() for _ in range(_OCTAVES)])

    def add(self, rows: int, seconds: float) -> None:
        """One step of `rows` rows took `seconds`."""
        octave = min(_OCTAVES - 1, rows.bit_length() - 1)
        measured = self.seconds_of[octave]
        before = measured.value
        self.rows[octave].add(rows)
        measured.add(seconds)
        # A machine that gets faster or slower does so for all: an octave that is not met any more must not keep the
        # price of a bad moment, which would keep it from ever being met again.
        if before > 0:
            for other in self.seconds_of:
                if other is not measured:
                    other.value *= measured.value / before

    def seconds(self, rows: float) -> float:
        """Of a step of so many rows; 0 before the first step. Never falls with rows; the last slope goes on."""
        points = [(x.value, y.value) for x, y in zip(self.rows, self.seconds_of, strict=True) if x.seen]
        if not points:
            return 0.0
        best = points[0][1]
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            if rows <= x0:
                break
            if rows <= x1 or (x1, y1) == points[-1]:
                best = max(best, y0 + (y1 - y0) * (rows - x0) / max(1e-9, x1 - x0))
                break
            best = max(best, y1)
        return best

    def line(self, sessions: int) -> tuple[float, float]:
        """(base, seconds a row) of the line through steps of one and of five rows a session."""
        few, many = self.seconds(sessions), self.seconds(5 * sessions)
        row_s = (many - few) / (4 * sessions)
        return max(0.1 * few, few - row_s * sessions), row_s


@dataclass(slots=True)
class Pace:
    """Seconds a token, over the newest commits."""

    seconds: float = 0.0
    tokens: float = 0.0
    commits: float = 0.0

    def add(self, seconds: float, tokens: int) -> None:
        """A commit of so many tokens came so long after the one before it."""
        self.seconds = self.seconds * _PACE_FADE + seconds
        self.tokens = self.tokens * _PACE_FADE + tokens
        self.commits = self.commits * _PACE_FADE + 1

    @property
    def token_s(self) -> float:
        """What a token takes; 0 before the first."""
        return self.seconds / self.tokens if self.tokens else 0.0

    @property
    def commit_s(self) -> float:
        """Between commits; 0 before the first."""
        return self.seconds / self.commits if self.commits else 0.0

    @property
    def commit_tokens(self) -> float:
        """In a commit; 0 before the first."""
        return self.tokens / self.commits if self.commits else 0.0


@dataclass(slots=True)
class ByteTime:
    """Seconds that a byte takes, from round trips that end with messages of different sizes.

    Least squares through the origin over points that fade with age, each of them by how much a message's bytes and its
    round trip differ from the one's before it. So a round trip that drifts or jumps counts for nothing, and a moment's
    jam for little: what differs by far more than usual is cut.
    """

    fade: float
    weight: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    errors: float = 0.0  # squared
    queued_s: float = 0.0

    def add(self, size: float, seconds: float) -> None:
        """A message had so many bytes more than the one before it, and its round trip took so much longer."""
        expected = self.xy / self.xx * size if self.xx else 0.0
        error = seconds - expected
        if self.weight >= _FEW_POINTS:
            most = _UNUSUAL * self._scatter_s
            error = min(most, max(-most, error))
        self.weight = self.weight * self.fade + 1
        self.xx = self.xx * self.fade + size * size
        self.xy = self.xy * self.fade + size * (expected + error)
        self.errors = self.errors * self.fade + error * error
        self.queued_s = max(0.0, self.queued_s * _QUEUE_FADE + error)

    @property
    def _scatter_s(self) -> float:
        return math.sqrt(self.errors / self.weight + _LEAST_SCATTER_S**2)

    @property
    def byte_s(self) -> float:
        """At least 0; 0 while all messages had the same size."""
        return max(0.0, self.xy / self.xx) if self.xx else 0.0

    @property
    def doubt_s(self) -> float:
        """Its standard error; infinite while there are too few points.

        Neighbouring differences share a round trip, which makes the variance half as large again.
        """
        if self.weight < _FEW_POINTS or not self.xx:
            return math.inf
        return self._scatter_s * math.sqrt(1.5 / self.xx)


@dataclass(slots=True)
class Downlink:
    """What a byte of a commit takes on its way to the edge, over many commits; over few where these contradict."""

    many: ByteTime = field(default_factory=lambda: ByteTime(_MANY_COMMITS))
    few: ByteTime = field(default_factory=lambda: ByteTime(_FEW_COMMITS))

    def add(self, size: float, seconds: float) -> None:
        """So many bytes a stream's newest commit has more than the one before it, so much longer its way down took."""
        for measured in (self.many, self.few):
            measured.add(size, seconds)
        if abs(self.few.byte_s - self.many.byte_s) > _CONTRADICTION * math.hypot(self.few.doubt_s, self.many.doubt_s):
            self.many = replace(self.few, fade=_MANY_COMMITS)

    @property
    def byte_s(self) -> float:
        """Seconds a byte, 0 or more."""
        return self.many.byte_s

    @property
    def doubt_s(self) -> float:
        """Its standard error; infinite while nothing is known."""
        return self.many.doubt_s

    @property
    def queued_s(self) -> float:
        """By so much have round trips grown of late, one after the other, 0 or more: what is sent piles up."""
        return self.many.queued_s


def _new_round_trip() -> Line:
    return Line(fade=1 - 1 / 16)


@dataclass(slots=True)
class DrafterExperience:
    """What an edge has measured of one drafter.

    Attributes:
        calibration: what its confidence is worth.
        drafting_s: to draft one token.
        reading_s: to read one token that others have committed, in a pass with some more.
    """

    calibration: Calibration = field(default_factory=Calibration)
    drafting_s: Smoothed = field(default_factory=Smoothed)
    reading_s: Smoothed = field(default_factory=Smoothed)

    def copy(self) -> DrafterExperience:
        """Return measurements that go on by themselves from these."""
        bins = [list(counts) for counts in self.calibration.bins]
        calibration = Calibration(replace(self.calibration.acceptance), bins)
        return DrafterExperience(calibration, replace(self.drafting_s), replace(self.reading_s))


@dataclass(slots=True)
class Experience:
    """What an edge has measured; sessions share it, so that a new text begins where the last ended.

    Attributes:
        drafters: of each, by name; there is one for each that was asked for.
        round_trip: seconds against bytes of Draft messages; before the first of them, of an Open.
        timed: whether a Draft message has been timed: an Open's time may hold a connection's handshake.
        strangers: newest times, one after the other, that are half or twice what was to be expected.
        step: seconds of the verifier's steps against their rows.
        pace: of commits.
        downlink: what a byte takes there; measured where codes are wished for.
        lead: positions from the newest that the verifier has processed to the one that a drafting job follows; the
            same.
    """

    drafters: dict[str, DrafterExperience] = field(default_factory=dict)
    round_trip: Line = field(default_factory=_new_round_trip)
    timed: bool = False
    strangers: int = 0
    step: Line = field(default_factory=Line)
    pace: Pace = field(default_factory=Pace)
    downlink: Downlink = field(default_factory=Downlink)
    lead: Smoothed = field(default_factory=Smoothed)

    def of(self, drafter: str) -> DrafterExperience:
        """Of the drafter of that name."""
        if drafter not in self.drafters:
            self.drafters[drafter] = DrafterExperience()
        return self.drafters[drafter]

    def copy(self) -> Experience:
        """Return measurements that go on by themselves from these."""
        return replace(
            self,
            drafters={name: drafter.copy() for name, drafter in self.drafters.items()},
            round_trip=replace(self.round_trip),
            step=replace(self.step),
            pace=replace(self.pace),
            downlink=Downlink(replace(self.downlink.many), replace(self.downlink.few)),
            lead=replace(self.lead),
        )

    def time_open(self, seconds: float) -> None:
        """An Open was answered after so long; counts while nothing better is known."""
        if not self.timed:
            self.round_trip = _new_round_trip()
            self.round_trip.add(0, seconds)

    def time_draft(self, size: int, seconds: float) -> None:
        """A Draft message of so many bytes was answered after so long, the verifier's own time taken off."""
        line = self.round_trip
        expected = line.base + line.slope * size
        strange = self.timed and not 0.5 * expected - _USUAL_S < seconds < 2 * expected + _USUAL_S
        self.strangers = self.strangers + 1 if strange else 0
        if self.strangers == 1:
            return  # a moment's jam, perhaps
        if not self.timed or strange:
            # Another link: its times beside the old one's, at other sizes, would look like a price on bytes.
            self.round_trip, self.timed, self.strangers = _new_round_trip(), True, 0
        self.round_trip.add(size, max(0.0, seconds))

"""Measurements of an edge: its link, its verifier and its drafters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from outrider.proto.policy.likely_branches import OtherShares
from outrider.proto.policy.measures import Calibration, Line, Smoothed

DRAFT_BYTES = 30  # a Draft message beside its tokens, framing included, for the link's rate
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
        """Mean time of a token, in seconds; 0 before the first."""
        return self.seconds / self.tokens if self.tokens else 0.0

    @property
    def commit_s(self) -> float:
        """Mean time between commits, in seconds; 0 before the first."""
        return self.seconds / self.commits if self.commits else 0.0

    @property
    def commit_tokens(self) -> float:
        """Mean tokens of a commit; 0 before the first."""
        return self.tokens / self.commits if self.commits else 0.0


@dataclass(slots=True)
class ByteTime:
    """The time of a byte, in seconds, from round trips that end with messages of different sizes.

    The fit is least squares through the origin over points that fade with age; each point is the difference of a
    message's bytes and round trip from those of the message before it. A drift or jump of the round trip thus counts
    for nothing, and a moment's jam for little, because differences far beyond the usual are clipped.

    Attributes:
        fade: weight of the older points at each new one.
        weight: faded number of points.
        xx: faded sum of squared differences in bytes.
        xy: faded sum of differences in bytes times those in seconds.
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
    """The time of a commit's bytes on their way to the edge.

    Attributes:
        best: estimate over many commits, unless the newest contradict them.
        few: estimate over the newest commits.
    """

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
        calibration: share of hits by the lead of the drafter's drafts.
        drafting_s: time to draft one token, in seconds.
        reading_s: time to read one committed token, in a pass with several, in seconds.
        beside: share of the misses of other drafters' chains at which it had the token.
    """

    calibration: Calibration = field(default_factory=Calibration)
    drafting_s: Smoothed = field(default_factory=Smoothed)
    reading_s: Smoothed = field(default_factory=Smoothed)
    beside: OtherShares = field(default_factory=OtherShares)

    def copy(self) -> DrafterMeasurements:
        """Return an independent copy."""
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
        downlink: time of a commit's bytes; measured for steered drafters alone.
        lead: positions from the newest that the verifier has processed to the one that a drafting job follows; measured
            for steered drafters alone.
    """

    drafters: dict[str, DrafterMeasurements] = field(default_factory=dict)
    round_trip: Line = field(default_factory=_new_round_trip)
    timed: bool = False
    outliers: int = 0
    step: Line = field(default_factory=Line)
    pace: Pace = field(default_factory=Pace)
    downlink: Downlink = field(default_factory=Downlink)
    lead: Smoothed = field(default_factory=Smoothed)

    @property
    def round_trip_s(self) -> float:
        """Smoothed round-trip time of a small message, in seconds, without the verifier's work."""
        trip_s, byte_s = self.round_trip.fit()
        return trip_s + byte_s * DRAFT_BYTES

    def of(self, drafter: str) -> DrafterMeasurements:
        """Return the measurements of the drafter of that name."""
        if drafter not in self.drafters:
            self.drafters[drafter] = DrafterMeasurements()
        return self.drafters[drafter]

    def copy(self) -> Measurements:
        """Return an independent copy."""
        return replace(
            self,
            drafters={name: drafter.copy() for name, drafter in self.drafters.items()},
            round_trip=replace(self.round_trip),
            step=replace(self.step),
            pace=replace(self.pace),
            downlink=Downlink(replace(self.downlink.best), replace(self.downlink.few)),
            lead=replace(self.lead),
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

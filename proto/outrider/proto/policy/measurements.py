"""What an edge has measured of its link, its verifier and its drafters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from outrider.proto.policy.measures import Calibration, Line, Smoothed

_PACE_FADE = 0.95  # at every commit
_USUAL_S = 0.005  # by which a round trip may always differ from the usual
_MANY_COMMITS, _FEW_COMMITS = 1 - 1 / 32, 1 - 1 / 8  # fade of the downlink's price at every commit
_CONTRADICTION = 1.5  # standard errors between the two
_QUEUE_FADE = 1 - 1 / 64
_FEW_POINTS = 4
_UNUSUAL = 6.0  # times the usual scatter of round trips
_MIN_SCATTER_S = 0.0005


@dataclass(slots=True)
class Pace:
    """Means over the newest commits.

    Attributes:
        seconds: faded sum of the times between commits.
        tokens: faded sum of their tokens.
        commits: faded number of them.
    """

    seconds: float = 0.0
    tokens: float = 0.0
    commits: float = 0.0

    def add(self, seconds: float, tokens: int) -> None:
        """Take in that a commit of `tokens` came `seconds` after the one before it."""
        self.seconds = self.seconds * _PACE_FADE + seconds
        self.tokens = self.tokens * _PACE_FADE + tokens
        self.commits = self.commits * _PACE_FADE + 1

    @property
    def token_s(self) -> float:
        """Seconds a token; 0 before the first."""
        return self.seconds / self.tokens if self.tokens else 0.0

    @property
    def commit_s(self) -> float:
        """Seconds between commits; 0 before the first."""
        return self.seconds / self.commits if self.commits else 0.0

    @property
    def commit_tokens(self) -> float:
        """Tokens in a commit; 0 before the first."""
        return self.tokens / self.commits if self.commits else 0.0


@dataclass(slots=True)
class ByteTime:
    """Seconds that a byte takes, from round trips that end with messages of different sizes.

    Least squares through the origin over points that fade with age: each is the difference of a message's bytes and
    round trip from those of the message before it. A round trip that drifts or jumps thus counts for nothing, and a
    moment's jam for little, because what differs by far more than usual is cut.

    Attributes:
        fade: weight of the older points at each new one.
        weight: faded number of points.
        xx: faded sum of squared differences in bytes.
        xy: faded sum of differences in bytes times those in seconds.
        errors: faded sum of squared errors, in square seconds.
        queued_s: how much round trips have grown lately, one after the other, in seconds.
    """

    fade: float
    weight: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    errors: float = 0.0
    queued_s: float = 0.0

    def add(self, size: float, seconds: float) -> None:
        """Take in a message of `size` more bytes than the one before it, whose round trip took `seconds` longer."""
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
        """Seconds a byte, 0 or more; 0 while all messages had the same size."""
        return max(0.0, self.xy / self.xx) if self.xx else 0.0

    @property
    def doubt_s(self) -> float:
        """Standard error of `byte_s`; infinite while there are too few points.

        Neighbouring differences share a round trip, which makes the variance half as large again.
        """
        if self.weight < _FEW_POINTS or not self.xx:
            return math.inf
        return self._scatter_s * math.sqrt(1.5 / self.xx)


@dataclass(slots=True)
class Downlink:
    """What a byte of a commit takes on its way to the edge.

    Attributes:
        many: over many commits, unless the newest contradict them.
        few: over the newest commits.
    """

    many: ByteTime = field(default_factory=lambda: ByteTime(_MANY_COMMITS))
    few: ByteTime = field(default_factory=lambda: ByteTime(_FEW_COMMITS))

    def add(self, size: float, seconds: float) -> None:
        """Take in a commit of `size` more bytes than the one before it, whose way down took `seconds` longer."""
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
        """Standard error of `byte_s`; infinite while nothing is known."""
        return self.many.doubt_s

    @property
    def queued_s(self) -> float:
        """How much round trips have grown lately, in seconds, 0 or more: what is sent piles up."""
        return self.many.queued_s


def _new_round_trip() -> Line:
    return Line(fade=1 - 1 / 16)


@dataclass(slots=True)
class DrafterMeasurements:
    """What an edge has measured of one drafter.

    Attributes:
        calibration: what its confidence is worth.
        drafting_s: seconds to draft one token.
        reading_s: seconds to read one token that others have committed, in a pass with some more.
    """

    calibration: Calibration = field(default_factory=Calibration)
    drafting_s: Smoothed = field(default_factory=Smoothed)
    reading_s: Smoothed = field(default_factory=Smoothed)

    def copy(self) -> DrafterMeasurements:
        """Return measurements that go on by themselves from these."""
        bins = [list(counts) for counts in self.calibration.bins]
        calibration = Calibration(replace(self.calibration.acceptance), bins)
        return DrafterMeasurements(calibration, replace(self.drafting_s), replace(self.reading_s))


@dataclass(slots=True)
class Measurements:
    """What an edge has measured; a new text begins where the last ended.

    Attributes:
        drafters: measurements of each drafter, by name.
        round_trip: seconds against bytes of Draft messages; before the first of them, of an Open.
        timed: whether a Draft message has been timed: an Open's time may hold a connection's handshake.
        outliers: newest times, one after the other, that are half or twice the expected one.
        step: seconds of the verifier's steps against their rows.
        pace: seconds and tokens of commits.
        downlink: seconds a byte of commits; measured for steered drafters alone.
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

    def of(self, drafter: str) -> DrafterMeasurements:
        """Return the measurements of the drafter of that name."""
        if drafter not in self.drafters:
            self.drafters[drafter] = DrafterMeasurements()
        return self.drafters[drafter]

    def copy(self) -> Measurements:
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
        """Take in that an Open was answered after `seconds`, which counts while nothing better is known."""
        if not self.timed:
            self.round_trip = _new_round_trip()
            self.round_trip.add(0, seconds)

    def time_draft(self, size: int, seconds: float) -> None:
        """Take in that a Draft message of `size` bytes was answered after `seconds`, the verifier's time taken off."""
        line = self.round_trip
        expected = line.base + line.slope * size
        outlying = self.timed and not 0.5 * expected - _USUAL_S < seconds < 2 * expected + _USUAL_S
        self.outliers = self.outliers + 1 if outlying else 0
        if self.outliers == 1:
            return  # a moment's jam, perhaps
        if not self.timed or outlying:
            # Another link: its times beside the old one's, at other sizes, would look like a price on bytes.
            self.round_trip, self.timed, self.outliers = _new_round_trip(), True, 0
        self.round_trip.add(size, max(0.0, seconds))

"""What one text adds to the measurements of its edge: of the link, the verifier and its drafters."""

from __future__ import annotations

from outrider.proto.policy import (
    TOKEN_BYTES,
    DrafterMeasurements,
    Measurements,
    SteeringView,
    TextCalibration,
    commit_bytes,
)
from outrider.proto.policy.selection import Arm
from outrider.proto.session.chain import Chain
from outrider.proto.session.selection import Conditions
from outrider.proto.types import Commit, Patience

DRAFT_BYTES = 30  # of a Draft message beside its tokens, framing included, for the link's rate
UNMEASURED_S = 0.0005  # to draft a token, of a drafter that has not
UNMEASURED_STEP_S = 0.03  # of a verifier that has not made any


class SharedMeasurements:
    """The measurements of an edge, as they go from text to text; each machine works on its own.

    Attributes:
        newest: of the text that had the newest event.
    """

    def __init__(self) -> None:
        self.newest = Measurements()

    def snapshot(self) -> Measurements:
        """Return a copy for a machine that begins a text."""
        return self.newest.copy()

    def newer_than(self, own: Measurements) -> Measurements | None:
        """Return a copy for a machine whose own measurements are `own`; None where no other text has added any."""
        return self.snapshot() if self.newest is not own else None


class Meter:
    """Times the streams of one text and calibrates its drafters, on measurements of its own.

    Attributes:
        measurements: of this edge, this text's included.
        commit_at: when the newest commit came, or else the stream opened.
    """

    def __init__(self, drafters: tuple[str, ...], measurements: Measurements) -> None:
        self.measurements = measurements
        self.commit_at = 0.0
        self._drafters = drafters
        self._calibrations = [TextCalibration(measurements.of(name).calibration) for name in drafters]
        self._heard_commit = False  # on this stream
        self._sent_at: list[tuple[float, int]] = []  # when each Draft message of this stream went, and its bytes
        self._round_trip: tuple[int, float] | None = None  # bytes of the newest commit; seconds, without the uplink's
        self._revision = 0  # of what calibrations say of this text's drafts
        self._chances: list[float] = []
        self._chances_of: tuple[int, int, int] | None = None  # revision, epoch and drafter

    # --- measurements from outside ---

    def adopt(self, measurements: Measurements) -> None:
        """Go on with a snapshot that holds what other texts have measured meanwhile."""
        self.measurements = measurements
        self._revision += 1
        for name, calibration in zip(self._drafters, self._calibrations, strict=True):
            calibration.common = measurements.of(name).calibration

    def begin_kind(self, measurements: Measurements) -> None:
        """Go on with the measurements of another kind of text; this text's own calibration begins afresh."""
        self.measurements = measurements
        self._revision += 1
        self._calibrations = [TextCalibration(measurements.of(name).calibration) for name in self._drafters]

    # --- the link and the verifier ---

    @property
    def round_trip_s(self) -> float:
        """Smoothed round-trip time of a small message, in seconds, without the verifier's work."""
        return self.measurements.round_trip.base + self.measurements.round_trip.slope * DRAFT_BYTES

    def open_stream(self, opened_at: float, now: float) -> None:
        """Take in that an Open of `opened_at` was answered now."""
        self._round_trip = None
        self._sent_at.clear()
        self.commit_at = now
        self._heard_commit = False
        self.measurements.time_open(now - opened_at)

    def begin_turn(self, now: float) -> None:
        """Take in that another turn begins on the same stream."""
        self._sent_at.clear()
        self.commit_at = now

    def forget_round_trip(self) -> None:
        """Compare the next round trip with none before it."""
        self._round_trip = None

    def send_draft(self, tokens: int, now: float) -> None:
        """Take in that a Draft message of so many tokens goes now."""
        self._sent_at.append((now, DRAFT_BYTES + TOKEN_BYTES * tokens))

    def take_commit(self, commit: Commit, now: float, *, downlink: bool) -> bool:
        """Take in a commit that came now; return whether it timed a round trip. `downlink`: whether to price bytes."""
        measurements, timing = self.measurements, commit.timing
        if self._heard_commit:  # the prompt was read before the first of a stream
            measurements.pace.add(now - self.commit_at, len(commit.tokens))
        self._heard_commit = True
        self.commit_at = now
        if timing.verify_s > 0:
            measurements.step.add(commit.verified + 1, timing.verify_s)
        if not 0 < timing.echo <= len(self._sent_at):
            return False
        sent_at, draft_bytes = self._sent_at[timing.echo - 1]
        seconds = now - sent_at - timing.hold_s
        measurements.time_draft(draft_bytes, seconds)
        if downlink:
            before = self._round_trip
            size, down_s = self._round_trip = (
                commit_bytes(commit),
                seconds - measurements.round_trip.slope * draft_bytes,
            )
            if before is not None:
                measurements.downlink.add(size - before[0], down_s - before[1])
        return True

    # --- drafters ---

    def drafter(self, drafter: int) -> DrafterMeasurements:
        """Return what was measured of a drafter."""
        return self.measurements.of(self._drafters[drafter])

    def compare(self, drafter: int, confidence: float, hit: bool) -> None:
        """Take in that a proposal of this confidence (NaN: not known) met the committed token."""
        self._calibrations[drafter].add(confidence, hit)
        self._revision += 1

    def chances(self, chain: Chain, drafter: int) -> list[float]:
        """Return of each draft of the drafter's chain the chance that it agrees, given that those before it do.

        The chances of earlier calls serve again as long as nothing was calibrated and the chain is the same.
        """
        key = (self._revision, chain.epoch, drafter)
        if key != self._chances_of:
            self._chances_of, self._chances = key, []
        chance = self._calibrations[drafter].chance
        self._chances += [chance(draft.confidence) for draft in chain.drafts[len(self._chances) :]]
        return self._chances

    # --- what policies are shown ---

    def arms(self, active: int) -> list[Arm]:
        """Return the drafters as a selector sees them; one that has not drafted yet is taken for the active one."""
        usual_s = self.drafter(active).drafting_s.value or UNMEASURED_S
        measured = [(name, self.measurements.of(name)) for name in self._drafters]
        return [Arm(name, of.drafting_s.value or usual_s, of.reading_s.value) for name, of in measured]

    def conditions(self, patience: Patience | None) -> Conditions:
        """Return what a round costs beside its drafter, where the text asks for such patience."""
        step, patience_s = self.measurements.step, patience.seconds if patience is not None else 0.0
        return Conditions(self.round_trip_s, step.base or UNMEASURED_STEP_S, step.slope, patience_s)

    def steering_view(self) -> SteeringView:
        """Return what the rule of steering vectors goes by."""
        measurements = self.measurements
        return SteeringView(
            commit_s=measurements.pace.commit_s,
            commit_tokens=measurements.pace.commit_tokens,
            lead=measurements.lead.value,
            byte_s=measurements.downlink.byte_s,
            doubt_s=measurements.downlink.doubt_s,
            queued_s=measurements.downlink.queued_s,
        )

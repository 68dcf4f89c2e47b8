"""Measurements that one text adds to those of its edge: link, verifier and drafters."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Generic, TypeVar

from outrider.proto.policy import Measurements
from outrider.proto.policy.measurements import DRAFT_BYTES, DrafterMeasurements, TextCalibration, commit_bytes
from outrider.proto.policy.selector import RoundCosts
from outrider.proto.policy.window import TOKEN_BYTES, due_to_flush
from outrider.proto.types import Commit, DraftToken

UNMEASURED_S = 0.0005  # assumed time to draft a token
UNMEASURED_STEP_S = 0.03  # assumed time of a verifier's step

T = TypeVar("T")


class SentMessages(Generic[T]):
    """Notes on the Draft messages of one stream, each until a commit echoes a later one."""

    def __init__(self) -> None:
        self._notes: deque[T] = deque()
        self._first = 1  # number of the oldest

    def __len__(self) -> int:
        return len(self._notes)

    def clear(self) -> None:
        """Count from 1 once more, on another stream or in another turn."""
        self._notes.clear()
        self._first = 1

    def append(self, note: T) -> None:
        self._notes.append(note)

    def echoed(self, number: int) -> T | None:
        """Return the note on this message, and forget those before it; None where there is none, or no more."""
        if not 0 <= number - self._first < len(self._notes):
            return None
        while self._first < number:
            self._forget()
        return self._notes[0]

    def take(self, number: int) -> T | None:
        note = self.echoed(number)
        if note is not None:
            self._forget()
        return note

    def _forget(self) -> None:
        self._notes.popleft()
        self._first += 1


class SharedMeasurements:
    """The `newest` measurements of an edge, handed from text to text; each machine works on its own copy."""

    def __init__(self) -> None:
        self.newest = Measurements()

    def snapshot(self) -> Measurements:
        return self.newest.copy()

    def newer_than(self, own: Measurements) -> Measurements | None:
        """Return a copy for a machine whose own measurements are `own`; None where no other text has added any."""
        return self.snapshot() if self.newest is not own else None


class Meter:
    """Times the streams of one text and calibrates its drafters, on measurements of its own.

    Attributes:
        commit_at: arrival of the newest commit or of the answer to Open, or else when that is expected, in seconds.
    """

    def __init__(self, drafters: tuple[str, ...], measurements: Measurements) -> None:
        self.measurements = measurements
        self.commit_at = 0.0
        self._has_commit = False  # on this stream
        self._sent = SentMessages[tuple[float, int]]()  # when each went, and its bytes
        self._round_trip: tuple[int, float] | None = None  # bytes of the newest commit; seconds, without the uplink's
        self._chances: list[float] = []
        self._survival = 1.0
        self._chances_of = self._chances_in = -1  # drafter and epoch; -1: its calibration has changed since
        self.take_drafters(drafters)

    def take_drafters(self, drafters: tuple[str, ...]) -> None:
        """Measure the drafters of these names from now on; this text has measured nothing of them."""
        self._drafters = drafters
        self._take_mine()
        self._calibrations = [TextCalibration(mine.calibration) for mine in self._mine]

    # --- measurements from outside ---

    def adopt(self, measurements: Measurements) -> None:
        """Go on with a snapshot that holds what other texts have measured meanwhile."""
        self._take_up(measurements)
        for mine, calibration in zip(self._mine, self._calibrations, strict=True):
            calibration.common = mine.calibration

    def begin_kind(self, measurements: Measurements) -> None:
        """Go on with the measurements of another kind of text; this text's own calibration starts over."""
        self._take_up(measurements)
        self._calibrations = [TextCalibration(mine.calibration) for mine in self._mine]

    def _take_up(self, measurements: Measurements) -> None:
        self.measurements = measurements
        self._take_mine()

    def _take_mine(self) -> None:
        self._chances_of = -1
        self._mine = [self.measurements.of(name) for name in self._drafters]

    # --- the link and the verifier ---

    def open_stream(self, now: float) -> None:
        """Start over with the times of messages, for a stream whose Open is sent now."""
        self._round_trip = None
        self._sent.clear()
        self.commit_at = now + self.measurements.round_trip_s  # expected: drafts leave in time for the first step
        self._has_commit = False

    def time_open(self, opened_at: float, now: float) -> None:
        """Time an Open that was sent at `opened_at` and is answered now."""
        self.commit_at = now
        self.measurements.time_open(now - opened_at)

    def begin_turn(self, now: float) -> None:
        """Start over with the times of messages, for another turn on the same stream."""
        self._sent.clear()
        self.commit_at = now

    def forget_round_trip(self) -> None:
        """Compare the next round trip with none before it."""
        self._round_trip = None

    def send_draft(self, tokens: int, now: float) -> None:
        self._sent.append((now, DRAFT_BYTES + TOKEN_BYTES * tokens))

    def take_commit(self, commit: Commit, now: float, *, downlink: bool) -> bool:
        """Measure a commit, and its bytes with `downlink`; return whether it timed a round trip."""
        measurements, timing = self.measurements, commit.timing
        if self._has_commit:  # the prompt was read before the first of a stream
            measurements.pace.add(now - self.commit_at, len(commit.tokens))
        self._has_commit = True
        self.commit_at = now
        if timing.verify_s > 0:
            measurements.step.add(commit.verified + commit.verified_beside + 1, timing.verify_s)
        sent = self._sent.echoed(timing.echo)
        if sent is None:
            return False
        sent_at, draft_bytes = sent
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
        return self._mine[drafter]

    def compare(self, drafter: int, scores: Sequence[float], hits: Sequence[bool]) -> None:
        """Count proposals [n] of these scores (NaN: unknown) that were compared with the committed tokens."""
        add = self._calibrations[drafter].add
        for score, hit in zip(scores, hits, strict=True):
            add(score, hit)
        if self._chances_of == drafter:
            self._chances_of = -1

    def chances(self, drafts: Sequence[DraftToken], epoch: int, drafter: int) -> list[float]:
        """Return for each draft of the drafter's chain the chance that it agrees, given that those before it do.

        Those of earlier calls are reused while calibration and chain, which `epoch` numbers, stay the same.
        """
        if self._chances_of != drafter or self._chances_in != epoch:
            self._chances_of, self._chances_in = drafter, epoch
            self._chances, self._survival = [], 1.0
        chances = self._chances
        known = len(chances)
        if known < len(drafts):
            new = self._calibrations[drafter].chances([draft.score for draft in drafts[known:]])
            self._survival = math.prod(new, start=self._survival)
            chances += new
        return chances

    def is_due(self, now: float, next_s: float) -> bool:
        """Return whether drafts that wait for the next look, in `next_s` seconds, would come too late for a step."""
        measured = self.measurements
        return due_to_flush(
            now,
            commit_at=self.commit_at,
            round_trip_s=measured.round_trip_s,
            step_s=measured.step.mean,
            next_s=next_s,
        )

    def idle_s(self, now: float) -> float:
        """Return the seconds until the next commit, as far as a step's time tells."""
        return self.commit_at + self.measurements.step.mean - now

    def forget_chances(self) -> None:
        """Compute the chances of the chain's drafts anew: the first of them are text, and said nothing of a drafter."""
        self._chances_of = -1

    def survival(self, drafts: Sequence[DraftToken], epoch: int, drafter: int) -> float:
        """Return the chance that all drafts of the drafter's chain agree."""
        if drafts:
            self.chances(drafts, epoch, drafter)
            return self._survival
        return 1.0

    def round_costs(self, active: int) -> RoundCosts:
        """Return the costs of a round; a drafter that has not drafted yet is assumed as fast as the active one."""
        usual_s = self._mine[active].drafting_s.value or UNMEASURED_S
        drafting_s = [mine.drafting_s.value or usual_s for mine in self._mine]
        base_s, row_s = self.measurements.step.fit()
        reading_s = [mine.reading_s.value for mine in self._mine]
        return RoundCosts(drafting_s, reading_s, self.measurements.round_trip_s, base_s or UNMEASURED_STEP_S, row_s)

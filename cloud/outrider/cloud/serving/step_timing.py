"""The time of an engine's steps, by stage."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from outrider.cloud.serving.batching import Batch
from outrider.cloud.serving.verifier_metrics import VerifierMetrics
from outrider.proto.policy import Smoothed

MAX_KEPT = 4096


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The time of one step by stage, seconds.

    Attributes:
        sessions: number that took part.
        rows: rows of the forward pass.
        forward_s: the model's pass.
        sample_s: from logits to tokens and steering vectors.
        overhead_s: all else since the step before it, but for waiting: events, planning, commits, other threads.
    """

    sessions: int
    rows: int
    forward_s: float
    sample_s: float
    overhead_s: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Moments of one step on the monotonic clock, seconds."""

    began: float
    forwarded: float
    sampled: float
    ended: float

    @property
    def verify_s(self) -> float:
        """Time of the step in seconds, with the wait where steps have a minimum."""
        return self.ended - self.began


class StepMeter:
    """The meter of an engine's steps.

    Attributes:
        timings: the newest steps' times; a reader may take them out.
        step_s: smoothed time of a decoding step.
    """

    def __init__(self, metrics: VerifierMetrics, now: float) -> None:
        self.timings: deque[StepTiming] = deque(maxlen=MAX_KEPT)
        self.step_s = Smoothed()
        self._metrics = metrics
        self._accounted_until = now

    def waited(self, seconds: float) -> None:
        """Count no overhead for `seconds` in which there was nothing to do."""
        self._accounted_until += seconds

    def record(self, batch: Batch[Any], times: StepTimes) -> None:
        """Count a step."""
        timing = StepTiming(
            sessions=len(batch.shares),
            rows=batch.num_rows,
            forward_s=times.forwarded - times.began,
            sample_s=times.sampled - times.forwarded,
            overhead_s=times.began - self._accounted_until,
        )
        self._accounted_until = times.ended
        self.timings.append(timing)
        self._metrics.step(timing.sessions, timing.rows, timing.forward_s, timing.sample_s, timing.overhead_s)
        if batch.only_verifies:
            self.step_s.add(times.verify_s)

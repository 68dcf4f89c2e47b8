"""The state of an engine, for whoever reports it."""

from __future__ import annotations

import time
from collections import deque

from outrider.cloud.serving.admission import Admission
from outrider.cloud.serving.slots import Slots
from outrider.cloud.serving.step_timing import StepMeter, StepTiming


class EngineState:
    """The present state of an engine, which any thread may read."""

    def __init__(self, slots: Slots, admission: Admission, meter: StepMeter) -> None:
        self._slots = slots
        self._admission = admission
        self._meter = meter

    @property
    def session_count(self) -> int:
        """Admitted sessions, without those that are parked until their next turn."""
        return self._slots.num_running

    @property
    def admitted(self) -> dict[str, int]:
        """Epochs of the sessions that were admitted lately."""
        return dict(self._admission.admitted)

    @property
    def parked_count(self) -> int:
        """Sessions that are parked until their next turn."""
        return self._slots.num_parked

    @property
    def texts_of_keys(self) -> dict[str, dict[str, float]]:
        """Seconds for which each text has gone on, by API key and session."""
        return self._slots.texts_of_keys(time.monotonic())

    @property
    def credit(self) -> int:
        """Unverified tokens that a session may have in flight."""
        return self._admission.credit

    @property
    def step_s(self) -> float:
        """Smoothed time of a decoding step, seconds; 0: none yet."""
        return self._meter.step_s.value

    @property
    def timings(self) -> deque[StepTiming]:
        """Times of the newest steps; a reader may take them out."""
        return self._meter.timings

    @property
    def draining(self) -> bool:
        """Whether sessions are being sent away."""
        return self._admission.draining

    @property
    def failed(self) -> bool:
        """Whether steps fail whatever they are for, so that sessions are refused until the process is replaced."""
        return self._admission.failed

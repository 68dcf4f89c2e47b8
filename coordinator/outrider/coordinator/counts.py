"""What a coordinator counts while it works: plain numbers of one event loop, read by whoever asks."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from outrider.proto.errors import OutriderError
from outrider.proto.types import SessionReport

MOST_MODELS = 64  # told apart in reports, which come from strangers; what comes after them is counted as `other`


@dataclass(slots=True)
class Reported:
    """Sums over the reports of finished sessions with one target."""

    sessions: int = 0
    committed: int = 0
    accepted: int = 0
    drafted: int = 0
    judged: int = 0
    steps: int = 0
    resumes: int = 0
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class CoordinatorCounts:
    """Of one coordinator, since it began: leases by outcome, and what finished sessions reported."""

    granted: Counter[str] = field(default_factory=Counter)  # by model
    refused: Counter[str] = field(default_factory=Counter)  # leases, by kind of error
    refused_calls: Counter[str] = field(default_factory=Counter)  # of any kind, those for leases among them; the same
    reported: dict[str, Reported] = field(default_factory=dict)  # by model

    def grant(self, model: str) -> None:
        """A lease was given out."""
        self.granted[model] += 1

    def refuse(self, error: OutriderError) -> None:
        """A lease was asked for in vain."""
        self.refused[type(error).__name__] += 1

    def refuse_call(self, error: OutriderError) -> None:
        """A call was answered with an error."""
        self.refused_calls[type(error).__name__] += 1

    def report(self, report: SessionReport) -> None:
        """A session has finished."""
        model = report.model
        if model not in self.reported and len(self.reported) >= MOST_MODELS:
            model = "other"
        sums = self.reported.setdefault(model, Reported())
        sums.sessions += 1
        sums.committed += report.committed_tokens
        sums.accepted += report.accepted_tokens
        sums.drafted += report.drafted_tokens
        sums.judged += report.judged_tokens
        sums.steps += report.steps
        sums.resumes += report.resumes
        sums.uplink_bytes += report.uplink_bytes
        sums.downlink_bytes += report.downlink_bytes
        sums.seconds += report.seconds

"""What a verifier counts while it works: plain numbers, written by one thread each, read by whoever asks."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.proto.errors import OutriderError
from outrider.proto.speculation import JudgedDrafts
from outrider.proto.tally import SECONDS, TOKENS, Tally
from outrider.proto.types import Commit


@dataclass(slots=True)
class EngineCounts(JudgedDrafts):
    """Of one engine, since it began.

    Attributes:
        rows: of each step.
        forward: seconds of each step in the model.
        sample: seconds of each step from logits to tokens.
        overhead: all else since the step before, but for waiting.
        running: sessions in the newest step.
        admitted: sessions that were taken.
        committed: tokens.
        waits: from a session's commit to its next step: patience, company and other sessions.
        lingers: steps that began later than they could have, for the drafts of others.
        finished: texts by why they ended.
        codes: steering codes that went with commits.
        code_bytes: of their numbers.
    """

    rows: Tally = field(default_factory=lambda: Tally(TOKENS))
    forward: Tally = field(default_factory=lambda: Tally(SECONDS))
    sample: Tally = field(default_factory=lambda: Tally(SECONDS))
    overhead: Tally = field(default_factory=lambda: Tally(SECONDS))
    running: int = 0
    admitted: int = 0
    committed: int = 0
    waits: Tally = field(default_factory=lambda: Tally(SECONDS))
    lingers: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    codes: int = 0
    code_bytes: int = 0

    def step(self, sessions: int, rows: int, forward_s: float, sample_s: float, overhead_s: float) -> None:
        """A step was made for so many sessions; seconds."""
        self.running = sessions
        self.rows.add(rows)
        self.forward.add(forward_s)
        self.sample.add(sample_s)
        self.overhead.add(overhead_s)

    def commit(self, commit: Commit) -> None:
        """A commit goes to an edge."""
        self.committed += len(commit.tokens)
        if commit.tokens:
            self.waits.add(commit.timing.queue_s)
        if commit.judged:
            self.judge(commit.judged, commit.accepted)
        if commit.steering is not None:
            self.codes += 1
            self.code_bytes += len(commit.steering.values)
        if commit.finish is not None:
            _count(self.finished, commit.finish.name.lower())


@dataclass(slots=True)
class StreamCounts:
    """Of a server's streams, since it began.

    Attributes:
        refused: streams refused before a session was admitted, by kind of error.
        failed: streams ended by an error later, by its kind.
        goaways: sessions sent elsewhere.
    """

    refused: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    goaways: int = 0

    def refuse(self, error: OutriderError) -> None:
        """A stream was refused."""
        _count(self.refused, type(error).__name__)

    def fail(self, error: OutriderError) -> None:
        """A stream was ended by an error."""
        _count(self.failed, type(error).__name__)


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1

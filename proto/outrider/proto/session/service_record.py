"""Records of the service that a text asked for and got, which both sides count by the verifier's times in commits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from outrider.proto.types import Commit, ServiceGoal

KEPT_SHARE = 0.95  # of the gaps of a text; its goal is missed below it


@dataclass(slots=True)
class ServiceRecord:
    """Gaps of one text, counted at the verifier, so that no link adds to them.

    Attributes:
        goal: service that the text asked for.
        gaps: times from one commit to the next, of which `kept` were no longer than the goal's.
        first_token_s: time from the text's beginning at the verifier to its first token, in seconds; 0: there is none.
        unlikely: whether the coordinator found no verifier that is expected to keep the gap.
    """

    goal: ServiceGoal
    gaps: int = 0
    kept: int = 0
    first_token_s: float = 0.0
    unlikely: bool = False

    def fresh(self) -> ServiceRecord:
        """Return the record of the next turn, of which nothing is counted yet."""
        return replace(self, gaps=0, kept=0, first_token_s=0.0)

    def take(self, commit: Commit, *, first: bool) -> None:
        """Count a commit with tokens: the text's `first`, or one that ends a gap."""
        seconds = commit.timing.queue_s + commit.timing.verify_s
        if first:
            self.first_token_s = seconds
        else:
            self.gaps += 1
            self.kept += not self.goal.gap_s or seconds <= self.goal.gap_s

    @property
    def missed(self) -> bool:
        """Whether the first token came too late, or more gaps were too long than may be."""
        late = 0 < self.goal.first_token_s < self.first_token_s
        return late or self.kept < KEPT_SHARE * self.gaps


def service_summary(of_texts: Iterable[ServiceRecord | None]) -> dict[str, Any]:
    """Return what became of the service that texts of a request asked for, for JSON; empty: they asked for none."""
    records = [record for record in of_texts if record is not None]
    if not records:
        return {}
    return {
        "service": {
            "goal": str(records[0].goal),
            "gaps": sum(record.gaps for record in records),
            "gaps_kept": sum(record.kept for record in records),
            "first_token_ms": round(1e3 * max(record.first_token_s for record in records), 3),
            "missed": any(record.missed for record in records),
            "unlikely": any(record.unlikely for record in records),
        }
    }

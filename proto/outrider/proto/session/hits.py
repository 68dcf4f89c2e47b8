"""Hits of an edge's drafters in one text: their proposals compared with the committed tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.proto.session.jobs import TeacherForced
from outrider.proto.session.measuring import Meter
from outrider.proto.session.selection import Selection
from outrider.proto.session.text import EdgeText
from outrider.proto.types import DraftToken


@dataclass(frozen=True, slots=True, eq=False)
class HitCounter:
    """Counts hits for the statistics, the calibration and the selection."""

    _text: EdgeText
    _meter: Meter
    _selection: Selection

    def compare(
        self, drafter: int, start: int, drafts: Sequence[DraftToken], tokens: Sequence[int], borrowed: int = 0
    ) -> int:
        """Count the drafter's drafts from `start` on, up to the first that misses; return the hits before it.

        The first `borrowed` of them are another's, and say nothing of this one.
        """
        hits = next((i for i, draft in enumerate(drafts) if draft.id != tokens[i]), len(drafts))
        compared = drafts[: hits + 1]
        if not compared:
            return 0
        own = range(min(borrowed, len(compared)), len(compared))
        if borrowed:
            self._meter.forget_chances()
        if own:
            self._learn(drafter, start + own.start, [i < hits for i in own], compared[own.start :])
        self._text.statistics.compared += len(compared)
        self._text.statistics.hits += hits
        return hits

    def compare_forced(self, drafter: int, start: int, forced: TeacherForced) -> None:
        """Compare teacher-forced proposals from position `start` on with the committed tokens there."""
        known = max(0, self._selection.first_undecided(drafter) - start)
        drafts, start = forced.drafts[known:], start + known
        if not drafts:
            return
        committed = self._text.tokens[start : start + len(drafts)]
        hits = [draft.id == token for draft, token in zip(drafts, committed, strict=True)]
        self._learn(drafter, start, hits, drafts)

    def _learn(self, drafter: int, start: int, hits: list[bool], drafts: Sequence[DraftToken]) -> None:
        """Count the hits of a drafter's proposals for positions from `start` on."""
        self._meter.compare(drafter, [draft.lead for draft in drafts], hits)
        self._selection.note(drafter, start, hits)
        counts = self._text.statistics.of(self._selection.names[drafter])
        counts.compared += len(hits)
        counts.hits += sum(hits)

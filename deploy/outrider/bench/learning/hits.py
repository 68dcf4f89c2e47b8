"""Hits of a drafter, text by text, so that a change has a standard error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.bench.learning.record import HitShares
from outrider.cloud.learning.adapted import AdaptedDrafter
from outrider.cloud.learning.batch import judged_rows
from outrider.cloud.learning.losses import LOSSES
from outrider.cloud.learning.record import LessonKind, LessonRecord


@dataclass(frozen=True, slots=True, eq=False)
class TextHits:
    """Hits and positions of some texts, int64 [texts] each, and which are at T = 0, bool [texts]."""

    hits: np.ndarray
    positions: np.ndarray
    greedy: np.ndarray

    def share(self) -> float:
        """Return the mean of the shares at T = 0 and at T = 1."""
        shares = self.shares()
        return (shares.greedy + shares.sampled) / 2

    def shares(self) -> HitShares:
        """Return the shares of positions that are hits; 0 where there are none."""
        parts = [(self.hits[at].sum(), self.positions[at].sum()) for at in (self.greedy, ~self.greedy)]
        return HitShares(*(round(float(hits / max(1, positions)), 4) for hits, positions in parts))

    def errors_of_change(self, before: TextHits) -> HitShares:
        """Return the standard errors of the change since `before` on the same texts, which are drawn at random.

        The estimate is that of a ratio, sum of changes over sum of positions, by its linear part (Cochran 1977,
        section 2.11). With fewer than two texts it is 0.
        """
        errors = []
        for at in (self.greedy, ~self.greedy):
            change, positions = (self.hits - before.hits)[at], self.positions[at]
            texts = len(positions)
            if texts < 2:
                errors.append(0.0)
                continue
            spread = change - positions * change.sum() / positions.sum()
            errors.append(float(np.sqrt((spread**2).sum() * texts / (texts - 1)) / positions.sum()))
        return HitShares(*(round(error, 4) for error in errors))


@torch.no_grad()
def hits_of(drafter: AdaptedDrafter, records: Sequence[LessonRecord]) -> TextHits:
    """Return the drafter's hits: positions where its proposal, with the shared noise, is the target's token."""
    counts = np.zeros((len(records), 2), dtype=np.int64)
    for count, record in zip(counts, records, strict=True):
        rows = judged_rows(drafter, [record], LOSSES["osd"]())
        if rows is not None:
            count[:] = int((rows.kinds == LessonKind.ACCEPTED).sum()), len(rows.kinds)
    greedy = np.array([record.sampling.temperature == 0 for record in records], dtype=bool)
    return TextHits(counts[:, 0], counts[:, 1], greedy)

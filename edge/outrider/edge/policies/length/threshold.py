"""While the last draft is sure enough."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.window import EdgeView


@dataclass(frozen=True, slots=True)
class ThresholdWindow:
    """Draft on while the drafter's probability of its last draft is at least `least`, up to `most` drafts.

    Stop once q(x_k) < least: the criterion of assisted generation in Hugging Face transformers
    (`assistant_confidence_threshold`, 0.4 by default, with 20 tokens at most), and at T = 0 Kangaroo's early stop of
    drafting (Liu et al. 2024, arXiv 2404.18911: once the most likely token's probability is below eta). The doubtful
    draft itself is still sent. A drafter that does not say how sure it is counts with its calibrated chance.

    They look after every draft. Here each look ends a drafting job, so `stride` drafts are made between two looks;
    replayed, 4 give more tokens a second than 1 or 2 on every link.
    """

    least: float = 0.4
    most: int = 20
    stride: int = 4

    def __post_init__(self) -> None:
        if not 0 <= self.least <= 1:
            raise InvalidArgument("the threshold must be a probability, 0 to 1", field="window")
        if self.most < 1 or self.stride < 1:
            raise InvalidArgument("most and stride must be 1 or more", field="window")

    def more(self, view: EdgeView) -> int:
        """Return the tokens to draft now."""
        if view.in_flight and _last(view) < self.least:
            return 0
        return max(0, min(self.stride, self.most - view.in_flight))


def _last(view: EdgeView) -> float:
    """Return the confidence of the last draft."""
    if view.drafts and not math.isnan(view.drafts[-1].confidence):
        return view.drafts[-1].confidence
    return view.chances[-1] if view.chances else view.acceptance

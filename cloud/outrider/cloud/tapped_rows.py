"""The hidden states that led to the logits of a step, kept until the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outrider.cloud.steering import Taps


class TappedRows:
    """The residual stream that entered some layers of a model, in the rows of the newest step whose logits were wanted.

    A step may take several passes; its rows are counted through all of them, like its logits. Nothing is copied before
    `of` is called.
    """

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        """Tap `layers`; raise ModelRefused where `Taps` does."""
        self._taps = Taps(model, layers)
        self._passes: list[tuple[dict[int, torch.Tensor], Sequence[int]]] = []

    def begin(self) -> None:
        """Begin a step and forget the last one."""
        self._passes.clear()

    def keep(self, rows: Sequence[int]) -> None:
        """Note after a pass that its `rows` gave the next logits."""
        self._passes.append((self._taps.entering(), rows))

    def of(self, layers: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
        """Return [n, taps * hidden] float32 that entered `layers` in `rows` [n] of the step's logits."""
        parts = [entering[layer][0, row] for entering, row in map(self._source, rows) for layer in layers]
        return torch.cat(parts).view(len(rows), -1).float()

    def _source(self, row: int) -> tuple[dict[int, torch.Tensor], int]:
        """Return the pass that gave row `row` of the step's logits, and which of its own rows that was."""
        for entering, kept in self._passes:
            if row < len(kept):
                return entering, kept[row]
            row -= len(kept)
        raise IndexError(f"the step gave no such row; {row} too many")

    def close(self) -> None:
        """Remove the hooks."""
        self._taps.close()
        self._passes.clear()

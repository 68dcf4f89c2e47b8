"""The hidden states behind the logits of a step, kept until the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outrider.cloud.steering import Taps


class TappedRows:
    """The residual stream that entered some layers of a model, in the rows of the newest step whose logits were wanted.

    A step may take several passes; its rows are counted through all of them, as its logits are. Nothing is copied
    before somebody asks.
    """

    def __init__(self, model: Any, layers: Sequence[int]) -> None:
        """Raises ModelRefused as `Taps` does."""
        self._taps = Taps(model, layers)
        self._passes: list[tuple[dict[int, torch.Tensor], Sequence[int]]] = []

    def begin(self) -> None:
        """A step begins: what the last one left is not wanted any more."""
        self._passes.clear()

    def keep(self, rows: Sequence[int]) -> None:
        """After a pass: its rows `rows` gave the next logits."""
        self._passes.append((self._taps.entering(), rows))

    def of(self, layers: Sequence[int], rows: Sequence[int]) -> torch.Tensor:
        """[n, taps * hidden] float32: what entered `layers` in `rows` [n] of the step's logits."""
        parts = [entering[layer][0, row] for entering, row in map(self._source, rows) for layer in layers]
        return torch.cat(parts).view(len(rows), -1).float()

    def _source(self, row: int) -> tuple[dict[int, torch.Tensor], int]:
        """The pass that gave row `row` of the step's logits, and which of its own rows that was."""
        for entering, kept in self._passes:
            if row < len(kept):
                return entering, kept[row]
            row -= len(kept)
        raise IndexError(f"the step gave no such row; {row} too many")

    def close(self) -> None:
        """Tap no more."""
        self._taps.close()
        self._passes.clear()

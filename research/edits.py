"""Documents that texts repeat: a text with some of its tokens replaced, inserted and deleted."""

from __future__ import annotations

import random
from collections.abc import Sequence


def edited(tokens: Sequence[int], share: float, run: int, *, seed: int) -> list[int]:
    """Return tokens with `share` of them replaced, inserted or deleted in runs of `run`, by tokens of the same text."""
    draw_number = random.Random(f"{seed} {run} {len(tokens)}")
    document: list[int] = []
    place = 0
    while place < len(tokens):
        if draw_number.random() >= share / run:
            document.append(tokens[place])
            place += 1
            continue
        kind = draw_number.choice(("replace", "insert", "delete"))
        if kind != "delete":
            document += draw_number.choices(tokens, k=run)
        if kind != "insert":
            place += run
    return document

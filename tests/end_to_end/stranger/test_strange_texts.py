"""Random texts in random worlds, each held against one that a stranger wrote apart from the product.

Each world is drawn from a seed, which its test is named by: `-k world-17` plays it again.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from strange_worlds import THEMES, WORLDS, World


@pytest.mark.parametrize("seed", range(len(THEMES)), ids=lambda seed: f"{THEMES[seed]}-{seed}")
def test_the_first_texts_of_every_kind_of_world_are_the_strangers(play, seed) -> None:
    played = play(replace(World.drawn(seed), texts=2))
    assert played.complaints == [], f"in world {seed}"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(WORLDS), ids=lambda seed: f"world-{seed}")
def test_every_text_of_a_world_is_the_strangers(play, seed) -> None:
    played = play(World.drawn(seed))
    assert played.complaints == [], f"in world {seed}, with {dict(played.counts)}"

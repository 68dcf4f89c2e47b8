"""Worlds played once for a test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from strange_play import Play
from strange_worlds import World


@pytest.fixture
def play(tmp_path_factory: pytest.TempPathFactory, relay: type[Any]) -> Callable[[World], Play]:
    """Play a world, and return what it shows."""
    base = tmp_path_factory.getbasetemp() / "strange"
    base.mkdir(exist_ok=True)

    def played(world: World) -> Play:
        with pytest.MonkeyPatch.context() as patch:
            made = Play(world, base, relay, patch)
            asyncio.run(made.run())
        return made

    return played

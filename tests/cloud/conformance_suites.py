"""Suites of our own backend."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from branch_conformance import BRANCH_CHECKS
from conformance import CHECKS, Suite
from conformance_oracle import Oracle

from outrider.cloud.target.backend import Backend
from outrider.cloud.target.own_cache import OwnCacheTarget
from outrider.cloud.target.target import Target
from outrider.cloud.target.target_loading import load_target
from outrider.cloud.target.transformers_backend import TransformersBackend

_LONG = ("anything_in_any_order", "texts_are_those_of_the_rule", "texts_follow_the_law")
# Every check for a family of targets beside others, the long ones in soak.
EVERY_CHECK = [pytest.param(check, marks=[pytest.mark.soak] * (check in _LONG)) for check in (*CHECKS, *BRANCH_CHECKS)]


@lru_cache(maxsize=3)
def loaded(folder: Path, exact: str, device: str) -> Target:
    return load_target(str(folder), kv_tokens=2048, exact=exact, device=device)


def suite_of(
    folder: Path,
    oracle: Oracle,
    made: Callable[..., Backend] = TransformersBackend,
    *,
    page_size: int = 16,
    exact: str = "auto",
    device: str = "cpu",
) -> Suite:
    first = loaded(folder, exact, device)
    parts = {"passes": first.passes, "packing": first.packing, "straight": first.straight}
    target = type(first)(first.model, first.tokenizer_json, kv_tokens=2048, page_size=page_size, **parts)
    if isinstance(target, OwnCacheTarget) and isinstance(first, OwnCacheTarget):
        target.most_rows = first.most_rows
    forward = target.forward

    def fail_next_step() -> None:
        def failing(*_: Any) -> Any:
            target.forward = forward  # type: ignore[method-assign]
            raise RuntimeError("it happens once")

        target.forward = failing  # type: ignore[method-assign]

    def spoil_next_step(number: float) -> None:
        def spoiled(*batch: Any) -> Any:
            target.forward = forward  # type: ignore[method-assign]
            logits = forward(*batch)
            logits[-1, logits.shape[1] // 2] = number
            return logits

        target.forward = spoiled  # type: ignore[method-assign]

    return Suite(made(target), oracle, fail_next_step, spoil_next_step)

"""The parts of a target's step: of its pass by torch's profiler, beside it by the engine's own timings."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.autograd.profiler import record_function
from torch.autograd.profiler_legacy import profile  # that of kineto prints lines of its own
from transformers import AttentionInterface

from outrider.cloud.target import attention
from outrider.cloud.target.target import Target
from research.engine.timed_steps import Clock, Steps

_MARKED_ATTENTION = "outrider_marked"
_PASSES = 24
_PRODUCTS = ("linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "_linear_pointwise")


@dataclass(frozen=True, slots=True)
class PassShares:
    """Shares of a pass's time, which add up to 1.

    Attributes:
        products: products by weights.
        attention: attention function with its reads and writes of the KV cache.
        operators: all other operators.
        python: time in no operator.
        calls: operators called in a pass, those inside others too.
    """

    products: float
    attention: float
    operators: float
    python: float
    calls: int


def pass_shares(steps: Steps, clock: Clock = time.perf_counter) -> PassShares:
    """Measure passes with and without the profiler, by turns, and compare the fastest of each kind.

    What the profiler adds is taken off evenly, by operator: the time of an operator has the profiler's work for the
    operators inside it.

    Args:
        steps: steps whose passes are measured.
        clock: seconds of the wall, by which the profiler times operators.
    """

    def forward_s() -> float:
        began = clock()
        steps.forward()
        return clock() - began

    plain_s, profiled_s, events = math.inf, math.inf, []
    with _marked(steps.target):
        for _ in range(_PASSES):
            plain_s = min(plain_s, forward_s())
            with profile() as profiled:
                seconds = forward_s()
            if seconds < profiled_s:
                profiled_s, events = seconds, profiled.function_events
    return shares_of(events, plain_s, profiled_s)


def shares_of(events: Sequence[Any], plain_s: float, profiled_s: float) -> PassShares:
    """Return the shares of a pass that took `plain_s`, and `profiled_s` with the profiler, which saw `events`."""
    added_s = max(0.0, profiled_s - plain_s) / max(1, len(events))
    parts: defaultdict[str, float] = defaultdict(float)
    for event in events:
        if event.cpu_parent is None:
            parts[_part(event.name)] += max(0.0, event.cpu_time_total / 1e6 - added_s * _inside(event))
    whole_s = max(plain_s, sum(parts.values()))
    products, attended, operators = (parts[name] / whole_s for name in ("products", "attention", "operators"))
    calls = sum(event.name != _MARKED_ATTENTION for event in events)
    return PassShares(products, attended, operators, max(0.0, 1.0 - products - attended - operators), calls)


def _part(name: str) -> str:
    if name == _MARKED_ATTENTION:
        return "attention"
    return "products" if name.rpartition("::")[2] in _PRODUCTS else "operators"


def _inside(event: Any) -> int:
    return sum(1 + _inside(child) for child in event.cpu_children)


@contextmanager
def _marked(target: Target) -> Iterator[None]:
    """Have the profiler see attention as one event in the passes of `target` inside the block."""

    def attend(*arguments: Any, **keywords: Any) -> Any:
        with record_function(_MARKED_ATTENTION):
            return attention.paged_attention(*arguments, **keywords)

    def marked(recorded: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        return attend if recorded is attention.paged_attention else function

    before = target.model_pass
    if target.straight is None:
        AttentionInterface.register(_MARKED_ATTENTION, attend)
        target.model.set_attn_implementation(_MARKED_ATTENTION)
    else:
        target.model_pass = target.straight.compiled(wrap=marked)
    try:
        yield
    finally:
        target.model_pass = before
        target.model.set_attn_implementation(attention.NAME)

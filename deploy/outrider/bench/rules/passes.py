"""Processor time of a target's first layers, and of a drafter's passes."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from outrider.bench.rules.record import PassTime
from outrider.drafters.onnx import OnnxDrafter
from outrider.drafters.packages import DrafterPackage
from outrider.drafters.proposals import ProposalRule
from outrider.proto.types import Sampling

REPEATS = 15
LENGTHS = (1, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Weights that a step of the first layers reads, and its processor time."""

    parameters: int
    step_ms: float


def least_ms(work: Callable[[], object], reset: Callable[[], object]) -> float:
    """Return the least processor time of `work` in this thread, in ms; `reset` comes before each time.

    The least of several is the work itself: a machine that does other things can only add to it.
    """
    found = []
    for _ in range(REPEATS):
        reset()
        began = time.thread_time()
        work()
        found.append(time.thread_time() - began)
    return 1e3 * min(found)


def layer_costs(target: Any, tokens: Sequence[int]) -> Mapping[int, LayerCost]:
    """Return the cost of a step of one row after `tokens`, with the first 1, 2, … layers of the target."""
    all_layers, found = target.model.layers, {}
    head = target.lm_head.weight.numel()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the time of one thread is all of it
    try:
        for number in range(1, len(all_layers) + 1):
            target.model.layers = all_layers[:number]
            target.config.num_hidden_layers = number
            cache = DynamicCache()
            target(torch.tensor([tokens]), past_key_values=cache)
            row = torch.tensor([tokens[-1:]])

            def step() -> None:
                target(row, past_key_values=cache)  # noqa: B023 - called at once
                cache.crop(-1)  # noqa: B023 - called at once

            step_ms = least_ms(step, lambda: None)
            weights = sum(weight.numel() for layer in all_layers[:number] for weight in layer.parameters())
            found[number] = LayerCost(weights + head, step_ms)
    finally:
        target.model.layers, target.config.num_hidden_layers = all_layers, len(all_layers)
        torch.set_num_threads(threads)
    return found


def pass_costs(package: DrafterPackage, tokens: Sequence[int]) -> Iterator[PassTime]:
    """Yield the time of a drafter's passes over more tokens after `tokens`, on one thread."""
    before, after = tokens, tuple(itertools.islice(itertools.cycle(tokens), max(LENGTHS)))
    state = OnnxDrafter(package).open(ProposalRule(Sampling(), prompt_length=len(before)))
    try:
        state.extend(before)
        state.propose(1)

        def reset() -> None:
            state.truncate(len(before))

        for length in LENGTHS:
            one_by_one = least_ms(lambda: state.propose(length), reset)  # noqa: B023 - called at once
            one_pass = least_ms(lambda: state.propose_forced(after[:length]), reset)  # noqa: B023 - called at once
            yield PassTime(length, one_by_one, one_pass)
    finally:
        state.close()

"""Steps of a target, and of transformers' `generate`, on the same clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outrider.cloud import attention
from outrider.cloud.distribution import VerificationInput
from outrider.cloud.sampling import Sampler
from outrider.cloud.target import SessionRows, Target
from outrider.proto.types import DraftToken, Sampling

Clock = Callable[[], float]

_TIMED_ATTENTION = "outrider_timed"
_PREFILL_ROWS = 256


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """Times of one step, seconds; `products_s` and `attention_s` come from a second pass over the same rows."""

    forward_s: float
    products_s: float
    attention_s: float
    sampling_s: float


class Steps:
    """Repeated steps of sessions after their contexts, as a context manager that holds their KV pages."""

    def __init__(self, target: Target, contexts: Sequence[Sequence[int]], rows: int, sampling: Sampling, clock: Clock):
        """Step on `target`.

        Args:
            target: target with room for all contexts and rows.
            contexts: tokens before the rows of each session.
            rows: rows of a session in a step: its newest token and drafts.
            sampling: sampling settings of all sessions.
            clock: seconds.
        """
        self._target, self._clock = target, clock
        self._length = len(contexts[0])
        self._caches = [target.pool.allocate(self._length + rows) for _ in contexts]
        block = tuple(token % target.vocab_size for token in range(3, 3 + rows))
        self._batch = [SessionRows(cache, block, rows) for cache in self._caches]
        drafts = tuple(map(DraftToken, block[1:]))
        self._inputs = [
            VerificationInput(sampling, [*context, block[0]], self._length + 1, drafts) for context in contexts
        ]
        self._sampler = Sampler(target.device)
        for cache, context in zip(self._caches, contexts, strict=True):
            for first in range(0, self._length, _PREFILL_ROWS):
                target.forward([SessionRows(cache, tuple(context[first : first + _PREFILL_ROWS]), 0)])

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        for cache in self._caches:
            self._target.pool.release(cache)

    def step(self) -> MeasuredStep:
        """Make one step, and its pass again with a stopwatch in it."""
        began = self._clock()
        logits = self._target.forward(self._batch)
        forwarded = self._clock()
        self._sampler.sample(logits, self._inputs)
        sampled = self._clock()
        self._rewind()
        with _stopwatch(self._target.model, self._clock) as parts:
            self._target.forward(self._batch)
        self._rewind()
        return MeasuredStep(forwarded - began, parts["products"], parts["attention"], sampled - forwarded)

    def _rewind(self) -> None:
        for cache in self._caches:
            cache.truncate(self._length)


@contextmanager
def _stopwatch(model: Any, clock: Clock) -> Iterator[dict[str, float]]:
    """Add up the time of linear layers and of attention in the passes of `model` inside the block."""
    from transformers import AttentionInterface

    parts = {"products": 0.0, "attention": 0.0}
    began = 0.0

    def before(*_: object) -> None:
        nonlocal began
        began = clock()

    def after(*_: object) -> None:
        parts["products"] += clock() - began

    def attend(*arguments: Any, **keywords: Any) -> Any:
        started = clock()
        attended = attention.paged_attention(*arguments, **keywords)
        parts["attention"] += clock() - started
        return attended

    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    hooks = [layer.register_forward_pre_hook(before) for layer in layers]
    hooks += [layer.register_forward_hook(after) for layer in layers]
    AttentionInterface.register(_TIMED_ATTENTION, attend)
    model.set_attn_implementation(_TIMED_ATTENTION)
    try:
        yield parts
    finally:
        model.set_attn_implementation(attention.NAME)
        for hook in hooks:
            hook.remove()


class _Streamer:
    """A streamer that times the steps between the tokens that `generate` hands it, and has other work done between."""

    def __init__(self, clock: Clock, between: Callable[[], None]) -> None:
        self.times_s: list[float] = []
        self._clock, self._between = clock, between
        self._tokens = -1  # the prompt comes first
        self._resumed = 0.0

    def put(self, _: torch.Tensor) -> None:
        now = self._clock()
        self._tokens += 1
        if self._tokens > 1:  # the first token's step reads the prompt
            self.times_s.append(now - self._resumed)
        if self._tokens > 0:
            self._between()
        self._resumed = self._clock()

    def end(self) -> None:
        """Do nothing: a streamer needs the method."""


def generate_times(
    model: Any, contexts: Sequence[Sequence[int]], steps: int, clock: Clock, between: Callable[[], None]
) -> list[float]:
    """Return seconds of `steps` steps of transformers' greedy `generate` for a batch of `contexts`.

    `between` is called `steps` + 1 times, after each token. An end token does not end the texts.
    """
    streamer = _Streamer(clock, between)
    input_ids = torch.tensor(contexts)
    model.generation_config.eos_token_id = None
    model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        streamer=streamer,
        max_new_tokens=steps + 1,
        do_sample=False,
        pad_token_id=0,
    )
    return streamer.times_s

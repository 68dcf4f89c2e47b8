"""A KV cache that only counts: the backend of a verifier whose target has no model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.cloud.target.backend import Capacity, Handle, StepOutput, StepRow, TargetFacts
from outrider.proto.errors import ResourceExhausted

PAGE_SIZE = 4
FORGOTTEN = 0.7  # chance that nothing is


@dataclass(slots=True, eq=False)
class CountedSequence:
    """A sequence of which only lengths are known."""

    length: int = 0
    num_pages: int = 0


class CountedPages:
    """Pages that sequences hold and give back; `held` of them are held now."""

    def __init__(self, pages: int, facts: TargetFacts, rng: random.Random | None = None) -> None:
        """Hold `pages` pages; `rng` decides whether a sequence finds its beginning computed; None: it never does."""
        self.facts = facts
        self.held = 0
        self._pages = pages
        self._rng = rng

    @property
    def capacity(self) -> Capacity:
        return Capacity(PAGE_SIZE, self._pages, self._pages - self.held)

    def open(self, tokens: Sequence[int] = (), isolation: str = "") -> CountedSequence:  # noqa: ARG002 - the port's
        """Open a sequence; whole pages of it may be computed already."""
        found = min((len(tokens) - 1) // PAGE_SIZE, self.capacity.free_pages) if tokens else 0
        if found <= 0 or self._rng is None or self._rng.random() < FORGOTTEN:
            return CountedSequence()
        self.held += found
        return CountedSequence(found * PAGE_SIZE, found)

    def reserve(self, handle: Handle, tokens: int) -> None:
        """Let a sequence hold pages for `tokens` positions; raises `ResourceExhausted`."""
        sequence = _counted(handle)
        pages = self.capacity.pages_for(tokens)
        if pages - sequence.num_pages > self.capacity.free_pages:
            raise ResourceExhausted("no page is free")
        self.held += pages - sequence.num_pages
        sequence.num_pages = pages

    def compute(self, handle: Handle, positions: int) -> None:
        _counted(handle).length += positions

    def truncate(self, handle: Handle, length: int) -> None:
        if length > handle.length:
            raise ValueError(f"the sequence has {handle.length} positions, not {length}")
        _counted(handle).length = length

    def release(self, handle: Handle) -> None:
        sequence = _counted(handle)
        self.held -= sequence.num_pages
        sequence.num_pages = sequence.length = 0

    def tap(self, layers: Sequence[int]) -> None:
        """Do nothing: there are no layers."""

    def step(self, rows: Sequence[StepRow]) -> StepOutput:
        """Refuse: the simulated engine asks the target itself."""
        raise NotImplementedError

    def close(self) -> None:
        """Do nothing."""


def _counted(handle: Handle) -> CountedSequence:
    if not isinstance(handle, CountedSequence):
        raise TypeError("the sequence holds no pages here")
    return handle


def toy_facts(tokenizer_sha256: str, vocab_size: int, context_length: int, eos_tokens: frozenset[int]) -> TargetFacts:
    """Return the facts of a target without a model."""
    return TargetFacts("", tokenizer_sha256, vocab_size, context_length, eos_tokens, 1, 1, torch.device("cpu"))

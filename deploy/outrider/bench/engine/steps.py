"""Steps of a target, and of transformers' `generate`, on the same clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.bench.step_shape import StepShape
from outrider.cloud.backend import VerificationBranch
from outrider.cloud.branch_cache import BranchCache
from outrider.cloud.distribution import VerificationInput
from outrider.cloud.sampling import Sampler
from outrider.cloud.target import SessionRows, Target
from outrider.proto.types import BlockBranch, DraftToken, Sampling

Clock = Callable[[], float]

_PREFILL_ROWS = 256


@dataclass(frozen=True, slots=True)
class Case:
    """The work of a step, the same for every engine.

    Attributes:
        sessions: sessions that take part.
        rows: rows of each.
        logits: rows of each whose logits are wanted, the last ones.
        context: tokens before the rows of each session.
        branches: branches of one row each beside these, which take the place of one draft after another.
    """

    sessions: int
    rows: int
    logits: int
    context: int
    branches: int = 0

    @property
    def name(self) -> str:
        """Sessions and rows in the form of the option; `prefill` and its length where a prompt is read."""
        if self.logits < self.rows:
            return f"prefill {self.rows}"
        return str(StepShape(self.sessions, self.rows, self.branches))

    @property
    def decodes(self) -> bool:
        """Whether it is the step of plain decoding."""
        return self.rows == self.logits == 1

    def contexts(self, vocab_size: int) -> list[list[int]]:
        """Return the tokens before the rows of each session."""
        return [[(37 * i + j) % vocab_size for i in range(self.context)] for j in range(self.sessions)]

    def prompt(self, vocab_size: int) -> list[int]:
        """Return the rows of a session."""
        return [token % vocab_size for token in range(3, 3 + self.rows)]

    def leaves(self, vocab_size: int) -> list[BlockBranch]:
        """Return the branches of a session."""
        return [
            BlockBranch(i % (self.rows - 1), (DraftToken((3 + self.rows + i) % vocab_size),))
            for i in range(self.branches)
        ]


class Steps:
    """Repeated steps of sessions after their contexts, as a context manager that holds their KV pages."""

    def __init__(self, target: Target, case: Case, sampling: Sampling, clock: Clock):
        """Step on `target`.

        Args:
            target: target with room for all contexts and rows.
            case: what a step computes.
            sampling: sampling settings of all sessions.
            clock: seconds.
        """
        self._target, self._clock, self._length = target, clock, case.context
        self._caches = [target.pool.allocate(case.context + case.rows) for _ in range(case.sessions)]
        block = tuple(case.prompt(target.vocab_size))
        self._batch = [SessionRows(cache, block, case.logits) for cache in self._caches]
        self._leaves = case.leaves(target.vocab_size)
        contexts = case.contexts(target.vocab_size)
        known = case.rows - case.logits + 1
        drafts = tuple(map(DraftToken, block[known:]))
        self._inputs = [
            VerificationInput(sampling, [*context, *block[:known]], case.context + known, drafts)
            for context in contexts
        ]
        self._inputs += [
            VerificationBranch.of(whole, leaf).verification for whole in tuple(self._inputs) for leaf in self._leaves
        ]
        self._sampler = Sampler(target.device)
        self.tokens_after_contexts = [
            self._read(cache, context) for cache, context in zip(self._caches, contexts, strict=True) if context
        ]

    def _read(self, cache: Any, context: list[int]) -> int:
        for first in range(0, len(context), _PREFILL_ROWS):
            logits = self._target.forward([SessionRows(cache, tuple(context[first : first + _PREFILL_ROWS]), 1)])
        return int(logits[-1].argmax())

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        for cache in self._caches:
            self._target.pool.release(cache)

    @property
    def target(self) -> Target:
        """The target that makes the pass."""
        return self._target

    def forward(self) -> torch.Tensor:
        """Make the pass of a step, and forget it."""
        with self._target.pool.lend(len(self._leaves) * len(self._caches)) as pages:
            logits = self._target.forward([*self._batch, *self._beside(pages)])
        for cache in self._caches:
            cache.truncate(self._length)
        return logits

    def _beside(self, pages: list[int]) -> Iterator[SessionRows]:
        """Lay the branches of all sessions on lent `pages`, one each."""
        for cache in self._caches:
            for index, (draft,) in self._leaves:
                branch = BranchCache.beside(self._target.pool, cache, self._length + 1 + index, 1, pages)
                if branch is not None:
                    yield SessionRows(branch, (draft.id,), 1)

    def step(self) -> tuple[float, float]:
        """Make one step, and return the seconds of its pass and of its sampling."""
        began = self._clock()
        logits = self.forward()
        forwarded = self._clock()
        self._sampler.sample(logits, self._inputs)
        return forwarded - began, self._clock() - forwarded

    def turn(self, warm: int, timed: int) -> list[tuple[float, float]]:
        """Make `warm` steps and then `timed` ones, and return the seconds of these."""
        return [self.step() for _ in range(warm + timed)][warm:]


class _Streamer:
    """A streamer that times the steps between the tokens that `generate` hands it, and has other work done between."""

    def __init__(self, clock: Clock, warm: int, timed: int, between: Callable[[list[float]], None]) -> None:
        self._clock, self._warm, self._steps, self._between = clock, warm, warm + timed, between
        self._times: list[float] = []
        self._tokens = -1  # the prompt comes first
        self._resumed = 0.0

    def put(self, _: torch.Tensor) -> None:
        now = self._clock()
        self._tokens += 1
        if self._tokens > 1:  # the first token's step reads the prompt
            self._times.append(now - self._resumed)
        if len(self._times) == self._steps:
            self._between(self._times[self._warm :])
            self._times = []
        self._resumed = self._clock()

    def end(self) -> None:
        """Do nothing: a streamer needs the method."""


def generate_in_turns(
    model: Any,
    contexts: Sequence[Sequence[int]],
    turns: int,
    warm: int,
    timed: int,
    clock: Clock,
    between: Callable[[list[float]], None],
) -> None:
    """Run turns of `warm` and then `timed` steps of transformers' greedy `generate` for a batch of `contexts`.

    `between` is called after each turn, with the seconds of the timed steps. An end token does not end the texts.
    """
    input_ids = torch.tensor(contexts)
    model.generation_config.eos_token_id = None
    model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        streamer=_Streamer(clock, warm, timed, between),
        max_new_tokens=turns * (warm + timed) + 1,
        do_sample=False,
        pad_token_id=0,
    )


def generate_first_s(model: Any, prompt: Sequence[int], clock: Clock) -> float:
    """Return the seconds in which transformers' `generate` reads a prompt and makes a token."""
    input_ids = torch.tensor([prompt])
    began = clock()
    model.generate(
        input_ids, attention_mask=torch.ones_like(input_ids), max_new_tokens=1, do_sample=False, pad_token_id=0
    )
    return clock() - began

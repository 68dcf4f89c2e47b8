"""Steps of a target, and of transformers, on the same clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from outrider.cloud.target.distribution import VerificationInput
from outrider.cloud.target.sampler import Sampler
from outrider.cloud.target.target import SessionRows, Target
from outrider.proto.types import DraftToken, Sampling
from research.step_shape import StepShape

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
    """

    sessions: int
    rows: int
    logits: int
    context: int

    @property
    def name(self) -> str:
        """Sessions and rows in the form of the option; `prefill` and its length where a prompt is read."""
        if self.logits < self.rows:
            return f"prefill {self.rows}"
        return str(StepShape(self.sessions, self.rows))

    @property
    def decodes(self) -> bool:
        """Whether it is the step of plain decoding."""
        return self.rows == self.logits == 1

    def text(self, vocab_size: int, session: int = 0) -> list[int]:
        """Return the tokens before the rows of a session."""
        return [(37 * i + session) % vocab_size for i in range(self.context)]

    def prompt(self, vocab_size: int) -> list[int]:
        """Return the rows of a session."""
        return [token % vocab_size for token in range(3, 3 + self.rows)]


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
        text = case.text(target.vocab_size)
        block = tuple(case.prompt(target.vocab_size))
        self._caches = [target.pool.allocate(case.context + case.rows) for _ in range(case.sessions)]
        self._batch = [SessionRows(cache, block, case.logits) for cache in self._caches]
        known = case.rows - case.logits + 1
        drafts = tuple(map(DraftToken, block[known:]))
        one = VerificationInput(sampling, [*text, *block[:known]], case.context + known, drafts)
        self._inputs = [one] * case.sessions
        self._sampler = Sampler(target.device)
        self.token_after_context = self._read(text) if text else None

    def _read(self, text: list[int]) -> int:
        """Read a text once, give every session keys and values of its own, and return the token that follows."""
        first, *others = self._caches
        for start in range(0, len(text), _PREFILL_ROWS):
            logits = self._target.forward([SessionRows(first, tuple(text[start : start + _PREFILL_ROWS]), 1)])
        with torch.inference_mode():
            for cache in others:
                for layer in self._target.pool.layers:
                    self._target.pool.copy(layer, first.slots[: len(text)], cache.slots[: len(text)])
                cache.extend(text)
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
        logits = self._target.forward(self._batch)
        for cache in self._caches:
            cache.truncate(self._length)
        return logits

    def step(self) -> tuple[float, float]:
        """Make one step, and return the seconds of its pass and of its sampling."""
        began = self._clock()
        logits = self.forward()
        forwarded = self._clock()
        self._sampler.sample(logits, self._inputs)
        return forwarded - began, self._clock() - forwarded

    def turn(self, warm: int, timed: int) -> list[float]:
        """Make `warm` steps and then `timed` ones, and return the seconds of these."""
        return [sum(self.step()) for _ in range(warm + timed)][warm:]


class LibrarySteps:
    """Steps of transformers on a KV cache of its own kind.

    A row of a session is a step of its greedy `generate`; of several rows it makes the pass by which its assisted
    generation verifies them.
    """

    def __init__(self, model: Any, case: Case, clock: Clock) -> None:
        """Step on `model`, whose texts no end token ends from now on."""
        vocab_size = model.config.vocab_size
        self._model, self._case, self._clock = model, case, clock
        model.generation_config.eos_token_id = None
        self._cache = DynamicCache(config=model.config)
        text = case.text(vocab_size)
        if text:
            self._forward(torch.tensor([text]), 1)
            self._cache.batch_repeat_interleave(case.sessions)
        self._tokens = torch.tensor([[*text, *case.prompt(vocab_size)]]).expand(case.sessions, -1)

    def turn(self, warm: int, timed: int) -> list[float]:
        """Make `warm` steps and then `timed` ones, and return the seconds of these."""
        if self._case.decodes:
            times = _StepTimes(self._clock)
            self._generate(warm + timed, times)
            return times.steps[warm:]
        return [self._step() for _ in range(warm + timed)][warm:]

    def _step(self) -> float:
        began = self._clock()
        if self._case.context:
            self._forward(self._tokens[:, self._case.context :], self._case.logits)
            self._forget()
        else:
            self._generate(1)
        return self._clock() - began

    @torch.inference_mode()
    def _forward(self, rows: torch.Tensor, logits: int) -> None:
        """Make the pass for `rows` [sessions, rows], and choose the tokens after the last `logits` of each session."""
        self._model(rows, past_key_values=self._cache, logits_to_keep=logits).logits.argmax(-1)

    def _generate(self, count: int, streamer: Any = None) -> None:
        self._model.generate(
            self._tokens,
            attention_mask=torch.ones_like(self._tokens),
            past_key_values=self._cache,
            streamer=streamer,
            max_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
        )
        self._forget()

    def _forget(self) -> None:
        self._cache.crop(self._case.context - self._cache.get_seq_length())


class _StepTimes:
    """A streamer that times the steps of `generate`, the first from when it hands over the prompt."""

    def __init__(self, clock: Clock) -> None:
        self.steps: list[float] = []
        self._clock, self._last = clock, 0.0

    def put(self, tokens: torch.Tensor) -> None:
        """Take the prompt, or the tokens of a step."""
        now = self._clock()
        if tokens.dim() == 1:
            self.steps.append(now - self._last)
        self._last = now

    def end(self) -> None:
        """Do nothing: a streamer needs the method."""

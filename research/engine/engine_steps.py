"""Steps of the verifier's engine itself, with sessions whose drafts are right, so that every step has the same rows."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from outrider.cloud.serving.engine import Engine
from outrider.cloud.serving.slots import Outbox
from outrider.cloud.target.target import Target
from outrider.cloud.target.transformers_backend import TransformersBackend
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto.errors import DeadlineExceeded, OutriderError
from outrider.proto.session import VerifierRules
from outrider.proto.types import (
    CloudFrame,
    Commit,
    Draft,
    DraftToken,
    Open,
    Patience,
    Report,
    Sampling,
    token_ids,
)
from research.engine.timed_steps import Case

_DEADLINE_S = 600.0
_MAX_GAP_S = 60.0  # so that all have read their prompts before the first has ended its text


class _Edge(Outbox):
    """An edge in the engine's own thread, which answers each commit with what it believes is the text after it."""

    def __init__(
        self, engine: Engine, key: int, prompt: Sequence[int], text: Sequence[int], drafts: int, reading: set[int]
    ) -> None:
        """Decode as session `key` of those that are `reading` their prompts; the last to end that starts the timing."""
        self.tokens: list[int] = []
        self.error: OutriderError | None = None
        self.ended = threading.Event()
        self._engine, self._key = engine, key
        self._prompt, self._text, self._drafts = tuple(prompt), text, drafts
        self._chain = 0
        self._reading = reading

    def open(self, rules: VerifierRules, sampling: Sampling) -> None:
        """Open the session; its steps wait for drafts, where there are to be any."""
        patience = Patience(math.inf, self._drafts) if self._drafts else None
        frame = Open(
            rules.model,
            rules.tokenizer_sha256,
            self._prompt,
            sampling,
            f"bench-{self._key}",
            patience=patience,
            drafting=self._drafts > 0,
        )
        self._engine.post_open(self._key, frame, self, teacher="")
        if self._drafts:  # believed, so that the engine does not verify fewer of them at first
            self._engine.post_frame(self._key, Report(drafting=True, acceptance=1.0), lambda: None)

    def close(self) -> None:
        """Leave the session's place to others."""
        self._engine.post_close(self._key)

    def put(self, item: CloudFrame | OutriderError) -> None:
        """Take a frame in, and send the drafts that follow it."""
        if isinstance(item, OutriderError):
            self.error = item
        elif isinstance(item, Commit):
            first = len(self.tokens)
            self.tokens += token_ids(item.tokens)
            missed = self.tokens[first:] != list(self._text[first : len(self.tokens)])
            self._chain += missed  # rows beside others may have other bits, and the text may then be another
            if self._reading:
                self._reading.discard(self._key)
                self._engine.meter.timings.clear()
        if isinstance(item, OutriderError) or (isinstance(item, Commit) and item.finish is not None):
            self.ended.set()
            return
        first = len(self.tokens)
        if drafts := tuple(map(DraftToken, self._text[first : first + self._drafts])):
            self._engine.post_frame(self._key, Draft(self._chain, len(self._prompt) + first, drafts), lambda: None)

    def unread(self) -> int:
        """Return 0: everything is read at once."""
        return 0

    def text(self) -> list[int]:
        """Wait for the whole text.

        Raises:
            OutriderError: the session failed.
        """
        if not self.ended.wait(_DEADLINE_S):
            raise DeadlineExceeded(f"the engine made {len(self.tokens)} tokens in {_DEADLINE_S:.0f} s")
        if self.error is not None:
            raise self.error
        return self.tokens


def planning_s(target: Target, case: Case, steps: int, sampling: Sampling) -> float | None:
    """Return the median time between steps of an engine, in seconds: events, plans and commits.

    The texts are decoded without drafts, and where `case` has more rows a second time with their own tokens as drafts.

    Args:
        target: target with room for the contexts and for texts of `steps` times the rows.
        case: sessions and rows of the steps.
        steps: steps that the texts are long enough for.
        sampling: sampling settings of all sessions.

    Returns:
        None where no step had all sessions and half of the rows: the engine verifies no more drafts than pay.

    Raises:
        OutriderError: a session failed.
    """
    engine = _engine(target, case)
    sampling = replace(sampling, max_tokens=steps * case.rows + 1, ignore_eos=True)
    prompts = [case.text(target.vocab_size, session) for session in range(case.sessions)]
    engine.start()
    try:
        texts: list[list[int]] = [[] for _ in prompts]
        for drafts in dict.fromkeys((0, case.rows - 1)):
            texts = decode(engine, prompts, texts, drafts, sampling)
    finally:
        engine.stop()
    between = [
        timing.overhead_s
        for timing in engine.meter.timings
        if timing.sessions == case.sessions and 2 * timing.rows >= case.sessions * case.rows
    ]
    return median(between) if between else None


def _engine(target: Target, case: Case) -> Engine:
    rules = VerifierRules(
        "bench", "bench", target.tokenizer_sha256, target.vocab_size, target.context_length, target.eos_tokens
    )
    config = VerifierConfig(max_sessions=case.sessions, max_gap_s=_MAX_GAP_S)
    return Engine(TransformersBackend(target), rules, config)


def decode(
    engine: Engine, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], drafts: int, sampling: Sampling
) -> list[list[int]]:
    """Return the texts that follow `prompts`, with `drafts` tokens of `texts` to verify in each step.

    Raises:
        OutriderError: a session failed.
    """
    first = drafts * len(prompts)
    reading = set(range(first, first + len(prompts)))
    edges = [
        _Edge(engine, key, prompt, text, drafts, reading)
        for key, (prompt, text) in enumerate(zip(prompts, texts, strict=True), start=first)
    ]
    for edge in edges:
        edge.open(engine.rules, sampling)
    decoded = [edge.text() for edge in edges]
    for edge in edges:
        edge.close()
    return decoded

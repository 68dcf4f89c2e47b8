"""Probes of a recording: the target's opinion of proposals, and what a token of drafter and target takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch

from outrider.bench.simulator.costs import Costs
from outrider.bench.traces.recording import DrafterCosts, TargetCosts
from outrider.cloud.kv_cache import SessionCache
from outrider.cloud.sampling import Sampler, VerificationInput, processed_logits
from outrider.cloud.target import Rows, Target
from outrider.cloud.text_writer import WrittenText
from outrider.edge.drafters.proposals import ProposalRule
from outrider.edge.drafters.protocol import Drafter, DraftState
from outrider.proto.policy import Line
from outrider.proto.types import DraftToken, Sampling

DRAFTS = (0, 1, 2, 4, 8, 16)  # verified in a step
REPEATS = 5
TEXTS = 4
BLOCK = 8  # tokens a job of a drafter
BLOCKS = 4  # after a prompt


class TargetChances:
    """The target's probabilities along one text; at temperature 0 those at 1, as the verifier takes them."""

    def __init__(self, written: WrittenText) -> None:
        """Process the logits of all positions of the text."""
        if written.logits is None:
            raise ValueError("the text was written without its logits")
        prompt = written.request.prompt
        block = tuple(map(DraftToken, written.tokens[:-1]))
        verified = VerificationInput(written.request.sampling, list(prompt), len(prompt), block)
        with torch.inference_mode():
            self._scores = processed_logits(written.logits, verified)  # [n, vocab] float64
            self._log_totals = torch.logsumexp(self._scores, dim=-1)

    def of(self, tokens: Sequence[int]) -> list[float]:
        """Return [n] probabilities of `tokens` [n], each after the text before it; 0 beyond the vocabulary."""
        wanted = torch.tensor(tokens, device=self._scores.device)
        known = wanted.clamp(max=self._scores.shape[1] - 1)
        p = torch.exp(self._scores.gather(1, known[:, None])[:, 0] - self._log_totals)
        return [float(chance) for chance in torch.where(known == wanted, p, 0.0)]


class TargetProbe:
    """Times steps after the prompts of a few texts."""

    def __init__(self, target: Target, sampling: Sampling) -> None:
        self._target = target
        self._sampling = sampling
        self._sampler = Sampler(target.device)

    def costs(self, texts: Sequence[WrittenText]) -> TargetCosts:
        """Return costs from texts of middle length; the very first step does not count: it makes the target ready."""
        ordered = sorted(texts, key=lambda text: text.prompt_length)
        first = max(0, (len(ordered) - TEXTS) // 2)
        chosen = ordered[first : first + TEXTS]
        self._steps_after(chosen[0], (0,), 1)
        reading: list[tuple[int, float]] = []
        by_rows: dict[int, list[float]] = {}
        for text in chosen:
            reading_s, steps = self._steps_after(text, DRAFTS, REPEATS)
            reading.append((text.prompt_length, reading_s))
            for rows, seconds in steps:
                by_rows.setdefault(rows, []).append(seconds)
        line = Line(fade=1.0)
        for rows, all_s in by_rows.items():
            line.add(rows, median(all_s))
        prefill_s = median(max(0.0, seconds - line.base) / rows for rows, seconds in reading)
        return TargetCosts(line.base, line.slope, prefill_s)

    def _steps_after(
        self, text: WrittenText, drafts: Sequence[int], repeats: int
    ) -> tuple[float, list[tuple[int, float]]]:
        """Return seconds of reading the prompt, and (rows, seconds) of steps after it, whatever the drafts are."""
        prompt, pool = text.transcript[: text.prompt_length], self._target.pool
        drafts = [count for count in drafts if len(prompt) + 1 + count <= self._target.context_length]
        transcript = [*prompt, text.transcript[text.prompt_length]]
        cache = pool.allocate(len(transcript) + max(drafts))
        try:
            reading_s = self._step(cache, VerificationInput(self._sampling, list(prompt), len(prompt), ()), prompt)
            steps = []
            for _ in range(repeats):
                for count in drafts:  # all counts a round, so that a slow moment meets them all
                    cache.truncate(len(prompt))
                    block = (DraftToken(transcript[-1]),) * count
                    verified = VerificationInput(self._sampling, transcript, len(prompt), block)
                    steps.append((count + 1, self._step(cache, verified, transcript[-1:] * (count + 1))))
        finally:
            pool.release(cache)
        return reading_s, steps

    def _step(self, cache: SessionCache, verified: VerificationInput, rows: Sequence[int]) -> float:
        """Return the seconds of a step that puts `rows` into the cache, the last of which are verified."""
        began = time.perf_counter()
        logits = self._target.forward([Rows(cache, tuple(rows), len(verified.block) + 1)])
        self._sampler.sample(logits, [verified])
        return time.perf_counter() - began


class DrafterProbe:
    """Times one drafter, text by text. Processor time: the drafters compute in this thread alone."""

    def __init__(self, drafter: Drafter, sampling: Sampling) -> None:
        self._drafter = drafter
        self._sampling = sampling
        self._token_s: list[float] = []
        self._reading: list[tuple[int, float]] = []  # tokens of a prompt, seconds with the one that was drafted

    def after(self, text: WrittenText) -> None:
        """Time one prompt, and a few blocks after it."""
        state = self._drafter.open(ProposalRule(self._sampling, prompt_length=text.prompt_length))
        try:
            began = time.thread_time()
            state.extend(text.transcript[: text.prompt_length])
            state.propose(1)
            self._reading.append((text.prompt_length, time.thread_time() - began))
            self._blocks(state)
        finally:
            state.close()

    def costs(self) -> DrafterCosts:
        """Return the medians; a drafter that never proposed anything counts as a usual one."""
        token_s = median(self._token_s) if self._token_s else Costs().drafting_s
        read = [max(0.0, seconds - token_s) / (tokens - 1) for tokens, seconds in self._reading if tokens > 1]
        return DrafterCosts(token_s, median(read) if read else 0.0)

    def _blocks(self, state: DraftState) -> None:
        for _ in range(BLOCKS):
            began = time.thread_time()
            drafted = len(state.propose(BLOCK))
            if drafted < 2:
                return
            self._token_s.append((time.thread_time() - began) / drafted)

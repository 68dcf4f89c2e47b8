"""A target and drafters without a model, whose tokens are a function of the prefix."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.proto.errors import Internal, OutriderError
from outrider.proto.session import CatchUpJob, CaughtUp, Drafted, DrafterFailed, DraftJob, TeacherForced
from outrider.proto.types import DraftToken

Oracle = Callable[[tuple[int, ...]], int]  # the target's token after a prefix
Proposer = Callable[[tuple[int, ...], int], tuple[DraftToken, ...]]  # the drafts after a prefix, at most a number

_CATCH_UP_S = 0.001


def hashing_oracle(seed: int, vocab: int = 8, eos_odds: float = 0.01) -> Oracle:
    """Return a target whose next token is a fixed, unpredictable function of the prefix; its EOS is 0."""

    def next_token(prefix: tuple[int, ...]) -> int:
        rng = random.Random(f"{seed} {prefix}")
        return 0 if rng.random() < eos_odds else rng.randrange(1, vocab)

    return next_token


@dataclass(frozen=True, slots=True)
class OracleTarget:
    """A target that follows its oracle."""

    oracle: Oracle

    def after(self, transcript: Sequence[int], block: tuple[int, ...]) -> tuple[int, ...]:
        before = tuple(transcript)
        return tuple(self.oracle(before + block[:j]) for j in range(len(block) + 1))

    def reward(self, start: int, drafts: int) -> None:
        """Not known."""


def drafter_of(
    oracle: Oracle,
    seed: int,
    right: float,
    silent: float = 0.0,
    dies_after: int = 1 << 30,
    confidence: str = "none",
    vocab: int = 8,
    runners_up: int = 0,
) -> Proposer:
    """Return a drafter that proposes the oracle's tokens, or others.

    Args:
        right: chance of the oracle's token.
        silent: chance of fewer tokens than asked for.
        dies_after: number of calls before it raises `Internal`.
        confidence: `none`, `telling` (high where it is right) or `false` (low there).
        runners_up: tokens named beside each proposal; the first is the oracle's in place of most that are wrong.
    """
    rng, calls = random.Random(seed), itertools.count()

    def confidence_of(hit: bool) -> float:
        if confidence == "none":
            return math.nan
        return rng.uniform(0.7, 1.0) if hit == (confidence == "telling") else rng.uniform(0.0, 0.6)

    def propose(prefix: tuple[int, ...], count: int) -> tuple[DraftToken, ...]:
        if next(calls) >= dies_after:
            raise Internal("the drafter has died")
        if rng.random() < silent:
            count = rng.randrange(count)
        drafts: tuple[DraftToken, ...] = ()
        for _ in range(count):
            wanted = oracle(prefix)
            token = wanted if rng.random() < right else rng.randrange(vocab)
            prefix += (token,)
            others = [wanted, *(rng.randrange(vocab) for _ in range(runners_up))] if runners_up else []
            named = tuple([other for other in others[rng.random() < 0.2 :] if other != token][:runners_up])
            drafts += (DraftToken(token, confidence_of(token == wanted), runners_up=named),)
        return drafts

    return propose


class ScriptedDrafters:
    """Drafters that keep a prefix each. A token takes half to twice `drafting_s`."""

    def __init__(self, proposers: Sequence[Proposer], drafting_s: float, rng: random.Random) -> None:
        self.prefixes: list[tuple[int, ...]] = [()] * len(proposers)
        self._proposers = proposers
        self._drafting_s = drafting_s
        self._rng = rng

    def draft(self, job: DraftJob) -> tuple[Drafted | DrafterFailed, float]:
        prefix = self.prefixes[job.drafter][: job.truncate_to] + job.extend_with
        forced_from = job.truncate_to + job.skip
        try:
            forced = self._teacher_force(job.drafter, prefix, forced_from, forced_from + job.teacher_forced)
            drafts = self._proposers[job.drafter](prefix, job.count) if job.count else ()
        except OutriderError as error:
            return DrafterFailed(error, job.drafter), self._drafting_s
        self.prefixes[job.drafter] = prefix + tuple(draft.id for draft in drafts)
        seconds = self._drafting_s * max(1, len(drafts)) * self._rng.uniform(0.5, 2)
        return Drafted(job, drafts, seconds, TeacherForced(forced)), seconds

    def catch_up(self, job: CatchUpJob) -> tuple[CaughtUp | DrafterFailed, float]:
        prefix = self.prefixes[job.drafter][: job.truncate_to] + job.tokens
        try:
            forced = self._teacher_force(job.drafter, prefix, job.start, len(prefix))
        except OutriderError as error:
            return DrafterFailed(error, job.drafter), self._drafting_s
        self.prefixes[job.drafter] = prefix
        log_q = (-1.0 - job.drafter,) * job.score  # the first drafter fits prompts best
        return CaughtUp(job, TeacherForced(forced, log_q), _CATCH_UP_S), self._drafting_s

    def _teacher_force(self, drafter: int, prefix: tuple[int, ...], start: int, end: int) -> tuple[DraftToken, ...]:
        proposals = [self._proposers[drafter](prefix[:position], 1) for position in range(start, end)]
        return tuple(drafts[0] if drafts else DraftToken(-1) for drafts in proposals)

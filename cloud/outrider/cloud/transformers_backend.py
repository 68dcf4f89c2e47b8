"""Our own backend: a model of transformers on the paged KV cache, default and oracle of all others."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from functools import cached_property
from typing import NoReturn

import torch

from outrider.cloud.backend import Capacity, Handle, StepOutput, StepRow, TargetFacts
from outrider.cloud.distribution import VerificationInput
from outrider.cloud.kv_cache import SessionCache
from outrider.cloud.prompt_scores import split_scored, wanted_rows
from outrider.cloud.sampling import Sampled, Sampler, are_numbers
from outrider.cloud.target import SessionRows, Target
from outrider.proto.types import CommittedToken, DraftToken, PromptToken, token_ids

log = logging.getLogger(__name__)


class TransformersBackend:
    """The port (`Backend`) of a `Target` in this process."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._sampler = Sampler(target.device)
        self._tapped_layers: tuple[int, ...] = ()

    @cached_property
    def facts(self) -> TargetFacts:
        """Facts of the target."""
        target, config = self.target, self.target.model.config.get_text_config()
        return TargetFacts(
            tokenizer_json=target.tokenizer_json,
            tokenizer_sha256=target.tokenizer_sha256,
            vocab_size=target.vocab_size,
            context_length=target.context_length,
            eos_tokens=target.eos_tokens,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            device=target.device,
            guarantee=target.passes.guarantee,
            precision=target.precision,
            scores_prompts=True,
        )

    @property
    def capacity(self) -> Capacity:
        """Present state of the KV cache."""
        pool = self.target.pool
        return Capacity(pool.page_size, pool.page_count, pool.free_pages)

    def tap(self, layers: Sequence[int]) -> None:
        """Have later steps tap what enters `layers`; ModelRefused: the target has no such layers."""
        self.target.tap(layers)
        self._tapped_layers = tuple(layers)

    def open(self, tokens: Sequence[int] = (), isolation: str = "") -> SessionCache:
        """Open a sequence on the pages of `isolation` that hold the beginning of `tokens`, but for the last of them."""
        return self.target.pool.open(tokens[:-1], isolation)

    def reserve(self, handle: Handle, tokens: int) -> None:
        """Let a sequence hold pages for `tokens` positions, side by side where so many are free."""
        self.target.pool.resize(_own(handle), tokens)

    def truncate(self, handle: Handle, length: int) -> None:
        """Forget the positions from `length` on."""
        _own(handle).truncate(length)

    def fork(self, handle: Handle) -> SessionCache:
        """Return a sequence that shares the full pages of another."""
        return self.target.pool.fork(_own(handle), handle.length)

    def release(self, handle: Handle) -> None:
        """Give a sequence's pages back, whose text stays cached until their room is needed."""
        self.target.pool.release(_own(handle))

    @torch.inference_mode()
    def step(self, rows: Sequence[StepRow]) -> StepOutput:
        """Compute all rows in one pass and sample by the coupled rule."""
        lengths = [row.handle.length for row in rows]
        logits = self.target.forward([_session_rows(row) for row in rows])
        if not are_numbers(logits):
            self._refuse(rows, lengths)
        forwarded = time.monotonic()
        scores: list[tuple[PromptToken, ...]] = []
        places: Sequence[int] = range(len(logits))
        if any(row.scored for row in rows):
            scores, logits, places = split_scored(rows, logits)
        inputs = [row.verification for row in rows if row.verification is not None]
        sampled = self._sampler.sample(logits, inputs) if inputs else []
        for row in rows:
            drafts = 0 if row.verification is None else len(row.verification.block)
            self.target.pool.register(_own(row.handle), row.handle.length - drafts)
        left = iter(sampled)
        of_rows = [None if row.verification is None else next(left) for row in rows]
        return StepOutput(of_rows, self._taps(rows, inputs, sampled, places), forwarded, logits, scores)

    def close(self) -> None:
        """Do nothing: what it holds ends with this process."""

    def _refuse(self, rows: Sequence[StepRow], lengths: Sequence[int]) -> NoReturn:
        """Undo a step whose logits are no numbers.

        What led to them may be in the KV cache, where no other session must find it.
        """
        for row, length in zip(rows, lengths, strict=True):
            self.target.pool.distrust(_own(row.handle))
            self.truncate(row.handle, length)
        raise FloatingPointError("the target's logits are not numbers")

    def _taps(
        self,
        rows: Sequence[StepRow],
        inputs: Sequence[VerificationInput],
        sampled: Sequence[Sampled],
        places: Sequence[int],
    ) -> torch.Tensor | None:
        """Return the tapped states; `places` are those of the verified rows among all that had logits."""
        verifying = [row for row in rows if row.verification is not None]
        if not any(row.tapped for row in verifying):
            return None
        newest = newest_rows(inputs, sampled)
        wanted = [places[at] for at, row in zip(newest, verifying, strict=True) if row.tapped]
        try:
            return self.target.tapped(self._tapped_layers, wanted)
        except RuntimeError as error:  # torch raises it for want of memory too, and no text ends for a vector
            log.warning("nothing is tapped in this step: %s", str(error).split("\n")[0])
            return None


def _own(handle: Handle) -> SessionCache:
    assert isinstance(handle, SessionCache)  # noqa: S101 - a backend gets its own handles
    return handle


def _session_rows(row: StepRow) -> SessionRows:
    cache, verification = _own(row.handle), row.verification
    drafts = () if verification is None else token_ids(verification.block)
    return SessionRows(cache, (*row.tokens, *drafts), wanted_rows(row))


def newest_rows(inputs: Sequence[VerificationInput], sampled: Sequence[Sampled]) -> list[int]:
    """Return [n] each session's row, among the step's logits, of the newest position that is valid after the step.

    A session's first row is its last committed token, at position p; row j after it is its draft at p + j. Where a
    drafts agree, a + 1 tokens are committed, the last of which has not been processed: the newest that has is p + a.
    """
    firsts = itertools.accumulate((each.rows for each in inputs), initial=0)
    agreed = (_agreed(each.block, result.tokens) for each, result in zip(inputs, sampled, strict=True))
    return [first + hits for first, hits in zip(firsts, agreed, strict=False)]


def _agreed(block: tuple[DraftToken, ...], tokens_by_target: tuple[CommittedToken, ...]) -> int:
    """Return how many drafts of `block` [k] the target accepts."""
    return next((j for j, draft in enumerate(block) if draft.id != tokens_by_target[j].id), len(block))

"""Our own backend: a model of transformers on the paged KV cache, default and oracle of all others."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import torch

from outrider.cloud.target.backend import Capacity, Handle, StepOutput, StepRow, TargetFacts, VerificationBranch
from outrider.cloud.target.distribution import are_numbers
from outrider.cloud.target.kv_cache import BranchCache, PagedKVCache, SessionCache
from outrider.cloud.target.sampler import Sampled, Sampler, token_facts
from outrider.cloud.target.target import SessionRows, Target
from outrider.cloud.target.verification import VerificationInput
from outrider.proto.session.acceptance import num_agreeing
from outrider.proto.types import TokenFacts, token_ids

log = logging.getLogger(__name__)


class TransformersBackend:
    """The port (`Backend`) of a `Target` in this process."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self._sampler = Sampler(target.device)

    @cached_property
    def facts(self) -> TargetFacts:
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
            verifies_branches=target.verifies_branches,
        )

    @property
    def capacity(self) -> Capacity:
        return self.target.pool.capacity

    def tap(self, layers: Sequence[int]) -> None:
        self.target.tap(layers)

    def open(self, tokens: Sequence[int] = (), isolation: str = "") -> SessionCache:
        """Open a sequence on the pages of `isolation` that hold the beginning of `tokens`, but for the last of them."""
        return self.target.pool.open(tokens[:-1], isolation)

    def reserve(self, handle: Handle, tokens: int) -> None:
        self.target.pool.resize(_own(handle), tokens)

    def truncate(self, handle: Handle, length: int) -> None:
        _own(handle).truncate(length)

    def release(self, handle: Handle) -> None:
        self.target.pool.release(_own(handle))

    @torch.inference_mode()
    def step(self, rows: Sequence[StepRow]) -> StepOutput:
        lengths = [row.handle.length for row in rows]
        try:
            return self._step(rows, lengths)
        except Exception as error:
            for row, length in zip(rows, lengths, strict=True):
                if isinstance(error, FloatingPointError):
                    self.target.pool.distrust(_own(row.handle))  # what led to such logits may be in the KV cache
                self.truncate(row.handle, min(length, row.handle.length))  # a cache that was emptied stays so
            raise

    def _step(self, rows: Sequence[StepRow], lengths: Sequence[int]) -> StepOutput:
        pool = self.target.pool
        for row in rows:
            pool.begin_write(_own(row.handle), _longest(row))  # before pages are lent, and slots read for branches
        with pool.lend(sum(_branch_pages(pool, row) for row in rows)) as pages:
            branches = [branch for number, row in enumerate(rows) for branch in self._branches(number, row, pages)]
            logits = self.target.forward([*map(_session_rows, rows), *map(_branch_rows, branches)])
            if not are_numbers(logits):
                raise FloatingPointError("the target's logits are not numbers")
            forwarded = time.monotonic()
            scores: list[tuple[TokenFacts, ...]] = []
            row_indices: Sequence[int] = range(len(logits))
            if any(row.scored for row in rows):
                scores, logits, row_indices = _split_scored(rows, logits)
            inputs = [row.verification for row in rows if row.verification is not None]
            inputs += [branch.verification for branch in branches]
            paths = paths_of(rows, branches, self._sampler.sample(logits, inputs) if inputs else [])
            for row, length in zip(rows, lengths, strict=True):
                pool.register(_own(row.handle), length + len(row.tokens))
            for path in paths:
                if path.branch is not None:
                    path.branch.cache.replace_end(pool, _own(rows[path.row].handle))
        sampled: list[Sampled | None] = [None] * len(rows)
        for path in paths:
            sampled[path.row] = path.sampled
        followed = {path.row: path.branch.number for path in paths if path.branch is not None}
        taps = self._taps(rows, paths, row_indices)
        return StepOutput(sampled, taps, forwarded, _logits_of(logits, paths), scores, followed)

    def close(self) -> None:
        """Do nothing: what it holds ends with this process."""

    def _branches(self, number: int, row: StepRow, pages: list[int]) -> Iterator[_Branch]:
        """Lay a row's branches on lent `pages`, those that find room there and, should they be followed, in its own."""
        pool, cache = self.target.pool, _own(row.handle)
        for i, branch in enumerate(row.branches):
            base = cache.length + len(row.tokens) + branch.index
            laid = None
            if base + len(branch.drafts) <= cache.capacity:
                laid = BranchCache.beside(pool, cache, base, len(branch.drafts), pages)
            if laid is not None:
                yield _Branch(number, i, branch, laid)

    def _taps(self, rows: Sequence[StepRow], paths: Sequence[_Path], row_indices: Sequence[int]) -> torch.Tensor | None:
        """Return the tapped states; `row_indices` are those of the verified rows among all that had logits."""
        tapped = [path for path in paths if rows[path.row].tapped]
        if not tapped:
            return None
        wanted = [row_indices[path.newest] for path in tapped]
        try:
            return self.target.tapped(wanted)
        except RuntimeError as error:  # torch raises it for want of memory too, and no text ends for a vector
            log.warning("nothing is tapped in this step: %s", str(error).split("\n")[0])
            return None


def _own(handle: Handle) -> SessionCache:
    assert isinstance(handle, SessionCache)  # noqa: S101 - a backend gets its own handles
    return handle


def _session_rows(row: StepRow) -> SessionRows:
    cache, verification = _own(row.handle), row.verification
    drafts = () if verification is None else token_ids(verification.block)
    return SessionRows(cache, (*row.tokens, *drafts), _wanted_rows(row), len(drafts))


def _branch_rows(branch: _Branch) -> SessionRows:
    return SessionRows(branch.cache, token_ids(branch.branch.drafts), len(branch.branch.drafts))


def _split_scored(
    rows: Sequence[StepRow], logits: torch.Tensor
) -> tuple[list[tuple[TokenFacts, ...]], torch.Tensor, list[int]]:
    """Return what the rows' scored tokens get, the other logits, and the row indices of these.

    Args:
        rows: rows of a step, of which one or more score.
        logits: [sum of `_wanted_rows`, vocab] float32 of the rows, then those of their branches.
    """
    scores: list[tuple[TokenFacts, ...]] = []
    verified: list[int] = []
    first = 0
    for row in rows:
        verifies = 0 if row.verification is None else row.verification.rows
        if row.scored:
            scores.append(token_facts(logits[first : first + len(row.scored)], row.scored, row.top_logprobs))
        end = first + _wanted_rows(row)
        verified += range(end - verifies, end)
        first = end
    verified += range(first, len(logits))
    return scores, logits[torch.tensor(verified, dtype=torch.int64, device=logits.device)], verified


def _wanted_rows(row: StepRow) -> int:
    """Return how many of a row's last positions need logits: all where it scores, else those that verify."""
    verifies = 0 if row.verification is None else row.verification.rows
    return len(row.tokens) + max(0, verifies - 1) if row.scored else verifies


def _longest(row: StepRow) -> int:
    """Return how many positions a row may write to."""
    drafts = [len(row.path(branch)) for branch in (None, *range(len(row.branches)))]
    return min(len(row.tokens) + max(drafts), _own(row.handle).capacity - row.handle.length)


def _branch_pages(pool: PagedKVCache, row: StepRow) -> int:
    start = row.handle.length + len(row.tokens)
    bases = [start + branch.index for branch in row.branches]
    return sum(
        pool.pages_for(base + len(branch.drafts)) - base // pool.page_size
        for base, branch in zip(bases, row.branches, strict=True)
    )


class _Branch(NamedTuple):
    """Branch `number` of row `row` of a step, laid on pages."""

    row: int
    number: int
    branch: VerificationBranch
    cache: BranchCache

    @property
    def verification(self) -> VerificationInput:
        return self.branch.verification


class _Path(NamedTuple):
    """Drafts of a row, in its block or along a branch, and what the target says of them.

    Attributes:
        row: number of the row.
        sampled: the target's tokens.
        logits: [k + 1] rows of logits that these come from.
        newest: row of logits of the newest position that is valid after the step. The last committed token, at position
            p, is in the first row, and the draft at p + j in row j after it: where a drafts agree, a + 1 tokens are
            committed, and the newest that has been processed is at p + a.
        branch: the branch; None: the block was followed.
    """

    row: int
    sampled: Sampled
    logits: list[int]
    newest: int
    branch: _Branch | None


def paths_of(rows: Sequence[StepRow], branches: Sequence[_Branch], sampled: Sequence[Sampled]) -> list[_Path]:
    """Return the path of each row that verifies, in order; `sampled` has the blocks' results, then the branches'."""
    verifying = [(number, row.verification) for number, row in enumerate(rows) if row.verification is not None]
    counts = [each.rows for _, each in verifying] + [branch.verification.rows for branch in branches]
    firsts = list(itertools.accumulate(counts, initial=0))
    beside = {
        (branch.row, branch.branch.index, branch.branch.first.id): index
        for index, branch in enumerate(branches, start=len(verifying))
    }
    paths = []
    for index, (number, verification) in enumerate(verifying):
        result, first = sampled[index], firsts[index]
        agreed = num_agreeing(verification.block, token_ids(result.tokens))
        there = beside.get((number, agreed, result.tokens[agreed].id))
        if there is None:
            of_block = list(range(first, first + verification.rows))
            paths.append(_Path(number, result, of_block, first + agreed, None))
            continue
        branch, further = branches[there - len(verifying)], sampled[there]
        tokens = (*result.tokens[: agreed + 1], *further.tokens)
        of_path = [*range(first, first + agreed + 1), *range(firsts[there], firsts[there + 1])]
        newest = firsts[there] + num_agreeing(branch.verification.block, token_ids(further.tokens))
        paths.append(_Path(number, Sampled(tokens, result.reward), of_path, newest, branch))
    return paths


def _logits_of(logits: torch.Tensor, paths: Sequence[_Path]) -> torch.Tensor:
    """Return the rows of the paths, of all that a step has; without a copy where every block was followed."""
    rows = [row for path in paths for row in path.logits]
    if rows == list(range(len(rows))):
        return logits[: len(rows)]
    return logits[torch.tensor(rows, device=logits.device)]

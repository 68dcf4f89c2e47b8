"""The port (`outrider.cloud.target.backend.Backend`) on stock vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from outrider.cloud.target.backend import Capacity, Handle, StepOutput, StepRow, TargetFacts
from outrider.cloud.target.sampler import Sampled
from outrider.cloud.target.verification import VerificationInput
from outrider.cloud.vllm.adapter import VllmCore
from outrider.cloud.vllm.sequences import BlockSequence, Paging
from outrider.cloud.vllm.worker_messages import ForwardPass, PassResult, committed_tokens


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of row number `row` that one pass computes: `tokens` [n], and what to verify after them, if anything."""

    row: int
    tokens: tuple[int, ...]
    verification: VerificationInput | None
    tapped: bool

    @property
    def num_rows(self) -> int:
        return len(self.tokens) + (len(self.verification.block) if self.verification is not None else 0)


class VllmBackend:
    """A target that vLLM computes, in this process or in others."""

    def __init__(self, core: VllmCore, facts: TargetFacts, *, max_rows: int, max_requests: int) -> None:
        """Step by `core`, in passes of at most `max_rows` rows of at most `max_requests` sequences."""
        self._core = core
        self._facts = facts
        self._max_rows = max_rows
        self._max_requests = max_requests
        self._paging = Paging(core.store)

    @property
    def facts(self) -> TargetFacts:
        return self._facts

    @property
    def capacity(self) -> Capacity:
        return self._paging.capacity

    def tap(self, layers: Sequence[int]) -> None:
        self._core.tap(layers)

    def open(self, tokens: Sequence[int] = (), isolation: str = "") -> BlockSequence:
        """Open a sequence on the blocks that vLLM's prefix cache has for it."""
        return self._paging.open(list(tokens), isolation)

    def reserve(self, handle: Handle, tokens: int) -> None:
        self._paging.reserve(_own(handle), tokens)

    def truncate(self, handle: Handle, length: int) -> None:
        self._paging.truncate(_own(handle), length)

    def release(self, handle: Handle) -> None:
        self._paging.release(_own(handle))

    def step(self, rows: Sequence[StepRow]) -> StepOutput:
        """Compute all rows in as few passes as their number allows."""
        sequences = [_own(row.handle) for row in rows]
        lengths = [sequence.length for sequence in sequences]
        sampled: list[Sampled | None] = [None] * len(rows)
        taps: list[torch.Tensor | None] = [None] * len(rows)
        forwarded = 0.0
        try:
            for pieces in passes(rows, self._max_rows, self._max_requests):
                result = self._compute(pieces, sequences)
                forwarded = result.forwarded
                for piece in pieces:
                    request = sequences[piece.row].request
                    if piece.verification is not None and request is not None:
                        sampled[piece.row] = result.sampled[request.name]
                        taps[piece.row] = result.taps.get(request.name)
        except Exception as error:
            for sequence, length in zip(sequences, lengths, strict=True):
                self._paging.part(sequence)  # nobody knows how far the workers came
                self._paging.truncate(sequence, length)
                if isinstance(error, FloatingPointError):
                    self._paging.distrust(sequence)
            self._core.forget_pass()
            raise
        of_tapped = [tap for tap in taps if tap is not None]
        return StepOutput(sampled, torch.stack(of_tapped) if of_tapped else None, forwarded)

    def close(self) -> None:
        self._core.close()

    def _compute(self, pieces: Sequence[Piece], sequences: Sequence[BlockSequence]) -> PassResult:
        """Compute one pass, and grow the sequences by it."""
        paging = self._paging
        rows = [
            paging.row(sequences[piece.row], piece.tokens, self._portable(piece.verification), tapped=piece.tapped)
            for piece in pieces
        ]
        work = ForwardPass(tuple(rows), frozenset(paging.departed), tuple(paging.copies))
        result = self._core.run(work)
        paging.departed -= work.departed
        paging.copied()
        if not result.finite:
            raise FloatingPointError("the target's logits, or the scores made of them, are not numbers")
        for piece, row in zip(pieces, rows, strict=True):
            sequence, end = sequences[piece.row], row.start + len(row.tokens)
            sequence.tokens += (*row.tokens, *row.drafts)
            request = sequence.request
            assert request is not None  # noqa: S101 - it has just stepped
            request.agreed = end
            if piece.verification is not None:
                committed = committed_tokens(piece.verification, result.sampled[row.name])
                request.tokens[end:] = committed
                request.agreed += len(committed) - 1
            paging.settle(sequence, request.agreed)
        return result

    def _portable(self, verification: VerificationInput | None) -> VerificationInput | None:
        """Return what workers in other processes need: of most transcripts, the length alone."""
        if verification is None or not self._core.remote or verification.sampling.penalises:
            return verification
        return replace(verification, transcript=range(len(verification.transcript)))


def passes(rows: Sequence[StepRow], max_rows: int, max_requests: int) -> list[list[Piece]]:
    """Return the rows' pieces, by passes of at most `max_rows` rows of at most `max_requests` sequences.

    A row is cut only where it is longer than a pass; its drafts come last, together.
    """
    found: list[list[Piece]] = [[]]
    room = max_rows
    for number, row in enumerate(rows):
        tokens, drafts = row.tokens, len(row.verification.block) if row.verification is not None else 0
        while len(tokens) + drafts > room or len(found[-1]) == max_requests:
            cut = min(room, len(tokens) - 1)
            if len(tokens) + drafts > max_rows and cut > 0 and len(found[-1]) < max_requests:
                found[-1].append(Piece(number, tokens[:cut], None, tapped=False))
                tokens = tokens[cut:]
            found.append([])
            room = max_rows
        found[-1].append(Piece(number, tokens, row.verification, row.tapped))
        room -= found[-1][-1].num_rows
    return [pieces for pieces in found if pieces]


def _own(handle: Handle) -> BlockSequence:
    assert isinstance(handle, BlockSequence)  # noqa: S101 - a backend gets its own handles
    return handle

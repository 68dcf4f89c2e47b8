"""Sequences as vLLM's workers know them: a request, for as long as the tokens go on as they expect."""

from __future__ import annotations

import itertools

from outrider.cloud.target.distribution import VerificationInput
from outrider.cloud.target.sampler import Sampled
from outrider.cloud.vllm.sequences import BlockSequence, Paging, WorkerRequest
from outrider.cloud.vllm.worker_messages import PassRow
from outrider.proto.types import token_ids

_numbers = itertools.count()


def request_row(
    paging: Paging,
    sequence: BlockSequence,
    tokens: tuple[int, ...],
    verification: VerificationInput | None,
    tapped: bool,
) -> PassRow:
    """Return a sequence's row of the next pass: `tokens` [n], then the drafts to verify.

    It goes on with the request that the workers know where its tokens are those that they expect; else it becomes a
    new one, of all its tokens.
    """
    start, end = sequence.length, sequence.length + len(tokens)
    drafts = token_ids(verification.block) if verification is not None else ()
    request, new_tokens = sequence.request, None
    if request is None or not request.serves(start, tokens, ends=verification is not None):
        paging.part(sequence)
        new_tokens = [*sequence.tokens, *tokens]
        if verification is None and tuple(sequence.coming[start:end]) == tokens:
            new_tokens += sequence.coming[end:]  # the workers then know how it goes on
        request = sequence.request = WorkerRequest(f"s{next(_numbers)}", new_tokens, len(new_tokens), 0, start)
    elif verification is not None:
        del request.tokens[end:]  # a request whose tokens end later gives none
    new_blocks = [block.block_id for block in sequence.blocks[request.num_blocks :]]
    request.num_blocks = len(sequence.blocks)
    return PassRow(
        request.name,
        start,
        tokens,
        drafts,
        list(new_tokens) if new_tokens is not None else None,
        new_blocks,
        len(request.tokens) - request.prompt_length,
        verification,
        tapped,
    )


def committed_tokens(verification: VerificationInput, sampled: Sampled) -> list[int]:
    """Return the drafts that agree, and the target's own token after them."""
    own, block = token_ids(sampled.tokens), token_ids(verification.block)
    agreed = next((j for j, draft in enumerate(block) if draft != own[j]), len(block))
    return list(own[: agreed + 1])

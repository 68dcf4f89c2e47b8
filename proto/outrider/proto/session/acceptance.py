"""The one place where a step becomes text."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.proto.types import BlockBranch, CommittedToken, DraftToken, FinishReason, Sampling


def num_agreeing(block: Sequence[DraftToken], tokens_by_target: Sequence[int]) -> int:
    """Return how many drafts of a block [k] agree with the target's tokens [k + 1], as far as all before them do."""
    return next((j for j, draft in enumerate(block) if draft.id != tokens_by_target[j]), len(block))


def branch_taken(
    block: Sequence[DraftToken], branches: Sequence[BlockBranch], tokens_by_target: Sequence[int]
) -> BlockBranch | None:
    """Return the branch that the target's tokens [k + 1] take where they leave the block [k]; None: they take none."""
    agreed = num_agreeing(block, tokens_by_target)
    wanted = tokens_by_target[agreed]
    return next((each for each in branches if each.index == agreed and each.drafts[0].id == wanted), None)


def accept_drafts(
    block: tuple[DraftToken, ...],
    tokens_by_target: tuple[CommittedToken, ...],
    *,
    generated: int,
    sampling: Sampling,
    eos_tokens: frozenset[int],
) -> tuple[tuple[CommittedToken, ...], int, FinishReason | None]:
    """Follow the drafts while they agree, then take the target's own token; end where the text ends.

    Args:
        block: [k] drafts that the step verified.
        tokens_by_target: [k + 1]; entry j is the target's token after the transcript and block[:j], and is meaningful
            only while block[:j] agrees.
        generated: tokens of text before this step.
        sampling: parameters with stop tokens and the length limit.
        eos_tokens: ids that end a text of the target.

    Returns:
        The committed tokens, the number of drafts among them, which come first, and why the text ends (None: it goes
            on). EOS takes precedence over stop tokens, and these over the length limit.
    """
    tokens: list[CommittedToken] = []
    for j, token in enumerate(tokens_by_target):
        tokens.append(token)
        agreed = j < len(block) and block[j].id == token.id
        accepted = j + agreed
        if token.id in eos_tokens and not sampling.ignore_eos:
            return tuple(tokens), accepted, FinishReason.EOS
        if token.id in sampling.stop_tokens:
            return tuple(tokens), accepted, FinishReason.STOP_TOKEN
        if generated + len(tokens) >= sampling.max_tokens:
            return tuple(tokens), accepted, FinishReason.LENGTH
        if not agreed:
            return tuple(tokens), accepted, None
    raise ValueError("tokens_by_target must hold one token more than block")

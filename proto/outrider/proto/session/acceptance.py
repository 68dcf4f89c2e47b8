"""The one place where a step becomes text."""

from __future__ import annotations

from outrider.proto.types import CommittedToken, DraftToken, FinishReason, Sampling


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

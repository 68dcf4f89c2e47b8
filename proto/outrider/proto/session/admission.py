"""The rules of a verifier, and checks of frames against them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.proto.errors import (
    InvalidArgument,
    PromptTooLong,
    ResourceExhausted,
    TokenizerMismatch,
    Unavailable,
    UnknownToken,
    UnsupportedProtocol,
)
from outrider.proto.policy.likely_branches import MAX_BRANCHES
from outrider.proto.types import (
    PROTOCOL_VERSION,
    Branch,
    Branches,
    Continue,
    Draft,
    Goal,
    Guarantee,
    Open,
    Patience,
    Sampling,
)


@dataclass(frozen=True, slots=True)
class VerifierRules:
    """Rules that a verifier announces to its sessions; fixed while it runs.

    Attributes:
        context_length: tokens that the target holds, prompt included.
        max_drafts: most drafts verified in a step.
        max_credit: most unverified drafts of a session.
        patience: how long to wait for drafts; None: planned, from each session's own measurements.
        max_patience_s: longest that a step waits for drafts, whatever an edge asks for, in seconds.
        guarantee: what a text keeps whatever shares its steps.
        keep_s: longest time that an idle session is kept at its edge's request, in seconds.
        release: version of Outrider, for people.
        projections: projections whose steering vectors the verifier can make.
        precision: what decides its rounding; empty: unknown.
        scores_prompts: whether it can tell the log probabilities of prompts.
        trees: whether a step can verify branches beside the chain.
    """

    name: str
    model: str
    tokenizer_sha256: str
    vocab_size: int
    context_length: int
    eos_tokens: frozenset[int]
    max_drafts: int = 16
    max_credit: int = 64
    patience: Patience | None = None
    max_patience_s: float = 10.0
    goal: Goal = Goal.LATENCY
    guarantee: Guarantee = Guarantee.DISTRIBUTION
    keep_s: float = 300.0
    release: str = ""
    projections: frozenset[str] = frozenset()
    precision: str = ""
    scores_prompts: bool = True
    trees: bool = False


def check_continue(
    frame: Continue, transcript: Sequence[int], first_chain: int, rules: VerifierRules
) -> tuple[int, ...]:
    """Return the prompt of the turn that `frame` begins; `first_chain` is the first chain number of the last turn.

    Raises:
        InvalidArgument: the frame cannot follow the transcript; the field is named.
    """
    if frame.start > len(transcript):
        raise InvalidArgument(
            f"{frame.start} lies beyond the transcript, which ends at {len(transcript)}", field="continuation.start"
        )
    if frame.chain < first_chain:
        raise InvalidArgument(f"is {frame.chain}, the last turn began with {first_chain}", field="continuation.chain")
    prompt = (*transcript[: frame.start], *frame.prompt)
    if not prompt:
        raise InvalidArgument("leaves no token at all; give at least one", field="continuation.prompt")
    _check_vocabulary(frame.prompt, rules.vocab_size, "continuation.prompt")
    _check_prompt_length(prompt, rules.context_length, "continuation.prompt")
    return prompt


def check_draft(draft: Draft, prompt_length: int, rules: VerifierRules) -> None:
    """Refuse drafts that no text of this prompt can hold.

    Raises:
        InvalidArgument: a field is wrong; it is named.
    """
    if draft.start < prompt_length:
        raise InvalidArgument(
            f"{draft.start} lies inside the prompt; text begins at {prompt_length}", field="draft.start"
        )
    if draft.start + len(draft.tokens) > rules.context_length + rules.max_credit:
        raise InvalidArgument(f"{draft.start} lies beyond the context of {rules.context_length}", field="draft.start")
    if draft.tokens:
        largest = max(draft.tokens).id  # tokens are ordered by their ids first
        _check_vocabulary((largest,), rules.vocab_size, "draft.tokens")
    if draft.branches:
        _check_runs(draft.branches, prompt_length, rules, "draft.branches.")


def check_branches(frame: Branches, prompt_length: int, rules: VerifierRules) -> None:
    """Refuse branches that no text of this prompt can hold.

    Raises:
        InvalidArgument: a field is wrong; it is named.
        ResourceExhausted: there are more than any chain may have.
    """
    _check_runs(frame.branches, prompt_length, rules, "branches.")


def _check_runs(branches: tuple[Branch, ...], prompt_length: int, rules: VerifierRules, prefix: str) -> None:
    if len(branches) > MAX_BRANCHES:
        raise ResourceExhausted(f"are {len(branches)}; send {MAX_BRANCHES} at most", field=f"{prefix}starts")
    for branch in branches:
        if not prompt_length <= branch.start < rules.context_length + rules.max_credit:
            raise InvalidArgument(f"{branch.start} lies outside the text", field=f"{prefix}starts")
        if len(branch.tokens) > rules.max_credit:
            raise ResourceExhausted(f"exceed {rules.max_credit}; respect the credit", field=f"{prefix}lengths")
        _check_vocabulary(branch.tokens, rules.vocab_size, f"{prefix}tokens")


def check_open(frame: Open, rules: VerifierRules) -> None:
    """Refuse a session before any compute.

    Raises:
        UnsupportedProtocol, TokenizerMismatch, InvalidArgument: a field is wrong; it is named.
        Unavailable: the text was begun where there is more room, and can go on there.
    """
    if frame.protocol_version != PROTOCOL_VERSION:
        raise UnsupportedProtocol(
            f"is {frame.protocol_version}, this verifier speaks {PROTOCOL_VERSION}; update the older side",
            field="open.protocol_version",
        )
    if frame.tokenizer_sha256 != rules.tokenizer_sha256:
        raise TokenizerMismatch(
            f"is {frame.tokenizer_sha256[:12]}…, the target {rules.model!r} has {rules.tokenizer_sha256[:12]}…; "
            "fetch the target's tokenizer from the coordinator",
            field="open.tokenizer_sha256",
        )
    if frame.prompt_logprobs is not None and not rules.scores_prompts:
        raise InvalidArgument(
            "are not to be had here: the target runs on vLLM's engine; ask a verifier with --engine transformers",
            field="open.prompt_logprobs",
        )
    _check_room(frame, rules)
    _check_vocabulary(frame.prompt, rules.vocab_size, "open.prompt")
    _check_vocabulary(frame.committed, rules.vocab_size, "open.committed")
    sampling = frame.sampling
    _check_vocabulary(sampling.allowed_tokens, rules.vocab_size, "sampling.allowed_tokens")
    _check_vocabulary(sampling.stop_tokens, rules.vocab_size, "sampling.stop_tokens")
    _check_vocabulary(tuple(token for token, _ in sampling.logit_bias), rules.vocab_size, "sampling.bias_tokens")
    over = rules.eos_tokens & set(frame.committed) if not sampling.ignore_eos else set()
    if over or set(sampling.stop_tokens) & set(frame.committed):
        raise InvalidArgument("holds a token that ends the text; there is nothing to resume", field="open.committed")


def _check_room(frame: Open, rules: VerifierRules) -> None:
    so_far = len(frame.prompt) + len(frame.committed)
    if frame.context_length and so_far >= frame.context_length:
        raise InvalidArgument("fills the context that the text was promised; nothing is left", field="open.committed")
    if max(frame.context_length, so_far + 1 if frame.committed else 0) > rules.context_length:
        raise Unavailable(
            f"is {frame.context_length or 'unknown'} and {so_far} positions are taken, verifier {rules.name} has "
            f"{rules.context_length}; start another one with the --context-length and --kv-tokens of the first",
            field="open.context_length",
        )
    _check_prompt_length(frame.prompt, rules.context_length, "open.prompt")


def limited(frame: Open, rules: VerifierRules) -> Sampling:
    """Return the settings of a text that ends with the context that it was promised, or else with the target's."""
    sampling, room = frame.sampling, (frame.context_length or rules.context_length) - len(frame.prompt)
    max_tokens, min_tokens = min(sampling.max_tokens, room), min(sampling.min_tokens, room)
    return replace(sampling, max_tokens=max_tokens, min_tokens=min_tokens)


def _check_prompt_length(prompt: tuple[int, ...], context_length: int, field_name: str) -> None:
    if len(prompt) >= context_length:
        raise PromptTooLong(
            f"has {len(prompt)} tokens; the target holds {context_length}, text included; shorten it", field=field_name
        )


def _check_vocabulary(tokens: tuple[int, ...], vocab_size: int, field_name: str) -> None:
    if tokens and max(tokens) >= vocab_size:
        raise UnknownToken(f"token id {max(tokens)} is not in the vocabulary of {vocab_size}", field=field_name)
